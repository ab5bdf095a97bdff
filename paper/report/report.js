// Draws the page: filters, controls, legend, panels and tables. Data becomes text, never markup.

const SVG_TAGS = new Set(["circle", "g", "path", "svg", "text"]);
const MOST_ROWS = 10;

// Elements

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const makeButton = (press, attributes, ...children) =>
  make("button", { type: "button", onclick: press, ...attributes }, ...children);

const toggle = (set, value) => set.delete(value) || set.add(value);

// Data: the values of a line are places in the values of each field, or null

const data = JSON.parse(byId("data").textContent);
data.lines.forEach((line, index) => (line.index = index));
const fields = new Map(data.fields.map((field, place) => [field.name, { ...field, place }]));

const valueOf = (line, name) => line.values[fields.get(name).place];
const nameOf = (line, name) => fields.get(name)?.values[valueOf(line, name)];
const isVaried = (lines, name) =>
  new Set(lines.map((line) => nameOf(line, name)).filter((value) => value !== undefined)).size > 1;
const isAccuracy = (metric) => metric.endsWith("accuracy");
const isUneven = (line) => line.longest > line.epochs;
const pointsOf = (values, pool) => values.map((value, index) => [data.epochs[pool][index], value]);
const meanOf = (line, metric) => pointsOf(line[metric].mean, line.at);
const foldsOf = (line, metric) => line[metric].folds.map((fold) => pointsOf(fold, line.fold_at));

const inUnits = (metric, value) => (isAccuracy(metric) ? 100 : 1) * (value / data.scale);
const written = (metric, value) => inUnits(metric, value).toFixed(isAccuracy(metric) ? 2 : 4);

const state = {
  metric: Object.keys(data.metrics)[0],
  columns: fields.has("forward") ? "forward" : "",
  rows: "",
  colour: "",
  scale: "all",
  bands: true,
  filters: new Map(data.fields.map(({ name }) => [name, new Set()])),
  off: new Set(),
  pinned: new Set(),
  panels: [],
  reading: null,
  updates: [],
};
// Studies never share a chart; noises do not where there would be too many lines.
const roomy = 40 * (fields.get("forward")?.values.length ?? 1);
const separate = data.lines.length > roomy ? ["study", "data", "noise"] : ["study", "data"];
state.rows = separate.find((name) => fields.has(name)) ?? "";

const filtered = () =>
  data.lines.filter((line) =>
    data.fields.every(({ name }) => {
      const wanted = state.filters.get(name);
      return wanted.size === 0 || wanted.has(valueOf(line, name));
    }),
  );

// Pointing at lines and keeping them in view

function highlight(more = []) {
  const chosen = new Set([...state.pinned, ...more]);
  for (const panel of state.panels) panel.highlight(chosen, state.reading);
}

function pin(line) {
  toggle(state.pinned, line);
  for (const update of state.updates) update();
  highlight();
}

function point(reading) {
  const before = state.reading;
  const isSame =
    reading?.panel === before?.panel &&
    reading?.epoch === before?.epoch &&
    reading?.chosen.line === before?.chosen.line;
  if (isSame && reading) return;
  state.reading = reading;
  highlight(reading ? [reading.chosen.line] : []);
  byId("tip").hidden = !reading;
  if (reading) showTip(reading);
}

function showTip({ panel, share, epoch, values, chosen, byKeys, labelOf, styles }) {
  const { metric } = state;
  const room = innerWidth < 600 ? 5 : MOST_ROWS;
  const most = values.length > room + 1 ? room : values.length;
  const start = Math.max(0, Math.min(values.indexOf(chosen) - (most >> 1), values.length - most));
  const rows = values.slice(start, start + most).map((each) => {
    const half = each.half === null ? "" : ` ± ${written(metric, each.half)}`;
    return make(
      "tr",
      { class: each === chosen ? "chosen" : null, "data-line": each.line.index },
      make("td", {}, sampleOf(styles[each.line.index])),
      make("td", { class: "name" }, labelOf(each.line)),
      make("td", { class: "number" }, written(metric, each.value)),
      make("td", { class: "number" }, half),
    );
  });
  const unit = isAccuracy(metric) ? ", %" : "";
  const runs = `${chosen.line.folds.length} run${chosen.line.folds.length === 1 ? "" : "s"}`;
  const more = values.length > most ? `; ${values.length - most} more lines` : "";
  byId("tip").replaceChildren(
    make("p", {}, make("strong", {}, `epoch ${epoch}`), ` ${data.metrics[metric]}${unit}`),
    make("table", {}, make("tbody", {}, ...rows)),
    make("p", { class: "more" }, `${chosen.line.name}, ${runs}${more}`),
  );
  placeTip(byId("tip"), panel.svg.getBoundingClientRect(), share);
  if (byKeys) {
    const value = written(metric, chosen.value) + (unit && " percent");
    byId("reading").textContent = `epoch ${epoch}, ${labelOf(chosen.line)}: ${value}`;
  }
}

/** Beside the crosshair where there is room, else below the chart. */
function placeTip(tip, chart, share) {
  const box = byId("panels").getBoundingClientRect();
  const wide = tip.getBoundingClientRect().width;
  const at = chart.left - box.left + share * chart.width;
  let [left, top] = [at + 18, chart.top - box.top + 14];
  if (left + wide > box.width) left = at - 18 - wide;
  if (left < 0) [left, top] = [at - wide / 2, chart.bottom - box.top + 4];
  tip.style.left = `${Math.max(0, Math.min(left, box.width - wide))}px`;
  tip.style.top = `${top}px`;
}

// Filters, controls and legend

const thenRender = (change) => (event) => {
  change(event);
  render();
};

function makeFilters() {
  const groups = data.fields.map(({ name, label, values, labels }) => {
    const wanted = state.filters.get(name);
    const chips = values.map((value, place) => {
      const attributes = { class: "chip", "data-field": name, "data-value": value };
      const chip = makeButton(thenRender(() => toggle(wanted, place)), attributes, labels[place]);
      state.updates.push(() => chip.setAttribute("aria-pressed", wanted.has(place)));
      return chip;
    });
    const title = make("span", { class: "label", id: `filter-${name}` }, label);
    const group = { class: "filter", role: "group", "aria-labelledby": `filter-${name}` };
    return make("div", group, title, ...chips);
  });
  const sets = [...state.filters.values()];
  const press = thenRender(() => sets.forEach((wanted) => wanted.clear()));
  const clear = makeButton(press, { class: "chip clear" }, "clear filters");
  state.updates.push(() => (clear.hidden = sets.every((wanted) => wanted.size === 0)));
  byId("filters").replaceChildren(...groups, clear);
}

function makeControls() {
  const choice = (label, name, options) => {
    const onchange = thenRender(({ target }) => (state[name] = target.value));
    const entries = options.map(([value, words]) => make("option", { value }, words));
    const select = make("select", { id: `choose-${name}`, onchange }, ...entries);
    select.value = state[name];
    return make("label", {}, make("span", { class: "label" }, label), select);
  };
  const names = data.fields.map(({ name, label }) => [name, label]);
  const byField = [
    choice("panels by", "columns", [["", "nothing"], ...names]),
    choice("rows by", "rows", [["", "nothing"], ...names]),
    choice("colours by", "colour", [["", "as in the paper"], ...names]),
  ];
  const onchange = thenRender(({ target }) => (state.bands = target.checked));
  const box = make("input", { type: "checkbox", id: "bands", checked: "", onchange });
  byId("controls").replaceChildren(
    choice("show", "metric", Object.entries(data.metrics)),
    ...(names.length ? byField : []),
    choice("height fits", "scale", [["all", "all epochs"], ["later", "the later half"]]),
    make("label", { class: "check" }, box, "95 % interval"),
  );
}

function renderLegend(lines, styles) {
  const legend = byId("legend");
  const focused = legend.contains(document.activeElement) && document.activeElement.dataset.key;
  const entries = Map.groupBy(lines, (line) => styles[line.index].key);
  const buttons = [...entries.values()].map((own) => {
    const style = styles[own[0].index];
    const press = thenRender(() => toggle(state.off, style.key));
    const attributes = {
      class: "entry",
      "data-key": style.key,
      "aria-pressed": String(!state.off.has(style.key)),
      onpointerenter: () => highlight(own),
      onpointerleave: () => highlight(),
    };
    return [style.order, makeButton(press, attributes, sampleOf(style), style.label)];
  });
  const sorted = buttons.sort(([a], [b]) => a - b).map(([, button]) => button);
  legend.replaceChildren(...sorted);
  sorted.find(({ dataset }) => dataset.key === focused)?.focus({ preventScroll: true });
}

// Panels

/** [label, lines] for each value of a field. A float twin, which has none, is beside each. */
function split(lines, name) {
  if (!name) return [["", lines]];
  const { labels } = fields.get(name);
  const twins = lines.filter((line) => valueOf(line, name) === null);
  const groups = labels
    .map((label, place) => [label, lines.filter((line) => valueOf(line, name) === place)])
    .filter(([, own]) => own.length)
    .map(([label, own]) => [label, [...own, ...twins]]);
  return groups.length || !twins.length ? groups : [["float", twins]];
}

function renderPanels(lines, styles) {
  const columns = state.columns === state.rows ? "" : state.columns;
  const rows = split(lines, state.rows).map(([rowLabel, rowLines]) => {
    const domain = domainOf(rowLines, state.metric, state.scale === "later");
    return split(rowLines, columns).map(([label, own]) => {
      const words = [rowLabel, columns && `${fields.get(columns).label} ${label}`].filter(Boolean);
      return makePanel(words.join(", ") || data.metrics[state.metric], own, domain, styles);
    });
  });
  state.panels = lines.length ? rows.flat() : [];
  const nodes = rows.map((row) => make("div", { class: "row" }, ...row.map(({ node }) => node)));
  const words = "Nothing to draw: no line is left, or all are switched off.";
  const shown = lines.length ? nodes : [make("p", { class: "none" }, words)];
  byId("panels").replaceChildren(...shown, byId("tip"));
  drawPanels();
}

function drawPanels() {
  // All widths first: each makes the browser lay the page out again after a change.
  const widths = state.panels.map(({ svg }) => svg.clientWidth);
  state.panels.forEach((panel, index) => panel.draw(widths[index]));
  state.reading = null;
  byId("tip").hidden = true;
  highlight();
}

// Tables

/** Sort a table: numbers by value, words as people order them, missing cells last. */
function sortBy(table, head, direction) {
  const isNumber = head.classList.contains("number");
  const compareWords = new Intl.Collator("en", { numeric: true }).compare;
  const sign = direction === "descending" ? -1 : 1;
  const keyOf = (cell) => {
    if (cell.classList.contains("missing")) return null;
    return isNumber ? Number(cell.dataset.value) : cell.textContent;
  };
  const rows = [...table.tBodies[0].rows];
  const keyed = rows.map((row) => [row, keyOf(row.cells[head.cellIndex])]);
  keyed.sort(([, a], [, b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (isNumber ? a - b : compareWords(a, b));
  });
  table.tBodies[0].append(...keyed.map(([row]) => row));
  for (const each of table.tHead.querySelectorAll("[aria-sort]")) {
    each.setAttribute("aria-sort", each === head ? direction : "none");
  }
}

function makeSortable(table) {
  for (const head of table.tHead.querySelectorAll("[aria-sort]")) {
    const isNumber = head.classList.contains("number");
    const [first, second] = isNumber ? ["descending", "ascending"] : ["ascending", "descending"];
    const press = () =>
      sortBy(table, head, head.getAttribute("aria-sort") === first ? second : first);
    head.replaceChildren(makeButton(press, {}, ...head.childNodes));
  }
}

/** Turn the names of a table into buttons that keep their lines in view. */
function makeNames(table) {
  for (const row of table.tBodies[0].rows) {
    const line = data.lines[row.dataset.line];
    const swatch = make("span");
    const button = makeButton(() => pin(line), {}, swatch, ...row.cells[0].childNodes);
    row.cells[0].replaceChildren(button);
    state.updates.push(() => {
      row.classList.toggle("pinned", state.pinned.has(line));
      button.setAttribute("aria-pressed", state.pinned.has(line));
      swatch.replaceChildren(sampleOf(state.styles[line.index]));
    });
  }
}

/** Show the configuration of a training, as it was recorded. */
function showRecorded(number) {
  const unit = data.units[number];
  if (!unit) return;
  byId("recorded-name").textContent = unit.name;
  const place = unit.path
    ? ["recorded in ", make("a", { href: unit.href }, unit.path)]
    : ["as the table has it, which leaves out what all units share"];
  byId("recorded-path").replaceChildren(...place);
  byId("recorded-text").textContent = unit.lines.map((at) => data.texts[at]).join("\n");
  byId("recorded").showModal();
  byId("recorded-text").scrollTop = 0;
}

function render() {
  const lines = filtered();
  const shown = new Set(lines.map(({ index }) => index));
  state.styles = stylesOf(lines);
  for (const update of state.updates) update();
  renderLegend(lines, state.styles);
  for (const row of document.querySelectorAll(".box tbody tr")) {
    row.hidden = !shown.has(Number(row.dataset.line));
  }
  renderPanels(lines.filter(({ index }) => !state.off.has(state.styles[index].key)), state.styles);
  const all = data.lines.length;
  const some = shown.size === all ? all : `${shown.size} of ${all}`;
  byId("count").textContent = `${some} configuration${all === 1 ? "" : "s"}`;
}

byId("explorer").hidden = false;
for (const name of ["configurations-table", "runs-table"]) makeSortable(byId(name));
makeNames(byId("configurations-table"));
makeFilters();
makeControls();
render();

const runOf = (hash) => /^#run-(\d+)$/.exec(hash)?.[1];
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#run-"]');
  if (link) {
    event.preventDefault();
    showRecorded(runOf(link.getAttribute("href")));
  }
  if (["recorded", "recorded-close"].includes(event.target.id)) byId("recorded").close();
});
showRecorded(runOf(location.hash));
// A tap elsewhere closes the reading.
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest?.(".chart, #tip")) point(null);
});

let drawnWidth = byId("panels").clientWidth;
new ResizeObserver(() => {
  const width = byId("panels").clientWidth;
  if (width !== drawnWidth) requestAnimationFrame(drawPanels);
  drawnWidth = width;
}).observe(byId("panels"));

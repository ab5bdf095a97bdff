// The page at work: filters, controls, the legend, and the panels that follow from them.

function chips(field) {
  const wanted = state.filters.get(field.name);
  const made = field.values.map((value) => {
    const press = () => {
      if (!wanted.delete(value)) wanted.add(value);
      render();
    };
    const pressed = { class: "chip", "aria-pressed": String(wanted.has(value)) };
    const place = { "data-field": field.name, "data-value": value };
    return makeButton(press, { ...pressed, ...place }, labelOf(field.name, value));
  });
  const id = `filter-${field.name}`;
  const label = make("span", { class: "label", id }, field.label);
  return make("div", { class: "filter", role: "group", "aria-labelledby": id }, label, ...made);
}

function renderFilters() {
  // A button that is pressed stays the one in focus, though it is made anew.
  const active = document.activeElement?.dataset ?? {};
  const clear = () => {
    state.filters.forEach((wanted) => wanted.clear());
    render();
  };
  const any = [...state.filters.values()].some((wanted) => wanted.size);
  const none = makeButton(clear, { class: "chip clear", hidden: !any }, "clear filters");
  byId("filters").replaceChildren(...data.fields.map(chips), none);
  if (active.field) {
    const same = [...byId("filters").querySelectorAll("button")].find(
      ({ dataset }) => dataset.field === active.field && dataset.value === active.value,
    );
    same?.focus({ preventScroll: true });
  }
}

function choice(label, name, options) {
  const change = (event) => {
    state[name] = event.target.value;
    render();
  };
  const made = options.map(([value, words]) =>
    make("option", { value, selected: state[name] === value }, words),
  );
  const select = make("select", { id: `choose-${name}`, onchange: change }, ...made);
  return make("label", {}, make("span", { class: "label" }, label), select);
}

function makeControls() {
  const fields = data.fields.map(({ name, label }) => [name, label]);
  const toggle = (event) => {
    state.bands = event.target.checked;
    render();
  };
  const box = make("input", { type: "checkbox", id: "bands", checked: true, onchange: toggle });
  const controls = [choice("show", "metric", Object.entries(METRICS))];
  if (fields.length) {
    controls.push(
      choice("panels by", "columns", [["", "nothing"], ...fields]),
      choice("rows by", "rows", [["", "nothing"], ...fields]),
      choice("colours by", "colour", [["", "as in the paper"], ...fields]),
    );
  }
  controls.push(
    choice("height fits", "scale", [["whole", "all epochs"], ["later", "the later half"]]),
    make("label", { class: "check" }, box, "95 % interval"),
  );
  byId("controls").replaceChildren(...controls);
}

function renderLegend(lines, styleOf) {
  const entries = new Map();
  for (const line of lines) {
    const style = styleOf(line);
    if (!entries.has(style.key)) entries.set(style.key, { style, lines: [] });
    entries.get(style.key).lines.push(line);
  }
  const ordered = [...entries.values()].sort((one, other) => one.style.order - other.style.order);
  const made = ordered.map((entry) => {
    const { style, lines: own } = entry;
    const press = () => {
      if (!state.off.delete(style.key)) state.off.add(style.key);
      render();
      const again = [...byId("legend").children].find((one) => one.dataset.key === style.key);
      again?.focus({ preventScroll: true });
    };
    const over = (chosen) => () => emphasise(chosen);
    const attributes = { class: "entry", "data-key": style.key };
    const pressed = { "aria-pressed": String(!state.off.has(style.key)) };
    const events = { onpointerenter: over(own), onpointerleave: over([]) };
    return makeButton(press, { ...attributes, ...pressed, ...events }, sample(style), style.label);
  });
  byId("legend").replaceChildren(...made);
}

// Panels

function emphasise(more) {
  const chosen = new Set([...state.pinned, ...more]);
  for (const panel of state.panels) panel.emphasise(chosen);
}

function pin(line) {
  if (!state.pinned.delete(line)) state.pinned.add(line);
  markNames();
  emphasise([]);
}

function markNames() {
  for (const [line, { row, button }] of state.names) {
    row.classList.toggle("pinned", state.pinned.has(line));
    button.setAttribute("aria-pressed", String(state.pinned.has(line)));
  }
}

function pointed(panel, told) {
  const before = state.told;
  const same = told && told.epoch === before?.epoch && told.chosen.line === before.chosen.line;
  if (same && panel === state.panel) return;
  [state.panel, state.told] = [panel, told];
  for (const other of state.panels) {
    if (other === panel || !told || data.lines.length <= 100) {
      other.mark(told?.epoch ?? null, told?.chosen.line ?? null);
    }
  }
  emphasise(told ? [told.chosen.line] : []);
  byId("tip").hidden = !told;
  if (told) showTip(panel, told);
}

function showTip(panel, { epoch, values, chosen, x, width, height, byKeys, told }) {
  const tip = byId("tip");
  const room = innerWidth < 600 ? 5 : MOST_ROWS;
  const most = values.length > room + 1 ? room : values.length;
  const near = Math.max(0, Math.min(values.indexOf(chosen) - (most >> 1), values.length - most));
  const rows = values.slice(near, near + most).map((one) => {
    const half = one.half === null ? "" : ` ± ${figure(told.metric, one.half)}`;
    const cells = [
      make("td", {}, sample(told.styleOf(one.line))),
      make("td", { class: "name" }, told.labelOf(one.line)),
      make("td", { class: "number" }, figure(told.metric, one.value)),
      make("td", { class: "number" }, half),
    ];
    const kind = one === chosen ? "chosen" : null;
    return make("tr", { class: kind, "data-line": one.line.index }, ...cells);
  });
  const unit = isAccuracy(told.metric) ? ", %" : "";
  const left = values.length - most;
  const count = chosen.line.folds.length;
  const folds = `${count} fold${count === 1 ? "" : "s"}`;
  const more = left ? `; ${left} more lines` : "";
  tip.replaceChildren(
    make("p", {}, make("strong", {}, `epoch ${epoch}`), ` ${told.metricLabel}${unit}`),
    make("table", {}, make("tbody", {}, ...rows)),
    make("p", { class: "more" }, `${chosen.line.name}, ${folds}${more}`),
  );
  placeTip(tip, panel, x, width, height);
  if (byKeys) {
    const value = figure(told.metric, chosen.value) + (unit && " percent");
    byId("reading").textContent = `epoch ${epoch}, ${told.labelOf(chosen.line)}: ${value}`;
  }
}

/** Beside the crosshair where there is room for it, else below the chart. */
function placeTip(tip, panel, x, width, height) {
  const box = byId("panels").getBoundingClientRect();
  const chart = panel.svg.getBoundingClientRect();
  const [left, top] = [chart.left - box.left + (x / width) * chart.width, chart.top - box.top];
  const size = tip.getBoundingClientRect();
  const put = (toLeft, toTop) => {
    tip.style.left = `${Math.max(0, Math.min(toLeft, box.width - size.width))}px`;
    tip.style.top = `${toTop}px`;
  };
  if (left + 18 + size.width <= box.width) put(left + 18, top + 14);
  else if (left - 18 - size.width >= 0) put(left - 18 - size.width, top + 14);
  else put(left - size.width / 2, top + chart.height + 4);
}

/**
 * The values of a field that lines have, in order; one nameless value of no field. What a field
 * does not touch, which is a float network, is beside every value.
 */
function split(lines, name) {
  if (!name) return [["", lines]];
  const beside = lines.filter((line) => valueOf(line, name) === null);
  const found = fieldOf(name).values
    .map((value) => [value, lines.filter((line) => valueOf(line, name) === value)])
    .filter(([, own]) => own.length)
    .map(([value, own]) => [labelOf(name, value), [...own, ...beside]]);
  return found.length || !beside.length ? found : [["float", beside]];
}

function renderPanels(lines, styleOf) {
  const metricLabel = METRICS[state.metric];
  state.panels = [];
  const rows = split(lines, state.rows).map(([rowName, rowLines]) => {
    const domain = domainOf(rowLines, state.metric, state.scale === "later");
    const columns = state.columns === state.rows ? "" : state.columns;
    const panels = split(rowLines, columns).map(([name, own]) => {
      const words = [rowName, columns && `${fieldOf(columns).label} ${name}`].filter(Boolean);
      const title = words.join(", ") || metricLabel;
      const { metric, bands } = state;
      const drawing = { metric, metricLabel, domain, bands, styleOf, labelOf: labeller(own) };
      return makePanel({ title, lines: own, ...drawing }, pointed, pin);
    });
    state.panels.push(...panels);
    const kind = panels.length > 1 ? "row many" : "row";
    return make("div", { class: kind }, ...panels.map(({ node }) => node));
  });
  const words = "Nothing to draw: no line is left, or all are switched off.";
  const shown = lines.length ? rows : [make("p", { class: "none" }, words)];
  byId("panels").replaceChildren(...shown, byId("tip"));
  drawPanels();
}

function drawPanels() {
  for (const panel of state.panels) panel.measure();
  for (const panel of state.panels) panel.draw();
  pointed(null, null);
}

function render() {
  const lines = filtered();
  const styleOf = stylist(lines);
  renderFilters();
  renderLegend(lines, styleOf);
  const shown = new Set(lines.map((line) => line.index));
  showRows(byId("configurations-table"), shown);
  showRows(byId("runs-table"), shown);
  for (const [line, { swatch }] of state.names) swatch.replaceChildren(sample(styleOf(line)));
  const on = lines.filter((line) => !state.off.has(styleOf(line).key));
  renderPanels(on, styleOf);
  const all = data.lines.length;
  const some = shown.size === all ? all : `${shown.size} of ${all}`;
  byId("count").textContent = `${some} configuration${all === 1 ? "" : "s"}`;
}

byId("explorer").hidden = false;
for (const name of ["configurations-table", "runs-table"]) makeSortable(byId(name));
state.names = makeNames(byId("configurations-table"), pin);
makeControls();
render();
makeLinks();

let drawnAt = byId("panels").clientWidth;
new ResizeObserver(() => {
  const width = byId("panels").clientWidth;
  if (width === drawnAt) return;
  drawnAt = width;
  requestAnimationFrame(drawPanels);
}).observe(byId("panels"));

// A finger that taps elsewhere puts the reading away.
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest?.(".chart, #tip")) pointed(null, null);
});

"use strict";
// Charts: the style and the label of each line, the axes, and reading by pointer and keys. report.js
// follows in the same script, and has the data and the state of the page.

const MARGIN = { left: 50, right: 12, top: 10, bottom: 36 };
const MOST_BANDS = 14;

// Styles and labels

/** The field that colours show: intervals or noises as in the paper, else another that differs. */
function colourField(lines) {
  if (state.colour) return state.colour;
  const taken = [state.columns, state.rows, "power", "study"];
  const others = data.fields.map(({ name }) => name).filter((name) => !taken.includes(name));
  const names = ["interval", "noise", ...others];
  return names.find((name) => isVaried(lines, name)) ?? (fields.has("interval") ? "interval" : null);
}

/** Colour, kind, label and place in the legend of every line, by its index. */
function stylesOf(lines) {
  const field = fields.get(colourField(lines));
  const namesPower = field?.name !== "power" && isVaried(lines, "power");
  const float = { colour: "ink", kind: "dashed", label: "float", order: Infinity, key: "float" };
  return data.lines.map((line) => {
    if (line.float) return float;
    const value = field ? valueOf(line, field.name) : 0;
    const power = nameOf(line, "power");
    const dotted = power === "progressive";
    const plain = field ? field.labels[value] : lines.length === 1 ? line.name : "all";
    return {
      colour: field ? field.colours[value] : "blue",
      kind: dotted ? "dotted" : "",
      label: namesPower && power !== "none" ? `${plain}, ${power}` : plain,
      order: 2 * value + dotted,
      key: `${field?.name} ${value} ${dotted}`,
    };
  });
}

const lineOf = ({ colour, kind }, d, more = "", index = null) =>
  make("path", { class: `line ${kind} ${more}`, color: `var(--${colour})`, d, "data-line": index });

const SAMPLE = { class: "sample", viewBox: "0 0 28 10", "aria-hidden": "true" };
const sampleOf = (style) => make("svg", SAMPLE, lineOf(style, "M2 5H26"));

/** What distinguishes a line from the others of its panel, in as few words as possible. */
function labelsOf(lines) {
  const order = { interval: 0, power: 0, static_mean: 2, static_std: 2, study: 3 };
  const rank = ({ name }) => order[name] ?? 1;
  const sorted = [...fields.values()].sort((a, b) => rank(a) - rank(b));
  const words = ({ name, label, labels }, line) => {
    const value = labels[valueOf(line, name)];
    if (name.startsWith("static_")) {
      return `${name.slice("static_".length)} ${value === "yes" ? "static" : "moves"}`;
    }
    return /^[\d.e+-]+$|^(true|false|none|yes|no|auto)$/i.test(value) ? `${label} ${value}` : value;
  };
  return (line) => {
    if (line.float) return line.name;
    let alike = lines.filter((other) => !other.float);
    const parts = [];
    for (const field of sorted) {
      const value = valueOf(line, field.name);
      const same = alike.filter((other) => valueOf(other, field.name) === value);
      if (same.length < alike.length) parts.push(words(field, line));
      alike = same;
    }
    return alike.length === 1 && parts.length ? parts.join(" · ") : line.name;
  };
}

// Charts

/** A round number of which about `count` make `range`. */
function roundStep(range, count) {
  const rough = range / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
}

/** The multiples of a step from low to high. */
function ticks(low, high, step) {
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.max(Math.floor(high / step + 1e-9) - first + 1, 0);
  return Array.from({ length: count }, (_, index) => (first + index) * step);
}

/** The range of the axes, up to a tick. Intervals may exceed it: those of few folds are wide. */
function domainOf(lines, metric, laterHalf) {
  const last = Math.max(...lines.map((line) => line.longest));
  let [low, high] = [Infinity, -Infinity];
  for (const line of lines) {
    const curves = [meanOf(line, metric), ...(isUneven(line) ? foldsOf(line, metric) : [])];
    for (const [epoch, value] of curves.flat()) {
      if (value === null || (laterHalf && epoch <= last / 2)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) [low, high] = [0, data.scale];
  const room = 0.05 * (high - low) || 0.01 * Math.abs(high) || 1;
  low = Math.max(low - room, 0);
  high += room / 4;
  const step = roundStep(high - low, 7);
  high = Math.ceil(high / step - 1e-9) * step;
  if (isAccuracy(metric)) high = Math.min(high, data.scale);
  // A single epoch lies in the middle.
  const [first, end] = last === 1 ? [0, 2] : [1, last];
  return { first, end, last, low, high, step };
}

/** The path of [epoch, value] points; null interrupts it. */
function pathOf(points, x, y) {
  let path = "";
  points.forEach(([epoch, value], index) => {
    if (value === null) return;
    const starts = index === 0 || points[index - 1][1] === null;
    path += `${starts ? "M" : "L"}${x(epoch).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return path;
}

function bandOf(line, metric, x, y) {
  const { half } = line[metric];
  const most = isAccuracy(metric) ? data.scale : Infinity;
  const [upper, lower] = [[], []];
  meanOf(line, metric).forEach(([epoch, value], index) => {
    if (value === null || half?.[index] == null) return;
    upper.push([epoch, Math.min(value + half[index], most)]);
    lower.push([epoch, Math.max(value - half[index], 0)]);
  });
  if (upper.length < 2) return "";
  return `${pathOf([...upper, ...lower.reverse()], x, y)}Z`;
}

/** Sentences that say what a chart does not show. */
function hintsOf(lines, metric) {
  const hints = [];
  const uneven = lines.filter(isUneven);
  if (uneven.length) {
    const shared = [...new Set(uneven.map((line) => `${line.epochs} of ${line.longest}`))];
    const epochs = shared.length > 3 ? "" : ` (${shared.join(", ")})`;
    const means = `Some folds are ahead of others: means are of the epochs that all have${epochs}`;
    hints.push(`${means}, and thin lines are single folds.`);
  }
  const haveBands = lines.some((line) => line[metric].half);
  if (state.bands && !haveBands) hints.push("No 95 % interval: it takes three folds.");
  else if (state.bands && lines.length > MOST_BANDS) {
    hints.push("Too many lines for bands: point at one to see its 95 % interval.");
  }
  return hints.map((hint) => make("p", { class: "hint" }, hint));
}

/** One chart, which calls point() with what is pointed at. */
function makePanel(title, lines, domain, styles) {
  const { metric } = state;
  const labelOf = labelsOf(lines);
  const overlay = make("g", { class: "overlay" });
  let x, y, width, height, right, bottom;

  function draw(available) {
    width = Math.max(available, 200);
    height = Math.round(Math.min(Math.max(width * 0.7, 250), 460));
    [right, bottom] = [width - MARGIN.right, height - MARGIN.bottom];
    const { first, end, low, high } = domain;
    x = (epoch) => MARGIN.left + ((epoch - first) / (end - first)) * (right - MARGIN.left);
    y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const bands = lines.length > MOST_BANDS ? [] : lines.map((line) => band(line));
    const folds = lines.filter(isUneven).flatMap(foldLines);
    const curves = lines.map((line) => curve(line));
    const isSingle = (line) => onlyPoint(meanOf(line, metric));
    const dots = lines.filter(isSingle).map((line) => dot(line, isSingle(line), 4));
    svg.replaceChildren(...axes(), clipped(...bands, ...folds, ...curves), ...dots);
    svg.append(...dropMark(), overlay);
  }

  /** A view of the plot area that cuts off what lies outside; at the sides there is room. */
  function clipped(...children) {
    const [left, top] = [MARGIN.left - 5, MARGIN.top];
    const [wide, high] = [right - left + 5, bottom - top];
    const viewBox = `${left} ${top} ${wide} ${high}`;
    return make("svg", { x: left, y: top, width: wide, height: high, viewBox }, ...children);
  }

  const colourOf = (line) => `var(--${styles[line.index].colour})`;
  const band = (line, kind = "") => {
    const d = state.bands ? bandOf(line, metric, x, y) : "";
    return make("path", { class: `band ${kind}`, color: colourOf(line), d });
  };
  const curve = (line, more) =>
    lineOf(styles[line.index], pathOf(meanOf(line, metric), x, y), more, line.index);
  const dot = (line, [epoch, value], r) => {
    const [cx, cy] = [x(epoch).toFixed(1), y(value).toFixed(1)];
    const hidden = value < domain.low || value > domain.high;
    return make("circle", { class: "spot", color: colourOf(line), cx, cy, r, hidden });
  };
  const onlyPoint = (points) => {
    const [first, second] = points.filter(([, value]) => value !== null);
    return second ? undefined : first;
  };
  const foldLines = (line) =>
    foldsOf(line, metric).map((points) => {
      if (onlyPoint(points)) return dot(line, onlyPoint(points), 3);
      return make("path", { class: "fold", color: colourOf(line), d: pathOf(points, x, y) });
    });
  const path = (kind, d) => make("path", { class: kind, d });
  const tick = (words, left, top, anchor, kind = "tick") =>
    make("text", { class: kind, x: left, y: top, "text-anchor": anchor }, words);

  function axes() {
    const { low, high, step } = domain;
    const digits = Math.max(0, -Math.floor(Math.log10(inUnits(metric, step)) + 1e-9));
    const labelOf = (level) =>
      inUnits(metric, level).toFixed(Math.min(digits, 6)) + (isAccuracy(metric) ? " %" : "");
    const levels = ticks(low, high, step).flatMap((level) => [
      path("grid", `M${MARGIN.left} ${y(level).toFixed(1)}H${right}`),
      tick(labelOf(level), MARGIN.left - 8, y(level) + 4, "end"),
    ]);
    const stride = Math.max(roundStep(domain.end - domain.first, width / 65), 1);
    const epochs = ticks(1, domain.last, stride).flatMap((epoch) => [
      path("grid short", `M${x(epoch).toFixed(1)} ${bottom}v5`),
      tick(epoch, x(epoch), bottom + 17, "middle"),
    ]);
    const label = tick("epoch", right, height - 4, "end");
    const axis = path("axis", `M${MARGIN.left} ${bottom}H${right}`);
    return [...levels, ...epochs, label, axis];
  }

  /** Where the learning rate drops, if that is the same epoch for all lines. */
  function dropMark() {
    const { drop } = lines[0];
    if (drop === null || lines.some((line) => line.drop !== drop)) return [];
    const at = x(drop + 0.5);
    const [left, anchor] = at - MARGIN.left > 130 ? [at - 5, "end"] : [at + 5, "start"];
    return [
      path("drop", `M${at.toFixed(1)} ${MARGIN.top}V${bottom}`),
      tick("learning rate drops", left, bottom - 6, anchor, "drop-label"),
    ];
  }

  /** The values of the lines at an epoch, or the nearest that they have, the highest first. */
  function valuesAt(epoch) {
    const values = lines.map((line) => {
      const epochs = data.epochs[line.at];
      let index = epochs.findIndex((each) => each >= epoch);
      if (index > 0 && epoch - epochs[index - 1] < epochs[index] - epoch) index -= 1;
      const { mean, half } = line[metric];
      return { line, at: epochs[index], value: mean[index] ?? null, half: half?.[index] ?? null };
    });
    return values.filter(({ value }) => value !== null).sort((a, b) => b.value - a.value);
  }

  /** Emphasise these lines, with their folds, and mark an epoch. */
  function highlight(chosen, reading) {
    const strong = lines.filter((line) => chosen.has(line));
    svg.classList.toggle("focused", strong.length > 0);
    const folds = strong.slice(0, 6).flatMap(foldLines);
    const bands = strong.map((line) => band(line, "strong"));
    const curves = strong.map((line) => curve(line, "strong"));
    overlay.replaceChildren(clipped(...bands, ...folds, ...curves));
    if (!reading || reading.epoch > domain.end) return;
    overlay.append(path("cross", `M${x(reading.epoch).toFixed(1)} ${MARGIN.top}V${bottom}`));
    for (const { line, at, value } of valuesAt(reading.epoch)) {
      overlay.append(dot(line, [at, value], line === reading.chosen.line ? 5 : 2.5));
    }
  }

  function read(epoch, line, byKeys = false) {
    const values = valuesAt(epoch);
    const chosen = values.find((each) => each.line === line) ?? values[0];
    const share = x(epoch) / width;
    if (chosen) point({ panel, share, epoch, values, chosen, byKeys, labelOf, styles });
  }

  /** The epoch and the line that an event is nearest to. */
  function nearest(event) {
    const box = svg.getBoundingClientRect();
    const share = (event.clientX - box.left) * (width / box.width) - MARGIN.left;
    const { first, end, last } = domain;
    const wanted = first + (share / (right - MARGIN.left)) * (end - first);
    const epoch = Math.min(Math.max(Math.round(wanted), 1), last);
    const top = (event.clientY - box.top) * (height / box.height);
    const away = ({ value }) => Math.abs(y(value) - top);
    const near = valuesAt(epoch).sort((a, b) => away(a) - away(b))[0];
    return [epoch, near?.line];
  }

  function keys(event) {
    const reading = state.reading?.panel === panel ? state.reading : null;
    const epoch = reading?.epoch ?? domain.last;
    const line = reading?.chosen.line;
    const values = valuesAt(epoch);
    const rank = Math.max(values.findIndex((each) => each.line === line), 0);
    const far = event.shiftKey ? 10 : 1;
    const moves = {
      ArrowLeft: () => read(Math.max(epoch - far, 1), line, true),
      ArrowRight: () => read(Math.min(epoch + far, domain.last), line, true),
      Home: () => read(1, line, true),
      End: () => read(domain.last, line, true),
      ArrowUp: () => read(epoch, values[Math.max(rank - 1, 0)]?.line, true),
      ArrowDown: () => read(epoch, values[Math.min(rank + 1, values.length - 1)]?.line, true),
      Enter: () => line && pin(line),
      Escape: () => point(null),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  const svg = make("svg", {
    class: "chart",
    tabindex: "0",
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": `${data.metrics[metric]}, ${title}: ${lines.length} lines; arrow keys read them`,
    onpointermove: (event) => read(...nearest(event)),
    onpointerleave: (event) => event.pointerType === "mouse" && point(null),
    onclick: (event) => {
      const [epoch, line] = nearest(event);
      read(epoch, line);
      if (line && event.pointerType === "mouse") pin(line);
    },
    onkeydown: keys,
    onfocus: () => svg.matches(":focus-visible") && read(domain.last, null, true),
    onblur: () => point(null),
  });
  const caption = make("figcaption", {}, title);
  const node = make("figure", { class: "panel" }, caption, ...hintsOf(lines, metric), svg);
  const panel = { node, svg, draw, highlight };
  return panel;
}

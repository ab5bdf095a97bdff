// What everything else is drawn with. Data becomes text here, and never markup.

const byId = (id) => document.getElementById(id);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const make = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);

const shape = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

const makeButton = (press, attributes, ...children) =>
  make("button", { type: "button", onclick: press, ...attributes }, ...children);

/** A piece of a line, as a legend shows it. */
const sample = (style) =>
  shape(
    "svg",
    { class: "sample", viewBox: "0 0 28 10", "aria-hidden": "true" },
    shape("path", { class: lineClass(style), d: "M2 5H26" }),
  );

const lineClass = ({ colour, dotted, dashed }) =>
  `line ${colour}${dotted ? " dotted" : ""}${dashed ? " dashed" : ""}`;

/** A round number of which about so many make the way. */
function roundStep(way, about) {
  const rough = way / Math.max(about, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((one) => one * power >= rough * 0.999) * power;
}

/** The multiples of a step from low to high. */
function ticks(low, high, step) {
  const found = [];
  const last = Math.floor(high / step + 1e-9);
  for (let at = Math.ceil(low / step - 1e-9); at <= last; at++) found.push(at * step);
  return found;
}

const isAccuracy = (metric) => metric.endsWith("accuracy");

/** A value of a metric, without its unit. */
const figure = (metric, value) =>
  isAccuracy(metric) ? ((100 * value) / data.scale).toFixed(2) : (value / data.scale).toFixed(4);

/** As on an axis: no more digits than the steps need. */
function axisLabel(metric, value, step) {
  const shown = isAccuracy(metric) ? (100 * value) / data.scale : value / data.scale;
  const unit = isAccuracy(metric) ? (100 * step) / data.scale : step / data.scale;
  const digits = Math.max(0, -Math.floor(Math.log10(unit) + 1e-9));
  return shown.toFixed(Math.min(digits, 6)) + (isAccuracy(metric) ? " %" : "");
}

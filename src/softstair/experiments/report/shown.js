// What there is to show, what of it is shown, and the colours and words of every line.

const data = JSON.parse(byId("data").textContent);
data.lines.forEach((line, index) => (line.index = index));
// Values may have any name at all, that of something which every object has too.
for (const field of data.fields) field.labels = new Map(Object.entries(field.labels));

const METRICS = {
  valid_accuracy: "validation accuracy",
  train_accuracy: "training accuracy",
  valid_loss: "validation loss",
  train_loss: "training loss",
};
// The captions of the paper's figures.
const PAPER = {
  interval: new Map([
    ["same_start", "green"],
    ["same_end", "red"],
    ["partition", "yellow"],
    ["overlapped", "blue"],
    ["none", "grey"],
  ]),
  noise: new Map([
    ["uniform", "blue"],
    ["triangular", "green"],
    ["normal", "red"],
    ["logistic", "yellow"],
  ]),
};
const PALETTE = ["blue", "yellow", "green", "red", "purple", "teal", "pink", "brown"];

const places = new Map(data.fields.map((field, place) => [field.name, place]));
const has = (name) => places.has(name);
const fieldOf = (name) => data.fields[places.get(name)];
const valueOf = (line, name) => line.values[places.get(name)];
const labelOf = (name, value) => fieldOf(name).labels.get(value) ?? value;
const varied = (lines, name) => {
  const values = new Set(lines.map((line) => valueOf(line, name)));
  values.delete(null); // a degree of freedom does not matter to a float network
  return values.size > 1;
};

const state = {
  metric: "valid_accuracy",
  columns: has("forward") ? "forward" : "",
  rows: "",
  colour: "",
  scale: "whole",
  bands: true,
  filters: new Map(data.fields.map((field) => [field.name, new Set()])),
  off: new Set(),
  pinned: new Set(),
  panels: [],
  names: new Map(),
  panel: null,
  told: null,
};
// Studies are never drawn into one chart, and noises are not where that would be a thicket.
const crowded = data.lines.length > 40 * (state.columns ? fieldOf("forward").values.length : 1);
state.rows = ["study", "data"].find(has) ?? (crowded && has("noise") ? "noise" : "");

const filtered = () =>
  data.lines.filter((line) =>
    data.fields.every(({ name }) => {
      const wanted = state.filters.get(name);
      return wanted.size === 0 || wanted.has(valueOf(line, name));
    }),
  );

/** The field that colours tell: intervals as in the paper; noises, where only they differ. */
function colourField(lines) {
  if (state.colour) return state.colour;
  if (has("interval") && varied(lines, "interval")) return "interval";
  if (has("noise") && varied(lines, "noise")) return "noise";
  const moves = (line) => ![null, "none"].includes(valueOf(line, "interval"));
  if (has("interval") && lines.some(moves)) return "interval";
  const taken = [state.columns, state.rows, "power", "study"];
  const free = data.fields.filter(({ name }) => !taken.includes(name));
  return free.find(({ name }) => varied(lines, name))?.name ?? "";
}

/** Colour, dots, words and place in the legend of every line. */
function stylist(lines) {
  const field = colourField(lines);
  const dots = has("power");
  const laws = dots && field !== "power" && varied(lines, "power");
  const float = { colour: "ink", dashed: true, label: "float", order: Infinity, key: "float" };
  const styles = data.lines.map((line) => {
    if (line.float) return float;
    const value = field ? valueOf(line, field) : "";
    const rank = field ? fieldOf(field).values.indexOf(value) : 0;
    const colour = PAPER[field]?.get(value) ?? PALETTE[rank % PALETTE.length];
    const law = dots ? valueOf(line, "power") : "none";
    const words = [field ? labelOf(field, value) : lines.length === 1 ? line.name : "all"];
    if (laws && law !== "none") words.push(law);
    const dotted = law === "progressive";
    const key = JSON.stringify([field, value, dotted]);
    return { colour, dotted, label: words.join(", "), order: 2 * rank + dotted, key };
  });
  return (line) => styles[line.index];
}

/** What tells a line of a panel from the others, in as few words as can be. */
function labeller(lines) {
  const names = data.fields.map((field) => field.name);
  const order = { interval: 0, power: 0, static_mean: 2, static_std: 2, study: 3 };
  const rank = (name) => order[name] ?? 1;
  names.sort((one, other) => rank(one) - rank(other));
  const say = (name, line) => {
    const value = labelOf(name, valueOf(line, name));
    const still = value === "yes" ? "static" : "moves";
    if (name.startsWith("static_")) return `${name.slice("static_".length)} ${still}`;
    const bare = /^[\d.e+-]+$|^(true|false|none|yes|no|auto)$/i.test(value);
    return bare ? `${fieldOf(name).label} ${value}` : value;
  };
  const words = (line) => {
    if (line.float) return line.name;
    let alike = lines.filter((one) => !one.float);
    const said = [];
    for (const name of names) {
      const same = alike.filter((one) => valueOf(one, name) === valueOf(line, name));
      if (same.length < alike.length) said.push(say(name, line));
      alike = same;
    }
    return alike.length === 1 && said.length ? said.join(" · ") : line.name;
  };
  const known = new Map();
  return (line) => {
    if (!known.has(line)) known.set(line, words(line));
    return known.get(line);
  };
}

// A panel: axes, bands and lines, and what the pointer or the keys point at.

const MARGIN = { left: 50, right: 12, top: 10, bottom: 36 };
const MOST_BANDS = 14;
const MOST_ROWS = 10;
const LEVELS = 7;

const epochAt = (line, index) => (line.at ? line.at[index] : index) + 1;
const foldEpochAt = (line, index) => (line.fold_at ? line.fold_at[index] : index) + 1;
const lastOf = (lines) => Math.max(...lines.map((line) => line.longest ?? line.epochs));
const halfAt = (line, metric, index) => line[metric].half?.[index] ?? null;

/** The point of a line that is nearest to an epoch; -1 where the line has ended before. */
function indexOf(line, epoch, metric) {
  const length = line[metric].mean.length;
  if (epoch > line.epochs) return -1;
  if (!line.at) return epoch - 1;
  let low = 0;
  let high = length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (epochAt(line, middle) < epoch) low = middle + 1;
    else high = middle;
  }
  const before = low > 0 && epoch - epochAt(line, low - 1) < epochAt(line, low) - epoch;
  return before ? low - 1 : low;
}

const mostOf = (metric) => (isAccuracy(metric) ? data.scale : Infinity);

/**
 * From where to where the axes go, up to a tick. Intervals may reach beyond: of two folds they are
 * very wide.
 */
function domainOf(lines, metric, laterHalf) {
  const last = lastOf(lines);
  let low = Infinity;
  let high = -Infinity;
  const widen = (values, epochOf) =>
    values.forEach((value, index) => {
      if (value === null || (laterHalf && epochOf(index) <= last / 2)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  for (const line of lines) {
    widen(line[metric].mean, (index) => epochAt(line, index));
    const folds = line.longest ? line[metric].folds : [];
    for (const fold of folds) widen(fold, (index) => foldEpochAt(line, index));
  }
  if (low > high) [low, high] = [0, data.scale];
  const room = 0.05 * (high - low) || 0.01 * Math.abs(high) || 1;
  low = Math.max(low - room, 0);
  const step = roundStep(high + room / 4 - low, LEVELS);
  const top = Math.min(Math.ceil((high + room / 4) / step - 1e-9) * step, mostOf(metric));
  // A single epoch lies in the middle.
  const [first, end] = last === 1 ? [0, 2] : [1, last];
  return { first, last: end, epochs: last, low, high: top, step };
}

/** points: [epoch, value] one after the other; a value of null interrupts the path. */
function pathOf(points, x, y) {
  let path = "";
  let pen = "M";
  for (const [epoch, value] of points) {
    if (value === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${x(epoch).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

/** The point of a path that has no other, and would not be seen. */
function onlyOf(points) {
  const known = points.filter(([, value]) => value !== null);
  return known.length === 1 ? known[0] : null;
}

function bandOf(line, metric, x, y) {
  const { mean } = line[metric];
  const upper = [];
  const lower = [];
  mean.forEach((value, index) => {
    const half = halfAt(line, metric, index);
    if (value === null || half === null) return;
    upper.push([epochAt(line, index), Math.min(value + half, mostOf(metric))]);
    lower.push([epochAt(line, index), Math.max(value - half, 0)]);
  });
  return upper.length > 1 ? `${pathOf([...upper, ...lower.reverse()], x, y)}Z` : "";
}

/** What a chart does not show that one may look for, in a sentence each. */
function hintsOf({ lines, metric, bands }) {
  const hints = [];
  const uneven = lines.filter((line) => line.longest);
  if (uneven.length) {
    const [of, their] = uneven.length === 1 ? ["one line", "its"] : [`${uneven.length} lines`, "a"];
    const shared = [...new Set(uneven.map((line) => `${line.epochs} of ${line.longest}`))];
    const epochs = shared.length > 3 ? "" : ` (${shared.join(", ")})`;
    hints.push(
      `The folds of ${of} have not come equally far: ${their} mean is of the epochs that all ` +
        `have${epochs}, and thin lines are single folds.`,
    );
  }
  const wide = lines.filter((line) => line[metric].half);
  if (bands && wide.length && lines.length > MOST_BANDS) {
    hints.push("Too many lines for bands: point at one to see its 95 % interval.");
  } else if (bands && !wide.length) {
    hints.push("No 95 % interval: it takes three folds.");
  }
  return hints;
}

/**
 * One chart. `told` has title, lines, metric, domain, bands, styleOf and labelOf (of a line);
 * `pointed(panel, epoch, line)` is called with what is pointed at, or null twice; `pinned(line)`
 * with what is clicked on.
 */
function makePanel(told, pointed, pinned) {
  const { lines, metric, domain } = told;
  const svg = shape("svg", {
    class: "chart",
    tabindex: "0",
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": `${told.metricLabel}, ${told.title}: ${lines.length} lines; arrow keys read them`,
  });
  const caption = make("figcaption", {}, told.title);
  const hints = hintsOf(told).map((hint) => make("p", { class: "hint" }, hint));
  const node = make("figure", { class: "panel" }, caption, ...hints, svg);
  const panel = { node, svg, measure, draw, mark, emphasise };
  const paths = new Map();
  let x, y, width, height, overlay, folds;
  let strong = [];
  let current = null;

  // Apart from drawing, for it makes the browser lay the page out.
  function measure() {
    width = Math.max(svg.clientWidth, 200);
  }

  function draw() {
    height = Math.round(Math.min(Math.max(width * 0.7, 250), 460));
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    x = (epoch) =>
      MARGIN.left + ((epoch - domain.first) / (domain.last - domain.first)) * (right - MARGIN.left);
    y = (value) =>
      bottom - ((value - domain.low) / (domain.high - domain.low)) * (bottom - MARGIN.top);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const clip = `clip-${Math.random().toString(36).slice(2)}`;
    // With room at the sides for dots: lines do not go there.
    const area = {
      x: MARGIN.left - 5,
      y: MARGIN.top,
      width: right - MARGIN.left + 10,
      height: bottom - MARGIN.top,
    };
    const bands = shape("g", { "clip-path": `url(#${clip})` });
    const curves = shape("g", { "clip-path": `url(#${clip})` });
    const dots = shape("g");
    folds = shape("g", { class: "folds", "clip-path": `url(#${clip})` });
    overlay = shape("g", { class: "overlay" });
    paths.clear();
    strong = [];
    for (const line of lines) {
      const style = told.styleOf(line);
      const points = line[metric].mean.map((value, index) => [epochAt(line, index), value]);
      const curve = shape("path", {
        class: lineClass(style),
        d: pathOf(points, x, y),
        "data-line": line.index,
      });
      const band = shape("path", { class: `band ${style.colour}` });
      paths.set(line, { curve, band });
      // Many bands are mud: then only what stands out has one.
      if (lines.length <= MOST_BANDS) fillBand(line);
      if (line.longest) bands.append(...foldsOf(line));
      curves.append(curve);
      bands.append(band);
      const only = onlyOf(points);
      if (only && isInside(only[1])) dots.append(dot(style, only, 4));
    }
    svg.replaceChildren(
      shape("defs", {}, shape("clipPath", { id: clip }, shape("rect", area))),
      ...axes(right, bottom),
      bands,
      folds,
      curves,
      dots,
      ...dropLine(bottom),
      overlay,
    );
  }

  function dot(style, [epoch, value], size) {
    const place = { cx: x(epoch).toFixed(1), cy: y(value).toFixed(1), r: size };
    return shape("circle", { class: `spot ${style.colour}`, ...place });
  }

  const isInside = (value) => value >= domain.low && value <= domain.high;

  const foldsOf = (line) =>
    line[metric].folds.map((fold) => {
      const points = fold.map((value, index) => [foldEpochAt(line, index), value]);
      const style = told.styleOf(line);
      const only = onlyOf(points);
      return only
        ? dot(style, only, 3)
        : shape("path", { class: `fold ${style.colour}`, d: pathOf(points, x, y) });
    });

  function fillBand(line) {
    const { band } = paths.get(line);
    if (told.bands && !band.hasAttribute("d")) band.setAttribute("d", bandOf(line, metric, x, y));
  }

  function axes(right, bottom) {
    const drawn = [];
    const { step } = domain;
    for (const level of ticks(domain.low, domain.high, step)) {
      const label = { class: "tick", x: MARGIN.left - 8, y: y(level) + 4, "text-anchor": "end" };
      drawn.push(
        shape("path", { class: "grid", d: `M${MARGIN.left} ${y(level).toFixed(1)}H${right}` }),
        shape("text", label, axisLabel(metric, level, step)),
      );
    }
    const stride = Math.max(roundStep(domain.last - domain.first, width / 65), 1);
    for (const epoch of ticks(1, domain.epochs, stride)) {
      const label = { class: "tick", x: x(epoch), y: bottom + 17, "text-anchor": "middle" };
      drawn.push(
        shape("path", { class: "grid short", d: `M${x(epoch).toFixed(1)} ${bottom}v5` }),
        shape("text", label, String(epoch)),
      );
    }
    const name = { class: "tick", x: right, y: height - 4, "text-anchor": "end" };
    drawn.push(shape("text", name, "epoch"));
    drawn.push(shape("path", { class: "axis", d: `M${MARGIN.left} ${bottom}H${right}` }));
    return drawn;
  }

  /** Where the learning rate drops, if it does so for all lines at once. */
  function dropLine(bottom) {
    const { drop } = lines[0];
    if (drop === null || lines.some((line) => line.drop !== drop)) return [];
    const at = x(drop + 0.5);
    const room = at - MARGIN.left > 130;
    const place = { x: at + (room ? -5 : 5), y: bottom - 6, "text-anchor": room ? "end" : "start" };
    return [
      shape("path", { class: "drop", d: `M${at.toFixed(1)} ${MARGIN.top}V${bottom}` }),
      shape("text", { class: "drop-label", ...place }, "learning rate drops"),
    ];
  }

  /** What the lines have at an epoch, the highest first. */
  function valuesAt(epoch) {
    const found = [];
    for (const line of lines) {
      const index = indexOf(line, epoch, metric);
      const value = index < 0 ? null : line[metric].mean[index];
      if (value === null || value === undefined) continue;
      found.push({ line, value, half: halfAt(line, metric, index), at: epochAt(line, index) });
    }
    return found.sort((one, other) => other.value - one.value);
  }

  /** The crosshair, and a dot on a line. */
  function mark(epoch, line = null) {
    current = epoch === null ? null : { epoch, line };
    if (epoch === null || epoch > domain.last) return overlay.replaceChildren();
    const at = x(epoch).toFixed(1);
    const drawn = [
      shape("path", { class: "cross", d: `M${at} ${MARGIN.top}V${height - MARGIN.bottom}` }),
    ];
    for (const one of valuesAt(epoch)) {
      const size = one.line === line ? 5 : 2.5;
      if (isInside(one.value)) drawn.push(dot(told.styleOf(one.line), [one.at, one.value], size));
    }
    overlay.replaceChildren(...drawn);
  }

  /** These lines stand out, with their folds; if none of them is here, all are alike. */
  function emphasise(chosen) {
    const here = lines.filter((line) => chosen.has(line));
    if (here.length === strong.length && here.every((line, at) => line === strong[at])) return;
    svg.classList.toggle("focused", here.length > 0);
    for (const line of strong) {
      const { curve, band } = paths.get(line);
      curve.classList.remove("strong");
      band.classList.remove("strong");
      if (lines.length > MOST_BANDS) band.removeAttribute("d");
    }
    for (const line of here) {
      const { curve, band } = paths.get(line);
      curve.classList.add("strong");
      band.classList.add("strong");
      fillBand(line);
    }
    strong = here;
    folds.replaceChildren(...here.slice(0, 6).flatMap(foldsOf));
  }

  function tell(epoch, line, byKeys) {
    const values = valuesAt(epoch);
    const chosen = values.find((one) => one.line === line) ?? values[0];
    if (chosen) pointed(panel, { epoch, values, chosen, x: x(epoch), width, height, byKeys, told });
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const left = ((event.clientX - box.left) / box.width) * width;
    const top = ((event.clientY - box.top) / box.height) * height;
    const share = (left - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    const wanted = domain.first + share * (domain.last - domain.first);
    const epoch = Math.min(Math.max(Math.round(wanted), 1), domain.epochs);
    const near = valuesAt(epoch).sort(
      (one, other) => Math.abs(y(one.value) - top) - Math.abs(y(other.value) - top),
    )[0];
    if (near) tell(epoch, near.line, false);
    return near;
  }

  function keys(event) {
    const { epoch, line } = current ?? { epoch: domain.epochs, line: null };
    const last = lastOf(lines);
    const far = event.shiftKey ? 10 : 1;
    const values = valuesAt(epoch);
    const rank = Math.max(values.findIndex((one) => one.line === line), 0);
    const moves = {
      ArrowLeft: () => tell(Math.max(epoch - far, 1), line, true),
      ArrowRight: () => tell(Math.min(epoch + far, last), line, true),
      Home: () => tell(1, line, true),
      End: () => tell(last, line, true),
      ArrowUp: () => tell(epoch, values[Math.max(rank - 1, 0)]?.line, true),
      ArrowDown: () => tell(epoch, values[Math.min(rank + 1, values.length - 1)]?.line, true),
      Enter: () => line && pinned(line),
      Escape: () => pointed(panel, null),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") pointed(panel, null);
  });
  svg.addEventListener("click", (event) => {
    const near = point(event);
    if (near && event.pointerType === "mouse") pinned(near.line);
  });
  svg.addEventListener("keydown", keys);
  svg.addEventListener("focus", () => {
    if (svg.matches(":focus-visible")) tell(lastOf(lines), null, true);
  });
  svg.addEventListener("blur", () => pointed(panel, null));
  return panel;
}

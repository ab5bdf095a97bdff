// Tables that sort, rows that are filtered, and the configuration of a run.

/** Numbers by value, words as people order them; what is missing comes last. */
function sortBy(table, head, direction) {
  const body = table.tBodies[0];
  const column = head.cellIndex;
  const isNumber = head.classList.contains("number");
  const compareWords = new Intl.Collator("en", { numeric: true }).compare;
  const sign = direction === "descending" ? -1 : 1;
  const keyOf = (row) => {
    const cell = row.cells[column];
    if (cell.classList.contains("missing")) return null;
    return isNumber ? Number(cell.dataset.value) : cell.textContent;
  };
  const keyed = [...body.rows].map((row) => ({ row, key: keyOf(row) }));
  keyed.sort(({ key: one }, { key: other }) => {
    if (one === null || other === null) return (one === null) - (other === null);
    return sign * (isNumber ? one - other : compareWords(one, other));
  });
  body.append(...keyed.map(({ row }) => row));
  for (const each of table.tHead.rows[0].cells) {
    const now = each === head ? direction : "none";
    if (each.hasAttribute("aria-sort")) each.setAttribute("aria-sort", now);
  }
}

function makeSortable(table) {
  for (const head of table.tHead.rows[0].cells) {
    if (!head.hasAttribute("aria-sort")) continue;
    const first = head.classList.contains("number") ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    const next = () => (head.getAttribute("aria-sort") === first ? second : first);
    const press = () => sortBy(table, head, next());
    head.replaceChildren(makeButton(press, {}, ...head.childNodes));
  }
}

function showRows(table, shown) {
  for (const row of table.tBodies[0].rows) row.hidden = !shown.has(Number(row.dataset.line));
}

/** The names in a table become buttons that keep their lines in view. */
function makeNames(table, pinned) {
  const found = new Map();
  for (const row of table.tBodies[0].rows) {
    const line = data.lines[Number(row.dataset.line)];
    const swatch = make("span", { class: "swatch" });
    const button = makeButton(() => pinned(line), { "aria-pressed": "false" });
    const cell = row.cells[0];
    button.append(swatch, ...cell.childNodes);
    cell.replaceChildren(button);
    found.set(line, { row, button, swatch });
  }
  return found;
}

/** The configuration of a unit, as it was recorded. */
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

function makeLinks() {
  const number = (hash) => /^#run-(\d+)$/.exec(hash)?.[1];
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#run-"]');
    if (!link) return;
    event.preventDefault();
    showRecorded(Number(number(link.getAttribute("href"))));
  });
  byId("recorded-close").addEventListener("click", () => byId("recorded").close());
  byId("recorded").addEventListener("click", (event) => {
    if (event.target === event.currentTarget) event.currentTarget.close();
  });
  const asked = number(location.hash);
  if (asked !== undefined) showRecorded(Number(asked));
}

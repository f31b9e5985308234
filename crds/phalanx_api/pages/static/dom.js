// Small functions over the document, and the formats of numbers.

export const find = (id) => document.getElementById(id);

// Returns an element with attributes and children; texts become text nodes, never markup.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export function makeSvg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Shows rows of texts in a table body. A row keeps its element while its key is shown, so focus stays on what it was on.
export function showRows(body, rows, { focusable = false } = {}) {
  const present = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const keys = new Set(rows.map(({ key }) => key));
  for (const [key, row] of present) if (!keys.has(key)) row.remove();
  rows.forEach(({ key, cells, marks = {}, selected = false }, number) => {
    const row = present.get(key) ?? make("tr");
    row.dataset.key = key;
    if (body.rows[number] !== row) {
      const hasFocus = row === document.activeElement;
      body.insertBefore(row, body.rows[number] ?? null);
      if (hasFocus) row.focus();
    }
    if (focusable && row.tabIndex !== 0) row.tabIndex = 0;
    if (focusable) row.setAttribute("aria-selected", String(selected));
    cells.forEach((text, column) => {
      const cell = row.cells[column] ?? row.appendChild(column ? make("td") : make("th", { scope: "row" }));
      if (cell.textContent !== text) cell.textContent = text;
      const mark = marks[column] ?? "";
      if (cell.className !== mark) cell.className = mark;
    });
  });
}

const significant = (value) => (value < 100 ? value.toPrecision(3) : value.toFixed(0));
export const milliseconds = (seconds) => (seconds === null || seconds === undefined ? "-" : seconds < 0.9995 ? `${significant(seconds * 1000)} ms` : `${significant(seconds)} s`);
export const seconds = (value) => (value === null || value === undefined ? "-" : value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`);
export const percent = (share) => (share === null || share === undefined ? "-" : `${Math.round(share * 100)} %`);
export const count = (number) => number.toLocaleString("en");

const COLOURS = ["#1f77b4", "#d1661f", "#2e8b57", "#b03060", "#7a4fa3", "#8c6d1f", "#16818f", "#c23b3b", "#5a6b7b", "#4f7f1f"];
const known = new Map();

// Returns the colour of a group, the same for the time of the page.
export function colourOf(group) {
  if (!known.has(group)) known.set(group, COLOURS[known.size % COLOURS.length]);
  return known.get(group);
}

export const prefersLessMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function legendEntry(group, text = group) {
  const swatch = make("span", { className: "swatch" });
  swatch.style.backgroundColor = colourOf(group);
  return make("li", {}, swatch, text);
}

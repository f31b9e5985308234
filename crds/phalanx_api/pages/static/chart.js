// Tables, and lines over a number.

import { colourOf, find, legendEntry, make, makeSvg } from "./dom.js";

// Shows rows of texts as a table.
export function fill(id, heads, rows) {
  const head = make("tr", {}, ...heads.map((name) => make(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
  const body = rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell))));
  find(id).replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

// Shows lines as a drawing and as a table.
export function show(id, lines, { x, y, empty, first = "Group", at = String }) {
  const place = find(id);
  if (!lines.length) {
    place.replaceChildren(make("p", { className: "facts" }, empty));
    return;
  }
  const xs = lines.flatMap(({ points }) => points.map(([at]) => at)), ys = lines.flatMap(({ points }) => points.map(([, value]) => value));
  const minX = Math.min(0, ...xs), maxX = Math.max(0, ...xs), spanX = maxX - minX || 1, maxY = Math.max(...ys) || 1;
  const left = 64, top = 12, width = 380, height = 180;
  const paths = lines.map(({ name, points }) => makeSvg("polyline", {
    fill: "none", stroke: colourOf(name), "stroke-width": 2, points: points.map(([at, value]) => `${left + (width * (at - minX)) / spanX},${top + height * (1 - value / maxY)}`).join(" "),
  }));
  const label = (px, py, content) => makeSvg("text", { x: px, y: py }, content);
  const drawing = makeSvg("svg", { viewBox: `0 0 ${left + width + 16} ${top + height + 40}`, class: "chart", role: "img", "aria-label": "The table below has the numbers" },
    makeSvg("path", { class: "axis", d: `M${left} ${top}V${top + height}H${left + width}` }), ...paths,
    label(4, top + 10, y(maxY)), label(4, top + height, y(0)), label(left, top + height + 30, x), label(left, top + height + 16, at(minX)), label(left + width - 24, top + height + 16, at(maxX)));
  const columns = [...new Set(xs)].sort((one, other) => one - other);
  const rows = lines.map(({ name, points }) => {
    const values = new Map(points);
    return make("tr", {}, make("th", { scope: "row" }, name), ...columns.map((column) => make("td", {}, values.has(column) ? y(values.get(column)) : "-")));
  });
  const heads = columns.map((column) => make("th", { scope: "col" }, at(column)));
  const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, first), ...heads)), make("tbody", {}, ...rows));
  const legend = make("ul", { className: "legend" }, ...lines.map(({ name }) => legendEntry(name)));
  const region = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: x }, table);
  const details = make("details", { open: place.querySelector("details")?.open ?? false }, make("summary", {}, "Numbers"), region);
  place.replaceChildren(drawing, legend, details);
}

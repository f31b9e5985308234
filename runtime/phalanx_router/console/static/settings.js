// Settings of the router, its policy, traffic and latencies, and the curves of caches and load.

import { read } from "./api.js";
import { colourOf, count, find, legendEntry, make, makeSvg, milliseconds, percent } from "./dom.js";

export function start() {}

export async function update() {
  const found = await read("settings");
  if (!found) return;
  const quantiles = ["ttft", "itl", "wait"].map((name) => [{ ttft: "TTFT", itl: "ITL", wait: "Wait for a group" }[name], ...["p50", "p90", "p99"].map((p) => milliseconds(found[name][p]))]);
  fill("latencies", ["At most", "P50", "P90", "P99"], quantiles);
  fill("traffic", ["Window", "Requests/s", "Mean prompt", "Not cached", "Mean output"], found.traffic.map((window) => [
    `${window.window_s} s`, (window.arrivals / window.window_s).toFixed(2), count(Math.round(window.prompt)), count(Math.round(window.missed)), count(Math.round(window.output)),
  ]));
  fill("router-settings", ["Setting", "Value"], Object.entries(found.settings).map(([name, value]) => [name, text(value)]));
  fill("policy", ["Field", "Value"], Object.entries(found.policy).map(([name, value]) => [name, text(value)]));
  const misses = found.group_curves.filter(({ curve }) => curve.hit_rates?.length).map(({ group, curve }) => ({
    name: group, points: curve.hit_rates.map((rate, index) => [found.sizes[index], 1 - rate]),
  }));
  show("miss-curve", misses, { x: "size, times the present one", y: percent, empty: "No group has measured its prefix cache yet." });
  const loads = found.load_curves.map(({ group, points }) => ({ name: group, points }));
  show("load-curve", loads, { x: "running requests", y: milliseconds, empty: "No group has measured its steps yet." });
}

const text = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

function fill(id, heads, rows) {
  const head = make("tr", {}, ...heads.map((name) => make(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
  const body = rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell))));
  find(id).replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

// Shows lines as a drawing and as a table.
function show(id, lines, { x, y, empty }) {
  const place = find(id);
  if (!lines.length) {
    place.replaceChildren(make("p", { className: "facts" }, empty));
    return;
  }
  const xs = lines.flatMap(({ points }) => points.map(([at]) => at)), ys = lines.flatMap(({ points }) => points.map(([, value]) => value));
  const maxX = Math.max(...xs), maxY = Math.max(...ys) || 1;
  const left = 64, top = 12, width = 380, height = 180;
  const paths = lines.map(({ name, points }) => makeSvg("polyline", {
    fill: "none", stroke: colourOf(name), "stroke-width": 2, points: points.map(([at, value]) => `${left + (width * at) / maxX},${top + height * (1 - value / maxY)}`).join(" "),
  }));
  const label = (px, py, content) => makeSvg("text", { x: px, y: py }, content);
  const drawing = makeSvg("svg", { viewBox: `0 0 ${left + width + 16} ${top + height + 40}`, class: "chart", role: "img", "aria-label": "The table below has the numbers" },
    makeSvg("path", { class: "axis", d: `M${left} ${top}V${top + height}H${left + width}` }), ...paths,
    label(4, top + 10, y(maxY)), label(4, top + height, y(0)), label(left, top + height + 30, x), label(left + width - 24, top + height + 16, String(maxX)));
  const columns = [...new Set(xs)].sort((one, other) => one - other);
  const rows = lines.map(({ name, points }) => {
    const values = new Map(points);
    return make("tr", {}, make("th", { scope: "row" }, name), ...columns.map((at) => make("td", {}, values.has(at) ? y(values.get(at)) : "-")));
  });
  const heads = columns.map((at) => make("th", { scope: "col" }, String(at)));
  const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Group"), ...heads)), make("tbody", {}, ...rows));
  const legend = make("ul", { className: "legend" }, ...lines.map(({ name }) => legendEntry(name)));
  const region = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: x }, table);
  const details = make("details", { open: place.querySelector("details")?.open ?? false }, make("summary", {}, "Numbers"), region);
  place.replaceChildren(drawing, legend, details);
}

// Settings of the router, its policy, traffic and latencies, and the curves of caches and load.

import { fill, show } from "./chart.js";
import { count, milliseconds, percent } from "./dom.js";
import { read } from "./session.js";

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

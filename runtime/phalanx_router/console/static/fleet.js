// The fleet: a map of each group's pages with its streams as lines, moves as curves, and the same numbers as tables.

import { write } from "./api.js";
import { count, find, make, milliseconds, percent, prefersLessMotion, seconds, showRows } from "./dom.js";
import { read } from "./session.js";
import { confirm, notice, viewer } from "./shell.js";

const CELLS = 120, ROWS = 5, TILE = 176, HEIGHT = 104, GAP = 12, JUMP_MS = 1500;
let fleet = null, before = new Map(), jumps = [], frame = 0, timer = 0;
// What the router knows of a group by its reports.
const STATES = { fresh: "linked", degraded: "linked, late reports", suspect: "silent", dead: "lost" };
// What routers and operator do about a hotspot, as in docs/balancing.md.
const MEASURES = {
  steer: "new requests go elsewhere", weigh: "gets fewer requests", requeue: "waiting requests leave", rescue: "streams leave before a preemption",
  replicate: "its prefix is copied", migrate: "streams leave", evacuate: "streams leave; replaced if it stays slow", scale: "only more groups or memory help", none: "balancing is off",
};

export function start() {
  find("group-rows").addEventListener("keydown", (event) => {
    if (event.key === "d" && !event.ctrlKey && !event.metaKey) drain(event.target.closest("tr")?.dataset.key);
  });
  addEventListener("resize", draw);
  find("drain-hint").textContent = viewer().may_write ? "d drains the focused group." : "This key may not drain groups.";
}

export const groups = () => fleet?.groups.map((group) => group.name) ?? [];

async function drain(group) {
  if (!group || !viewer().may_write) return;
  const answer = await confirm(`Drain ${group}?`, "Its streams move or end. A new group replaces it if as many groups are wanted.");
  if (!answer) return;
  try {
    await write("drain", { group });
    notice(`The operator is asked to drain ${group}.`);
  } catch (error) {
    notice(error.message);
  }
}

export async function update() {
  const next = await read("fleet");
  if (!next) return draw();
  if (next.instance !== fleet?.instance) [before, jumps] = [new Map(), []]; // another router, with other numbers
  const started = performance.now();
  findJumps(next);
  fleet = next;
  showFacts();
  showTables();
  draw();
  find("map").dataset.frameMs = (performance.now() - started).toFixed(1);
}

function findJumps(next) {
  const now = performance.now(), places = new Map();
  const names = next.groups.map((group) => group.name);
  for (const [number, index] of next.streams) {
    if (index < 0) continue;
    const group = names[index], from = before.get(number);
    if (from && from !== group) jumps.push({ from, to: group, at: now });
    places.set(number, group);
  }
  before = places;
  jumps = jumps.filter((jump) => now - jump.at < JUMP_MS);
}

function showFacts() {
  const parts = [
    fleet.groups.length === 1 ? "1 linked group" : `${fleet.groups.length} linked groups`, `${count(fleet.streams.length)} streams of this router`, `${fleet.queued} queued`,
    ...(fleet.held ? [`${fleet.held} held`] : []), `${count(fleet.moves_total)} moves`,
    ...(fleet.moves_failed_total ? [`${count(fleet.moves_failed_total)} failed`] : []),
    ...(fleet.shed_total ? [`${count(fleet.shed_total)} refused`] : []), `balancing mode ${fleet.mode}`, `router CPU ${percent(fleet.cpu_share)}`,
    ...(fleet.saturated ? ["most groups are overloaded"] : []),
  ];
  find("router").textContent = fleet.router;
  find("fleet-facts").textContent = parts.join(", ");
  const lines = find("explanation");
  if (lines.dataset.text === fleet.explanation.join("\n")) return; // a screen reader may read them
  lines.dataset.text = fleet.explanation.join("\n");
  lines.replaceChildren(...fleet.explanation.map((line) => make("li", {}, line)));
}

function showTables() {
  showRows(find("group-rows"), fleet.groups.map((group) => {
    const state = group.draining ? "draining" : group.drain_requested ? "drain requested" : STATES[group.state] ?? group.state;
    const batch = group.max_num_seqs ? `${group.running} of ${group.max_num_seqs}` : String(group.running);
    const hot = group.hotspot ? `${group.hotspot}: ${MEASURES[group.action] ?? group.action}` : "-";
    const cells = [
      group.name, state, count(group.streams), batch, String(group.waiting), percent(group.pages ? group.used_pages / group.pages : null),
      percent(group.hit_rate), group.itl_s ? milliseconds(group.itl_s) : "-", percent(group.device_busy), count(group.preemptions), hot,
    ];
    return { key: group.name, cells, marks: { 10: group.hotspot ? "hot" : "" } };
  }), { focusable: true });
  showRows(find("move-rows"), fleet.moves.slice(0, 20).map((move) => ({
    key: `${move.request} ${move.index}`,
    cells: [seconds(move.at_s), String(move.request), move.source, move.target, move.reason, move.outcome || "in progress", count(move.pages), milliseconds(move.stall_s)],
  })));
}

// Draws all tiles; again while moves are shown.
function draw() {
  cancelAnimationFrame(frame);
  clearTimeout(timer);
  if (!fleet || find("fleet").hidden) return;
  const canvas = find("map"), width = canvas.clientWidth || 800;
  const columns = Math.max(1, Math.floor((width - GAP) / (TILE + GAP)));
  const height = GAP + Math.ceil(fleet.groups.length / columns) * (HEIGHT + GAP);
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(["used", "reserved", "cached", "free", "stream", "ink", "faint", "hot"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const places = new Map(fleet.groups.map((group, index) => [group.name, { x: GAP + (index % columns) * (TILE + GAP), y: GAP + Math.floor(index / columns) * (HEIGHT + GAP) }]));
  const streams = fleet.groups.map(() => []);
  for (const stream of fleet.streams) if (stream[1] >= 0) streams[stream[1]].push(stream);
  fleet.groups.forEach((group, index) => drawGroup(pen, places.get(group.name), group, streams[index], colours));
  const now = performance.now();
  jumps = jumps.filter((jump) => now - jump.at < JUMP_MS);
  for (const jump of jumps) drawJump(pen, places.get(jump.from), places.get(jump.to), (now - jump.at) / JUMP_MS, colours);
  if (jumps.length && !prefersLessMotion()) frame = requestAnimationFrame(draw);
  else if (jumps.length) timer = setTimeout(draw, JUMP_MS);
}

function drawGroup(pen, { x, y }, group, streams, colours) {
  pen.fillStyle = group.hotspot ? colours.hot : colours.ink;
  pen.font = "12px system-ui, sans-serif";
  pen.fillText(group.name.length > 24 ? `…${group.name.slice(-23)}` : group.name, x, y + 11);
  const share = (pages) => (group.pages ? Math.round((CELLS * pages) / group.pages) : 0);
  const used = share(group.used_pages), reserved = used + share(group.reserved_pages), cached = reserved + share(group.cached_pages);
  const size = TILE / (CELLS / ROWS);
  for (let cell = 0; cell < CELLS; cell += 1) {
    const column = Math.floor(cell / ROWS), row = cell % ROWS;
    pen.fillStyle = cell < used ? colours.used : cell < reserved ? colours.reserved : cell < cached ? colours.cached : colours.free;
    pen.fillRect(x + column * size, y + 18 + row * size, size - 1, size - 1);
  }
  pen.fillStyle = colours.stream;
  const step = Math.min(5, TILE / Math.max(1, streams.length));
  streams.forEach(([, , context, , moving], position) => {
    const length = Math.min(30, 4 + 3 * Math.log2(1 + context / 32));
    pen.globalAlpha = moving ? 1 : 0.75;
    pen.fillRect(x + position * step, y + HEIGHT - length, Math.max(1, step - 2), length);
  });
  pen.globalAlpha = 1;
  if (group.draining || group.drain_requested) {
    pen.strokeStyle = colours.reserved;
    pen.strokeRect(x - 4, y - 2, TILE + 8, HEIGHT + 6);
  }
}

function drawJump(pen, from, to, share, colours) {
  if (!from || !to) return;
  const start = { x: from.x + TILE / 2, y: from.y + HEIGHT / 2 }, end = { x: to.x + TILE / 2, y: to.y + HEIGHT / 2 };
  const bend = { x: (start.x + end.x) / 2, y: Math.min(start.y, end.y) - 40 };
  pen.strokeStyle = pen.fillStyle = colours.stream;
  pen.globalAlpha = 1 - share / 2;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.moveTo(start.x, start.y);
  pen.quadraticCurveTo(bend.x, bend.y, end.x, end.y);
  pen.stroke();
  const at = prefersLessMotion() ? 1 : Math.min(1, share * 1.5), rest = 1 - at;
  const dot = { x: rest * rest * start.x + 2 * rest * at * bend.x + at * at * end.x, y: rest * rest * start.y + 2 * rest * at * bend.y + at * at * end.y };
  pen.beginPath();
  pen.arc(dot.x, dot.y, 5, 0, 7);
  pen.fill();
  pen.globalAlpha = 1;
  pen.lineWidth = 1;
}


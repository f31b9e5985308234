// Requests, and the time line of one of them.

import { write } from "./api.js";
import { colourOf, count, find, legendEntry, make, makeSvg, milliseconds, seconds, showRows } from "./dom.js";
import { groups } from "./fleet.js";
import { forget, read } from "./session.js";
import { confirm, notice, viewer } from "./shell.js";

let list = null, chosen = "", shown = "", hasEnded = false;

export function start() {
  const body = find("request-rows");
  const keyOf = (event) => event.target.closest("tr")?.dataset.key;
  body.addEventListener("click", (event) => choose(keyOf(event)));
  body.addEventListener("keydown", (event) => {
    if (event.key === "Enter") choose(keyOf(event));
    if (event.key === "m" && !event.ctrlKey && !event.metaKey) move(keyOf(event));
  });
  find("move-hint").textContent = "Enter shows the focused request" + (viewer().may_write ? ", m moves it." : ".");
}

export async function update() {
  const next = await read("requests");
  if (next) {
    if (next.instance !== list?.instance) chosen = ""; // another router, with other numbers
    list = next;
    show();
  }
  if (chosen && !hasEnded) await showDetails();
}

function show() {
  find("request-facts").textContent = `${list.open} open${list.truncated ? "; older ones are left out" : ""}`;
  showRows(find("request-rows"), list.requests.map((request) => ({
    key: String(request.number),
    selected: String(request.number) === chosen,
    cells: [
      String(request.number), request.tenant || "-", request.group || "-", count(request.prompt_tokens), count(request.tokens),
      milliseconds(request.first_token_s), seconds(request.duration_s), String(request.moves), request.end || "open",
    ],
  })), { focusable: true });
}

async function choose(key) {
  if (!key) return;
  [chosen, shown, hasEnded] = [key, "", false];
  if (list) show();
  await showDetails();
}

async function move(key) {
  if (!key || !viewer().may_write) return;
  const current = list.requests.find((request) => String(request.number) === key)?.group;
  const target = await confirm(`Move request ${key}?`, "Its pages are copied; the client receives each token once.", groups().filter((group) => group !== current));
  if (!target) return;
  try {
    await write("move", { instance: list.instance, request: Number(key), target });
    notice(`Request ${key} moves to ${target}.`);
  } catch (error) {
    notice(error.message);
  }
}

async function showDetails() {
  let details;
  try {
    forget(`requests/${chosen}`);
    details = await read(`requests/${chosen}`);
  } catch (error) {
    find("request-details").replaceChildren(make("p", { className: "error" }, error.message));
    return;
  }
  const text = JSON.stringify({ ...details, request: { ...details.request, duration_s: 0, arrived_unix_s: 0 } });
  if (text === shown) return;
  [shown, hasEnded] = [text, Boolean(details.request.end)];
  const { request, events, segments } = details;
  const rows = events.map((event) => make("tr", {}, make("th", { scope: "row" }, seconds(event.at_s)), make("td", {}, event.kind), make("td", {}, event.group || "-"), make("td", {}, String(event.index)), make("td", {}, event.note || "")));
  const heads = ["After", "Event", "Group", "Token", "Note"].map((text) => make("th", { scope: "col" }, text));
  find("request-details").replaceChildren(
    make("h3", {}, `Request ${request.number}`),
    make("p", { className: "facts" }, `${request.prompt_tokens} prompt tokens, ${request.tokens} tokens, ${request.moves} moves, ${request.replays} replays, ${request.end || "open"}`),
    bar(request, segments),
    make("ul", { className: "legend" }, ...segments.map((segment) => legend(segment))),
    make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Time line" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows))),
    ...(details.dropped ? [make("p", { className: "facts" }, `${details.dropped} events are left out`)] : []),
  );
}

const legend = ({ group, start, end }) => legendEntry(group, `${group}: tokens ${start} to ${end - 1}`);

function bar(request, segments) {
  const total = Math.max(1, request.tokens);
  const parts = segments.map(({ group, start, end }) => makeSvg("rect", { x: (100 * start) / total, y: 0, width: Math.max(0.4, (100 * (end - start)) / total), height: 6, fill: colourOf(group) }));
  const attributes = { viewBox: "0 0 100 6", class: "chart", preserveAspectRatio: "none", height: 18, role: "img", "aria-label": "Tokens by group; the list below has the numbers" };
  return makeSvg("svg", attributes, ...parts);
}

// All services that the user's token may read, and the details of one.

import { fill, show } from "./chart.js";
import { find, showRows } from "./dom.js";
import { read } from "./session.js";
import "./theme.js";

const PERIOD_MS = 5000, ROUTER_PORT = 8081;
let services = [], chosen = null, isReading = false, mustRepeat = false;

const notice = (text) => { if (find("notice").textContent !== text) find("notice").textContent = text; };
const keyOf = ({ namespace, name }) => `${namespace}/${name}`;

async function update() {
  if (document.hidden || isReading) return;
  isReading = true;
  try {
    do {
      mustRepeat = false;
      await readServices();
    } while (mustRepeat);
  } finally {
    isReading = false;
  }
}

async function readServices() {
  const namespace = find("namespace").value.trim();
  try {
    const found = await read(namespace ? `services?namespace=${encodeURIComponent(namespace)}` : "services");
    services = found.services;
    const unready = services.filter((service) => !service.is_ready).length;
    find("facts").textContent = `${services.length} service${services.length === 1 ? "" : "s"}${found.is_truncated ? ", and more that are not shown" : ""}, ${unready} not ready`;
    notice("");
  } catch (error) {
    if (error.status === 403 || error.status === 404) forgetServices();
    notice(error.status === 403 ? `Your token may not list services here: name a namespace. ${error.message}` : `The services cannot be read: ${error.message}`);
  }
  showServices();
  await showChosen();
}

function forgetServices() {
  services = [];
  find("facts").textContent = "";
}

function showServices() {
  showRows(find("service-rows"), services.map((service) => ({
    key: keyOf(service),
    selected: keyOf(service) === chosen,
    cells: [
      keyOf(service), service.state, `${service.ready_groups} of ${service.wanted_groups}`, String(service.draining_groups),
      service.hotspots.length ? service.hotspots.join(", ") : "-", service.scaling ? String(service.scaling.desired) : "-",
      service.troubles.length ? service.troubles.map(({ type, reason }) => `${type}: ${reason}`).join(", ") : "-", service.model,
    ],
    marks: { 1: service.is_ready ? "" : "error", 4: service.hotspots.length ? "error" : "" },
  })), { focusable: true });
}

async function showChosen() {
  const service = services.find((each) => keyOf(each) === chosen);
  find("details").hidden = !service;
  if (!service) return;
  find("details-title").textContent = keyOf(service);
  fill("troubles", ["Condition", "Reason", "Message"], service.troubles.length ? service.troubles.map(({ type, reason, message }) => [type, reason, message]) : [["-", "-", "Nothing needs attention."]]);
  const scaling = service.scaling;
  find("scaling-facts").textContent = scaling ? `${scaling.desired} groups desired, ${scaling.min_replicas} to ${scaling.max_replicas} allowed. ${scaling.reason} ${scaling.message}` : "This service has no autoscaler.";
  const where = `${service.name} -n ${service.namespace}`;
  const [scheme, port] = service.is_https ? ["https", 443] : ["http", 80];
  const forward = service.has_console ? [`kubectl port-forward -n ${service.namespace} service/${service.name} ${ROUTER_PORT}:${port}    # then open ${scheme}://localhost:${ROUTER_PORT}/ui`] : [];
  find("commands").textContent = [`kubectl phalanx watch ${where}`, `kubectl phalanx explain ${where}`, ...forward].join("\n");
  if (!scaling) find("scaling-curve").replaceChildren();
  else await showScaling(service);
}

async function showScaling(service) {
  let found;
  try {
    found = await read(`scaling/${service.namespace}/${service.name}`);
  } catch (error) {
    notice(`The decisions of the autoscaler cannot be read: ${error.message}`);
    return;
  }
  if (keyOf(service) !== chosen) return; // another service was chosen meanwhile
  const line = (name, field) => ({ name, points: found.points.filter((point) => point[field] !== null).map((point) => [-point.ago_s / 60, point[field]]) });
  const lines = [line("desired", "desired"), line("needed by the load", "needed")].filter(({ points }) => points.length);
  const empty = found.leads ? "The autoscaler has not decided yet." : "Another replica of the operator leads, and has the history.";
  show("scaling-curve", lines, { x: "minutes from now", y: (groups) => groups.toFixed(0), at: (minutes) => minutes.toFixed(0), empty, first: "Groups" });
}

function choose(row) {
  if (!row || row.dataset.key === chosen) return;
  chosen = row.dataset.key;
  find("scaling-curve").replaceChildren();
  showServices();
  showChosen();
}

find("service-rows").addEventListener("click", (event) => choose(event.target.closest("tr")));
find("service-rows").addEventListener("keydown", (event) => { if (event.key === "Enter") choose(event.target.closest("tr")); });
find("namespace-form").addEventListener("submit", (event) => { event.preventDefault(); mustRepeat = true; update(); });
document.addEventListener("visibilitychange", update);
addEventListener("phalanx-key", forgetServices);
find("namespace").value = new URLSearchParams(location.search).get("namespace") ?? "";
await update();
setInterval(update, PERIOD_MS);
document.documentElement.dataset.ready = "true";

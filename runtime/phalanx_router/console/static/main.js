// The page: chooses what is shown, reads it every second while it is visible, and handles keys and themes.

import { find } from "./dom.js";
import * as fleet from "./fleet.js";
import * as playground from "./playground.js";
import * as requests from "./requests.js";
import * as settings from "./settings.js";
import { read } from "./session.js";
import { notice, setViewer } from "./shell.js";
import { nextTheme } from "./theme.js";

const PERIOD_MS = 1000, NAMES = ["playground", "fleet", "requests", "settings"];
const PAGES = { playground, fleet, requests, settings };
let page = "playground", isReading = false, failed = false;

function show(name) {
  page = NAMES.includes(name) ? name : "playground";
  for (const each of NAMES) find(each).hidden = each !== page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${page[0].toUpperCase()}${page.slice(1)} - Phalanx console`;
  update();
}

async function update() {
  const shown = PAGES[page];
  if (document.hidden || isReading || !shown.update) return;
  isReading = true;
  try {
    if (shown === requests) await fleet.update();
    await shown.update();
    if (failed) notice("");
    failed = false;
  } catch (error) {
    failed = true;
    notice(`The router does not answer: ${error.message}`);
  } finally {
    isReading = false;
  }
}

function isTyping(target) {
  return target.closest("input, textarea, select, dialog") !== null;
}

addEventListener("keydown", (event) => {
  if (!find("single-keys").checked || isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in { 1: 0, 2: 0, 3: 0, 4: 0 }) location.hash = NAMES[Number(event.key) - 1];
  if (event.key === "?") find("help-dialog").showModal();
  if (event.key === "t") nextTheme();
});
addEventListener("hashchange", () => show(location.hash.slice(1)));
document.addEventListener("visibilitychange", update);
// Speech input may type single letters: they can be switched off.
find("single-keys").checked = localStorage.getItem("phalanx-single-keys") !== "off";
find("single-keys").addEventListener("change", (event) => localStorage.setItem("phalanx-single-keys", event.target.checked ? "on" : "off"));
find("help-button").addEventListener("click", () => find("help-dialog").showModal());

// Reads until the router answers, so that a page that was opened too early recovers.
async function readViewer() {
  for (;;) {
    try {
      setViewer(await read("viewer"));
      return notice("");
    } catch (error) {
      notice(`The router does not answer: ${error.message}`);
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
  }
}

await readViewer();
addEventListener("phalanx-key", readViewer);
for (const each of NAMES) {
  try {
    await PAGES[each].start();
  } catch (error) {
    notice(error.message);
  }
}
show(location.hash.slice(1));
setInterval(update, PERIOD_MS);
document.documentElement.dataset.ready = "true";

// The theme: that of the system, light or dark; the button `theme` changes it.

import { find } from "./dom.js";

const THEMES = ["system", "light", "dark"], KEY = "phalanx-theme";

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  find("theme").textContent = `Theme: ${name}`;
  localStorage.setItem(KEY, name);
}

export function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(localStorage.getItem(KEY) ?? "system") + 1) % THEMES.length]);
}

find("theme").addEventListener("click", nextTheme);
setTheme(THEMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system");

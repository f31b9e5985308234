// What all pages share: the viewer, notices, and questions.

import { find, make } from "./dom.js";

let present = { tenant: "", has_keys: false, may_write: false, sees_all: true };

export const viewer = () => present;

export function setViewer(found) {
  present = found;
  const rights = found.may_write ? "may write" : "read only";
  find("viewer").textContent = found.has_keys ? `${found.tenant}, ${rights}` : rights;
}

export function notice(text) {
  find("notice").textContent = text;
}

// Returns true, or the chosen one of `targets`; false if the answer is no.
export function confirm(title, text, targets = null) {
  const dialog = find("confirm-dialog");
  find("confirm-title").textContent = title;
  find("confirm-text").textContent = text;
  find("target-line").hidden = !targets;
  find("target").replaceChildren(...(targets ?? []).map((name) => make("option", {}, name)));
  dialog.returnValue = "no";
  find("confirm-yes").hidden = targets !== null && !targets.length;
  if (targets !== null && !targets.length) find("confirm-text").textContent = "There is no other group.";
  dialog.showModal();
  (targets === null ? find("confirm-no") : find("target")).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isYes = dialog.returnValue === "yes";
      resolve(isYes && targets ? find("target").value || false : isYes);
    }, { once: true });
  });
}

// Calls of the server with the key of the tab, which is a bearer token.

import { find } from "./dom.js";

export const TIMEOUT_MS = 10_000;
// An Ingress may serve all paths below one of its own.
const ROOT = new URL("..", import.meta.url);
// Each page stores its key under a name of its own: two of them may have one origin, as by port-forward, and different trust.
const KEY = document.documentElement.dataset.key;
let asking = null;
const tags = new Map();

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
  }
}

// Sends a request with the key to a path without a slash at its start; asks for a key and repeats it if the key is missing or wrong. `timeoutMs`: of each try.
export async function send(path, { timeoutMs, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const limit = timeoutMs ? { signal: AbortSignal.timeout(timeoutMs) } : {};
    const response = await fetch(new URL(path, ROOT), { ...options, ...limit, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) !== key) continue; // another call has got a new key
    sessionStorage.removeItem(KEY);
    await (asking ??= askForKey(Boolean(key)));
  }
}

function askForKey(wasRefused) {
  const dialog = find("key-dialog"), input = find("key");
  input.value = "";
  find("key-problem").textContent = wasRefused ? find("key-problem").dataset.refused : "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      asking = null;
      const key = input.value.trim();
      if (dialog.returnValue === "use" && /^[!-~]+$/.test(key)) {
        sessionStorage.setItem(KEY, key);
        tags.clear();
        dispatchEvent(new Event("phalanx-key"));
      }
      resolve();
    }, { once: true });
  });
}

// Returns the response, or throws an ApiError.
export async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error);
}

// Returns data of the console, or null if it is as it was at the last call.
export async function read(name) {
  const tag = tags.get(name);
  const headers = tag ? { "if-none-match": tag } : {};
  const response = await send(`ui/api/${name}`, { headers, cache: "no-store", timeoutMs: TIMEOUT_MS });
  if (response.status === 304) return null;
  await checked(response);
  if (response.headers.get("etag")) tags.set(name, response.headers.get("etag"));
  return response.json();
}

export function forget(name) {
  tags.delete(name);
}

// Calls of the router: data of the console, and the API of the models. All send the key of the tab.

import { find } from "./dom.js";

const KEY = "phalanx-key", TIMEOUT_MS = 10_000;
let asking = null;
const tags = new Map();

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
  }
}

// Sends a request with the key; asks for a key and repeats it if the key is missing or wrong.
export async function send(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) !== key) continue; // another call has got a new key
    sessionStorage.removeItem(KEY);
    await (asking ??= askForKey(Boolean(key)));
  }
}

function askForKey(wasRefused) {
  const dialog = find("key-dialog"), input = find("key");
  input.value = "";
  find("key-problem").textContent = wasRefused ? "The router does not know this key." : "";
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

async function check(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error);
}

// Returns data of the console, or null if it is as it was at the last call.
export async function read(name) {
  const tag = tags.get(name);
  const headers = tag ? { "if-none-match": tag } : {};
  const response = await send(`/ui/api/${name}`, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (response.status === 304) return null;
  await check(response);
  if (response.headers.get("etag")) tags.set(name, response.headers.get("etag"));
  return response.json();
}

export function forget(name) {
  tags.delete(name);
}

export async function write(name, body) {
  const headers = { "content-type": "application/json" };
  const request = { method: "POST", headers, body: JSON.stringify(body), signal: AbortSignal.timeout(TIMEOUT_MS) };
  return (await check(await send(`/ui/api/${name}`, request))).json();
}

export async function models() {
  return (await (await check(await send("/v1/models"))).json()).data.map((model) => model.id);
}

// Yields the events of a streamed chat answer.
export async function* chat(body, id, signal) {
  const headers = { "content-type": "application/json", "x-request-id": id };
  const request = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await check(await send("/v1/chat/completions", request));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the stream ended early");
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const lines = rest.slice(0, end).split("\n");
        rest = rest.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the router ends a request whose client leaves
  }
}

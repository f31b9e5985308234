// Calls of the router: orders of the console, and the API of the models.

import { TIMEOUT_MS, checked, send } from "./session.js";

export async function write(name, body) {
  const headers = { "content-type": "application/json" };
  const request = { method: "POST", headers, body: JSON.stringify(body), timeoutMs: TIMEOUT_MS };
  return (await checked(await send(`ui/api/${name}`, request))).json();
}

export async function models() {
  return (await (await checked(await send("v1/models"))).json()).data;
}

// Yields the events of a streamed chat answer.
export async function* chat(body, id, signal) {
  const headers = { "content-type": "application/json", "x-request-id": id };
  const request = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await checked(await send("v1/chat/completions", request));
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

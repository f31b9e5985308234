// The playground: a conversation with the model. Tokens are shaded by their probability and underlined in the colour of
// the group that computed them.

import { chat, models, read } from "./api.js";
import { colourOf, find, make, milliseconds, seconds, showRows } from "./dom.js";

const PERIOD_MS = 500;
let messages = [], current = null;

export async function start() {
  find("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!current) run();
  });
  find("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("chat-form").requestSubmit();
  });
  find("stop").addEventListener("click", () => current?.controller.abort());
  find("clear").addEventListener("click", clear);
  find("model").replaceChildren(...(await models()).map((name) => make("option", {}, name)));
}

function clear() {
  current?.controller.abort();
  messages = [];
  for (const id of ["conversation", "legend", "timing", "token-rows"]) find(id).replaceChildren();
}

function parameters() {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const system = find("system").value.trim(), tools = find("tools").value.trim(), stop = find("stop-text").value;
  return {
    model: find("model").value, stream: true, stream_options: { include_usage: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("max-tokens"), seed: number("seed"),
    ...(stop ? { stop } : {}), ...(tools ? { tools: JSON.parse(tools) } : {}),
    ...(find("logprobs").checked ? { logprobs: true, top_logprobs: 3 } : {}),
  };
}

function turn(role) {
  const text = make("span");
  const element = make("div", { className: "turn" }, make("b", {}, role), text);
  find("conversation").append(element);
  return text;
}

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return "console-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function run() {
  const question = find("message").value.trim();
  if (!question) return;
  messages.push({ role: "user", content: question });
  turn("You").textContent = question;
  const answer = { controller: new AbortController(), text: turn("Model"), tokens: [], content: "", tools: [], id: "", started: performance.now(), first: null };
  current = answer;
  showState();
  const timer = setInterval(() => place(answer), PERIOD_MS);
  try {
    for await (const event of chat(parameters(), randomId(), answer.controller.signal)) receive(answer, event);
    messages.push({ role: "assistant", content: answer.content, ...(answer.tools.length ? { tool_calls: answer.tools } : {}) });
  } catch (error) {
    const text = error.name === "AbortError" ? "stopped" : [error.code, error.message].filter(Boolean).join(": ");
    answer.text.append(make("span", { className: "error" }, ` ${text}`));
    if (answer.content) messages.push({ role: "assistant", content: answer.content });
    else messages.pop();
  } finally {
    clearInterval(timer);
    current = null;
    showState();
    await place(answer);
  }
}

function showState() {
  find("send").disabled = Boolean(current);
  find("stop").disabled = !current;
}

function receive(answer, event) {
  if (event.error) throw Object.assign(new Error(event.error.message), { code: event.error.code });
  answer.id = event.id ?? answer.id;
  const choice = event.choices?.[0];
  if (event.usage) answer.usage = event.usage;
  if (!choice) return;
  for (const call of choice.delta?.tool_calls ?? []) addTool(answer, call);
  const text = choice.delta?.content ?? "", details = choice.logprobs?.content ?? [];
  if (!text && !details.length) return;
  answer.first ??= performance.now();
  answer.content += text;
  if (details.length) for (const detail of details) addToken(answer, detail.token, detail);
  else addToken(answer, text, null);
  find("conversation").scrollTop = find("conversation").scrollHeight;
}

function addToken(answer, text, detail) {
  const element = make("span", { className: "token" }, text);
  if (detail) {
    const probability = Math.exp(detail.logprob);
    element.title = `${(probability * 100).toFixed(1)} %`;
    element.style.backgroundColor = `rgb(200 120 20 / ${((1 - probability) * 0.45).toFixed(2)})`;
  }
  answer.tokens.push({ text, detail, element, group: "" });
  answer.text.append(element);
}

function addTool(answer, call) {
  const tool = (answer.tools[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } });
  tool.function.name += call.function?.name ?? "";
  tool.function.arguments += call.function?.arguments ?? "";
  answer.toolText ??= answer.text.appendChild(make("pre"));
  answer.toolText.textContent = answer.tools.map((each) => `${each.function.name}(${each.function.arguments})`).join("\n");
}

// Reads which group computed which tokens, and shows it.
async function place(answer) {
  if (!answer.id) return;
  let details;
  try {
    details = await read(`requests/${encodeURIComponent(answer.id)}`);
  } catch {
    return; // the request is not known yet, or any more
  }
  for (const { group, start, end } of details.segments) {
    for (const token of answer.tokens.slice(start, end)) {
      if (token.group === group) continue;
      token.group = group;
      token.element.style.borderBottomColor = colourOf(group);
    }
  }
  markMoves(answer, details);
  const groups = [...new Set(details.segments.map((segment) => segment.group))];
  find("legend").replaceChildren(...groups.map((group) => legendEntry(group)));
  const ttft = answer.first === null ? "-" : milliseconds((answer.first - answer.started) / 1000);
  const usage = answer.usage ? `${answer.usage.prompt_tokens} prompt tokens, ${answer.usage.completion_tokens} tokens, ` : "";
  find("timing").textContent = `${usage}first token after ${ttft}, ${details.request.moves} moves, ${seconds(details.request.duration_s)} in all`;
  showTokens(answer);
}

function legendEntry(group) {
  const swatch = make("span", { className: "swatch" });
  swatch.style.backgroundColor = colourOf(group);
  return make("li", {}, swatch, group);
}

function markMoves(answer, details) {
  answer.marked ??= new Set();
  details.segments.slice(1).forEach((segment, number) => {
    const token = answer.tokens[segment.start];
    if (!token || answer.marked.has(segment.epoch)) return;
    answer.marked.add(segment.epoch);
    const from = details.segments[number].group;
    token.element.before(make("span", { className: "moved" }, `${from} → ${segment.group}`));
  });
}

function showTokens(answer) {
  if (!find("token-details").open) return;
  const rows = answer.tokens.map(({ text, detail, group }, index) => {
    const others = (detail?.top_logprobs ?? []).map((other) => `${JSON.stringify(other.token)} ${(Math.exp(other.logprob) * 100).toFixed(1)} %`);
    const probability = detail ? `${(Math.exp(detail.logprob) * 100).toFixed(1)} %` : "-";
    return { key: String(index), cells: [String(index), JSON.stringify(text), probability, group || "-", others.join(", ")] };
  });
  showRows(find("token-rows"), rows);
}

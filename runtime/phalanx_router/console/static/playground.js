// The playground: a conversation with the model. Tokens are shaded by their probability and underlined in the colour of
// the group that computed them.

import { chat, models } from "./api.js";
import { colourOf, find, legendEntry, make, milliseconds, seconds, showRows } from "./dom.js";
import * as images from "./images.js";
import { read } from "./session.js";

const PERIOD_MS = 500;
let messages = [], current = null, last = null;

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
  find("token-details").addEventListener("toggle", () => last && showTokens(last));
  images.start();
  const known = await models(), offer = () => images.offer(known.find(({ id }) => id === find("model").value));
  find("model").replaceChildren(...known.map(({ id }) => make("option", {}, id)));
  find("model").addEventListener("change", offer);
  offer();
}

function clear() {
  current?.controller.abort();
  [messages, last] = [[], null];
  images.forgetAll();
  for (const id of ["conversation", "legend", "timing", "token-rows"]) find(id).replaceChildren();
}

function readTools() {
  const text = find("tools").value.trim();
  if (!text) return {};
  try {
    return { tools: JSON.parse(text) };
  } catch (error) {
    throw new Error(`Tools: ${error.message}`);
  }
}

function parameters() {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const system = find("system").value.trim(), stop = find("stop-text").value;
  return {
    model: find("model").value, stream: true, stream_options: { include_usage: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("max-tokens"), seed: number("seed"),
    ...(stop ? { stop } : {}), ...readTools(), logprobs: true, top_logprobs: 3, // they number the tokens
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
  const conversation = messages, pictures = images.take();
  conversation.push({ role: "user", content: images.contentOf(question, pictures) });
  turn("You").append(...pictures.map(({ thumbnail }) => thumbnail), question);
  const answer = { controller: new AbortController(), text: turn("Model"), tokens: [], content: "", tools: [], id: "", started: performance.now(), first: null, decoder: new TextDecoder(), isShaded: find("logprobs").checked };
  current = last = answer;
  showState();
  const timer = setInterval(() => place(answer), PERIOD_MS);
  try {
    for await (const event of chat(parameters(), randomId(), answer.controller.signal)) receive(answer, event);
    conversation.push({ role: "assistant", content: answer.content, ...(answer.tools.length ? { tool_calls: answer.tools } : {}) });
  } catch (error) {
    const text = error.name === "AbortError" ? "stopped" : [error.code, error.message].filter(Boolean).join(": ");
    answer.text.append(make("span", { className: "error" }, ` ${text}`));
    if (answer.content) conversation.push({ role: "assistant", content: answer.content });
    else forgetQuestion(conversation, pictures);
  } finally {
    clearInterval(timer);
    if (current === answer) current = null;
    showState();
    await place(answer);
  }
}

// Without an answer the question is not part of the conversation, and may be sent again.
function forgetQuestion(conversation, pictures) {
  conversation.pop();
  if (conversation === messages) images.putBack(pictures);
}

function showState() {
  find("send").disabled = Boolean(current);
  find("stop").disabled = !current;
  find("conversation").setAttribute("aria-busy", String(Boolean(current)));
}

function receive(answer, event) {
  if (event.error) throw Object.assign(new Error(event.error.message), { code: event.error.code });
  answer.id = event.id ?? answer.id;
  const choice = event.choices?.[0];
  if (event.usage) answer.usage = event.usage;
  if (!choice) return;
  for (const call of choice.delta?.tool_calls ?? []) addTool(answer, call);
  const text = choice.delta?.content ?? "", thought = choice.delta?.reasoning_content ?? "", details = choice.logprobs?.content ?? [];
  if (!text && !thought && !details.length) return;
  answer.first ??= performance.now();
  answer.content += text;
  const box = find("conversation"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  addTokens(answer, text || thought, details, Boolean(thought));
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

// Shows the text of an event, token by token if the tokens are just this text. Special tokens, stop texts and those of tool
// calls are in no text: they are only in the table.
function addTokens(answer, text, details, isThought) {
  const pieces = details.map((detail) => answer.decoder.decode(new Uint8Array(detail.bytes ?? []), { stream: true }));
  const isWhole = pieces.join("") === text;
  const block = isWhole || !text ? null : answer.text.appendChild(make("span", { className: isThought ? "token thought" : "token" }, text));
  details.forEach((detail, index) => {
    const element = isWhole ? answer.text.appendChild(make("span", { className: isThought ? "token thought" : "token" }, pieces[index])) : block;
    if (isWhole && answer.isShaded) shade(element, Math.exp(detail.logprob));
    answer.tokens.push({ text: detail.token, detail, element, group: "" });
  });
}

function shade(element, probability) {
  element.title = `${(probability * 100).toFixed(1)} %`;
  element.style.backgroundColor = `rgb(200 120 20 / ${((1 - probability) * 0.45).toFixed(2)})`;
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
  if (!answer.id || answer !== last) return;
  let details;
  try {
    details = await read(`requests/${encodeURIComponent(answer.id)}`);
  } catch {
    showTiming(answer, null); // the request is not known yet, or any more
    return;
  }
  for (const { group, start, end } of details.segments) {
    for (const token of answer.tokens.slice(start, end)) {
      if (token.group === group) continue;
      token.group = group;
      if (token.element) token.element.style.borderBottomColor = colourOf(group);
    }
  }
  markMoves(answer, details);
  const groups = [...new Set(details.segments.map((segment) => segment.group))];
  find("legend").replaceChildren(...groups.map((group) => legendEntry(group)));
  showTiming(answer, details.request);
  showTokens(answer);
}

function showTiming(answer, request) {
  const ttft = answer.first === null ? "-" : milliseconds((answer.first - answer.started) / 1000);
  const usage = answer.usage ? `${answer.usage.prompt_tokens} prompt tokens, ${answer.usage.completion_tokens} tokens, ` : "";
  const facts = request ? `, ${request.moves} moves, ${seconds(request.duration_s)} in all` : "";
  find("timing").textContent = `${usage}first token after ${ttft}${facts}`;
}

function markMoves(answer, details) {
  answer.marked ??= new Set();
  details.segments.slice(1).forEach((segment, number) => {
    const token = answer.tokens.slice(segment.start).find((each) => each.element);
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

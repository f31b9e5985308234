// Vercel's `ai` package under node: text, streams, objects, its tool loop and embeddings, with two of its providers.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { CLIENT_URL, CLIENT_KEY, CLIENT_MODEL } = process.env;
const address = { baseURL: `${CLIENT_URL}/v1`, apiKey: CLIENT_KEY };
const compatible = createOpenAICompatible({ ...address, name: "phalanx", includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI(address);
const models = [compatible(CLIENT_MODEL), openai.responses(CLIENT_MODEL)];
const prompt = "Name a fruit.";

function expect(condition, found) {
  if (!condition) throw new Error(`found ${JSON.stringify(found)}`.slice(0, 300));
}

async function text() {
  for (const model of models) {
    const answer = await generateText({ model, prompt, maxOutputTokens: 16, maxRetries: 0 });
    expect(answer.text && answer.usage.outputTokens > 0, answer.usage);
  }
}

async function streamed() {
  for (const model of models) {
    const failures = [];
    const answer = streamText({ model, prompt, maxOutputTokens: 16, maxRetries: 0, onError: ({ error }) => failures.push(error) });
    let whole = "";
    for await (const part of answer.textStream) whole += part;
    expect(failures.length === 0, failures.map(String));
    expect(whole && (await answer.usage).outputTokens > 0, whole);
  }
}

async function object() {
  const schema = z.object({ fruit: z.enum(["apple", "pear"]), sweet: z.boolean() });
  const output = Output.object({ schema });
  const answer = await generateText({ model: compatible(CLIENT_MODEL), prompt, output, maxOutputTokens: 120, maxRetries: 0 });
  expect(typeof answer.output.sweet === "boolean", answer.output);
}

async function loop() {
  for (const model of models) {
    let calls = 0;
    const weather = tool({
      description: "Weather of a city",
      inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
      execute: async ({ city }) => { calls += 1; return `It rains in ${city}.`; },
    });
    const answer = await generateText({
      model, prompt: "How is the weather in Rome?", tools: { weather }, maxOutputTokens: 200, maxRetries: 0, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),  // a small model may not choose to
    });
    expect(calls >= 1 && answer.steps.length === 2 && answer.text, { calls, steps: answer.steps.length, text: answer.text, reason: answer.steps.map((step) => [step.finishReason, step.text]) });
  }
}

async function embeddings() {
  const model = compatible.embeddingModel(CLIENT_MODEL);
  const { embeddings: vectors } = await embedMany({ model, values: ["a boat", "a ship"], maxRetries: 0 });
  expect(vectors.length === 2, vectors.length);
}

const checks = { "text": text, "streamed text": streamed, "object": object, "tool loop": loop, "embeddings": embeddings };
let failed = false;
for (const [name, check] of Object.entries(checks)) {
  let why = "";
  try {
    await check();
  } catch (error) {
    console.error(error);
    why = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
    failed = true;
  }
  console.log("check: " + JSON.stringify({ name, why }));
}
process.exit(failed ? 1 : 0);

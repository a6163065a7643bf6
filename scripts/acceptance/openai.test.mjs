// The openai package for Node against the built-in model. LAPIDARY_URL names a running server.

import assert from "node:assert/strict";
import test from "node:test";

import OpenAI from "openai";

const url = process.env.LAPIDARY_URL;
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const ask = (content, more = {}) =>
  client.chat.completions.create({ model: "lapidary", messages: [{ role: "user", content }], temperature: 0, ...more });
const running = async () => {
  const text = await (await fetch(url + "/metrics")).text();
  return Number(text.match(/^lapidary_requests_running\{.*\} (\d+)$/m)[1]);
};
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather in a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string", description: "The name of the city." } },
        required: ["city"],
      },
    },
  },
  {
    type: "function",
    function: {
      name: "add",
      description: "Add two numbers.",
      parameters: {
        type: "object",
        properties: {
          a: { type: "number", description: "The first number." },
          b: { type: "number", description: "The second number." },
        },
        required: ["a", "b"],
      },
    },
  },
];

test("a reply, whole and streamed", async () => {
  const whole = await ask("Tell me a story about Zoe.");
  let text = "";
  for await (const chunk of await ask("Tell me a story about Zoe.", { stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
});

test("a thought is apart", async () => {
  const reply = await ask("What is the capital of Kenya?", { reasoning_effort: "high" });
  assert.equal(reply.choices[0].message.reasoning_content, "The user asks about Kenya. Its capital is Nairobi.");
  assert.ok(reply.usage.completion_tokens_details.reasoning_tokens > 0);
});

test("a tool is run by the package's own loop", async () => {
  const asked = [];
  const runner = client.chat.completions.runTools({
    model: "lapidary",
    temperature: 0,
    messages: [{ role: "user", content: "What is the weather in Oslo?" }],
    tools: tools.map((tool) => ({
      ...tool,
      function: {
        ...tool.function,
        parse: JSON.parse,
        function: (args) => (asked.push(args), '{"weather": "snowy", "temperature": -3}'),
      },
    })),
  });
  assert.equal(await runner.finalContent(), "It is snowy in Oslo and the temperature is -3 degrees.");
  assert.deepEqual(asked, [{ city: "Oslo" }]);
});

test("a schema holds", async () => {
  const schema = {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
    required: ["name", "age", "city"],
    additionalProperties: false,
  };
  const reply = await ask("Give JSON for a person called Ada, aged 36, living in Lima.", {
    response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  });
  assert.deepEqual(JSON.parse(reply.choices[0].message.content), { name: "Ada", age: 36, city: "Lima" });
});

test("errors have their classes", async () => {
  await assert.rejects(ask("x", { temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(ask("x", { model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(ask("dog ".repeat(20000)), (error) => error.code === "context_length_exceeded");
});

test("the responses stream adds up", async () => {
  const stream = client.responses.stream({ model: "lapidary", input: "What is the capital of Kenya?", temperature: 0 });
  const final = await stream.finalResponse();
  assert.equal(final.output_text, "The capital of Kenya is Nairobi.");
});

test("leaving cancels", async () => {
  const stream = await ask("Tell me a story about Zoe.", { stream: true, max_tokens: 7000, ignore_eos: true });
  for await (const _ of stream) break;
  stream.controller.abort();
  const end = Date.now() + 2000;
  while ((await running()) > 0) assert.ok(Date.now() < end, "the slot is free within 2 s");
});

// The official Node clients and the AI SDK against a gateway: `node suite.mjs URL KEY KEY_WITH_A_LIMIT`. Prints one JSON object: case -> "ok" or what was wrong.
import assert from "node:assert/strict";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool as aiTool } from "ai";

const [url, key, slowKey] = process.argv.slice(2);
const made = (options = {}) => new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 30_000, ...options });
const client = made();
const model = (await client.models.list()).data[0].id;
const asked = [{ role: "user", content: "The code of the garage is K4417. What is the code of the garage?" }];
const chat = (more = {}, options = {}, by = client) =>
  by.chat.completions.create({ model, messages: asked, temperature: 0, max_tokens: 24, ...more }, options);
const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] }, count: { type: "integer", minimum: 1, maximum: 99 } },
  required: ["colour", "count"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "pick", parameters: schema, strict: true } };
const question = asked[0].content;
const respond = (more = {}) => client.responses.create({ model, input: question, temperature: 0, ...more });
const claude = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 30_000 });
const message = (more = {}) => ({ model, messages: asked, max_tokens: 24, temperature: 0, ...more });
const fails = async (work, kind, status, check = () => {}) => {
  const error = await work().then(() => assert.fail("it did not fail"), (e) => e);
  assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
  assert.equal(error.status, status);
  check(error);
};

const cases = {
  async chat() {
    const answer = await chat();
    assert.match(answer.choices[0].message.content, /K4417/);
    assert.equal(answer.object, "chat.completion");
    const { prompt_tokens: prompt, completion_tokens: completion, total_tokens: total } = answer.usage;
    assert.ok(prompt > 0 && completion > 0 && total === prompt + completion);
  },
  async stream_with_usage() {
    const whole = await chat();
    let text = "", usage = null, ended = null;
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      ended = chunk.choices[0]?.finish_reason ?? ended;
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(ended, whole.choices[0].finish_reason);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async stream_runner() {
    const runner = client.chat.completions.stream({ model, messages: asked, temperature: 0, max_tokens: 24 });
    const final = await runner.finalChatCompletion();
    assert.match(final.choices[0].message.content, /K4417/);
  },
  async broken_off() {
    const stream = await chat({ stream: true, max_tokens: 200, ignore_eos: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    assert.ok(stream.controller.signal.aborted);
  },
  async tools() {
    const answer = await chat({ tools: [tool], tool_choice: "required", max_tokens: 300 });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.ok(["red", "green"].includes(JSON.parse(call.function.arguments).colour));
    const history = [...asked, answer.choices[0].message, { role: "tool", tool_call_id: call.id, content: "done" }];
    const next = await chat({ messages: history, tools: [tool], tool_choice: "none" });
    assert.equal(next.choices[0].message.tool_calls, undefined);
  },
  async json_schema() {
    const answer = await chat({ response_format: { type: "json_schema", json_schema: { name: "thing", schema, strict: true } }, max_tokens: 300 });
    const { colour, count } = JSON.parse(answer.choices[0].message.content);
    assert.ok(["red", "green"].includes(colour) && count >= 1 && count <= 99);
  },
  async logprobs_and_n() {
    const answer = await chat({ n: 2, temperature: 1, seed: 5, logprobs: true, top_logprobs: 2, max_tokens: 4, ignore_eos: true });
    assert.deepEqual(answer.choices.map((c) => c.index), [0, 1]);
    for (const choice of answer.choices) {
      assert.equal(choice.logprobs.content.length, 4);
      for (const token of choice.logprobs.content) assert.ok(token.logprob <= 0 && token.top_logprobs.length === 2);
    }
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: ["The code", "The sky"], max_tokens: 3, temperature: 0 });
    assert.deepEqual(answer.choices.map((c) => c.index), [0, 1]);
  },
  async errors() {
    await fails(() => chat({ temperature: 9 }), OpenAI.BadRequestError, 400, (e) => assert.equal(e.param, "temperature"));
    await fails(() => chat({ model: "nobody" }), OpenAI.NotFoundError, 404, (e) => assert.equal(e.code, "model_not_found"));
    await fails(() => chat({}, {}, made({ apiKey: "no-such-key" })), OpenAI.AuthenticationError, 401);
    await fails(() => client.embeddings.create({ model, input: "x" }), OpenAI.BadRequestError, 400);
    await fails(() => chat({}, {}, made({ baseURL: "http://127.0.0.1:9/v1" })), OpenAI.APIConnectionError, undefined);
  },
  async responses() {
    const made = await respond();
    assert.match(made.output_text, /K4417/);
    assert.equal(made.status, "completed");
    const next = await respond({ input: "What is the code of the garage?", previous_response_id: made.id });
    assert.equal(next.previous_response_id, made.id);
    assert.ok(next.usage.input_tokens > made.usage.input_tokens);
    assert.equal((await client.responses.retrieve(made.id)).output_text, made.output_text);
    const items = [];
    for await (const item of client.responses.inputItems.list(next.id)) items.push(item);
    assert.equal(items[0].content[0].text, "What is the code of the garage?");
    await client.responses.delete(made.id);
    await fails(() => client.responses.retrieve(made.id), OpenAI.NotFoundError, 404);
    await fails(() => respond({ tools: [{ type: "web_search" }] }), OpenAI.BadRequestError, 400, (e) => assert.equal(e.param, "tools[0].type"));
  },
  async responses_stream() {
    const whole = await respond();
    const stream = client.responses.stream({ model, input: question, temperature: 0 });
    const numbers = [];
    stream.on("event", (event) => numbers.push(event.sequence_number));
    const final = await stream.finalResponse();
    assert.deepEqual(final.output[0].content[0].text, whole.output_text);
    assert.deepEqual(numbers, numbers.map((_, i) => i));
  },
  async responses_tools() {
    const tools = [{ type: "function", name: "pick", parameters: schema, strict: true }];
    const made = await respond({ tools, tool_choice: "required", max_output_tokens: 300 });
    const call = made.output.find((item) => item.type === "function_call");
    assert.ok(["red", "green"].includes(JSON.parse(call.arguments).colour));
    const input = [{ role: "user", content: question }, ...made.output, { type: "function_call_output", call_id: call.call_id, output: "done" }];
    for (const item of made.output) if (item !== call && item.type === "function_call") input.push({ type: "function_call_output", call_id: item.call_id, output: "done" });
    assert.ok((await respond({ input, tools, tool_choice: "none", max_output_tokens: 8 })).output.length);
  },
  async responses_in_the_background() {
    let made = await respond({ background: true });
    assert.equal(made.status, "queued");
    while (["queued", "in_progress"].includes(made.status)) made = await client.responses.retrieve(made.id);
    assert.match(made.output_text, /K4417/);
    const long = await respond({ background: true, max_output_tokens: 400, ignore_eos: true });
    assert.equal((await client.responses.cancel(long.id)).status, "cancelled");
  },
  async anthropic() {
    const made = await claude.messages.create(message());
    assert.match(made.content[0].text, /K4417/);
    assert.equal(made.stop_reason, "end_turn");
    const stream = claude.messages.stream(message());
    assert.equal(await stream.finalText(), made.content[0].text);
    assert.ok((await claude.messages.countTokens({ model, messages: asked })).input_tokens > 0);
    const tools = [{ name: "pick", input_schema: schema }];
    const used = await claude.messages.create(message({ tools, tool_choice: { type: "any" }, max_tokens: 300 }));
    const use = used.content.find((block) => block.type === "tool_use");
    assert.ok(["red", "green"].includes(use.input.colour));
    const results = used.content.filter((b) => b.type === "tool_use").map((b) => ({ type: "tool_result", tool_use_id: b.id, content: "done" }));
    const messages = [...asked, { role: "assistant", content: used.content }, { role: "user", content: results }];
    assert.equal((await claude.messages.create(message({ messages, tools, tool_choice: { type: "none" } }))).type, "message");
    await fails(() => claude.messages.create(message({ model: "nobody" })), Anthropic.NotFoundError, 404, (e) => assert.equal(e.error.error.type, "not_found_error"));
    await fails(() => new Anthropic({ baseURL: url, apiKey: "no-such-key", maxRetries: 0 }).messages.create(message()), Anthropic.AuthenticationError, 401);
  },
  async ai_sdk() {
    // Its providers' defaults: OpenAI's Responses API, whose items it names by their ids in the next turn, and Anthropic's.
    for (const given of [createOpenAI({ baseURL: `${url}/v1`, apiKey: key })(model), createAnthropic({ baseURL: `${url}/v1`, apiKey: key })(model)]) {
      const first = await generateText({ model: given, prompt: question, temperature: 0, maxOutputTokens: 24, maxRetries: 0 });
      assert.match(first.text, /K4417/);
      const messages = [{ role: "user", content: question }, ...first.response.messages, { role: "user", content: "And again?" }];
      const second = streamText({ model: given, messages, temperature: 0, maxOutputTokens: 24, maxRetries: 0 });
      let text = "";
      for await (const piece of second.textStream) text += piece;
      assert.ok(text.length && (await second.usage).inputTokens > first.usage.inputTokens);
      const pick = aiTool({ description: "Pick a thing.", inputSchema: jsonSchema(schema), execute: async () => "done" });
      const used = await generateText({
        model: given, prompt: question, tools: { pick }, toolChoice: "required", maxOutputTokens: 300, maxRetries: 0, temperature: 0,
        stopWhen: stepCountIs(2), prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
      });
      assert.ok(["red", "green"].includes(used.steps[0].toolCalls[0].input.colour) && used.steps.length === 2);
      const output = Output.object({ schema: jsonSchema(schema) });
      const thing = await generateText({ model: given, prompt: question, output, maxOutputTokens: 300, maxRetries: 0, temperature: 0 });
      assert.ok(["red", "green"].includes(thing.output.colour));
    }
  },
  async limits_and_retries() {
    // A hint a second: the first passes, the second is told when to come back, and the client that retries does.
    const advise = (by) => by.post("/advisory", { body: { session_id: "node-client" } });
    const limited = made({ apiKey: slowKey });
    assert.equal((await advise(limited)).status, "accepted");
    await fails(() => advise(limited), OpenAI.RateLimitError, 429, (e) => assert.ok(Number(e.headers.get("retry-after")) >= 1));
    assert.equal((await advise(made({ apiKey: slowKey, maxRetries: 4 }))).status, "accepted");
  },
  async timeouts() {
    const long = { max_tokens: 400, ignore_eos: true };
    await fails(() => chat(long, { timeout: 20 }), OpenAI.APIConnectionTimeoutError, undefined);
    const stop = new AbortController();
    const work = chat({ ...long, stream: true }, { signal: stop.signal });
    stop.abort();
    await fails(() => work, OpenAI.APIUserAbortError, undefined);
  },
};

const found = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    found[name] = "ok";
  } catch (e) {
    found[name] = String(e.stack ?? e);
  }
}
console.log(JSON.stringify(found));

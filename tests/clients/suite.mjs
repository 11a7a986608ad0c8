// The official Node client against a gateway: `node suite.mjs URL KEY KEY_WITH_A_LIMIT`. Prints one JSON object: case -> "ok" or what was wrong.
import assert from "node:assert/strict";
import OpenAI from "openai";

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

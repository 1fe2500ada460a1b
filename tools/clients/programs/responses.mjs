// responses.mjs URL MODEL [tools]: OpenAI's node client and Vercel's ai on /v1/responses.
import assert from "node:assert";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText, Output, tool, stepCountIs } from "ai";
import { z } from "zod";

const [baseURL, model, withTools] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "none" });
const vercel = createOpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "none" });
const Answer = z.object({ a: z.enum(["ab", "ba"]), b: z.number().int().min(0).max(11) });
const done = (name, what) => console.log("ok", name, JSON.stringify(what).slice(0, 100));
const own = { model, max_output_tokens: 60 };

const first = await client.responses.create({ ...own, input: "ab" });
done("openai: text", first.output_text);
let joined = "";
for await (const event of await client.responses.create({ ...own, input: "ab", stream: true }))
  if (event.type === "response.output_text.delta") joined += event.delta;
assert.equal(joined, first.output_text);
const stream = client.responses.stream({ ...own, input: "ab" });
assert.equal((await stream.finalResponse()).output_text, joined);
done("openai: stream", joined);
const second = await client.responses.create({ ...own, input: "b", previous_response_id: first.id });
done("openai: previous_response_id", second.output_text);
const parsed = await client.responses.parse({ ...own, input: "ab", text: { format: zodTextFormat(Answer, "answer") } });
done("openai: parse", Answer.parse(parsed.output_parsed));
assert.equal((await client.responses.retrieve(first.id)).id, first.id);
await client.responses.delete(first.id);
await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
await assert.rejects(client.responses.create({ ...own, input: [{ role: "user", content: [
  { type: "input_image", image_url: "data:image/png;base64,AA==", detail: "auto" }] }] }), /text only/);
done("openai: retrieve, delete, image refused", "");

const common = { model: vercel(model), maxOutputTokens: 60, prompt: "ab" };
const text = await generateText(common);
assert.equal(text.text, joined);
done("vercel: generateText", [text.text, text.usage]);
let streamed = "";
for await (const piece of streamText(common).textStream) streamed += piece;
assert.equal(streamed, joined);
done("vercel: streamText", streamed);
const object = await generateText({ ...common, output: Output.object({ schema: Answer }) });
done("vercel: Output.object", Answer.parse(object.output));
const turns = await generateText({ ...common, prompt: undefined, messages: [
  { role: "user", content: "ab" }, ...text.response.messages, { role: "user", content: "b" }] });
done("vercel: second turn by item_reference", turns.text);

if (withTools) {
  const ab = { type: "function", name: "ab", strict: true, parameters: { type: "object", properties: { a: { enum: ["ab", "ba"] } },
    required: ["a"], additionalProperties: false } };
  const called = await client.responses.create({ ...own, input: "ab", tools: [ab], tool_choice: "required", parallel_tool_calls: false });
  const call = called.output.find((item) => item.type === "function_call");
  JSON.parse(call.arguments);
  const after = await client.responses.create({ ...own, previous_response_id: called.id, tools: [ab], tool_choice: "none",
    input: [{ type: "function_call_output", call_id: call.call_id, output: "b" }] });
  done("openai: tool round trip", [call.arguments, after.output_text]);
  const tools = { ab: tool({ inputSchema: z.object({ a: z.enum(["ab", "ba"]) }), execute: async ({ a }) => a }) };
  for (const store of [true, false]) {
    const more = { ...common, tools, stopWhen: stepCountIs(2), providerOptions: { openai: { parallelToolCalls: false, store } },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }) };
    const looped = await generateText(more);
    assert.equal(looped.steps[0].toolCalls.length, 1);
    const live = streamText(more);
    await live.consumeStream();
    assert.deepEqual((await live.steps)[0].toolCalls[0].input, looped.steps[0].toolCalls[0].input); // ids of calls are random
    assert.equal(looped.steps.length, 2);
    done(`vercel: tool loop, whole and streamed, store ${store}`, [looped.steps[0].toolCalls[0].input, looped.text]);
  }
}

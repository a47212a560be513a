// The loop of tools of tool_clients.py as users of OpenAI's Node client write it, against a server.
// Run as `node tool_clients.mjs FOLDER URL`, with the client in FOLDER. Prints what came as JSON.

import { createRequire } from "node:module";

const [folder, url] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");

const QUESTION = "Is it cold in Paris and Rome?";
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const FUNCTIONS = {
  temperature: [({ city }) => ({ Paris: "12", Rome: "21" })[city], CITY],
  unit: [() => "C", { type: "object", properties: {} }],
};
const described = Object.entries(FUNCTIONS).map(([name, [, parameters]]) => ({ name, parameters }));
const asked = [];

function called(name, text) {
  const given = JSON.parse(text);
  asked.push([name, ...Object.values(given)]);
  return FUNCTIONS[name][0](given);
}

const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });

async function chat(create) {
  const messages = [{ role: "user", content: QUESTION }];
  const tools = described.map((one) => ({ type: "function", function: one }));
  for (;;) {
    const [choice] = (await create({ model: "counter", messages, tools })).choices;
    messages.push(choice.message);
    if (choice.finish_reason !== "tool_calls") return choice.message.content;
    for (const { id, function: call } of choice.message.tool_calls)
      messages.push({ role: "tool", tool_call_id: id, content: called(call.name, call.arguments) });
  }
}

async function responses(create) {
  const input = [{ role: "user", content: QUESTION }];
  const tools = described.map((one) => ({ type: "function", strict: false, ...one }));
  for (;;) {
    const got = await create({ model: "counter", input, tools });
    input.push(...got.output);
    const calls = got.output.filter((item) => item.type === "function_call");
    if (!calls.length) return got.output.at(-1).content[0].text;
    for (const call of calls) {
      const output = called(call.name, call.arguments);
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

const texts = [
  await chat((given) => client.chat.completions.create(given)),
  await chat((given) => client.chat.completions.stream(given).finalChatCompletion()),
  await responses((given) => client.responses.create(given)),
  await responses((given) => client.responses.stream(given).finalResponse()),
];
console.log(JSON.stringify({ texts, asked }));

// node tool_runner.mjs URL {"model", "question", "stream"}: a conversation with a tool, run by the package itself.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const [baseURL, asked] = process.argv.slice(2);
const { model, question, stream } = JSON.parse(asked);
const cities = [];
const weather = betaZodTool({
  name: "get_weather",
  description: "Get the weather for a city.",
  inputSchema: z.object({ city: z.string() }),
  run: ({ city }) => {
    cities.push(city);
    return "sunny, 21 degrees";
  },
});
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const runner = client.beta.messages.toolRunner({
  model,
  stream,
  max_tokens: 96,
  temperature: 0,
  messages: [{ role: "user", content: question }],
  tools: [weather],
});
const streamed = [];
if (stream) {
  for await (const reply of runner) {
    for await (const event of reply) {
      if (event.type === "content_block_delta" && event.delta.type === "text_delta") streamed.push(event.delta.text);
    }
  }
}
const last = await runner.runUntilDone();
console.log(JSON.stringify({ cities, content: last.content, stop: last.stop_reason, streamed: streamed.join("") }));

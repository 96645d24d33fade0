// node ai_sdk.mjs URL PART: an object with any keys, in the older or the newer way, or a stream with a tool.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, part] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "tandem",
  baseURL: `${baseURL}/v1`,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const options = { model: provider("base"), temperature: 0, maxRetries: 0, maxOutputTokens: 96 };
const person = "As JSON: Ana is 34 and lives in Oslo.";
const schema = z.record(z.string(), z.union([z.string(), z.number()]));

const parts = {
  async generateObject() {
    const { object, usage } = await generateObject({ ...options, prompt: person, schema });
    return { object, usage };
  },

  async generateText() {
    const { output, usage } = await generateText({ ...options, prompt: person, output: Output.object({ schema }) });
    return { object: output, usage };
  },

  async streamText() {
    const cities = [];
    const weather = tool({
      description: "Get the weather for a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: ({ city }) => {
        cities.push(city);
        return "sunny, 21 degrees";
      },
    });
    const result = streamText({
      ...options,
      prompt: "What is the weather in Oslo?",
      tools: { get_weather: weather },
      stopWhen: isStepCount(3),
      onError: ({ error }) => {
        throw error;
      },
    });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    return { cities, pieces, finish: await result.finishReason, steps: (await result.steps).length };
  },
};
console.log(JSON.stringify(await parts[part]()));

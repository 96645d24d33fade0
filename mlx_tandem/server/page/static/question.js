// The question of the playground: reads the form into the body of a request.

import { byId, make } from "./dom.js";

// Returns the JSON of a field, undefined if it is empty. Throws an Error that names the field.
function json(id, name) {
  const text = byId(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    byId(id).focus();
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
}

const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
  reader.readAsDataURL(file);
});

export class Question {
  constructor() {
    this.images = [];
    byId("image").addEventListener("change", async (event) => {
      this.images = await Promise.all([...event.target.files].map(dataUrl));
      byId("thumbs").replaceChildren(...this.images.map((src, i) => make("img", { src, alt: `Image ${i + 1}` })));
    });
  }

  // Returns the body of the request to every model, without the model. Throws an Error for what cannot be sent.
  body() {
    const text = byId("prompt").value;
    if (!text.trim() && !this.images.length) {
      byId("prompt").focus();
      throw new Error("Write a question first.");
    }
    const images = this.images.map((url) => ({ type: "image_url", image_url: { url } }));
    const content = images.length ? [...images, { type: "text", text }] : text;
    const system = byId("system").value.trim();
    const schema = json("schema", "The JSON schema");
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content }],
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      seed: number("seed"),
      tools: json("tools", "The list of tools"),
      response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
    };
  }
}

// Requests to the server that this page came from. Addresses are relative, so that a path prefix of a proxy stays.

import { askForKey, key } from "./key.js";

// What the server refused, in its own words.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const where = (path) => new URL(path, document.baseURI);

async function messageOf(reply) {
  const text = await reply.text();
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return text || `the server answered with the status ${reply.status}`;
  }
}

// Sends a request with the key, and asks for the key as often as the server wants another.
async function ask(method, path, body, signal) {
  for (;;) {
    const used = key();
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const reply = await fetch(where(path), {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
    });
    if (reply.ok) return reply;
    const message = await messageOf(reply);
    if (reply.status !== 401) throw new Refused(reply.status, message);
    if (key() === used) await askForKey(message, used !== "");
  }
}

export const get = async (path) => (await ask("GET", path)).json();
export const send = async (method, path, body) => (await ask(method, path, body)).json();

// Yields the values of a stream of server-sent events.
export async function* stream(path, body, signal) {
  const reply = await ask("POST", path, body, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(200, event.error.message);
      yield event;
    }
  }
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The command that sends the same request. It names the key's variable and never holds the key.
export function curl(path, body) {
  const lines = [`curl -N ${where(path).href}`, "-H 'Content-Type: application/json'"];
  if (key()) lines.push('-H "Authorization: Bearer $TANDEM_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

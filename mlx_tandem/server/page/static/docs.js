// Shows the server's OpenAPI document: each route with its parameters, the fields of its body, and its answers.

import { get } from "./api.js";
import { byId, make, say } from "./dom.js";
import { plural, short } from "./format.js";

const GROUPS = [
  ["Answers", /^\/(v1\/)?(chat|completions|responses|embeddings|messages|perplexity)/],
  ["Models, adapters and aliases", /^\/(v1\/)?(models|adapters|aliases|load_lora|unload_lora)/],
  ["Learning and feedback", /^\/(v1\/)?(training|trajectories|feedback)|^\/model\/|^\/debug\/training/],
  ["Health and metrics", /^\/(health|readyz|live|metrics|version|openapi|debug|v1\/(overview|engine|cache|spec_decode))/],
  ["Ollama's routes", /^\/api\/(?!v1\/)/],
  ["Tinker's routes", /^\/api\/v1\//],
  ["Several machines", /^\/v1\/cluster/],
  ["Other clients and trainers", /./],
];

let schemas = {};

const resolved = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").pop()] ?? {} : schema ?? {});

// A schema in a few words: "integer, 1 to 16", "list of text", "one of a, b".
function words(schema, depth = 0) {
  if (!schema) return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return `one of ${schema.enum.map((each) => JSON.stringify(each)).join(", ")}`;
  if ("const" in schema) return JSON.stringify(schema.const);
  const several = schema.anyOf ?? schema.oneOf;
  if (several) {
    const kinds = several.filter((each) => each.type !== "null").map((each) => words(each, depth + 1));
    return depth > 1 ? "…" : [...new Set(kinds)].join(" or ");
  }
  const types = [schema.type ?? []].flat().map((type) => ({ string: "text", array: "list", boolean: "true or false" })[type] ?? type);
  let text = types.filter((type) => type !== "null").join(" or ") || "anything";
  if (schema.type === "array" && schema.items) text = `list of ${words(schema.items, depth + 1)}`;
  const { minimum: low, maximum: high } = schema;
  if (low !== undefined && high !== undefined) text += `, ${short(low)} to ${short(high)}`;
  else if (low !== undefined) text += `, at least ${short(low)}`;
  else if (high !== undefined) text += `, at most ${short(high)}`;
  return text;
}

function table(caption, rows) {
  const line = ([name, kind, more]) => make("tr", {}, make("th", { scope: "row" }, make("code", { textContent: name })), make("td", { textContent: kind }), make("td", { className: "muted", textContent: more }));
  return [
    make("h3", { textContent: caption }),
    make("div", { className: "table", role: "region", "aria-label": caption, tabIndex: 0 }, make("table", {}, make("tbody", {}, ...rows.map(line)))),
  ];
}

function more(schema, required) {
  const fallback = schema.default !== undefined && schema.default !== null ? `${JSON.stringify(schema.default)} if left out` : "";
  return [required ? "required" : fallback, schema.description ?? ""].filter(Boolean).join("; ");
}

function details(operation) {
  const parts = [];
  const given = operation.parameters ?? [];
  if (given.length) parts.push(...table("Parameters", given.map((each) => [each.name, `${words(each.schema)}, in the ${each.in}`, more(each.schema, each.required)])));
  for (const [media, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    const body = resolved(schema);
    const needed = (name) => body.required?.includes(name) ?? false;
    const fields = Object.entries(body.properties ?? {}).sort(([one], [other]) => needed(other) - needed(one));
    if (fields.length) parts.push(...table(`Body, ${media}`, fields.map(([name, each]) => [name, words(each), more(each, needed(name))])));
    else parts.push(make("p", { className: "muted", textContent: `Body: ${media}` }));
  }
  const good = Object.keys(operation.responses).filter((status) => status < "400").join(", ");
  parts.push(make("p", { className: "muted", textContent: `Answers with ${good}${operation.security?.length === 0 ? "; needs no key" : ""}.` }));
  return parts;
}

function route(path, method, operation) {
  const verb = method.toUpperCase();
  const inside = make("div");
  const element = make("details", { className: "route" }, make("summary", {}, make("span", { className: `verb ${verb}`, textContent: verb }), make("code", { textContent: path })), inside);
  element.addEventListener("toggle", () => inside.childNodes.length || inside.append(...details(operation)));
  const body = resolved(Object.values(operation.requestBody?.content ?? {})[0]?.schema);
  return { path, element, words: [verb, path, ...Object.keys(body.properties ?? {})].join(" ").toLowerCase() };
}

async function start() {
  const found = await get("openapi.json");
  schemas = found.components.schemas;
  const groups = GROUPS.map(([title]) => ({ title, routes: [] }));
  for (const [path, item] of Object.entries(found.paths)) {
    const group = groups[GROUPS.findIndex(([, pattern]) => pattern.test(path))];
    for (const [method, operation] of Object.entries(item)) group.routes.push(route(path, method, operation));
  }
  for (const group of groups) {
    group.routes.sort((one, other) => other.path.startsWith("/v1/") - one.path.startsWith("/v1/") || one.path.localeCompare(other.path));
    group.heading = make("h2", { textContent: group.title });
    byId("routes").append(group.heading, ...group.routes.map((each) => each.element));
  }
  const filter = () => {
    const wanted = byId("filter").value.trim().toLowerCase();
    let shown = 0;
    for (const { heading, routes } of groups) {
      for (const each of routes) each.element.hidden = !each.words.includes(wanted);
      const left = routes.filter((each) => !each.element.hidden).length;
      heading.hidden = left === 0;
      shown += left;
    }
    say(byId("found"), plural(shown, "route"));
  };
  byId("filter").addEventListener("input", filter);
  filter();
}

start().catch((error) => {
  byId("notice").hidden = false;
  say(byId("notice"), error.message);
});

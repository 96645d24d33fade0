// The adapters and aliases: what each does now, and loading, unloading and going back to a version.

import { get, send } from "./api.js";
import { acting, bar, byId, make, say, sure } from "./dom.js";
import { big, bytes, count, percent, plural, short } from "./format.js";

const MOST = 200; // rows of the table
const PAUSE = 10_000; // milliseconds between two lists of more adapters than that
const KINDS = ["one", "two", "three", "four", "five"];

export function adapters() {
  const rows = new Map();
  const body = byId("adapter-table").tBodies[0];
  const said = byId("adapters-said");
  let trained = new Set();
  let due = 0;
  let before = { time: 0, tokens: new Map() };

  async function goTo(button, name, version) {
    const learns = trained.has(name);
    if (learns && !(await sure(`Roll ${name} back?`, `Requests and training of ${name} go on from version ${version}.`, "Roll back"))) return;
    await acting(button, said, async () => {
      if (learns) await send("POST", `v1/training/rollback?adapter=${encodeURIComponent(name)}`, { to: version });
      else await send("POST", "v1/adapters", { name, version });
      await list();
      return `${name} now stands for ${name}@${version}.`;
    });
  }

  async function unload(button, name) {
    if (!(await sure(`Unload ${name}?`, "All its versions are forgotten here; its folder stays. Requests that run finish.", "Unload"))) return;
    await acting(button, said, async () => {
      await send("DELETE", `v1/adapters/${encodeURIComponent(name)}`);
      await list();
      return `${name} was unloaded.`;
    });
  }

  async function read(button, name) {
    await acting(button, said, async () => {
      const found = await send("POST", "v1/adapters", { name });
      await list();
      return `${found.id} was loaded.`;
    });
  }

  function row(name) {
    const button = (text, label, run) => {
      const made = make("button", { type: "button", className: "quiet", textContent: text, "aria-label": label });
      made.addEventListener("click", () => run(made, name));
      return made;
    };
    const select = make("select", { "aria-label": `Version of ${name}` });
    const go = make("button", { type: "button", className: "quiet", textContent: "Roll back", "aria-label": `Roll back ${name} to the chosen version` });
    go.addEventListener("click", () => goTo(go, name, Number(select.value)));
    const cells = Object.fromEntries(["state", "load", "requests", "tokens", "errors"].map((key) => [key, make("td")]));
    const labels = { state: "State", load: "Load", requests: "Requests", tokens: "Tokens", errors: "Errors" };
    for (const [key, cell] of Object.entries(cells)) {
      cell.dataset.label = labels[key];
      if (key !== "state") cell.className = "n";
    }
    const tag = make("span", { className: "tag" });
    const element = make(
      "tr", {},
      make("th", { scope: "row" }, make("span", { textContent: name }), tag),
      ...Object.values(cells),
      make("td", { className: "versions" }, select, go),
      make("td", { className: "acts" }, button("Load", `Load ${name}`, read), button("Unload", `Unload ${name}`, unload)),
    );
    const [load, forget] = element.querySelectorAll(".acts button");
    return { element, cells, select, go, tag, load, forget };
  }

  function options(select, found) {
    const wanted = found.versions.join();
    if (select.dataset.versions === wanted && select.dataset.current === String(found.version)) return;
    select.replaceChildren(...[...found.versions].reverse().map((v) => make("option", { value: v, textContent: v === found.version ? `${v}, current` : v })));
    select.value = found.version;
    Object.assign(select.dataset, { versions: wanted, current: found.version });
  }

  function fill(shown, found, perSecond) {
    const { cells } = shown;
    const learns = trained.has(found.name);
    say(shown.tag, learns ? "trained here" : found.pinned ? "pinned" : found.reward_model ? "reward model" : "");
    const isRead = found.version !== null;
    say(cells.state, !isRead ? "not read yet" : found.resident ? "on the device" : "not on the device");
    cells.state.dataset.on = Boolean(found.resident);
    say(cells.load, isRead ? `${short(perSecond)} tok/s${found.open ? `, ${found.open} open` : ""}` : "–");
    say(cells.requests, isRead ? count(found.requests) : "–");
    say(cells.tokens, isRead ? big(found.prompt_tokens + found.generated_tokens) : "–");
    say(cells.errors, isRead ? count(found.errors) : "–");
    shown.select.hidden = !isRead;
    if (isRead) options(shown.select, found);
    shown.go.hidden = !isRead || found.versions.length < 2;
    shown.load.hidden = isRead;
    shown.forget.hidden = learns || !isRead;
    shown.element.title = isRead ? `${found.format}, rank ${found.rank}, ${bytes(found.memory_bytes)}${found.path ? `, ${found.path}` : ""}` : found.path;
  }

  async function list() {
    const [{ adapters: all, slots, resident, loaded, registered }, learns] = await Promise.all([get("v1/adapters"), get("v1/training/status").catch(() => ({}))]);
    const names = learns.training_enabled ? (learns.adapters ?? [{ adapter: learns.current_lora?.split("@")[0] }]).map((each) => each.adapter) : [];
    trained = new Set(names);
    const now = { time: performance.now() / 1000, tokens: new Map() };
    say(byId("adapters-about"), `${plural(registered, "adapter")}, ${loaded} in memory, ${resident} of ${slots} slots on the device in use. Figures are those of current versions.`);
    byId("filter-field").hidden = all.length <= 12;
    const wanted = byId("filter").value.toLowerCase();
    const shown = all.filter((each) => each.name.toLowerCase().includes(wanted)).slice(0, MOST);
    const gone = new Set(rows.keys());
    shown.forEach((found, i) => {
      if (!rows.has(found.name)) rows.set(found.name, row(found.name));
      gone.delete(found.name);
      const own = rows.get(found.name);
      if (body.rows[i] !== own.element) body.insertBefore(own.element, body.rows[i] ?? null);
      const total = found.generated_tokens ?? 0;
      now.tokens.set(found.name, total);
      const last = before.tokens.get(found.name);
      fill(own, found, last === undefined ? 0 : Math.max(0, total - last) / (now.time - before.time));
    });
    for (const name of gone) {
      rows.get(name).element.remove();
      rows.delete(name);
    }
    const rest = all.length - shown.length;
    byId("more-adapters").hidden = !rest;
    say(byId("more-adapters"), `${plural(rest, "more name")} ${rest === 1 ? "is" : "are"} not shown.`);
    before = now;
    due = all.length > MOST ? performance.now() + PAUSE : 0;
    await aliases();
  }

  async function aliases() {
    const { aliases: all } = await get("v1/aliases");
    byId("no-aliases").hidden = all.length > 0;
    const key = JSON.stringify(all);
    const place = byId("aliases");
    if (place.dataset.key === key) return;
    place.dataset.key = key;
    place.replaceChildren(...all.slice(0, MOST).map((alias) => {
      const line = make("div", { className: "bar", role: "img" });
      bar(line, alias.arms.map((arm, i) => [arm.adapter, arm.share, KINDS[i % KINDS.length]]), alias.arms.map((arm) => `${arm.adapter} ${percent(arm.share)}`).join(", "));
      const arms = alias.arms.map((arm, i) => make("div", {}, make("dt", { textContent: arm.adapter, "data-kind": KINDS[i % KINDS.length] }), make("dd", { textContent: `${percent(arm.share)}, ${plural(arm.requests, "request")}` })));
      const test = alias.ab_test ? [make("p", { className: "muted", textContent: `A/B test: ${alias.ab_test.state ?? "running"}` })] : [];
      return make("article", { className: "card" }, make("h3", { textContent: alias.name }), line, make("dl", { className: "facts" }, ...arms), ...test);
    }));
  }

  byId("load-form").addEventListener("submit", (event) => {
    event.preventDefault();
    acting(event.submitter ?? event.target.querySelector("button"), said, async () => {
      const path = byId("load-path").value.trim();
      const found = await send("POST", "v1/adapters", { name: byId("load-name").value.trim(), pin: byId("load-pin").checked, ...(path ? { path } : {}) });
      event.target.reset();
      await list();
      return `${found.id} was loaded and is current.`;
    });
  });
  byId("filter").addEventListener("input", () => list().catch((error) => say(said, error.message)));
  return {
    async look() {
      if (performance.now() >= due) await list();
    },
  };
}

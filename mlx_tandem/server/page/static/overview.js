// The overview: figures with their history, and what lies in memory.

import { bar, byId, facts, say } from "./dom.js";
import { big, bytes, count, duration, percent, plural, short, span, time } from "./format.js";
import { Plot } from "./plots.js";
import { Series } from "./series.js";

const PARTS = { weights: "Weights", pool: "KV cache", adapter_slots: "Adapters", learning: "Learning", activations: "Steps" };

export function overview() {
  const series = new Series();
  const over = { group: "overview" };
  const plots = {
    rate: new Plot(byId("rate-plot"), [["tokens/s", "--accent"]], over),
    first: new Plot(byId("first-plot"), [["median", "--accent"], ["95%", "--second"]], { ...over, value: (s) => time(s) }),
    each: new Plot(byId("each-plot"), [["median", "--accent"], ["95%", "--second"]], { ...over, value: (s) => time(s) }),
    load: new Plot(byId("load-plot"), [["running", "--accent"], ["waiting", "--second"]], { ...over, whole: true }),
  };

  function figures(found, row) {
    const { columns } = series;
    say(byId("rate"), short(Math.round(row.rate)));
    say(byId("rate-more"), row.prompt ? `and ${count(row.prompt)} tokens/s of prompts read` : `${count(found.tokens.generated)} since the start`);
    plots.rate.draw([columns.time, columns.rate], `Throughput: ${count(row.rate)} tokens per second now, ${count(Math.max(...columns.rate))} at most`);
    for (const name of ["first", "each"]) {
      const [value, unit] = duration(row[name]);
      say(byId(name), value);
      say(byId(`${name}-unit`), unit);
      say(byId(`${name}-more`), row[name] === null ? "no answers in the last 30 s" : `95% within ${time(row[`${name}95`])}, last 30 s`);
      plots[name].draw([columns.time, columns[name], columns[`${name}95`]], `${byId(`${name}-title`).textContent}: median ${value} ${unit}`);
    }
    const { requests } = found;
    say(byId("running"), count(requests.running));
    say(byId("waiting"), count(requests.waiting));
    const bad = [[requests.refused, "refused"], [requests.failed, "failed"]].filter(([n]) => n).map(([n, word]) => `${count(n)} ${word}`);
    say(byId("load-more"), [`${count(requests.completed)} answered`, ...bad].join(", "));
    plots.load.draw([columns.time, columns.running, columns.waiting], `${requests.running} requests running, ${requests.waiting} waiting`);
  }

  function memory(found) {
    const { cache, memory: held, adapters } = found;
    const used = cache.blocks ? cache.used_blocks / cache.blocks : 0;
    const kept = cache.blocks ? Math.max(0, Math.min(1 - used, (cache.cached_blocks - cache.used_blocks) / cache.blocks)) : 0;
    bar(byId("kv-bar"), [["used", used, "one"], ["kept", kept, "two"]], `${percent(used)} of the KV cache in use, ${percent(kept)} kept of earlier prompts`);
    facts(byId("kv"), [
      ["In use", percent(used)],
      ["Kept of prompts", percent(kept)],
      ["Prompts found again", cache.queried_tokens ? percent(cache.hit_rate) : "–"],
      ["Room", `${count(cache.blocks * cache.block_size)} tokens`],
    ]);
    const kinds = ["one", "two", "three", "four", "five"];
    const parts = Object.entries(PARTS).filter(([name]) => held.parts[name]);
    bar(byId("memory-bar"), parts.map(([name], i) => [name, held.parts[name] / (held.budget || 1), kinds[i]]), `${bytes(held.active)} in use of ${bytes(held.budget)} that were given out at start`);
    facts(byId("memory"), [
      ["In use", bytes(held.active)],
      ["Peak", bytes(held.peak)],
      ...parts.map(([name, word]) => [word, bytes(held.parts[name])]),
      ["Limit", bytes(held.limit)],
    ]);
    byId("memory").querySelectorAll("dt").forEach((dt, i) => (dt.dataset.kind = i > 1 && i < parts.length + 2 ? kinds[i - 2] : ""));
    bar(byId("slots-bar"), [["slots", adapters.slots ? adapters.resident / adapters.slots : 0, "one"]], `${adapters.resident} of ${adapters.slots} slots used`);
    facts(byId("slots"), [
      ["On the device", `${adapters.resident} of ${plural(adapters.slots, "slot")}`],
      ["In memory", `${count(adapters.loaded)}, ${bytes(adapters.loaded_bytes)}`],
      ["Known", plural(adapters.registered, "name")],
    ]);
  }

  function disk(found) {
    byId("disk-off").hidden = found.enabled;
    facts(byId("disk"), !found.open ? [] : [
      ["Size", bytes(found.bytes)],
      ["Blocks", count(found.records)],
      ["Tokens found again", count(found.hit_tokens)],
      ["Read", found.reload_gb_per_s ? `${short(found.reload_gb_per_s)} GB/s` : "–"],
    ]);
  }

  return {
    take(found) {
      const row = series.add(found);
      const { engine } = found;
      const about = [found.model, engine && `${big(engine.parameters)} parameters`, engine && (engine.quantization ?? engine.dtype), engine && engine.device, `up ${span(found.uptime_s)}`, `version ${found.version}`];
      say(byId("about"), about.filter(Boolean).join(" · "));
      figures(found, row);
      memory(found);
      disk(found.disk_cache);
    },
  };
}

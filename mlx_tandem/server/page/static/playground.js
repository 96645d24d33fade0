// The playground: one question to several models at once.

import { get } from "./api.js";
import { Answer } from "./answer.js";
import { byId, make, say } from "./dom.js";
import { Question } from "./question.js";

const FIRST = 3; // models that are chosen at the beginning
const SHOWN = 24; // models with a box of their own
const SUGGESTED = 500;
const PAUSE = 10_000; // milliseconds between two requests for the names

export function playground() {
  const question = new Question();
  const chosen = new Map(); // name -> its box
  let asked = null; // what stops the answers that come

  function choice(name, on) {
    if (chosen.has(name)) {
      chosen.get(name).checked ||= on;
      return;
    }
    const box = make("input", { type: "checkbox", value: name, checked: on });
    chosen.set(name, box);
    byId("models").append(make("label", { className: "chip" }, box, make("span", { textContent: name })));
  }

  let due = 0;
  async function names() {
    if (performance.now() < due) return;
    const { data } = await get("v1/models");
    const found = [...new Set(data.map((each) => each.id))];
    byId("names").replaceChildren(...found.slice(0, SUGGESTED).map((value) => make("option", { value })));
    const begins = chosen.size === 0;
    found.slice(0, SHOWN).forEach((name, i) => choice(name, begins && i < FIRST));
    due = performance.now() + PAUSE;
  }

  function add() {
    const name = byId("other").value.trim();
    if (!name) return;
    choice(name, true);
    byId("other").value = "";
    say(byId("progress"), `${name} was added.`);
  }

  async function ask() {
    if (asked) return;
    let body;
    const models = [...chosen.values()].filter((box) => box.checked).map((box) => box.value);
    try {
      if (!models.length) throw new Error("Choose a model first.");
      body = question.body();
    } catch (error) {
      say(byId("progress"), error.message);
      return;
    }
    const follows = byId("follow").checked && !byId("follow-field").hidden;
    const answers = models.map((model) => new Answer(model, body, follows && trained.has(model)));
    byId("answers").replaceChildren(...answers.map((answer) => answer.element));
    asked = new AbortController();
    byId("stop").disabled = false;
    byId("send").disabled = true;
    say(byId("progress"), models.length === 1 ? "One answer is coming." : `${models.length} answers are coming.`);
    const said = await Promise.all(answers.map((answer) => answer.run(asked.signal)));
    asked = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
    say(byId("progress"), said.join(" "));
  }

  let trained = new Set();
  async function learns(does) {
    byId("follow-field").hidden = !does;
    if (!does || trained.size) return;
    const status = await get("v1/training/status");
    trained = new Set((status.adapters ?? [{ adapter: status.current_lora.split("@")[0] }]).map((each) => each.adapter));
  }

  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    if (event.target === byId("other")) {
      event.preventDefault();
      add();
    } else if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      ask();
    }
  });
  byId("add").addEventListener("click", add);
  byId("stop").addEventListener("click", () => asked?.abort());
  byId("copy").addEventListener("click", async () => {
    byId("curl").select();
    try {
      await navigator.clipboard.writeText(byId("curl").value);
      say(byId("copied"), "Copied.");
    } catch {
      say(byId("copied"), "Selected: copy it with the keyboard.");
    }
  });

  return {
    async look(found) {
      byId("image-field").hidden = !found?.engine?.images;
      await Promise.all([names(), learns(found?.learning)]);
    },
  };
}

// One answer: its text while it comes, what people say of it, and which version made each token.

import { curl, send, stream } from "./api.js";
import { acting, byId, make, say } from "./dom.js";
import { count, percent, plural, short, time } from "./format.js";

const PATH = "v1/chat/completions";
const COLOURS = 6; // of versions

export class Answer {
  // `model` is the name that was chosen; `body` is the request without what only this page asks for.
  constructor(model, body, follow) {
    this.body = { model, ...body, ...(follow ? { swap_policy: "inflight_keep" } : {}) };
    this.element = byId("answer").content.firstElementChild.cloneNode(true);
    this.find = (kind) => this.element.querySelector(kind);
    this.text = "";
    this.thoughts = "";
    this.tokens = []; // [text, version, logprob]
    this.calls = [];
    this.heading(model);
    this.bind();
  }

  heading(model) {
    const [name, version] = model.split("@");
    say(this.find("h3"), name);
    say(this.find("header .tag"), version ? `version ${version}` : "");
    this.element.setAttribute("aria-label", `Answer of ${model}`);
  }

  // Streams the answer. Resolves to a sentence about it, and never rejects.
  async run(signal) {
    this.element.classList.add("coming");
    const began = performance.now();
    let first = null;
    let usage = null;
    let reason = null;
    let failure = "";
    try {
      const asked = { ...this.body, stream: true, stream_options: { include_usage: true }, return_token_ids: true, logprobs: true };
      for await (const event of stream(PATH, asked, signal)) {
        this.id ??= event.id;
        usage = event.usage ?? usage;
        if (event.model !== this.model) this.heading((this.model = event.model));
        const [choice] = event.choices;
        if (!choice) continue;
        if (choice.token_ids?.length) first ??= performance.now();
        this.take(choice);
        reason = choice.finish_reason ?? reason;
      }
    } catch (error) {
      failure = error.name === "AbortError" ? "" : error.message;
      reason = error.name === "AbortError" ? "stopped" : "error";
    }
    this.element.classList.remove("coming");
    return this.end({ began, first, usage, reason, failure });
  }

  take({ delta, logprobs, token_ids: ids, versions }) {
    if (delta.content) {
      this.text += delta.content;
      this.find(".text").append(delta.content);
    }
    if (delta.reasoning_content) {
      this.thoughts += delta.reasoning_content;
      this.find(".thoughts").hidden = false;
      this.find(".thoughts p").append(delta.reasoning_content);
    }
    for (const call of delta.tool_calls ?? []) this.call(call);
    (ids ?? []).forEach((id, i) => {
      const known = logprobs?.content?.[i];
      this.tokens.push([known?.token ?? `[${id}]`, versions?.[i] ?? null, known?.logprob ?? null]);
    });
  }

  call({ index, function: { name, arguments: given } }) {
    if (!this.calls[index]) {
      this.calls[index] = make("code");
      this.find(".calls").append(make("li", {}, this.calls[index]));
      this.calls[index].textContent = `${name}(`;
    }
    this.calls[index].append(given ?? "");
  }

  end({ began, first, usage, reason, failure }) {
    for (const call of this.calls) call.append(")");
    const seconds = (performance.now() - (first ?? began)) / 1000;
    const made = usage?.completion_tokens ?? this.tokens.length;
    const parts = [plural(made, "token")];
    if (first) parts.push(`first after ${time((first - began) / 1000)}`);
    if (made > 1 && seconds > 0) parts.push(`${count((made - 1) / seconds)} tokens/s`);
    if (reason && reason !== "stop" && reason !== "error") parts.push({ length: "cut at the most tokens", tool_calls: "calls a tool" }[reason] ?? reason);
    say(this.find(".stats"), parts.join(" · "));
    this.find(".error").hidden = !failure;
    say(this.find(".error"), failure);
    this.find(".judge").hidden = false;
    for (const kind of ["up", "down", "fix"]) this.find(`.${kind}`).disabled = reason === "error" || reason === "stopped" || !this.id;
    this.find(".audit").disabled = !this.tokens.length;
    const name = this.model ?? this.body.model;
    return failure ? `${name}: ${failure}` : `${name} has answered: ${plural(made, "token")}.`;
  }

  bind() {
    const judge = (thumb) => (event) => acting(event.currentTarget, this.find(".said"), async () => {
      await send("POST", "v1/feedback", { completion_id: this.id, thumb, ...(this.corrected ? { corrected: this.corrected } : {}) });
      this.thumb = thumb;
      for (const kind of ["up", "down"]) this.find(`.${kind}`).setAttribute("aria-pressed", kind === thumb);
      return "Thank you. It is kept.";
    });
    this.find(".up").addEventListener("click", judge("up"));
    this.find(".down").addEventListener("click", judge("down"));
    this.find(".fix").addEventListener("click", () => this.toggle(".fix", ".correction", () => {
      const field = this.find("textarea");
      field.value ||= this.text;
      field.focus();
    }));
    this.find(".audit").addEventListener("click", () => this.toggle(".audit", ".origin", () => this.audit()));
    this.find(".curl").addEventListener("click", () => this.command());
    this.find(".correction").addEventListener("submit", (event) => {
      event.preventDefault();
      const corrected = this.find("textarea").value;
      acting(this.find(".correction button"), this.find(".said"), async () => {
        await send("POST", "v1/feedback", { completion_id: this.id, corrected, ...(this.thumb ? { thumb: this.thumb } : {}) });
        this.corrected = corrected;
        this.toggle(".fix", ".correction");
        this.find(".fix").focus();
        return "The correction is kept.";
      });
    });
  }

  toggle(button, place, opened = () => {}) {
    const shut = !this.find(place).hidden;
    this.find(place).hidden = shut;
    this.find(button).setAttribute("aria-expanded", !shut);
    if (!shut) opened();
  }

  // Shows each token with the version that made it. Where no version is named for each, the reply's model made all.
  audit() {
    const name = this.model.split("@")[0];
    const own = Number(this.model.split("@")[1] ?? 0);
    const versions = this.tokens.map(([, version]) => version ?? own);
    const different = [...new Set(versions)].sort((a, b) => a - b);
    const label = (version) => (version ? `${name}@${version}` : "the base");
    const kind = (version) => `v${different.indexOf(version) % COLOURS}`;
    say(this.find(".origin p"), different.length === 1 ? `One version made all ${plural(versions.length, "token")}.` : `${different.length} versions made these ${count(versions.length)} tokens.`);
    this.find(".legend").replaceChildren(...different.map((version) => {
      const made = versions.filter((each) => each === version).length;
      return make("li", {}, make("span", { className: kind(version), textContent: label(version) }), ` ${plural(made, "token")}`);
    }));
    this.find(".tokens").replaceChildren(...this.tokens.map(([text, , logprob], i) => make("span", {
      className: kind(versions[i]),
      textContent: text.replaceAll("\n", "⏎\n"),
      title: `${label(versions[i])}${logprob === null ? "" : `, probability ${percent(Math.exp(logprob))} (${short(logprob)})`}`,
    })));
  }

  command() {
    byId("curl").value = curl(PATH, { ...this.body, stream: true });
    say(byId("copied"), "");
    byId("curl-dialog").showModal();
    byId("curl").select();
  }
}

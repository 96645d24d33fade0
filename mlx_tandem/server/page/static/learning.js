// Learning: its curves, the guard's verdicts, pausing and going back; and the feedback that it may learn from.

import { get, send } from "./api.js";
import { acting, byId, facts, make, say, sure } from "./dom.js";
import { feedback } from "./feedback.js";
import { count, percent, short, time } from "./format.js";
import { Plot } from "./plots.js";

const UPDATES = 20;
const SAMPLES = 6;
const OUTCOMES = { published: "published", kept: "kept back", rolled_back: "taken back", refused: "refused", skipped: "skipped" };

export function learning() {
  const options = { steps: true, group: "learning" };
  const plots = {
    mean_reward: new Plot(byId("reward-plot"), [["mean reward", "--accent"]], options),
    loss: new Plot(byId("loss-plot"), [["loss", "--accent"]], { ...options, zero: false }),
    kl: new Plot(byId("kl-plot"), [["nats", "--accent"]], options),
  };
  const said = byId("learning-said");
  let status = null;
  let seen = "";

  const query = () => (byId("trained-field").hidden ? "" : `?adapter=${encodeURIComponent(byId("trained").value)}`);

  async function look() {
    await Promise.all([learn(), feedback()]);
  }

  async function learn() {
    status = await get(`v1/training/status${query()}`);
    byId("learns").hidden = !status.training_enabled;
    if (!status.training_enabled) {
      say(byId("learning-about"), "This server does not learn from its traffic. Started with --enable-rl-training, it trains an adapter while it answers.");
      return;
    }
    choices(status.adapters);
    headline();
    await versions();
    const key = [status.adapter, status.step, status.updates, status.rollbacks, status.last_update].join();
    if (key !== seen) {
      draw(await get(`v1/training/history${query()}`));
      seen = key;
    }
  }

  function choices(all) {
    if (!all || all.length === byId("trained").options.length) return;
    byId("trained").replaceChildren(...all.map((each) => make("option", { value: each.adapter, textContent: each.adapter })));
    byId("trained-field").hidden = false;
  }

  function headline() {
    const s = status;
    const doing = !s.running ? "paused" : s.busy ? `updating${s.update_left_s === null ? "" : `, ${time(s.update_left_s)} left`}` : "collecting answers";
    say(byId("learning-about"), `${s.current_lora} · ${doing}${s.reason ? ` · ${s.reason}` : ""}`);
    say(byId("pause"), s.running ? "Pause learning" : "Continue learning");
    facts(byId("learning-facts"), [
      ["Updates", count(s.updates)],
      ["Answers collected", count(s.trajectories_collected)],
      ["Waiting", count(s.buffered)],
      ["Mean reward", s.updates ? short(s.mean_reward) : "–"],
      ["Guard", s.last_verdict + (s.alarm ? `: ${s.alarm}` : "")],
      ["Taken back", count(s.rollbacks)],
      ["Learning rate", s.learning_rate.toExponential(1)],
      ["Share of the device", s.serving_ms + s.training_ms ? percent(s.training_ms / (s.serving_ms + s.training_ms)) : "–"],
    ]);
    byId("advice").hidden = !s.advice;
    say(byId("advice"), s.advice);
  }

  // The versions and checkpoints that can be gone back to.
  async function versions() {
    const name = status.adapter ?? status.current_lora.split("@")[0];
    const key = [name, status.version, status.current_lora, ...status.available_checkpoints].join();
    const select = byId("back-to");
    if (select.dataset.key === key) return;
    select.dataset.key = key;
    const { adapters } = await get("v1/adapters");
    const known = adapters.find((each) => each.name === name)?.versions ?? [];
    select.replaceChildren(
      make("option", { value: "", textContent: "the last good one" }),
      ...[...known].reverse().map((v) => make("option", { value: v, textContent: `${name}@${v}${v === status.version ? ", current" : ""}` })),
      ...status.available_checkpoints.map((each) => make("option", { value: each, textContent: each })),
    );
  }

  function draw({ updates, samples }) {
    byId("curves").hidden = updates.length === 0;
    const steps = updates.map((_, i) => i + 1);
    for (const [name, plot] of Object.entries(plots)) {
      const values = updates.map((each) => each[name]);
      plot.draw([steps, values], values.length ? `${short(values[values.length - 1])} at the last of ${values.length} updates, ${short(values[0])} at the first` : "no updates yet");
    }
    byId("updates").tBodies[0].replaceChildren(...updates.slice(-UPDATES).reverse().map((u) => {
      const cell = (label, text, kind = "") => make("td", { className: kind, textContent: text, "data-label": label });
      return make(
        "tr", {},
        cell("Step", count(u.step), "n"),
        cell("Version", u.version || "–"),
        make("td", { "data-label": "Outcome" }, make("span", { className: `tag ${u.outcome}`, textContent: OUTCOMES[u.outcome] ?? u.outcome })),
        cell("Verdict", u.verdict),
        cell("Reward", short(u.mean_reward), "n"),
        cell("Loss", short(u.loss), "n"),
        cell("Moved", short(u.kl), "n"),
        cell("Reason", u.reason || ""),
      );
    }));
    byId("samples").replaceChildren(...samples.slice(-SAMPLES).reverse().map((s) => make(
      "li", {},
      make("span", { className: "tag", textContent: s.reward === null ? "–" : short(s.reward) }),
      make("span", { className: "muted said-text", textContent: s.prompt }),
      make("span", { className: "said-text", textContent: `→ ${s.completion}` }),
    )));
  }

  byId("trained").addEventListener("change", () => {
    seen = "";
    look();
  });
  byId("pause").addEventListener("click", (event) => acting(event.currentTarget, said, async () => {
    const stops = status.running;
    await send("POST", `v1/training/${stops ? "stop" : "start"}${query()}`, {});
    await learn();
    return stops ? "Learning is paused. Answers are still collected." : "Learning goes on.";
  }));
  byId("back").addEventListener("click", async (event) => {
    const button = event.currentTarget;
    const to = byId("back-to").value;
    if (!(await sure("Roll back?", `Requests and training go on from ${to || "the last good version"}.`, "Roll back"))) return;
    acting(button, said, async () => {
      const found = await send("POST", `v1/training/rollback${query()}`, to ? { to: /^\d+$/.test(to) ? Number(to) : to } : {});
      await learn();
      return `Back at ${found.current_lora}.`;
    });
  });
  return { look };
}

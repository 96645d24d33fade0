// Starts the page: one view at a time, and one look at the server each second while somebody sees it.

import { adapters } from "./adapters.js";
import { get, Refused } from "./api.js";
import { byId, say } from "./dom.js";
import { learning } from "./learning.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";

const SECOND = 1000;
const WORDS = {
  ok: "Ready",
  degraded: "Nearly full",
  overloaded: "Full",
  starting: "Loading",
  restarting: "Restarting",
  idle: "Idle",
  waking: "Waking",
  shutting_down: "Shutting down",
  dead: "Stopped",
  unknown: "Connected",
};

const views = { overview: overview(), playground: playground(), adapters: adapters(), learning: learning() };
let current = "";
let timer = 0;
let looking = false;

function show() {
  const name = location.hash.slice(1) || "overview";
  if (!(name in views)) return;
  current = name;
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = byId(`${name}-title`).textContent;
  document.title = `${title} · mlx-tandem`;
  window.scrollTo(0, 0);
  look();
}

function state(status, more = "") {
  byId("state").dataset.status = status;
  say(byId("state-text"), `${WORDS[status] ?? status}${more}`);
}

function notice(text) {
  byId("notice").hidden = !text;
  say(byId("notice"), text);
}

// Asks for what every view shows. Returns null where the key does not open it; other views may still work.
async function overall() {
  try {
    const found = await get("v1/overview");
    const left = found.progress && found.progress.left_s !== null ? `, ${Math.ceil(found.progress.left_s)} s left` : "";
    state(found.status, found.progress ? `: ${found.progress.stage}${left}` : "");
    views.overview.take(found);
    return found;
  } catch (error) {
    if (!(error instanceof Refused) || current === "overview") throw error;
    state("unknown");
    return null;
  }
}

// Looks at the server, and again a second later. A slow server is asked less often.
async function look() {
  if (looking || document.hidden) return;
  looking = true;
  clearTimeout(timer);
  const began = performance.now();
  const view = current;
  try {
    const found = await overall();
    await views[view].look?.(found);
    notice("");
  } catch (error) {
    if (!(error instanceof Refused)) state("dead", ": no answer from the server");
    notice(error instanceof Refused ? error.message : "The server does not answer. This page asks again each second.");
  }
  looking = false;
  timer = setTimeout(look, view === current ? Math.max(SECOND, 4 * (performance.now() - began)) : 0);
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
show();

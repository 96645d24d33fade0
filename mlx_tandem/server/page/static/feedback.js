// What people have said of answers, newest first.

import { get } from "./api.js";
import { byId, make } from "./dom.js";
import { span } from "./format.js";

export async function feedback() {
  const { data } = await get("v1/feedback?limit=10");
  byId("no-feedback").hidden = data.length > 0;
  const place = byId("feedback");
  const key = JSON.stringify(data);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  place.replaceChildren(...data.map((each) => {
    const word = each.score === null ? "" : each.score >= 0.5 ? "good" : "bad";
    const about = `${each.model}${each.version ? `@${each.version}` : ""} · ${span(Date.now() / 1000 - each.created)} ago${each.learned ? " · learned from" : ""}`;
    return make(
      "li", {},
      make("span", { className: `tag ${word}`, textContent: word || (each.corrected ? "corrected" : "comment") }),
      make("span", { className: "said-text", textContent: each.answers.join(" / ") || "(empty)" }),
      ...(each.corrected ? [make("span", { className: "corrected", textContent: `→ ${each.corrected}` })] : []),
      make("span", { className: "muted", textContent: about }),
    );
  }));
}

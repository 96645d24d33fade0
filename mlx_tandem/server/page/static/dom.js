// Makes and finds elements. No text ever becomes markup.

export const byId = (id) => document.getElementById(id);

// Returns an element with properties (`data-…` and `aria-…` become attributes) and children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Sets a text if it differs, so that live regions speak about changes only.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Fills a definition list with [name, value] pairs, and keeps its elements when the names stay.
export function facts(list, pairs) {
  const names = [...list.querySelectorAll("dt")];
  if (names.length !== pairs.length || names.some((dt, i) => dt.textContent !== pairs[i][0])) {
    list.replaceChildren(
      ...pairs.map(([name]) => make("div", {}, make("dt", { textContent: name }), make("dd"))),
    );
  }
  list.querySelectorAll("dd").forEach((dd, i) => say(dd, pairs[i][1]));
}

// Draws a bar of parts: [name, share, class]. The shares are of the whole bar.
export function bar(element, parts, label) {
  if (element.children.length !== parts.length) {
    element.replaceChildren(...parts.map(([, , kind]) => make("span", { className: kind })));
  }
  [...element.children].forEach((part, i) => {
    part.style.width = `${Math.max(0, Math.min(1, parts[i][1] || 0)) * 100}%`;
  });
  element.setAttribute("aria-label", label);
}

// Asks a yes-or-no question in a dialog; resolves to whether the answer was yes.
export function sure(title, text, yes) {
  const dialog = byId("sure-dialog");
  byId("sure-title").textContent = title;
  byId("sure-text").textContent = text;
  byId("sure-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// Runs an action of a button: the button is off meanwhile, and `place` says what came of it.
export async function acting(button, place, work) {
  button.disabled = true;
  place.classList.remove("error");
  say(place, "");
  try {
    say(place, (await work()) ?? "");
  } catch (error) {
    place.classList.add("error");
    say(place, error.message);
  } finally {
    button.disabled = false;
  }
}

// The API key of this tab. It is kept in sessionStorage only, and asked for when the server wants one.

import { byId } from "./dom.js";

const NAME = "mlx-tandem key";
let asking = null;

export const key = () => sessionStorage.getItem(NAME) ?? "";

export function forget() {
  sessionStorage.removeItem(NAME);
  location.reload();
}

function shown() {
  const button = byId("forget");
  if (button) button.hidden = !key();
}

// Asks for the key with the server's message. Everybody who asks meanwhile gets the same answer.
export function askForKey(message, refused) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    byId("key-error").textContent = refused ? message : "";
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      sessionStorage.setItem(NAME, field.value.trim());
      field.value = "";
      asking = null;
      shown();
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

byId("forget")?.addEventListener("click", forget);
shown();

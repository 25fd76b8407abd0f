// API keys: asked for when the server wants one, kept in sessionStorage (until the tab closes), sent as a header only.
// The engine view needs the operator's key, which is kept apart; without one the user's is tried.

import { button, dialog, h } from "./dom.js";

const PLACES = { user: "quire.key", admin: "quire.admin-key" };
const asking = {}; // a prompt that is open, by kind: there is never a second one

function kept(kind) {
  try {
    return sessionStorage.getItem(PLACES[kind]) ?? "";
  } catch {
    return "";
  }
}

function keep(kind, key) {
  try {
    sessionStorage.setItem(PLACES[kind], key);
  } catch {
    // storage is switched off: the next call asks again
  }
}

const header = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

export const userHeaders = () => header(kept("user"));
export const adminHeaders = () => header(kept("admin") || kept("user"));

// Asks for a key. Resolves with whether one was given.
export function askForKey(kind = "user") {
  asking[kind] ??= prompt(kind, Boolean(kept(kind))).finally(() => { delete asking[kind]; });
  return asking[kind];
}

async function prompt(kind, wrong) {
  const what = kind === "admin" ? "the operator's key" : "an API key";
  // Not a password field: browsers would offer to keep it.
  const field = h("input", { type: "text", class: "secret", id: "key", autocomplete: "off", autocapitalize: "off", required: true, spellcheck: false });
  const key = await dialog("API key", (close) => h("form", {
    class: "key-form",
    onsubmit: (event) => {
      event.preventDefault();
      close(field.value.trim());
    },
  },
  h("h2", {}, wrong ? "That key was refused" : `This server needs ${what}`),
  h("p", { class: "muted" }, kind === "admin"
    ? "The engine view shows what all users' requests are doing: it is for operators (--admin-api-key)."
    : "Ask whoever runs it for a key."),
  h("label", { for: "key" }, kind === "admin" ? "Operator's key" : "API key"), field,
  h("p", { class: "muted small" }, "Kept in this tab until it is closed; never part of an address."),
  h("div", { class: "row end" }, button("Not now", () => close(null)), h("button", { class: "button primary", type: "submit" }, "Use this key"))));
  if (key) keep(kind, key);
  return Boolean(key);
}

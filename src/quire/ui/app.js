// The page's shell: which view is shown, theme, the model's name, keys, shortcuts. The chat is always there; the engine
// view is loaded when it is first looked at.

import { Chat } from "./chat.js";
import { button, byId, dialog, h, notice } from "./dom.js";
import { adminHeaders, askForKey } from "./keys.js";
import { openStore } from "./store.js";
import { ServerError, Unreachable, getJson, postJson } from "./stream.js";
import { lookForRestart, lost, onReturn } from "./watch.js";

const THEMES = ["", "light", "dark"];
const THEME_WORDS = { "": "as the system", light: "light", dark: "dark" };
const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const MOD = IS_MAC ? "⌘" : "Ctrl";

const SHORTCUTS = [
  ["Enter", "Send"], ["Shift Enter", "New line"], ["Esc", "Stop the answer"], ["↑ in an empty box", "Edit your last message"],
  [`${MOD} K`, "Search conversations"], [`${MOD} Shift O`, "New conversation"], [`${MOD} Shift Backspace`, "Delete the conversation"],
  [`${MOD} B`, "Show or hide conversations"], [`${MOD} .`, "Show or hide parameters"], ["Alt R", "Regenerate"], ["Alt C", "Compare two panes"],
  ["Alt T", "Theme"], ["Alt 1, Alt 2", "Chat, Engine"], [`${MOD} /`, "This list"],
];

const model = { name: undefined, maxLen: 0 };
let chat;
let engine = null; // its module, once loaded
let isEngineShown = false;

// -- theme -----------------------------------------------------------------------------------------------------------

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "";
  byId("theme").setAttribute("aria-label", `Theme: ${THEME_WORDS[theme]}`);
  byId("theme").title = `Theme: ${THEME_WORDS[theme]}`;
}

function nextTheme() {
  const root = document.documentElement;
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  try {
    if (theme) localStorage.setItem("quire.theme", theme);
    else localStorage.removeItem("quire.theme");
  } catch {
    // storage is switched off: until the page is closed
  }
  showTheme();
}

// -- sidebar and panel -----------------------------------------------------------------------------------------------

const isNarrow = () => innerWidth < 800;

function toggleSidebar(on = !document.body.classList.contains("with-sidebar")) {
  document.body.classList.toggle("with-sidebar", on);
  byId("open-sidebar").setAttribute("aria-expanded", String(on));
  byId("sidebar").inert = !on;
}

function togglePanel(on = byId("panel").hidden) {
  byId("panel").hidden = !on;
  byId("open-panel").setAttribute("aria-expanded", String(on));
  if (on && isNarrow()) toggleSidebar(false);
}

function shortcuts() {
  dialog("Keyboard shortcuts", (close) => [
    h("h2", {}, "Keyboard shortcuts"),
    h("dl", { class: "shortcuts" }, ...SHORTCUTS.flatMap(([keys, what]) => [h("dt", {}, ...keyNodes(keys)), h("dd", {}, what)])),
    h("div", { class: "row end" }, button("Close", () => close(), { class: "button primary" })),
  ]);
}

const keyNodes = (keys) => (keys.includes(" in ") || keys.includes(",") ? [keys] : keys.split(" ").map((key) => h("kbd", {}, key)));

// -- views -----------------------------------------------------------------------------------------------------------

async function route() {
  const [view, id = ""] = location.hash.slice(1).split("/");
  const wantsEngine = view === "engine";
  byId("chat").hidden = wantsEngine;
  byId("engine").hidden = !wantsEngine;
  byId("open-panel").hidden = byId("open-sidebar").hidden = wantsEngine;
  const { id: openId, leaf } = chat.conversation;
  byId("to-chat").href = wantsEngine && leaf ? `#chat/${openId}` : "#chat"; // from the engine back to what was open
  for (const [name, isIt] of [["to-chat", !wantsEngine], ["to-engine", wantsEngine]]) {
    if (isIt) byId(name).setAttribute("aria-current", "page");
    else byId(name).removeAttribute("aria-current");
  }
  if (wantsEngine !== isEngineShown) {
    isEngineShown = wantsEngine;
    if (wantsEngine) await showEngine();
    else engine?.unmount();
  }
  if (!wantsEngine && /^[0-9a-z]*$/.test(id)) await chat.open(id);
}

async function showEngine() {
  try {
    engine ??= await import("./engine.js");
    if (isEngineShown) engine.mount(byId("engine"), { headers: adminHeaders, onKeyNeeded: () => askForKey("admin") });
  } catch {
    byId("engine").replaceChildren(h("p", { class: "muted engine-failed" }, "The engine view could not be loaded: is the server still there?"));
    engine = null;
    isEngineShown = false;
  }
}

// -- the server ------------------------------------------------------------------------------------------------------

async function learnModel() {
  const shown = byId("model");
  try {
    const { data } = await getJson("v1/models");
    model.name = data[0].id;
    model.maxLen = data[0].max_model_len ?? 0;
    shown.replaceChildren(h("bdi", {}, model.name));
    chat.show();
    await learnDefaults();
    await lookForRestart();
  } catch (error) {
    if (error instanceof Unreachable) {
      shown.textContent = "not connected";
      lost();
    } else if (error instanceof ServerError && error.status === 401) {
      shown.textContent = "";
      if (await askForKey()) return learnModel();
      shown.replaceChildren(button("Enter a key", () => learnModel(), { class: "button small" }));
    } else {
      notice("model", error.message, { kind: "problem" });
    }
  }
}

// What the model's own files say about sampling.
async function learnDefaults() {
  try {
    const { parameters = "" } = await postJson("api/show", { model: model.name });
    chat.panel.setDefaults(Object.fromEntries(parameters.split("\n").filter(Boolean).map((line) => line.split(" ", 2))));
  } catch {
    // another server: OpenAI's defaults are shown
  }
}

// -- keyboard --------------------------------------------------------------------------------------------------------

function onKey(event) {
  const mod = IS_MAC ? event.metaKey : event.ctrlKey;
  const key = event.key.toLowerCase();
  const isFree = !document.querySelector("dialog[open]");
  const does = (action) => {
    event.preventDefault();
    action();
  };
  if (mod && key === "/" && isFree) does(shortcuts);
  else if (event.altKey && key === "t") does(nextTheme);
  else if (event.altKey && (key === "1" || key === "2")) does(() => { if (isEngineShown === (key === "1")) byId(key === "1" ? "to-chat" : "to-engine").click(); });
  else if (isEngineShown) return; // the others change the chat, which should be seen
  else if (mod && event.shiftKey && key === "o") does(() => chat.create());
  else if (mod && event.shiftKey && key === "backspace") does(() => chat.removeOpen());
  else if (mod && key === "k") does(() => { toggleSidebar(true); byId("search").focus(); });
  else if (mod && key === "b") does(() => toggleSidebar());
  else if (mod && key === ".") does(() => togglePanel());
  else if (event.altKey && key === "c") does(() => chat.compare(!chat.isComparing));
  else if (event.altKey && key === "r") does(() => chat.regenerateLast());
  else if (key === "escape" && isFree) does(() => (isNarrow() && document.body.classList.contains("with-sidebar") ? toggleSidebar(false) : chat.stop()));
}

async function start() {
  showTheme();
  byId("theme").addEventListener("click", nextTheme);
  byId("open-sidebar").addEventListener("click", () => toggleSidebar());
  byId("open-panel").addEventListener("click", () => togglePanel());
  toggleSidebar(!isNarrow());
  byId("model").textContent = "connecting …";
  chat = new Chat(await openStore(), {
    model: () => model, closeSidebar: () => { if (isNarrow()) toggleSidebar(false); }, togglePanel, shortcuts,
  });
  addEventListener("hashchange", route);
  addEventListener("popstate", route);
  addEventListener("keydown", onKey);
  byId("talk").addEventListener("pointerdown", () => { if (isNarrow()) toggleSidebar(false); });
  onReturn(learnModel);
  await route();
  if (!isEngineShown && !isNarrow()) byId("message").focus();
  await learnModel();
}

start();

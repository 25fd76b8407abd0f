// The engine view: what the engine does, four times a second. app.js calls mount and unmount; its data is
// /v1/engine/live and nothing else (docs/live.md). This module shows how the connection stands and holds the parts.

import { button, h } from "./dom.js";
import { Chart, setAttr, setText } from "./engine_charts.js";
import { number, percent, plural, rate, readUpdate, millis, seconds } from "./engine_data.js";
import { Figures, Latency, Restarts, Setup, Speculation } from "./engine_facts.js";
import { Memory } from "./engine_memory.js";
import { Prefix } from "./engine_prefix.js";
import { Requests } from "./engine_requests.js";
import { Connection } from "./engine_stream.js";

const HISTORY = 120; // points of half a second
const STEPS = 64;

const ago = (interval) => (back) => `${seconds(back * interval)} ago`;
const stepsAgo = (back) => `${plural(back, "step")} ago`;

function makeCharts() {
  const past = { places: HISTORY, from: "60 s ago", when: ago(0.5) };
  const steps = { places: STEPS, from: `${STEPS} steps ago`, when: stepsAgo, kind: "bars" };
  return {
    tokens: new Chart({ ...past, title: "Tokens per second", mirrored: true, format: number,
      series: [{ label: "answers", class: "s-main", format: rate }, { label: "prompts", class: "s-second", format: rate }] }),
    requests: new Chart({ ...past, title: "Requests", format: number,
      series: [{ label: "running", class: "s-main", format: number }, { label: "waiting", class: "s-second", format: number }] }),
    used: new Chart({ ...past, title: "KV memory in use", top: 1, format: percent,
      series: [{ label: "of all blocks", class: "s-main", format: percent }] }),
    batch: new Chart({ ...steps, title: "Batch of each step", mirrored: true, format: number,
      series: [{ label: "answers", class: "s-main", format: number }, { label: "prompts", class: "s-second", format: number }] }),
    time: new Chart({ ...steps, title: "Time of each step", format: millis,
      series: [{ label: "device", class: "s-main", format: millis }, { label: "host", class: "s-second", format: millis }] }),
  };
}

// States of the server in which the engine does not simply work, and what to say then.
const STATES = {
  starting: "The engine is starting.",
  paused: "The engine is paused: requests wait where they are until it is told to go on.",
  "falling asleep": "The engine is falling asleep.",
  asleep: "The engine is asleep: its memory is given back, requests wait until it is woken up.",
  "waking up": "The engine is waking up.",
  silent: "The engine has given no sign of life for longer than a step should take. It is replaced if it stays silent.",
  failed: "The engine failed and could not be replaced. The server's log says why.",
};

// What fills the view while there is nothing else to show: a title and a sentence.
const PANELS = {
  connecting: ["Connecting to the engine", "The first figures come within a second."],
  "no-core": ["", "This view fills as soon as it is there."],
  key: ["The operator's key is needed",
    "This server has keys, and the engine view shows what everybody's requests do. It opens with the key given as --admin-api-key."],
  forbidden: ["This server has no operator's key",
    "It has API keys, but none for operators, so nobody may watch the engine. Start it with --admin-api-key to open this view."],
  missing: ["This server has no engine view", "It answers, but does not know /v1/engine/live."],
  full: ["Too many are watching", "Eight pages may watch the engine at once. Close one of them, or wait for a place."],
  failed: ["The server could not answer", "It refused the live view for a reason of its own; its log says more."],
  lost: ["The server cannot be reached", "It may be starting, or have been stopped."],
};

class View {
  constructor(element, { headers, onKeyNeeded }) {
    this.element = element;
    this.onKeyNeeded = onKeyNeeded;
    this.model = null;
    this.lit = null; // id of the request whose cells are shown
    this.isPaused = false;
    this.#build();
    const send = typeof headers === "function" ? headers : () => headers ?? {};
    this.connection = new Connection({ headers: send, onUpdate: (raw) => this.#take(raw), onState: (state) => this.#state(state) });
  }

  #build() {
    this.charts = makeCharts();
    const light = (id) => this.#light(id);
    this.requests = new Requests(light);
    this.requests.onToggle = () => this.#draw();
    this.memory = new Memory(light);
    this.prefix = new Prefix();
    this.figures = new Figures();
    this.latency = new Latency();
    this.speculation = new Speculation();
    this.restarts = new Restarts();
    this.setup = new Setup();
    this.status = h("span", { class: "link-state", role: "status" });
    this.dot = h("i", { class: "dot", "aria-hidden": "true" });
    this.about = h("span", { class: "about" }, h("span", {}), h("span", { class: "wide" }));
    this.pause = button("Pause", () => this.#togglePause(), { class: "button small", "aria-pressed": "false" });
    this.choice = h("select", { class: "which", "aria-label": "Which engine", hidden: true, onchange: () => this.#turnTo(Number(this.choice.value)) });
    this.banner = h("div", { class: "banner", role: "status", hidden: true });
    this.panel = h("div", { class: "state", hidden: true });
    const { tokens, requests, used, batch, time } = this.charts;
    this.body = h("div", { class: "body", hidden: true }, this.figures.node,
      h("div", { class: "charts" }, tokens.node, requests.node, used.node, batch.node, time.node, this.latency.node),
      h("div", { class: "parts" }, [this.requests, this.memory, this.prefix, this.restarts, this.setup, this.speculation].map((part) => part.node)));
    this.root = h("div", { class: "engine" },
      h("header", { class: "engine-head" }, h("h1", {}, "Engine"), this.choice, h("span", { class: "live" }, this.dot, this.status), this.about, this.pause),
      this.banner, this.panel, this.body);
    this.element.append(this.root);
  }

  // ---- updates ----

  #take(raw) {
    const model = readUpdate(raw);
    if (model === null || this.isPaused) return;
    this.model = model;
    try {
      this.#draw();
    } catch (error) {
      reportError(error); // a fault of this page: the stream goes on, the next update may be drawn
    }
  }

  #draw() {
    if (this.model === null) return;
    const { server, core } = this.model;
    setText(this.about.firstChild, `Up ${seconds(server.uptime)}`);
    setText(this.about.lastChild, ` · ${plural(server.watchers, "watcher")}`);
    this.#offer(server.engines);
    this.restarts.update(this.model);
    this.latency.update(this.model);
    if (core !== null) this.#drawCore(this.model);
    this.#drawState();
  }

  // A choice of engines, where the server has several.
  #offer(count) {
    if (this.choice.length === count) return;
    this.choice.replaceChildren(...Array.from({ length: count }, (_, i) => h("option", { value: String(i) }, `Engine ${i} of ${count}`)));
    this.choice.value = String(this.connection.engine);
    this.choice.hidden = count < 2;
  }

  #turnTo(engine) {
    this.connection.engine = engine;
    this.model = this.lit = null;
    this.body.hidden = true;
    this.connection.open();
  }

  #drawCore(model) {
    const { core } = model;
    const past = core.history;
    this.figures.update(model);
    this.charts.tokens.when = this.charts.requests.when = this.charts.used.when = ago(past.interval);
    this.charts.tokens.update([past.decode, past.prefill].map((values) => values.map((n) => n / past.interval)));
    this.charts.requests.update([past.running, past.waiting], past.preemptions);
    this.charts.used.update([past.used]);
    this.charts.batch.update([core.steps.decode, core.steps.prefill]);
    this.charts.time.update([core.steps.device, core.steps.host]);
    this.requests.update(core);
    this.memory.update(core, this.lit);
    this.prefix.update(core);
    this.speculation.update(model);
    this.setup.update(model);
    this.body.hidden = false;
  }

  #light(id) {
    if (id === this.lit) {
      if (this.model?.core) this.memory.update(this.model.core, id); // another cell of the same request
      return;
    }
    this.lit = id;
    this.requests.light(id);
    if (this.model?.core) this.memory.update(this.model.core, id);
  }

  #togglePause() {
    this.isPaused = !this.isPaused;
    setText(this.pause, this.isPaused ? "Go on" : "Pause");
    setAttr(this.pause, "aria-pressed", String(this.isPaused));
    this.#showStatus();
  }

  // ---- how things stand ----

  #state(state) {
    const before = this.connected;
    this.connected = state;
    clearInterval(this.countdown);
    if (state.kind === "connecting" && before?.kind === "lost" && this.model) return; // the banner stays as it is
    this.#drawState();
    if (state.waitMs) this.#count(state);
  }

  // Seconds until the next try, in the banner or the panel.
  #count({ waitMs }) {
    const end = performance.now() + waitMs;
    const tick = () => {
      const left = Math.max(1, Math.ceil((end - performance.now()) / 1000));
      for (const node of this.root.querySelectorAll("[data-left]")) setText(node, `Trying again in ${left} s.`);
    };
    tick();
    this.countdown = setInterval(tick, 500);
  }

  #drawState() {
    const { kind } = this.connected ?? { kind: "connecting" };
    const isLive = kind === "live";
    this.root.classList.toggle("stale", !isLive && this.model !== null);
    this.#showStatus();
    this.#showPanel(this.#panelFor(kind));
    this.#showBanner(this.#bannerFor(kind));
  }

  #showStatus() {
    const { kind } = this.connected ?? { kind: "connecting" };
    const name = { live: this.isPaused ? "Paused" : "Live", connecting: "Connecting", lost: "Disconnected" }[kind] ?? "Not connected";
    setText(this.status, name);
    setAttr(this.dot, "class", `dot ${kind === "live" ? (this.isPaused ? "still" : "on") : kind === "connecting" ? "still" : "off"}`);
    this.pause.hidden = kind !== "live" || this.model?.core == null;
  }

  // What fills the view while there is nothing else to show; null: there is.
  #panelFor(kind) {
    if (kind === "key") return "key";
    if (kind === "forbidden" || kind === "missing") return kind;
    if (kind === "live") return this.model?.core == null && this.body.hidden ? (this.model ? "no-core" : "connecting") : null;
    return this.model && !this.body.hidden ? null : kind;
  }

  #showPanel(name) {
    const covers = ["key", "forbidden", "missing"].includes(name);
    if (covers) this.body.hidden = true;
    const state = this.model?.server.state;
    const key = name === null ? "" : `${name} ${name === "no-core" ? state : ""}`;
    if (this.panel.key === key) return;
    this.panel.key = key;
    this.panel.hidden = name === null;
    this.panel.replaceChildren();
    if (name === null) return;
    const [title, text, action] = this.#words(name, state);
    this.panel.append(h("h2", {}, title), h("p", {}, text));
    if (["lost", "full", "failed"].includes(name)) this.panel.append(h("p", { class: "quiet", "data-left": "" }));
    if (action) this.panel.append(action);
    setAttr(this.panel, "class", `state ${name}`);
  }

  #words(name, state) {
    const [title, text] = PANELS[name] ?? PANELS.lost;
    if (name === "no-core") return [(STATES[state] ?? "The engine is being replaced.").replace(/\.$/, ""), text];
    if (name === "key") return [title, text, button("Enter the key", () => this.#askKey(), { class: "button primary" })];
    if (name === "connecting" || name === "forbidden") return [title, text];
    return [title, text, button("Try now", () => this.connection.open())];
  }

  async #askKey() {
    if (await this.onKeyNeeded?.()) this.connection.open();
  }

  #bannerFor(kind) {
    if (this.body.hidden || ["key", "forbidden", "missing"].includes(kind)) return null;
    if (kind === "full") return { text: "Others took this page's place among the watchers. These are the last figures.", counts: true };
    if (kind !== "live") return { text: "The connection was lost. These are the last figures.", counts: true };
    const { core, server, coreAge } = this.model;
    if (core === null) return { text: "The engine is being replaced. Requests go on when the new one is there; these are the last figures." };
    if (STATES[server.state]) return { text: STATES[server.state], isBad: server.state === "failed" || server.state === "silent" };
    if (coreAge !== null && coreAge > 2) return { text: `The engine has been busy with one step for ${plural(Math.floor(coreAge), "second")}.` };
    return null;
  }

  #showBanner(banner) {
    const key = banner === null ? "" : banner.text;
    this.banner.hidden = banner === null;
    if (this.banner.key === key) return;
    this.banner.key = key;
    this.banner.replaceChildren();
    if (banner === null) return;
    this.banner.append(h("span", {}, banner.text));
    if (banner.counts) {
      const again = button("Try now", () => this.connection.open(), { class: "button small" });
      this.banner.append(h("span", { class: "quiet", "data-left": "" }), again);
    }
    setAttr(this.banner, "class", `banner${banner.counts || banner.isBad ? " bad" : ""}`);
  }

  close() {
    this.connection.stop();
    clearInterval(this.countdown);
    this.root.remove();
  }
}

let view = null;
let mounts = 0;

// The style sheet belongs to this module: a page that only chats does not load it.
function loadStyle() {
  const href = new URL("engine.css", import.meta.url).href;
  if ([...document.styleSheets].some((sheet) => sheet.href === href)) return Promise.resolve();
  return new Promise((resolve) => {
    document.head.append(h("link", { rel: "stylesheet", href, onload: resolve, onerror: resolve }));
  });
}

export async function mount(element, options = {}) {
  unmount();
  const mine = ++mounts;
  await loadStyle();
  if (mine !== mounts) return; // left again meanwhile
  view = new View(element, options);
  view.connection.open();
}

export function unmount() {
  mounts += 1;
  view?.close();
  view = null;
}

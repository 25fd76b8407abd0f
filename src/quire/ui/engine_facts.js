// The parts of the engine view that are figures and words: the row at the top, percentiles, guesses, restarts and
// suspects, and how the engine was set up. Each has a `node` and an `update(model)`.

import { h } from "./dom.js";
import { bar, setAttr, setText } from "./engine_charts.js";
import { NONE, millis, number, percent, plural, rate, seconds } from "./engine_data.js";

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
const mean = (numbers) => (numbers.length ? sum(numbers) / numbers.length : null);

// name, what is large, what is small below it
const FIGURES = [
  ["Running", (m) => number(m.core.running), (m) => `of at most ${number(m.core.maxRequests)}`],
  ["Waiting", (m) => number(m.core.waiting), (m) => waitFor(m.core)],
  ["Answer tokens/s", (m) => rate(m.core.decodeRate), (m) => `prompts ${rate(m.core.prefillRate)}/s`],
  ["First token", (m) => millis(m.server.ttft.p50), ({ server }) => (server.ttft.count ? `p99 ${millis(server.ttft.p99)}` : "none lately")],
  ["Step", (m) => millis(stepTime(m.core)), (m) => (m.core.stepRate ? `${rate(m.core.stepRate)} a second` : "none now")],
  ["KV in use", (m) => percent(used(m.core)), (m) => `${number(m.core.startup.kvTokens)} tokens fit`],
  ["Prefix hits", (m) => percent(m.core.prefixQueries ? Math.min(1, m.core.prefixHits / m.core.prefixQueries) : null), () => "of prompt tokens"],
  ["Preemptions", (m) => number(m.core.preemptions), () => "since the start"],
];

function waitFor(core) {
  if (core.deferred) return `${number(core.deferred)} for a grammar`;
  return core.waiting ? "for room" : "nobody";
}

function stepTime(core) {
  const [host, device] = [mean(core.steps.host.slice(-24)), mean(core.steps.device.slice(-24))];
  return host === null && device === null ? null : (host ?? 0) + (device ?? 0);
}

function used(core) {
  const blocks = sum(core.pools.map((pool) => pool.blocks));
  return blocks ? Math.min(1, sum(core.pools.map((pool) => pool.owned)) / blocks) : null;
}

export class Figures {
  constructor() {
    this.values = FIGURES.map(() => [h("span", { class: "big" }), h("span", { class: "small" })]);
    this.node = h("dl", { class: "headline" }, FIGURES.map(([name], i) => h("div", {}, h("dt", {}, name), h("dd", {}, this.values[i]))));
  }

  update(model) {
    FIGURES.forEach(([, large, small], i) => {
      setText(this.values[i][0], large(model));
      setText(this.values[i][1], small(model));
    });
  }
}

const LATENCIES = [["First token", "ttft"], ["Each token after", "perToken"], ["Whole request", "latency"]];

export class Latency {
  constructor() {
    this.cells = LATENCIES.map(() => ["p50", "p90", "p99", "count"].map((name) => h("td", { class: name === "count" ? "num wide" : "num" })));
    const heads = ["Time", "p50", "p90", "p99", "Of"].map((name, i) => h("th", { scope: "col", class: i === 4 ? "num wide" : i ? "num" : "" }, name));
    this.window = h("span", { class: "note" });
    this.node = h("div", { class: "chart latency" }, h("table", {},
      h("caption", {}, h("span", { class: "title" }, "Latency"), this.window),
      h("thead", {}, h("tr", {}, heads)),
      h("tbody", {}, LATENCIES.map(([name], i) => h("tr", {}, h("th", { scope: "row" }, name), this.cells[i])))));
  }

  update({ server }) {
    setText(this.window, `of the last ${number(server.window)} s`);
    LATENCIES.forEach(([, key], i) => {
      const { p50, p90, p99, count } = server[key];
      [millis(p50), millis(p90), millis(p99), number(count)].forEach((text, j) => setText(this.cells[i][j], text));
    });
  }
}

export class Speculation {
  constructor() {
    this.lead = h("p", { class: "lead" });
    this.body = h("tbody", {});
    this.rows = [];
    this.node = h("section", { class: "part third speculation" }, h("h2", {}, "Speculation"), this.lead,
      h("table", { class: "places" }, h("caption", { class: "unseen" }, "Guesses that were right, by their place among those made at once"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Guess"), h("th", { scope: "col", class: "rate" }, "Right"))), this.body));
  }

  update({ core }) {
    const spec = core.speculation;
    this.node.hidden = spec === null;
    if (spec === null) return;
    const recently = spec.recent === null ? "" : `, ${percent(spec.recent)} in the last seconds`;
    setText(this.lead, spec.draftTokens === 0 ? `Tokens are guessed by ${spec.method}; none was verified yet.`
      : `${percent(spec.acceptance)} of ${plural(spec.draftTokens, "token")} guessed by ${spec.method} were right${recently}.`);
    while (this.rows.length > spec.byPlace.length) this.rows.pop().node.remove();
    while (this.rows.length < spec.byPlace.length) this.#add();
    spec.byPlace.forEach((accepted, i) => {
      const share = spec.drafts ? Math.min(1, accepted / spec.drafts) : 0;
      setText(this.rows[i].text, percent(share));
      this.rows[i].bar.set(share);
    });
  }

  #add() {
    const [right, text] = [bar(), h("span", {})];
    const node = h("tr", {}, h("th", { scope: "row" }, `${this.rows.length + 1}.`), h("td", { class: "rate" }, right.node, text));
    this.rows.push({ node, bar: right, text });
    this.body.append(node);
  }
}

const CAUSES = { own: "It crashed", outside: "It was killed from outside", stall: "It stood still" };

export class Restarts {
  constructor() {
    this.lead = h("p", { class: "lead" });
    this.list = h("ul", { class: "restarts" });
    this.suspects = h("p", {});
    this.node = h("section", { class: "part third" }, h("h2", {}, "Restarts and suspects"), this.lead, this.list, this.suspects);
  }

  update({ server }) {
    setText(this.lead, server.restarts === 0 ? `The engine has run without a restart for ${seconds(server.uptime)}.`
      : `The engine was replaced ${plural(server.restarts, "time")} in ${seconds(server.uptime)}.`);
    while (this.list.children.length > server.recent.length) this.list.lastChild.remove();
    this.list.hidden = server.recent.length === 0;
    server.recent.forEach((restart, i) => {
      const line = this.list.children[i] ?? this.list.appendChild(h("li", {}, h("span", {}), h("span", { class: "quiet" })));
      setText(line.children[0], `${CAUSES[restart.cause] ?? (restart.cause || "It ended")}${restart.wasReady ? "" : " while it started"}`);
      setText(line.children[1], `${seconds(restart.ago)} ago`);
    });
    setText(this.suspects, this.#suspicion(server));
    setAttr(this.suspects, "class", server.suspects.length ? "warning" : "quiet");
  }

  #suspicion({ suspects, convicted }) {
    const refused = convicted ? ` ${plural(convicted, "request")} made it crash, and ${convicted === 1 ? "is" : "are"} refused now.` : "";
    if (suspects.length === 0) return convicted ? refused.trim() : "No request is suspected of making it crash.";
    const others = sum(suspects.slice(1));
    const wait = others ? `, ${number(others)} more wait for their turn` : "";
    return `${plural(suspects[0], "request")} on trial for making it crash${wait}.${refused}`;
  }
}

const auto = (text) => text || NONE;

const SETUP = [
  ["Device", (s) => `${auto(s.device)}${s.workers > 1 ? `, ${plural(s.workers, "worker")}` : ""}`],
  ["Computes in", (s) => auto(s.dtype)],
  ["Weights", (s) => (s.quantization ? s.quantization : NONE)],
  ["Attention kernels", (s) => auto(s.attention)],
  ["KV cache in", (s) => auto(s.kv_dtype)],
  ["Steps in flight", (s) => number(s.depth)],
  ["Weights loaded in", (s) => seconds(s.loadS)],
  ["Memory, kernels, graphs in", (s) => seconds(s.allocateS)],
  ["Graphs recorded", (s) => number(s.graphs)],
];

export class Setup {
  constructor() {
    this.values = SETUP.map(() => h("dd", {}));
    this.limits = h("dd", {});
    this.node = h("section", { class: "part third startup" }, h("h2", {}, "Start-up"),
      h("dl", { class: "setup" }, SETUP.map(([name], i) => h("div", {}, h("dt", {}, name), this.values[i])),
        h("div", {}, h("dt", {}, "Limits"), this.limits)));
  }

  update({ core }) {
    SETUP.forEach(([, value], i) => setText(this.values[i], value(core.startup)));
    setText(this.limits, `${number(core.maxStepTokens)} tokens a step, ${number(core.maxLength)} a request`);
  }
}

// What happened to one request: a strip of its time in the queue, in prefill chunks and in decoding, with marks where
// its blocks were taken away, and the same as a list of sentences. engine_requests.js shows it under a chosen row.

import { h } from "./dom.js";
import { setAttr, setText, svg } from "./engine_charts.js";
import { NONE, number, percent, plural, seconds } from "./engine_data.js";

const W = 1000;
const H = 28;

const NAMES = { queue: "Waited", prefill: "Prompt", decode: "Answer", preempt: "Preempted: its blocks were taken away", end: "Ended" };

function sentence(span, origin) {
  const at = `at ${seconds(Math.max(0, span.start - origin))}`;
  if (span.kind === "preempt" || span.kind === "end") return [NAMES[span.kind], at];
  const tokens = span.kind === "queue" ? "" : `, ${plural(span.tokens, "token")}`;
  const long = span.end - span.start;
  const speed = span.kind !== "queue" && long > 0 && span.tokens > 0 ? ` (${number(span.tokens / long)} a second)` : "";
  return [`${NAMES[span.kind]}${tokens}`, `${seconds(long)}${speed}`];
}

export class Timeline {
  constructor() {
    this.facts = h("p", { class: "facts" });
    this.strip = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", class: "strip" });
    this.from = h("span", {});
    this.to = h("span", {});
    this.list = h("ol", { class: "spans" });
    this.node = h("div", { class: "timeline" }, this.facts,
      h("div", { class: "strip-frame" }, this.strip),
      h("div", { class: "axis", "aria-hidden": "true" }, this.from, this.to), this.list);
  }

  update(request, now) {
    const spans = request.timeline;
    const start = spans.length ? Math.min(...spans.map((s) => s.start)) : now;
    const origin = request.arrived === null ? start : Math.min(start, request.arrived);
    const end = spans.length ? Math.max(start, ...spans.map((s) => s.end)) : now;
    setText(this.facts, this.#facts(request));
    setText(this.from, start > origin + 0.001 ? `${seconds(start - origin)} after it arrived` : "arrived");
    setText(this.to, `${seconds(Math.max(0, end - origin))}${request.phase === "ended" ? ", ended" : ", now"}`);
    this.#draw(spans, start, Math.max(end, start + 1e-6));
    this.#write(spans, origin);
    setAttr(this.strip, "aria-label", `Timeline of request ${request.id}; the list below says the same.`);
  }

  #facts(r) {
    const found = r.prompt > 0 ? ` (${percent(Math.min(1, r.cached / r.prompt))} of it from the prefix cache)` : "";
    const times = r.preemptions > 0 ? `, preempted ${plural(r.preemptions, "time")}` : "";
    return `Prompt of ${plural(r.prompt, "token")}${found}; ${number(r.output)} of at most ${number(r.maxOutput)} generated; ` +
      `${plural(r.blocks, "block")}${times}.`;
  }

  #draw(spans, start, end) {
    const x = (t) => ((t - start) / (end - start)) * W;
    let chunk = 0;
    const shapes = spans.map((span) => {
      if (span.kind === "preempt") return svg("rect", { class: "preempt", x: Math.min(W - 4, x(span.start)), y: 0, width: 4, height: H });
      if (span.kind === "end") return svg("rect", { class: "end", x: Math.max(0, x(span.start) - 2), y: 0, width: 2, height: H });
      const odd = span.kind === "prefill" && chunk++ % 2 === 1 ? " odd" : "";
      return svg("rect", { class: span.kind + odd, x: x(span.start), y: 5, width: Math.max(1.5, x(span.end) - x(span.start)), height: H - 10 });
    });
    // Marks lie over the spans they end.
    shapes.sort((a, b) => (a.getAttribute("y") === "0") - (b.getAttribute("y") === "0"));
    this.strip.replaceChildren(...shapes);
  }

  #write(spans, origin) {
    const lines = spans.length ? spans.map((span) => [span.kind, ...sentence(span, origin)]) : [["none", "Nothing was recorded", NONE]];
    while (this.list.children.length > lines.length) this.list.lastChild.remove();
    lines.forEach(([kind, what, how], i) => {
      const line = this.list.children[i] ?? this.list.appendChild(h("li", {}, h("i", { class: "swatch" }), h("span", {}), h("span", { class: "quiet" })));
      setAttr(line.children[0], "class", `swatch ${kind}`);
      setText(line.children[1], what);
      setText(line.children[2], how);
    });
  }
}

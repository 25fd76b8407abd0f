// Small charts of the engine view: SVG nodes, one path per series, colours by class (engine.css). A chart is a figure
// with a caption, the values that are now, a scale, and a sentence for screen readers. It knows no field of an update.

import { h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const W = 480;
const H = 120;

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttr(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// A bar that is filled from the left: {node, set(share 0 to 1, class)}. What it shows also stands beside it as text.
export function bar() {
  const fill = svg("rect", { height: 6 });
  const node = svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, fill);
  const set = (share, kind = "") => {
    setAttr(fill, "width", (100 * share).toFixed(1));
    setAttr(fill, "class", kind);
  };
  return { node, set };
}

// The next of 1, 2, 3, 4, 6, 8, 10, 20 … that is at least x: scales that do not move with every update.
export function roundUp(x) {
  if (!(x > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 3, 4, 6, 8, 10].map((step) => step * ten).find((top) => top >= x * 0.999) ?? 10 * ten;
}

const p = (x) => (Math.round(x * 10) / 10).toString();

// Paths of points that end at the right edge, `places` of which fill the width.
function areaPath(values, places, height, base) {
  if (values.length < 2) return "";
  const dx = W / (places - 1);
  const x0 = W - (values.length - 1) * dx;
  const top = values.map((v, i) => `${p(x0 + i * dx)} ${p(height(v, i))}`).join("L");
  const bottom = values.map((v, i) => `${p(x0 + i * dx)} ${p(base(i))}`).reverse().join("L");
  return `M${top}L${bottom}Z`;
}

function linePath(values, places, height) {
  if (values.length < 2) return "";
  const dx = W / (places - 1);
  const x0 = W - (values.length - 1) * dx;
  return `M${values.map((v, i) => `${p(x0 + i * dx)} ${p(height(v, i))}`).join("L")}`;
}

function barPath(values, places, height, base) {
  const dx = W / places;
  const x0 = W - values.length * dx;
  const bars = values.map((v, i) => {
    const [from, to] = [base(i), height(v, i)];
    return Math.abs(to - from) < 0.05 ? "" : `M${p(x0 + i * dx + 0.6)} ${p(from)}V${p(to)}h${p(dx - 1.2)}V${p(from)}Z`;
  });
  return bars.join("");
}

// `series` from the bottom up: {label, class, format}. kind: "area" (with a line on top) or "bars";
// mirrored: the first series grows up and the second down, each on a scale of its own.
export class Chart {
  constructor({ title, series, kind = "area", places, mirrored = false, top = null, from, when, format }) {
    Object.assign(this, { title, series, kind, places, mirrored, top, from, when, format });
    this.values = series.map(() => []);
    this.fills = series.map((s) => svg("path", { class: `fill ${s.class}` }));
    this.lines = series.map((s) => svg("path", { class: `stroke ${s.class}` }));
    this.marks = svg("path", { class: "mark" });
    this.cross = svg("path", { class: "cross" });
    this.picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", class: "plot" },
      svg("path", { class: "grid", d: mirrored ? `M0 0.5H${W}M0 ${H / 2}H${W}M0 ${H - 0.5}H${W}` : `M0 0.5H${W}M0 ${H - 0.5}H${W}` }),
      ...this.fills, ...(kind === "area" ? [...this.lines].reverse() : []), this.marks, this.cross);
    this.now = series.map(() => h("span", { class: "value" }));
    this.scale = [h("span", { class: "scale-top" }), h("span", { class: "scale-bottom" })];
    this.start = h("span", {}, from);
    this.end = h("span", {}, "now");
    const legend = series.map((s, i) => h("span", { class: "key" }, h("i", { class: `swatch ${s.class}` }), s.label, " ", this.now[i]));
    this.node = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "title" }, title), h("span", { class: "legend" }, legend)),
      h("div", { class: "frame" }, this.picture, this.scale),
      h("div", { class: "axis", "aria-hidden": "true" }, this.start, this.end));
    this.picture.addEventListener("pointermove", (event) => this.#point(event));
    this.picture.addEventListener("pointerleave", () => { this.at = null; this.#legend(); });
    this.at = null; // which place from the right a person points at
  }

  // One list of values per series; `marks`: counts whose places are marked.
  update(values, marks = []) {
    this.values = values.map((numbers) => numbers.slice(-this.places));
    if (this.mirrored) this.#drawMirrored();
    else this.#drawStacked();
    const dx = W / (this.places - 1);
    const marked = marks.slice(-this.places);
    const last = marked.length - 1;
    setAttr(this.marks, "d", marked.map((n, i) => (n > 0 ? `M${p(W - (last - i) * dx)} ${H}v-10` : "")).join(""));
    this.#legend();
    this.#describe();
  }

  #draw(i, height, base) {
    const make = this.kind === "bars" ? barPath : areaPath;
    setAttr(this.fills[i], "d", make(this.values[i], this.places, height, base));
    if (this.kind === "area") setAttr(this.lines[i], "d", linePath(this.values[i], this.places, height));
  }

  #drawStacked() {
    const sums = this.values[0].map((_, i) => this.values.reduce((sum, v) => sum + (v[i] ?? 0), 0));
    const most = Math.max(0, ...sums);
    const top = this.top ?? roundUp(most);
    const below = this.values[0].map(() => 0);
    const y = (v) => H - (Math.min(v, top) / top) * (H - 2);
    this.values.forEach((values, s) => {
      const start = [...below];
      this.#draw(s, (v, i) => y(start[i] + v), (i) => y(start[i]));
      values.forEach((v, i) => (below[i] += v));
    });
    setText(this.scale[0], this.top || most ? this.format(top) : "");
  }

  #drawMirrored() {
    this.values.forEach((values, s) => {
      const most = Math.max(0, ...values);
      const top = roundUp(most);
      const sign = s === 0 ? -1 : 1;
      this.#draw(s, (v) => H / 2 + sign * (v / top) * (H / 2 - 1), () => H / 2);
      setText(this.scale[s], most ? this.format(top) : "");
    });
  }

  #point(event) {
    const box = this.picture.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / Math.max(1, box.width)));
    this.at = Math.round((1 - share) * (this.places - 1));
    this.#legend();
  }

  // The values that are now, or those a person points at.
  #legend() {
    const known = this.at !== null && this.at < this.values[0].length;
    const back = known ? this.at : 0;
    this.series.forEach((s, i) => {
      const value = this.values[i].at(-1 - back);
      setText(this.now[i], value === undefined ? "–" : s.format(value));
    });
    const x = W - (back / (this.places - 1)) * W;
    setAttr(this.cross, "d", known ? `M${p(Math.min(W - 0.5, x))} 0V${H}` : "");
    setText(this.end, known && back > 0 ? this.when(back) : "now");
  }

  #describe() {
    const parts = this.series.map((s, i) => {
      const values = this.values[i];
      if (values.length === 0) return `${s.label}: nothing yet`;
      return `${s.label}: ${s.format(values.at(-1))} now, ${s.format(Math.max(...values))} at most`;
    });
    setAttr(this.picture, "aria-label", `${this.title}, ${this.from} to now. ${parts.join("; ")}.`);
  }
}

// The prefix tree as a table: a row per part that prompts begin with, its children below it, indented. Parts that one
// request alone went through are counted in one line of their parent, for a busy server has hundreds of them.

import { h } from "./dom.js";
import { bar, setAttr, setText } from "./engine_charts.js";
import { number, percent, plural } from "./engine_data.js";

const MAX_INDENT = 8; // levels beyond are drawn at this one

const isShared = (node) => node.requests > 1 || node.hits > 0 || node.children.length > 0;
const sum = (nodes, f) => nodes.reduce((total, node) => total + f(node), 0);

// Lines to draw, depth first without recursion (a chain may be 200 deep), busiest first.
function lines(roots) {
  const out = [];
  const todo = [{ nodes: roots, depth: 0, parent: "root" }];
  while (todo.length) {
    const { nodes, depth, parent, single } = todo.pop();
    if (single) {
      out.push(single);
      continue;
    }
    const shared = nodes.filter(isShared).sort((a, b) => b.requests - a.requests || b.hits - a.hits || (a.id < b.id ? -1 : 1));
    const alone = nodes.filter((node) => !isShared(node));
    if (alone.length) todo.push({ single: { key: `${parent}+`, depth, alone } });
    for (const node of shared.reverse()) {
      if (node.children.length) todo.push({ nodes: node.children, depth: depth + 1, parent: node.id });
      todo.push({ single: { key: node.id, depth, node } });
    }
  }
  return out;
}

class Line {
  constructor() {
    this.level = h("span", { class: "unseen" });
    this.name = h("span", {});
    this.note = h("span", { class: "quiet" });
    this.bar = bar();
    this.rate = h("span", {});
    this.cells = [h("td", { class: "num" }), h("td", { class: "num" }), h("td", { class: "num wide" })];
    this.node = h("tr", {}, h("th", { scope: "row" }, h("span", { class: "part-name" }, this.level, this.name, this.note)),
      this.cells[0], this.cells[1], h("td", { class: "rate" }, this.bar.node, this.rate), this.cells[2]);
  }

  update({ depth, node, alone }) {
    setText(this.level, depth ? `Level ${depth + 1}: ` : "");
    setAttr(this.node, "class", `d${Math.min(depth, MAX_INDENT)}${alone ? " alone" : node.cached ? "" : " evicted"}`);
    if (alone) return this.#write(plural(alone.length, "part"), " seen once", [sum(alone, (n) => n.requests), 0, 0], null);
    const rate = node.requests ? Math.min(1, node.hits / node.requests) : 0;
    this.#write(plural(node.tokens, "token"), node.cached ? "" : " evicted", [node.requests, node.hits, node.hitTokens], rate);
  }

  #write(name, note, values, rate) {
    setText(this.name, name);
    setText(this.note, note);
    values.forEach((value, i) => setText(this.cells[i], rate === null && i > 0 ? "" : number(value)));
    setText(this.rate, rate === null ? "" : percent(rate));
    this.bar.set(rate ?? 0);
  }
}

export class Prefix {
  constructor() {
    this.rows = [];
    this.summary = h("p", { class: "lead" });
    this.body = h("tbody", {});
    const heads = [["Part of a prompt", ""], ["Requests", "num"], ["Hits", "num"], ["Hit rate", "rate"], ["Tokens saved", "num wide"]];
    this.scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the prefix tree" },
      h("table", { class: "tree" }, h("caption", { class: "unseen" }, "The prefix tree: parts that prompts begin with, each below the part it follows."),
        h("thead", {}, h("tr", {}, heads.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), this.body));
    this.node = h("section", { class: "part half" }, h("h2", {}, "Prefix cache"), this.summary, this.scroll);
  }

  update(core) {
    setText(this.summary, this.#say(core));
    const shown = lines(core.prefix.nodes.filter((node) => node.parent === null));
    while (this.rows.length > shown.length) this.rows.pop().node.remove();
    while (this.rows.length < shown.length) {
      const row = new Line();
      this.rows.push(row);
      this.body.append(row.node);
    }
    shown.forEach((line, i) => this.rows[i].update(line));
    this.scroll.hidden = shown.length === 0;
  }

  #say(core) {
    if (!core.prefix.enabled) return "Prefix caching is off: every prompt is computed in full.";
    if (core.prefixQueries === 0) return "No prompt was looked up yet. Prompts that begin alike will share what was computed for the first.";
    const share = percent(Math.min(1, core.prefixHits / core.prefixQueries));
    return `${share} of all prompt tokens (${number(core.prefixHits)} of ${number(core.prefixQueries)}) were found in the cache since the engine started.`;
  }
}

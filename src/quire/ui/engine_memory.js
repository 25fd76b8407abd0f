// KV memory as a map: a cell is one block or several, filled from below with what requests own, then with what is
// cached, the rest free. Pointing at a cell tells which request owns most of it, and the other way round.

import { h } from "./dom.js";
import { setAttr, setText } from "./engine_charts.js";
import { number, percent, plural, seconds } from "./engine_data.js";

const NUM_TINTS = 6; // shades of the accent colour, so that neighbours of different requests are told apart

// The same request has the same shade in every update.
function tint(id) {
  let sum = 0;
  for (let i = 0; i < id.length; i++) sum = (sum * 31 + id.charCodeAt(i)) >>> 0;
  return sum % NUM_TINTS;
}

// How full something is, in eighths; a little is never nothing, and not quite all never everything.
function eighths(part, whole) {
  if (part <= 0) return 0;
  return part >= whole ? 8 : Math.min(7, Math.max(1, Math.round((8 * part) / whole)));
}

const ownerOf = (cell, requests) => (cell.owner >= 0 && cell.owned > 0 ? requests[cell.owner]?.id ?? null : null);

class Pool {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.cells = []; // nodes
    this.model = null;
    this.title = h("p", { class: "pool-title" });
    this.map = h("div", { class: "map", role: "img" });
    this.says = h("p", { class: "says" });
    this.legend = ["owned", "cached", "free"].map((kind) => {
      const value = h("span", { class: "value" });
      return { kind, value, node: h("span", { class: "key" }, h("i", { class: `swatch ${kind}` }), `${kind[0].toUpperCase()}${kind.slice(1)} `, value) };
    });
    this.node = h("div", { class: "pool" }, this.title, h("div", { class: "legend" }, this.legend.map((l) => l.node)), this.map, this.says);
    for (const kind of ["pointermove", "pointerdown"]) {
      this.map.addEventListener(kind, (event) => { if (event.target !== this.map) this.#point(event.target); }); // not the gaps
    }
    this.map.addEventListener("pointerleave", () => this.#point(null));
    this.pointed = null; // index of the cell under the pointer
  }

  update(pool, requests, lit, name) {
    this.model = { pool, requests };
    const pointed = this.pointed === null ? undefined : pool.cells[this.pointed];
    const owner = pointed ? ownerOf(pointed, requests) : lit;
    if (owner !== lit) return this.onPoint(owner); // the cell under the pointer has another owner now: drawn anew
    setText(this.title, name);
    this.title.hidden = name === "";
    for (const { kind, value } of this.legend) setText(value, number(pool[kind]));
    while (this.cells.length > pool.cells.length) this.cells.pop().remove();
    while (this.cells.length < pool.cells.length) {
      const cell = h("i", { "data-i": String(this.cells.length) });
      this.cells.push(cell);
      this.map.append(cell);
    }
    pool.cells.forEach((cell, i) => this.#draw(this.cells[i], cell, ownerOf(cell, requests), lit));
    setAttr(this.map, "class", `map${lit ? " has-lit" : ""}${pool.cells.length > 256 ? " many" : ""}`);
    setAttr(this.map, "aria-label", this.#describe());
    setText(this.says, this.#say(lit));
  }

  #draw(node, cell, owner, lit) {
    const owned = eighths(cell.owned, cell.size);
    const known = Math.max(eighths(cell.owned + cell.cached, cell.size), cell.cached > 0 ? Math.min(8, owned + 1) : owned);
    const shade = owner === null ? "" : ` t${tint(owner)}`;
    setAttr(node, "class", `o${owned} k${known}${shade}${lit !== null && owner === lit ? " lit" : ""}`);
  }

  #describe() {
    const { pool } = this.model;
    const share = (n) => percent(pool.blocks ? n / pool.blocks : 0);
    return `Map of ${plural(pool.blocks, "KV block")}: ${share(pool.owned)} owned by requests, ${share(pool.cached)} cached, ${share(pool.free)} free.`;
  }

  // What a person points at, or else what a cell is.
  #say(lit) {
    const { pool, requests } = this.model;
    const cell = this.pointed === null ? undefined : pool.cells[this.pointed];
    if (cell) return this.#sayCell(cell);
    const request = lit === null ? undefined : requests.find((r) => r.id === lit);
    if (request) return `Request ${request.id} holds ${plural(request.blocks, "block")}.`;
    const per = pool.blockTokens.length ? `, a block ${pool.blockTokens.map(number).join(" or ")} tokens` : "";
    const late = pool.refresh > 1 ? ` The map is up to ${seconds(pool.refresh)} old.` : "";
    return `A cell is ${plural(pool.cellBlocks, "block")}${per}. Point at one to see whose it is.${late}`;
  }

  #sayCell(cell) {
    const { pool, requests } = this.model;
    const first = this.pointed * pool.cellBlocks;
    const where = cell.size === 1 ? `Block ${number(first)}` : `Blocks ${number(first)} to ${number(first + cell.size - 1)}`;
    const owner = ownerOf(cell, requests);
    const free = cell.size - cell.owned - cell.cached;
    const parts = [[cell.owned, "owned"], [cell.cached, "cached"], [free, "free"]].filter(([n]) => n > 0);
    const what = cell.size === 1 ? parts[0]?.[1] ?? "free" : parts.map(([n, kind]) => `${number(n)} ${kind}`).join(", ");
    const whose = owner ? `, ${cell.size === 1 ? "by" : "mostly by"} ${owner}` : cell.owner === -2 ? ", by a request that is not listed" : "";
    return `${where}: ${what}${whose}.`;
  }

  #point(target) {
    const idx = target?.dataset?.i === undefined ? null : Number(target.dataset.i);
    if (idx === this.pointed) return;
    this.pointed = idx;
    if (!this.model) return;
    const cell = idx === null ? undefined : this.model.pool.cells[idx];
    this.onPoint(cell ? ownerOf(cell, this.model.requests) : null);
  }
}

export class Memory {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.pools = [];
    this.place = h("div", { class: "pools" });
    this.empty = h("p", { class: "nothing" }, "This engine keeps no KV blocks.");
    this.node = h("section", { class: "part half" }, h("h2", {}, "KV memory"), this.empty, this.place);
  }

  update(core, lit) {
    while (this.pools.length > core.pools.length) this.pools.pop().node.remove();
    while (this.pools.length < core.pools.length) {
      const pool = new Pool(this.onPoint);
      this.pools.push(pool);
      this.place.append(pool.node);
    }
    core.pools.forEach((pool, i) => this.pools[i].update(pool, core.requests, lit, core.pools.length > 1 ? `Pool ${i + 1}` : ""));
    this.empty.hidden = core.pools.length > 0;
  }
}

// The table of requests: those that run, those that wait, the last that ended. A row opens to show its timeline, and
// pointing at one (or focusing it) tells the memory map whose cells to show.

import { h } from "./dom.js";
import { bar, setAttr, setText } from "./engine_charts.js";
import { NONE, number, seconds } from "./engine_data.js";
import { Timeline } from "./engine_timeline.js";

const COLUMNS = [["Request", "id"], ["Phase", "phase"], ["Progress", "progress"], ["Prompt", "num mid"], ["Cached", "num wide"],
  ["Blocks", "num mid"], ["Preempted", "num wide"], ["Age", "num age"]];

const PHASES = {
  grammar: "Compiling grammar", parked: "Waits for a sibling", queued: "Queued", prefill: "Prefill", decode: "Decode",
  preempted: "Preempted", ended: "Ended", unknown: "Unknown",
};

const GROUPS = { running: "Running", waiting: "Waiting", ended: "Ended" };

// How far it has come, 0 to 1, and the same in words.
function progress(r) {
  const [done, all] = r.phase === "prefill" ? [r.computed, r.prompt] : [r.output, r.maxOutput];
  if (r.group === "waiting" && done === 0) return [0, NONE];
  return [all ? Math.min(1, done / all) : 0, `${number(done)} of ${number(all)}`];
}

function age(r, now) {
  const ended = r.timeline.at(-1);
  const until = r.phase === "ended" && ended ? ended.end : now;
  return r.arrived === null ? NONE : seconds(Math.max(0, until - r.arrived));
}

class Row {
  constructor(id, onToggle, onPoint) {
    this.button = h("button", { type: "button", class: "id", "aria-expanded": "false", onclick: () => onToggle(id) }, id);
    this.phase = h("span", { class: "phase" });
    this.bar = bar();
    this.text = h("span", {});
    this.cells = COLUMNS.slice(3).map(([, kind]) => h("td", { class: kind }));
    this.node = h("tr", { class: "request" }, h("th", { scope: "row" }, this.button), h("td", {}, this.phase),
      h("td", { class: "progress" }, this.bar.node, this.text), this.cells);
    this.node.addEventListener("click", (event) => { if (event.target !== this.button) onToggle(id); });
    this.node.addEventListener("pointerenter", () => onPoint(id));
    this.node.addEventListener("pointerleave", () => onPoint(null));
    this.button.addEventListener("focus", () => onPoint(id));
    this.button.addEventListener("blur", () => onPoint(null));
  }

  update(r, now) {
    const [share, words] = progress(r);
    setText(this.phase, PHASES[r.phase]);
    setAttr(this.phase, "class", `phase ${r.phase}`);
    setAttr(this.node, "class", `request ${r.group}${this.isLit ? " lit" : ""}${this.isOpen ? " open" : ""}`);
    this.bar.set(share, r.phase);
    setText(this.text, words);
    [number(r.prompt), number(r.cached), number(r.blocks), number(r.preemptions), age(r, now)]
      .forEach((text, i) => setText(this.cells[i], text));
  }
}

class Group {
  constructor(name) {
    this.name = name;
    this.title = h("th", { scope: "rowgroup", colspan: String(COLUMNS.length) });
    this.node = h("tbody", {}, h("tr", { class: "group-row" }, this.title));
  }
}

export class Requests {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.rows = new Map();
    this.chosen = null; // id of the row that is open
    this.last = null; // what was last known of it
    this.groups = Object.keys(GROUPS).map((name) => new Group(name));
    this.timeline = new Timeline();
    this.detail = h("tr", { class: "detail" }, h("td", { colspan: String(COLUMNS.length) }, this.timeline.node));
    this.empty = h("p", { class: "nothing" });
    const heads = COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
    this.table = h("table", { class: "requests" }, h("caption", { class: "unseen" }, "Requests, by what they do. A row opens to show what happened to it."),
      h("thead", {}, h("tr", {}, heads)), this.groups.map((group) => group.node));
    this.scroll = h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Table of requests" }, this.table);
    this.node = h("section", { class: "part whole" }, h("h2", {}, "Requests"), this.empty, this.scroll);
  }

  update(core) {
    const listed = core.requests;
    const focused = document.activeElement;
    const place = this.#placeOfChosen();
    this.#keepChosen(listed);
    const shown = this.chosen && !listed.some((r) => r.id === this.chosen) ? [...listed, this.last] : listed;
    const seen = new Set();
    for (const group of this.groups) {
      const members = shown.filter((r) => r.group === group.name && !seen.has(r.id) && seen.add(r.id));
      this.#fill(group, members, core);
    }
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    // A row that goes from one group to another keeps the focus.
    if (focused !== document.activeElement && this.table.contains(focused)) focused.focus({ preventScroll: true });
    this.scroll.hidden = shown.length === 0;
    if (place !== null && this.chosen !== null) this.scroll.scrollTop += this.#top() - place;
    this.empty.hidden = shown.length > 0;
    setText(this.empty, "No requests. Send a message in the chat, or any call to the API, and it shows up here.");
  }

  // Shows whose cells are pointed at in the map.
  light(id) {
    for (const [name, row] of this.rows) {
      row.isLit = name === id;
      row.node.classList.toggle("lit", row.isLit);
    }
  }

  // Where the open row is seen in the scrolled table; null: nowhere. It stays there when others come and go.
  #placeOfChosen() {
    if (!this.rows.get(this.chosen)?.node.isConnected) return null;
    const top = this.#top();
    return top >= 0 && top < this.scroll.clientHeight ? top : null;
  }

  #top() {
    return this.rows.get(this.chosen).node.offsetTop - this.scroll.scrollTop;
  }

  // A request that is open stays, when it has left the update, as it was last seen.
  #keepChosen(listed) {
    if (this.chosen === null) return;
    const found = listed.find((r) => r.id === this.chosen);
    if (found) this.last = found;
    else if (this.last) this.last = { ...this.last, phase: "ended", group: "ended", blocks: 0 };
    else this.chosen = null;
  }

  #fill(group, members, core) {
    const more = core.leftOut[group.name] ?? 0;
    setText(group.title, `${GROUPS[group.name]} ${number(members.length)}${more ? `, and ${number(more)} more that are not listed` : ""}`);
    group.node.hidden = members.length === 0;
    const nodes = [group.node.firstChild];
    for (const r of members) {
      const row = this.#row(r.id);
      row.isOpen = r.id === this.chosen;
      row.update(r, core.now);
      setAttr(row.button, "aria-expanded", String(row.isOpen));
      nodes.push(row.node);
      if (!row.isOpen) continue;
      this.timeline.update(r, core.now);
      nodes.push(this.detail);
    }
    this.#place(group.node, nodes);
    if (this.chosen === null) this.detail.remove();
  }

  // Moves only what is not where it belongs: a row that is moved would lose the focus.
  #place(parent, nodes) {
    const wanted = new Set(nodes);
    for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
    nodes.forEach((node, i) => {
      if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
    });
  }

  #row(id) {
    if (!this.rows.has(id)) this.rows.set(id, new Row(id, (x) => this.toggle(x), this.onPoint));
    return this.rows.get(id);
  }

  toggle(id) {
    this.chosen = this.chosen === id ? null : id;
    this.last = null;
    this.onToggle?.();
  }
}

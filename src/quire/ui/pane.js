// One column of messages: shows the path to a leaf, stays at the end while text grows there.

import { h, iconButton } from "./dom.js";
import { viewOf } from "./message.js";
import { firstSent } from "./tree.js";

const NEAR = 80; // pixels from the end that count as being there

export class Pane {
  constructor(actions, emptyState) {
    this.actions = actions;
    this.emptyState = emptyState;
    this.views = new Map();
    this.column = h("div", { class: "column" });
    this.head = h("p", { class: "pane-head", hidden: true });
    this.scroller = h("div", { class: "scroller", tabIndex: 0, role: "log", "aria-label": "Messages", "aria-live": "off" }, this.column);
    this.down = iconButton("down", "To the latest message", () => this.toEnd(), { class: "icon-button down", hidden: true });
    this.node = h("div", { class: "pane" }, this.head, this.scroller, this.down);
    this.sticks = true;
    this.scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => { if (this.sticks) this.#jump(); }).observe(this.column);
  }

  // `title`: what a pane of two is for.
  show(path, title) {
    this.head.hidden = !title;
    this.head.textContent = title ?? "";
    const wanted = new Set(path.map((message) => message.id));
    for (const [id, view] of this.views) {
      if (wanted.has(id)) continue;
      view.node.remove();
      this.views.delete(id);
    }
    if (!path.length) return this.column.replaceChildren(this.emptyState());
    const from = firstSent(path);
    const nodes = path.flatMap((message, idx) => [...(from > 0 && idx === from ? [divider()] : []), this.#view(message).node]);
    if (nodes.length !== this.column.childNodes.length || nodes.some((node, idx) => node !== this.column.childNodes[idx])) this.#arrange(nodes);
  }

  // Puts the nodes in order without touching those that are in place: focus and selection stay.
  #arrange(nodes) {
    for (const child of [...this.column.childNodes]) if (!nodes.includes(child)) child.remove();
    nodes.forEach((node, idx) => {
      if (this.column.childNodes[idx] !== node) this.column.insertBefore(node, this.column.childNodes[idx] ?? null);
    });
  }

  #view(message) {
    const kept = this.views.get(message.id);
    if (kept && kept.message === message) {
      kept.refresh();
      return kept;
    }
    const view = viewOf(message, this.actions);
    this.views.set(message.id, view);
    return view;
  }

  // Drawn at each frame while the answer is written.
  grow(message) {
    this.views.get(message.id)?.grow?.();
  }

  toEnd() {
    this.sticks = true;
    this.#jump();
  }

  #jump() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.sticks = scrollHeight - scrollTop - clientHeight < NEAR;
    this.down.hidden = this.sticks;
  }
}

const divider = () => h("p", { class: "dropped" }, "Messages above are no longer sent: the context was full.");

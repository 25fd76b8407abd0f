// Draws growing text as markdown, a little at each frame, and not more than a page can hold: of a very long answer the
// beginning stays, the end is shown as it is written, and all of it can be saved as a file.

import { button, download, h, number } from "./dom.js";
import { clean } from "./inline.js";
import { Markdown } from "./markdown.js";

const MAX_CHARS = 300_000;
const MAX_NODES = 20_000;
const PIECE = 4096; // characters at a time
const TAIL_CHARS = 1200;
const TAIL_EVERY_MS = 300;
const FRAME_MS = 8;

const views = new Set(); // those with something left to draw
let isAsked = false;

export class Shown {
  constructor(element, source) {
    this.element = element;
    this.source = source; // a Growing
    this.reader = { chunk: 0, at: 0 };
    this.numChars = 0;
    this.markdown = new Markdown(element);
    this.isOver = false;
  }

  // Draws for a while; true when nothing is left.
  draw(deadline) {
    if (this.tail) return this.#drawTail();
    let piece;
    while ((piece = this.source.read(this.reader, PIECE))) {
      this.numChars += piece.length;
      this.markdown.push(piece);
      if (this.numChars > MAX_CHARS || this.markdown.numNodes > MAX_NODES) {
        this.markdown.end();
        this.#cut();
        return this.#drawTail();
      }
      if (performance.now() > deadline) return false;
    }
    if (this.isOver && !this.isEnded) {
      this.isEnded = true;
      this.markdown.end();
    }
    return true;
  }

  finish() {
    this.isOver = true;
    ask(this);
  }

  #cut() {
    this.tail = h("pre", { class: "tail", dir: "auto", "aria-label": "The end of the answer" });
    this.count = h("span");
    this.element.append(h("div", { class: "cut" },
      h("p", {}, "This answer is longer than a page can show well. ", this.count, " Here is how it ends:"), this.tail,
      button("Save all of it as a file", () => download("answer.md", "text/markdown", this.source.text()), { class: "button small" })));
  }

  // Not at every frame: laying out so long a page takes a while.
  #drawTail() {
    const now = performance.now();
    if (!this.isOver && now - (this.tailMs ?? 0) < TAIL_EVERY_MS) return true;
    this.tailMs = now;
    this.tail.textContent = clean(this.source.tail(TAIL_CHARS));
    this.count.textContent = `It has ${number(this.source.length)} characters so far.`;
    return true;
  }
}

// Has a view drawn from the next frame on.
export function ask(view) {
  views.add(view);
  if (!isAsked) {
    isAsked = true;
    requestAnimationFrame(frame);
  }
}

function frame() {
  isAsked = false;
  const deadline = performance.now() + FRAME_MS;
  for (const view of [...views]) {
    if (view.draw(deadline)) views.delete(view);
    if (performance.now() > deadline) break;
  }
  if (views.size) {
    isAsked = true;
    requestAnimationFrame(frame);
  }
}

// A block of code that grows line by line: language, copy button, colours. Used by markdown.js and for tool calls.
// Bidirectional controls are shown by their number: in code they would hide what is written.

import { h, iconButton, copy } from "./dom.js";
import { clean } from "./inline.js";
import { highlight } from "./highlight.js";

const CHUNK_LINES = 100; // laid out together: what is there stays as it is when lines are added
const MAX_PIECES = 8000; // coloured pieces of one block; what follows is plain
const BIDI = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/;

export class CodeBlock {
  constructor(language) {
    this.language = language.toLowerCase();
    this.lines = [];
    this.state = null;
    this.numPieces = 0;
    this.code = h("code", { dir: "ltr" });
    this.partial = h("span");
    this.code.append(this.partial);
    const copyButton = iconButton("copy", "Copy code", () => copy(this.lines.join("\n"), copyButton));
    this.node = h("figure", { class: "code" },
      h("figcaption", {}, h("span", {}, clean(language).slice(0, 40) || "text"), copyButton),
      h("pre", { tabIndex: 0, role: "region", "aria-label": language ? `Code, ${clean(language).slice(0, 40)}` : "Code" }, this.code));
  }

  // A whole line.
  line(text) {
    if (this.lines.length % CHUNK_LINES === 0) {
      this.chunk = h("span", { class: "chunk" });
      this.partial.before(this.chunk);
    }
    this.lines.push(text);
    this.partial.textContent = "";
    this.#colour(text);
    this.chunk.append("\n");
  }

  // The line that is being written; replaced by the next call.
  unfinished(text) {
    this.partial.textContent = clean(text);
  }

  #colour(text) {
    if (this.numPieces > MAX_PIECES) return appendVisible(this.chunk, text);
    const [pieces, state] = highlight(this.language, text, this.state);
    this.state = state;
    this.numPieces += pieces.length;
    for (const [kind, piece] of pieces) {
      appendVisible(kind ? this.chunk.appendChild(h("span", { class: `c-${kind}` })) : this.chunk, piece);
    }
  }
}

function appendVisible(node, text) {
  if (!BIDI.test(text)) return node.append(clean(text));
  for (const part of text.split(/([\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069])/)) {
    if (BIDI.test(part)) node.append(h("span", { class: "c-hidden", title: "a character that changes the direction of text" }, `U+${part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`));
    else if (part) node.append(clean(part));
  }
}

// Markdown that arrives piece by piece. What is complete is rendered once; only the last block is rendered again.
//
//   const view = new Markdown(element);
//   view.push("some *te"); view.push("xt*\n"); view.end();
//
// A block longer than MAX_BLOCK is cut, so a frame never renders much; `view.numNodes` lets the caller stop at a limit.

import { h } from "./dom.js";
import { clean, inline } from "./inline.js";
import { CodeBlock } from "./code.js";

const MAX_BLOCK = 8192; // characters
const MAX_DEPTH = 6;
const MAX_ROWS = 500;
const MAX_COLUMNS = 50;

// None of these takes more than linear time on a hostile line.
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const DELIMITER_CELL = /^:?-+:?$/;

export class Markdown {
  constructor(element, depth = 0) {
    this.element = element;
    this.depth = depth;
    this.rest = ""; // the line that is being written
    this.tail = null; // {kind, lines, size, nodes}: the last block, which may still change
    this.code = null; // {block, mark, indent}: open code
    this.table = null;
    this.numNodes = 0;
  }

  push(text) {
    this.rest += text;
    let from = 0;
    let end;
    while ((end = this.rest.indexOf("\n", from)) >= 0) {
      this.#line(this.rest.slice(from, end).replace(/\r$/, ""));
      from = end + 1;
    }
    this.rest = this.rest.slice(from);
    while (this.rest.length > MAX_BLOCK) { // a line without end
      this.#line(this.rest.slice(0, MAX_BLOCK));
      if (!this.code) this.#close();
      this.rest = this.rest.slice(MAX_BLOCK);
    }
    this.#show();
  }

  end() {
    if (this.rest) this.#line(this.rest);
    this.rest = "";
    this.#show();
    this.#close();
    this.code = this.table = null;
  }

  #line(line) {
    if (this.code) return this.#codeLine(line);
    if (this.table && this.#row(line)) return;
    const kind = this.#kind(line);
    if (kind === "blank") {
      if (this.tail?.kind === "list") this.#extend("list", line);
      else this.#close();
    } else if (kind === "fence") this.#open(line);
    else if (kind === "heading" || kind === "rule") {
      this.#close();
      this.#put(kind === "rule" ? h("hr") : heading(line));
    } else if (kind === "table") this.#openTable(line);
    else this.#extend(kind, line);
  }

  // What a line is, where it stands.
  #kind(line) {
    const { tail } = this;
    if (tail?.kind === "list" && (tail.inCode || /^\s{2,}\S/.test(line))) return "list";
    if (!line.trim()) return "blank";
    if (FENCE.test(line)) return "fence";
    if (HEADING.test(line)) return "heading";
    if (RULE.test(line)) return "rule";
    if (QUOTE.test(line)) return "quote";
    const item = ITEM.exec(line);
    if (item && (tail?.kind !== "paragraph" || !/^\d/.test(item[2]) || parseInt(item[2], 10) === 1)) return "list";
    if (tail?.kind === "paragraph" && isTable(tail.lines.at(-1), line)) return "table";
    if (tail?.kind === "quote" || (tail?.kind === "list" && tail.lines.at(-1).trim())) return tail.kind; // goes on without its mark
    return "paragraph";
  }

  #extend(kind, line) {
    if (kind === "list" && !ITEM.test(line) && this.tail?.kind !== "list") kind = "paragraph"; // its list was cut
    const isOther = this.tail && (this.tail.kind !== kind || (kind === "list" && this.#beginsList(line)));
    if (isOther || (this.tail && this.tail.size + line.length > MAX_BLOCK)) {
      this.#close();
      return line.trim() ? this.#extend(kind, line) : undefined;
    }
    this.tail ??= { kind, lines: [], size: 0, nodes: [], inCode: false };
    this.tail.lines.push(line);
    this.tail.size += line.length + 1;
    this.tail.isNew = true;
    if (kind === "list" && FENCE.test(line.trim().replace(ITEM, ""))) this.tail.inCode = !this.tail.inCode;
  }

  // Whether an item belongs to a new list: another kind of mark, or enough of the old one is there.
  #beginsList(line) {
    const item = ITEM.exec(line);
    if (!item || item[1].length > 1 || this.tail.inCode) return false;
    return this.tail.size > MAX_BLOCK / 2 || /\d/.test(item[2]) !== /\d/.test(ITEM.exec(this.tail.lines[0])[2]);
  }

  // Renders the last block again, with the line that is being written.
  #show() {
    if (this.code) return this.code.block.unfinished(this.rest);
    if (this.table) return;
    const { tail, rest } = this;
    if (!tail && !rest) return;
    if (tail && !tail.isNew && tail.shown === rest) return;
    const kind = rest.trim() ? this.#kind(rest) : tail?.kind;
    const goesOn = tail && (kind === tail.kind || kind === "table");
    this.#remove();
    const holder = document.createDocumentFragment();
    if (tail) render(tail.kind, goesOn && rest ? [...tail.lines, rest] : tail.lines, holder, this.depth);
    if (rest && !goesOn) {
      if (kind === "heading") holder.append(heading(rest));
      else if (kind !== "rule" && kind !== "fence") render(kind, [rest], holder, this.depth);
    }
    const shown = tail ?? (this.preview = { nodes: [] });
    shown.nodes = [...holder.childNodes];
    shown.shown = rest;
    shown.isNew = false;
    this.element.append(holder);
  }

  // Takes away what #show put there.
  #remove() {
    for (const node of [...(this.preview?.nodes ?? []), ...(this.tail?.nodes ?? [])]) node.remove();
    this.preview = null;
    if (this.tail) this.tail.nodes = [];
  }

  #close() {
    this.#remove();
    if (this.tail) {
      const holder = h("div");
      render(this.tail.kind, this.tail.lines, holder, this.depth);
      this.numNodes += holder.querySelectorAll("*").length;
      this.element.append(...holder.childNodes);
    }
    this.tail = null;
    this.table = null;
  }

  #put(node) {
    this.#remove();
    this.numNodes += 1;
    this.element.append(node);
  }

  #open(line) {
    this.#close();
    const [, indent, mark, language] = FENCE.exec(line);
    this.code = { block: new CodeBlock(language.trim().split(/\s/)[0]), mark, indent: indent.length };
    this.#put(this.code.block.node);
  }

  #codeLine(line) {
    const { block, mark, indent } = this.code;
    const trimmed = line.trim();
    const isEnd = mark && trimmed.length >= mark.length && trimmed === mark[0].repeat(trimmed.length);
    if (isEnd || (!mark && !trimmed)) {
      block.unfinished("");
      this.code = null;
      return;
    }
    const before = block.numPieces;
    block.line(indent ? line.replace(new RegExp(`^ {0,${indent}}`), "") : line);
    this.numNodes += block.numPieces - before || 1;
  }

  #openTable(delimiters) {
    const head = this.tail.lines.pop();
    if (!this.tail.lines.length) {
      this.#remove();
      this.tail = null;
    }
    this.#close();
    const sides = cells(delimiters).map((cell) => ({ "11": "center", "01": "right" })[`${+cell.startsWith(":")}${+cell.endsWith(":")}`] ?? "");
    const body = h("tbody");
    this.table = { body, sides, numRows: 0 };
    const table = h("table", {}, h("thead", {}, tableRow("th", head, sides)), body);
    this.#put(h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table));
  }

  // Whether the line was taken as a row.
  #row(line) {
    const { table } = this;
    if (!line.includes("|") || QUOTE.test(line)) {
      this.table = null;
      return false;
    }
    if (table.numRows >= MAX_ROWS) { // more than a page should draw: the rest as text
      this.table = null;
      this.code = { block: new CodeBlock("rows that follow"), mark: "", indent: 0 };
      this.#put(this.code.block.node);
      this.#codeLine(line);
      return true;
    }
    table.numRows += 1;
    table.body.append(tableRow("td", line, table.sides));
    this.numNodes += table.sides.length + 1;
    return true;
  }
}

function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  const node = h(`h${Math.min(6, marks.length + 2)}`, { dir: "auto", class: `h${marks.length}` }); // the page has its own h1 and h2
  inline(text.trimEnd().replace(/(?<=\s)#+$/, ""), node);
  return node;
}

function isTable(head, delimiters) {
  if (!delimiters.includes("|") || !head.includes("|")) return false;
  const marks = cells(delimiters);
  return marks.length === cells(head).length && marks.every((mark) => DELIMITER_CELL.test(mark));
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).slice(0, MAX_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function tableRow(tag, line, sides) {
  const row = h("tr");
  const texts = cells(line);
  sides.forEach((side, idx) => {
    const cell = h(tag, { dir: "auto", ...(side && { class: side }), ...(tag === "th" && { scope: "col" }) });
    inline(texts[idx] ?? "", cell);
    row.append(cell);
  });
  return row;
}

function render(kind, lines, parent, depth) {
  if (depth > MAX_DEPTH) parent.append(h("p", { dir: "auto" }, clean(lines.join("\n"))));
  else if (kind === "list") renderList(lines, parent, depth);
  else if (kind === "quote") {
    const quote = h("blockquote", { dir: "auto" });
    nested(quote, lines.map((line) => line.replace(QUOTE, "")), depth);
    parent.append(quote);
  } else {
    const paragraph = h("p", { dir: "auto" });
    inline(lines.map((line) => line.trim()).join("\n"), paragraph);
    parent.append(paragraph);
  }
}

function nested(element, lines, depth) {
  const view = new Markdown(element, depth + 1);
  view.push(lines.join("\n"));
  view.end();
}

function renderList(lines, parent, depth) {
  const first = ITEM.exec(lines[0]);
  const number = parseInt(first[2], 10);
  const list = h(Number.isNaN(number) ? "ul" : "ol", { dir: "auto" });
  if (number !== 1 && !Number.isNaN(number)) list.start = number;
  for (const item of items(lines, first[1].length)) {
    const node = h("li", { dir: "auto" });
    item[0] = item[0].replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
    nested(node, item, depth);
    list.append(node);
  }
  parent.append(list);
}

// The lines of each item, without its mark and indent.
function items(lines, base) {
  const found = [];
  let indent = 0;
  let inCode = false;
  for (const line of lines) {
    const item = inCode ? null : ITEM.exec(line);
    if (item && item[1].length <= base + 1) {
      indent = item[0].length;
      found.push([line.slice(item[0].length)]);
    } else {
      const blanks = /^\s*/.exec(line)[0].length;
      found.at(-1).push(line.slice(Math.min(blanks, indent)));
    }
    if (FENCE.test(found.at(-1).at(-1).trimStart())) inCode = !inCode;
  }
  return found;
}

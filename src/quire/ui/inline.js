// Markdown inside a line: emphasis, code, links. inline(text, parent) appends nodes, and never markup of the text's own.
// Images are not loaded, and only http(s) links can be followed. Time is linear in the text, but for a small factor.

import { h } from "./dom.js";

const MAX_DEPTH = 6;
const MAX_LINK = 2000; // characters of a label or an address
const DELIMITERS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const SPECIAL = /[\\`*_~[!<&\nh]/g;
const URL_TEXT = /https?:\/\/[^\s<>"'`\]]+/y;

// Characters that terminals obey as pictures (ESC is ␛), and those that write text backwards by their number. Other marks
// of direction stay: every block has a direction of its own, so they reach no further than it.
export function clean(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f\u202d\u202e]/g, (ch) => {
    const code = ch.charCodeAt(0);
    return code > 0x7f ? `[U+${code.toString(16).toUpperCase()}]` : String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
  });
}

export function safeUrl(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

export function inline(source, parent, depth = 0) {
  const missing = new Set(); // closings that were looked for and are not there: not looked for again
  let text = "";
  let at = 0;
  const flush = () => {
    if (text) parent.append(clean(text));
    text = "";
  };
  while (at < source.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(source)?.index ?? source.length;
    text += source.slice(at, next);
    at = next;
    if (at >= source.length) break;
    const found = special(source, at, depth, missing);
    if (found) {
      flush();
      if (found.node) parent.append(found.node);
      at = found.end;
    } else {
      const plain = plainAt(source, at);
      text += plain.text;
      at = plain.end;
    }
  }
  flush();
}

// A special character that stands for itself, an escape or an entity.
function plainAt(source, at) {
  if (source[at] === "\\" && /[!-/:-@[-`{-~]/.test(source[at + 1] ?? "")) return { text: source[at + 1], end: at + 2 };
  if (source[at] === "&") {
    const entity = Object.keys(ENTITIES).find((name) => source.startsWith(name, at));
    if (entity) return { text: ENTITIES[entity], end: at + entity.length };
  }
  let end = at + 1; // a run of delimiters that open nothing is skipped as one
  if ("*_~`".includes(source[at])) while (source[end] === source[at]) end += 1;
  return { text: source.slice(at, end), end };
}

function special(source, at, depth, missing) {
  const ch = source[at];
  if (ch === "\n") return { node: h("br"), end: at + 1 };
  if (ch === "\\" && source[at + 1] === "\n") return { node: h("br"), end: at + 2 };
  if (ch === "`") return codeSpan(source, at, missing);
  if (ch === "<") {
    const br = /^<br\s{0,8}\/?>/i.exec(source.slice(at, at + 16));
    return br ? { node: h("br"), end: at + br[0].length } : null;
  }
  if (ch === "h") return bareUrl(source, at);
  if (depth >= MAX_DEPTH) return null;
  if (ch === "!" && source[at + 1] === "[") return link(source, at + 1, depth, missing, true);
  if (ch === "[") return link(source, at, depth, missing, false);
  if ("*_~".includes(ch)) return emphasis(source, at, depth, missing);
  return null;
}

function codeSpan(source, at, missing) {
  let open = at;
  while (source[open] === "`") open += 1;
  const ticks = source.slice(at, open);
  if (missing.has(ticks)) return null;
  let end = open;
  while ((end = source.indexOf(ticks, end)) >= 0) {
    let after = end + ticks.length;
    if (source[after] !== "`") {
      let code = source.slice(open, end).replaceAll("\n", " ");
      if (code.length > 2 && code.startsWith(" ") && code.endsWith(" ")) code = code.slice(1, -1);
      return { node: h("code", { dir: "auto" }, clean(code)), end: after };
    }
    while (source[after] === "`") after += 1;
    end = after;
  }
  missing.add(ticks);
  return null;
}

function emphasis(source, at, depth, missing) {
  const before = source[at - 1] ?? " ";
  for (const [mark, tag] of DELIMITERS) {
    if (!source.startsWith(mark, at) || missing.has(mark)) continue;
    const from = at + mark.length;
    if (/\s/.test(source[from] ?? " ") || source[from] === mark[0] || (mark[0] === "_" && /\w/.test(before))) continue;
    const end = closing(source, from, mark);
    if (end < 0) {
      missing.add(mark);
      continue;
    }
    const node = h(tag);
    inline(source.slice(from, end), node, depth + 1);
    return { node, end: end + mark.length };
  }
  return null;
}

function closing(source, from, mark) {
  let end = from;
  while ((end = source.indexOf(mark, end + 1)) >= 0) {
    const after = source[end + mark.length] ?? " ";
    const isSingle = mark.length === 1;
    if (isSingle && (after === mark || source[end - 1] === mark)) { // part of a longer run
      while (source[end] === mark) end += 1;
      continue;
    }
    if (/\s/.test(source[end - 1]) || (mark[0] === "_" && /\w/.test(after))) continue;
    if (!isSingle && after === mark[0]) end += 1; // ***: the inner one closes first
    return end;
  }
  return -1;
}

function link(source, at, depth, missing, isImage) {
  if (missing.has("](")) return null;
  const middle = source.indexOf("](", at);
  if (middle < 0) {
    missing.add("](");
    return null;
  }
  const inner = source.lastIndexOf("[", middle);
  if (middle - at > MAX_LINK || (inner !== at && !source.slice(at + 1, middle).includes("]"))) return null;
  const end = source.slice(middle, middle + MAX_LINK).indexOf(")");
  if (end < 0) return null;
  const label = source.slice(at + 1, middle);
  const address = source.slice(middle + 2, middle + end).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  return { node: linkNode(label, address, depth, isImage), end: middle + end + 1 };
}

function linkNode(label, address, depth, isImage) {
  if (isImage) return h("span", { class: "inert", title: "Images are not loaded" }, `image: ${clean(label)} (${clean(address)})`);
  const url = safeUrl(address);
  if (!url) return h("span", { class: "inert", title: "Only http and https links can be followed" }, h("bdi", {}, clean(label)), ` (${clean(address)})`);
  const node = anchor(url);
  inline(label, node, depth + 1);
  return node;
}

function anchor(url) {
  return h("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow", dir: "auto" });
}

function bareUrl(source, at) {
  if (/\w/.test(source[at - 1] ?? " ")) return null;
  URL_TEXT.lastIndex = at;
  let text = URL_TEXT.exec(source)?.[0].slice(0, MAX_LINK);
  if (!text) return null;
  text = text.replace(/[.,;:!?*_~]+$/, "");
  if (text.endsWith(")") && !text.includes("(")) text = text.slice(0, -1);
  const url = safeUrl(text);
  if (!url) return null;
  const node = anchor(url);
  node.append(clean(text));
  return { node, end: at + text.length };
}

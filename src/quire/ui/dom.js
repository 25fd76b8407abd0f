// Makes DOM nodes. The only way nodes are made on this page: text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

// h("button", {class: "quiet", onclick: f, disabled: true}, "Save"): strings become attributes, other values properties.
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (typeof value === "string") node.setAttribute(name, value);
    else node[name] = value;
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick, extra = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

export function button(text, onclick, extra = {}) {
  return h("button", { type: "button", class: "button", onclick, ...extra }, text);
}

export const byId = (id) => document.getElementById(id);

// Says something to screen readers only.
export function announce(text) {
  byId("announce").textContent = text;
}

// A modal dialog. `build(close)` gives its content; resolves with what close was given, null when dismissed.
export function dialog(label, build, extra = {}) {
  return new Promise((resolve) => {
    const box = h("dialog", { "aria-label": label, ...extra });
    const close = (value = null) => {
      box.returned = value;
      box.close();
    };
    box.addEventListener("close", () => {
      box.remove();
      refocus();
      resolve(box.returned ?? null);
    });
    box.addEventListener("click", (event) => {
      if (event.target === box) close();
    });
    add(box, [build(close)].flat());
    document.body.append(box);
    box.showModal();
  });
}

// Chromium gives the focus back when a dialog closes, but no text is taken in until it is given again.
function refocus() {
  const active = document.activeElement;
  if (!active || active === document.body) return;
  active.blur();
  active.focus({ preventScroll: true });
}

export function ask(question, yes) {
  return dialog(question, (close) => [
    h("p", {}, question),
    h("div", { class: "row end" },
      button("Cancel", () => close(false)),
      button(yes, () => close(true), { class: "button danger" })),
  ]);
}

// A line at the top of the page. Gives a function that takes it away; the same id replaces what was there.
export function notice(id, text, { kind = "", action, onaction, seconds = 0 } = {}) {
  const place = byId("notices");
  place.querySelector(`[data-id="${id}"]`)?.remove();
  const line = h("div", { class: `notice ${kind}`, "data-id": id }, h("span", {}, text));
  const remove = () => line.remove();
  if (action) line.append(button(action, () => { remove(); onaction(); }, { class: "button small" }));
  line.append(iconButton("close", "Dismiss", remove));
  place.append(line);
  if (seconds) setTimeout(remove, seconds * 1000);
  return remove;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Copies, and shows on the button that it did.
export async function copy(text, shownOn) {
  const before = shownOn.getAttribute("aria-label") ?? "Copy";
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = copyOldWay(text) ? "Copied" : "Could not copy";
  }
  shownOn.dataset.said = said;
  shownOn.setAttribute("aria-label", said);
  announce(said);
  setTimeout(() => {
    delete shownOn.dataset.said;
    shownOn.setAttribute("aria-label", before);
  }, 1500);
}

// Where the page is not served from localhost or over HTTPS there is no clipboard API.
function copyOldWay(text) {
  const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

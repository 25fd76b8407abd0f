// The list of conversations: search, rename, delete, export, import.

import { ask, button, dialog, download, h, icon, iconButton, notice, number } from "./dom.js";
import { MAX_BYTES, check, exported, fileName } from "./transfer.js";

const MAX_LISTED = 300;

export class Sidebar {
  // actions: {open(id), create(), current(), close(), rename(id, title), removed(id), flush(), shortcuts()}
  constructor(element, store, actions) {
    this.store = store;
    this.actions = actions;
    this.search = h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search conversations", autocomplete: "off", oninput: () => this.#searchSoon() });
    this.list = h("nav", { class: "conversations", "aria-label": "Conversations" });
    this.picker = h("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "File to import", onchange: () => this.#import(this.picker.files[0]) });
    element.append(
      h("button", { type: "button", class: "button primary wide", onclick: actions.create, id: "new" }, icon("plus"), "New conversation"),
      h("div", { class: "search" }, icon("search"), this.search),
      this.list,
      h("div", { class: "sidebar-foot" }, this.picker,
        iconButton("download", "Export all conversations", () => this.#exportAll()),
        iconButton("upload", "Import conversations", () => this.picker.click()),
        iconButton("trash", "Delete all conversations", () => this.#removeAll()),
        h("span", { class: "spring" }),
        iconButton("keys", "Keyboard shortcuts", actions.shortcuts)));
    if (!store.lasts) element.append(h("p", { class: "muted small" }, "This browser keeps no data: conversations last until the page is closed."));
    store.onOthersChange(() => this.refresh());
  }

  #searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), 150);
  }

  async refresh() {
    const text = this.search.value.trim();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const found = text ? await this.store.search(text, () => turn !== this.turn) : await this.store.list();
    if (turn !== this.turn) return;
    const days = new Map();
    for (const entry of found.slice(0, MAX_LISTED)) {
      const day = dayOf(entry.updated);
      if (!days.has(day)) days.set(day, []);
      days.get(day).push(entry);
    }
    const nothing = text ? "Nothing found." : "Conversations are kept here, in this browser only.";
    this.list.replaceChildren(...(found.length ? [...days].map(([day, entries]) => this.#day(day, entries)) : [h("p", { class: "muted small nothing" }, nothing)]));
    if (found.length > MAX_LISTED) this.list.append(h("p", { class: "muted small" }, `${number(found.length - MAX_LISTED)} more: search for them.`));
  }

  #day(day, entries) {
    return h("section", { "aria-label": day }, h("h2", {}, day), h("ul", {}, ...entries.map((entry) => this.#entry(entry))));
  }

  #entry(entry) {
    const isOpen = entry.id === this.actions.current();
    return h("li", { class: isOpen ? "entry open" : "entry" },
      h("button", { type: "button", class: "title", "aria-current": isOpen ? "true" : undefined, dir: "auto", title: entry.title, onclick: () => this.actions.open(entry.id), ondblclick: () => this.#rename(entry) }, entry.title),
      iconButton("edit", `Rename ${entry.title}`, () => this.#rename(entry)),
      iconButton("download", `Export ${entry.title}`, () => this.#export(entry)),
      iconButton("trash", `Delete ${entry.title}`, () => this.remove(entry.id)));
  }

  async #rename(entry) {
    const field = h("input", { type: "text", id: "title", maxLength: 200, dir: "auto" });
    field.value = entry.title;
    const title = await dialog("Rename", (close) => h("form", { onsubmit: (event) => { event.preventDefault(); close(field.value.trim()); } },
      h("label", { for: "title" }, "Title"), field,
      h("div", { class: "row end" }, button("Cancel", () => close()), h("button", { type: "submit", class: "button primary" }, "Rename"))));
    if (title) await this.actions.rename(entry.id, title);
  }

  async #export(entry) {
    await this.actions.flush();
    const conversation = await this.store.get(entry.id);
    if (conversation) download(fileName(entry.title), "application/json", exported([conversation]));
  }

  async #exportAll() {
    await this.actions.flush();
    const all = [];
    await this.store.each((conversation) => { all.push(conversation); });
    if (all.length) download(fileName("conversations"), "application/json", exported(all));
    else notice("transfer", "There is nothing to export yet.", { seconds: 5 });
  }

  async #import(file) {
    this.picker.value = "";
    if (!file) return;
    try {
      if (file.size > MAX_BYTES) throw new Error(`The file is larger than ${MAX_BYTES >> 20} MB: export fewer conversations at a time.`);
      const conversations = check(await file.text());
      for (const conversation of conversations) await this.store.put(conversation);
      notice("transfer", conversations.length === 1 ? "One conversation was imported." : `${conversations.length} conversations were imported.`, { kind: "info", seconds: 6 });
    } catch (error) {
      notice("transfer", error.message, { kind: "problem" });
    }
    await this.refresh();
  }

  // Deletes at once; for a while it can be undone.
  async remove(id) {
    const conversation = await this.store.get(id);
    await this.store.remove(id);
    this.actions.removed(id);
    await this.refresh();
    if (!conversation) return;
    notice("deleted", "The conversation was deleted.", {
      action: "Undo", seconds: 10,
      onaction: async () => { await this.store.put(conversation); await this.refresh(); },
    });
  }

  async #removeAll() {
    const entries = await this.store.list();
    if (!entries.length || !(await ask(`Delete all ${number(entries.length)} conversations? This cannot be undone.`, "Delete all"))) return;
    for (const { id } of entries) {
      await this.store.remove(id);
      this.actions.removed(id);
    }
    await this.refresh();
  }
}

function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - 86400000) return "Yesterday";
  return time >= midnight - 6 * 86400000 ? "This week" : "Earlier";
}

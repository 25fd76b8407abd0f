// Where messages are written: text, files of text, long pastes as files; send and stop.

import { button, dialog, h, icon, iconButton, notice, number } from "./dom.js";

const LONG_PASTE = 2000; // characters that become a file
const MAX_FILE_BYTES = 1 << 20;
const MAX_FILES_BYTES = 3 << 20; // together: a request may have 4 MB
const MAX_FILES = 20;
const MAX_ROWS = 12;

export class Composer {
  // actions: {send(text, files), stop(), compare(), editLast()}
  constructor(element, actions) {
    this.actions = actions;
    this.files = [];
    this.area = h("textarea", { id: "message", rows: 1, placeholder: "Write a message", "aria-label": "Message", dir: "auto" });
    this.chips = h("div", { class: "chips" });
    this.picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files", onchange: () => { this.addFiles(this.picker.files); this.picker.value = ""; } });
    this.sendButton = iconButton("send", "Send", () => this.#act(), { class: "icon-button send" });
    this.compareButton = iconButton("columns", "Compare two panes", () => actions.compare(), { "aria-pressed": "false" });
    this.room = h("span", { class: "room muted small" });
    element.append(h("div", { class: "composer" }, this.chips, this.area,
      h("div", { class: "row" }, iconButton("clip", "Attach text files", () => this.picker.click()), this.compareButton, this.picker, this.room, h("span", { class: "spring" }), this.sendButton)));
    this.#listen(element);
    this.refresh(false);
  }

  #listen(element) {
    this.area.addEventListener("input", () => this.refresh());
    this.area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.isBusy) this.#act();
      } else if (event.key === "ArrowUp" && !this.area.value) {
        event.preventDefault();
        this.actions.editLast();
      }
    });
    this.area.addEventListener("paste", (event) => this.#paste(event));
    const talk = element.parentElement;
    talk.addEventListener("dragover", (event) => { event.preventDefault(); talk.classList.add("dropping"); });
    talk.addEventListener("dragleave", (event) => { if (!talk.contains(event.relatedTarget)) talk.classList.remove("dropping"); });
    talk.addEventListener("drop", (event) => {
      event.preventDefault();
      talk.classList.remove("dropping");
      this.addFiles(event.dataTransfer.files);
    });
  }

  #paste(event) {
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    if (files.length && !text) {
      event.preventDefault();
      this.addFiles(files);
    } else if (text.length > LONG_PASTE) {
      event.preventDefault();
      const count = this.files.filter(({ name }) => name.startsWith("Pasted text")).length + 1;
      this.#keep({ name: `Pasted text ${count}.txt`, text });
    }
  }

  async addFiles(list) {
    for (const file of list) {
      if (file.size > MAX_FILE_BYTES) {
        notice("file", `${file.name} is larger than 1 MB: attach a smaller part of it.`, { kind: "problem", seconds: 8 });
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("binary");
        this.#keep({ name: file.name.slice(0, 200), text });
      } catch {
        notice("file", `${file.name} is not a text file: only text can be attached.`, { kind: "problem", seconds: 8 });
      }
    }
  }

  #keep(file) {
    const total = [...this.files, file].reduce((sum, { text }) => sum + text.length, 0);
    if (this.files.length >= MAX_FILES || total > MAX_FILES_BYTES) {
      notice("file", `A message takes ${MAX_FILES} files of 3 MB together: send some of them first.`, { kind: "problem", seconds: 8 });
      return;
    }
    this.files.push(file);
    this.refresh();
    this.area.focus();
  }

  #chip(file) {
    return h("span", { class: "chip" }, icon("file"),
      h("button", { type: "button", class: "link", onclick: () => this.#preview(file), title: "Show" }, h("bdi", {}, file.name)),
      h("span", { class: "muted" }, ` ${number(file.text.length)} characters`),
      iconButton("close", `Remove ${file.name}`, () => { this.files = this.files.filter((one) => one !== file); this.refresh(); }));
  }

  async #preview(file) {
    const toText = await dialog(file.name, (close) => [
      h("h2", {}, file.name), h("pre", { class: "preview", tabIndex: 0, dir: "auto" }, file.text.slice(0, 20000)),
      h("div", { class: "row end" }, button("Put into the message", () => close(true)), button("Close", () => close(), { class: "button primary" })),
    ]);
    if (!toText) return;
    this.files = this.files.filter((one) => one !== file);
    this.area.value += file.text;
    this.refresh();
  }

  #act() {
    if (this.isBusy) return this.actions.stop();
    const text = this.area.value;
    if (!text.trim() && !this.files.length) return;
    if (this.actions.send(text, this.files) === false) return; // something is wrong: what was written stays
    this.area.value = "";
    this.files = [];
    this.refresh();
  }

  refresh(isBusy = this.isBusy) {
    this.isBusy = isBusy;
    this.chips.replaceChildren(...this.files.map((file) => this.#chip(file)));
    this.area.rows = Math.min(MAX_ROWS, this.area.value.split("\n").length);
    const label = isBusy ? "Stop" : "Send";
    if (this.sendButton.getAttribute("aria-label") !== label) {
      this.sendButton.setAttribute("aria-label", label);
      this.sendButton.title = label;
      this.sendButton.replaceChildren(icon(isBusy ? "stop" : "send"));
    }
    this.sendButton.disabled = !isBusy && !this.area.value.trim() && !this.files.length;
  }

  // How much of the context the conversation takes.
  showRoom(used, all) {
    this.room.replaceChildren(...(used && all ? [
      h("meter", { min: 0, max: all, value: Math.min(used, all), high: all * 0.85, "aria-label": "Context used" }), ` ${number(used)} of ${number(all)} tokens`] : []));
  }

  fill(text) {
    this.area.value = text;
    this.refresh();
    this.area.focus();
  }
}

// How one message of a conversation looks: a question, an answer (thinking, text, calls, figures), a tool's result.
// Each view has `node` (the element), `refresh()` after its message changed, and calls `actions` for what is clicked.

import { button, copy, h, icon, iconButton, number } from "./dom.js";
import { CodeBlock } from "./code.js";
import { clean } from "./inline.js";
import { tokenView } from "./logprobs.js";
import { problemCard } from "./problems.js";
import { Growing } from "./run.js";
import { Shown, ask } from "./shown.js";

const seconds = (ms) => (ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000, 1)} s`);
const MAX_CARD_CHARS = 100_000; // of a call's arguments that are drawn
const MAX_QUESTION_CHARS = 20_000; // of a question

export function viewOf(message, actions) {
  const Kind = { user: UserView, assistant: AnswerView, tool: ToolView }[message.role];
  return new Kind(message, actions);
}

function branches(message, actions) {
  const all = actions.siblings(message);
  if (all.length < 2) return null;
  const idx = all.indexOf(message);
  const go = (step) => actions.show(all[idx + step]);
  return h("span", { class: "branches", role: "group", "aria-label": "Versions" },
    iconButton("left", "Earlier version", () => go(-1), { disabled: idx === 0 }),
    h("span", { class: "muted" }, `${idx + 1}/${all.length}`),
    iconButton("right", "Later version", () => go(1), { disabled: idx === all.length - 1 }));
}

class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = h("article", { class: "message user", "data-id": message.id, "aria-label": "You" });
    this.refresh();
  }

  refresh() {
    const { message, actions } = this;
    const key = actions.siblings(message).length;
    if (this.isEditing || key === this.key) return; // what has the focus stays
    this.key = key;
    const copyButton = iconButton("copy", "Copy", () => copy(message.content, copyButton));
    this.node.replaceChildren(
      h("div", { class: "bubble" },
        ...(message.files ?? []).map((file) => h("span", { class: "chip" }, icon("file"), h("bdi", {}, file.name), h("span", { class: "muted" }, ` ${number(file.text.length)} characters`))),
        message.content ? h("div", { class: "text", dir: "auto" }, clean(message.content.slice(0, MAX_QUESTION_CHARS))) : null,
        message.content.length > MAX_QUESTION_CHARS ? h("p", { class: "muted small" }, `… and so on: all ${number(message.content.length)} characters are sent.`) : null),
      h("div", { class: "tools" }, branches(message, actions), copyButton, iconButton("edit", "Edit", () => this.edit())));
  }

  edit() {
    this.isEditing = true;
    const area = h("textarea", { rows: Math.min(12, this.message.content.split("\n").length + 1), "aria-label": "Edit the message", dir: "auto" });
    area.value = this.message.content;
    const end = () => {
      this.isEditing = false;
      this.key = null;
      this.refresh();
    };
    const send = () => {
      end();
      this.actions.edit(this.message, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.node.replaceChildren(h("div", { class: "editing" }, area, h("div", { class: "row end" },
      h("span", { class: "muted small" }, "The old version is kept as a branch."), button("Cancel", end), button("Send", send, { class: "button primary" }))));
    area.focus();
  }
}

class ToolView {
  constructor(message) {
    this.message = message;
    const block = new CodeBlock("");
    for (const line of message.content.slice(0, MAX_CARD_CHARS).split("\n")) block.line(line);
    this.node = h("article", { class: "message tool", "data-id": message.id, "aria-label": "Result of a tool" },
      h("details", { class: "call" }, h("summary", {}, icon("tool"), "Result given to the model"), block.node));
  }

  refresh() {}
}

class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = h("div", { class: "text" });
    this.status = h("p", { class: "status" });
    this.calls = h("div", { class: "calls" });
    this.end = h("div", { class: "end" });
    this.node = h("article", { class: "message assistant", "data-id": message.id, "aria-label": "Answer" }, this.text, this.status, this.calls, this.end);
    this.#attach();
    this.refresh();
  }

  // Reads from the run while there is one, else from the message.
  #attach() {
    this.run = this.actions.runOf(this.message);
    this.content = new Shown(this.text, this.run?.content ?? new Growing(this.message.content));
    this.content.isOver = !this.run;
    this.reasoning = this.run?.reasoning ?? new Growing(this.message.reasoning ?? "");
    if (!this.content.draw(performance.now() + 20)) ask(this.content);
  }

  // What is new while the answer is written: called at each frame.
  grow() {
    ask(this.content);
    this.#thinking();
    this.#showCalls(this.run.calls.filter(Boolean));
    this.#showStatus();
  }

  refresh() {
    const run = this.actions.runOf(this.message);
    if (run && run !== this.run) { // the answer is being continued
      this.text.replaceChildren();
      this.#attach();
    }
    if (!run && this.run) {
      this.run = null;
      this.content.finish();
    }
    this.#thinking();
    this.#showCalls(this.run ? this.run.calls.filter(Boolean) : this.message.toolCalls ?? []);
    this.#showStatus();
    this.#showEnd();
  }

  #thinking() {
    if (!this.reasoning.length) return;
    if (!this.thoughts) {
      this.summary = h("summary");
      const body = h("div", { class: "thoughts" });
      this.thoughts = new Shown(body, this.reasoning);
      const box = h("details", { class: "thinking", ontoggle: () => { if (box.open) ask(this.thoughts); } }, this.summary, body);
      this.text.before(box);
      this.thinkingBox = box;
    }
    const isThinking = this.run && !this.run.content.length;
    const ms = this.message.stats?.thoughtMs ?? this.run?.thoughtMs;
    this.summary.textContent = isThinking ? "Thinking …" : ms ? `Thought for ${seconds(ms)}` : "Thinking";
    if (!this.run) this.thoughts.isOver = true;
    if (this.thinkingBox.open) ask(this.thoughts);
  }

  #showCalls(calls) {
    const key = calls.map((call) => call.arguments.length).join();
    if (key === this.callsKey && !(this.wasRunning && !this.run)) return;
    this.callsKey = key;
    this.wasRunning = Boolean(this.run);
    this.calls.replaceChildren(...calls.map((call) => callCard(call)));
    if (calls.length && !this.run && this.actions.isLeaf(this.message)) this.calls.append(this.#resultForm(calls));
  }

  // Nothing here runs tools: the user says what they gave.
  #resultForm(calls) {
    const areas = calls.map((call) => h("textarea", { rows: 2, class: "mono", "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returned`, dir: "auto" }));
    return h("form", {
      class: "results",
      onsubmit: (event) => {
        event.preventDefault();
        this.actions.toolResults(this.message, calls.map((call, idx) => ({ callId: call.id, content: areas[idx].value })));
      },
    }, ...areas, h("button", { type: "submit", class: "button primary" }, calls.length > 1 ? "Send results" : "Send result"));
  }

  #showStatus() {
    const text = this.run?.status ?? "";
    if (this.status.dataset.text === text) return;
    this.status.dataset.text = text;
    this.status.replaceChildren(...(text ? [h("span", { class: "pulse", "aria-hidden": "true" }), `${text} …`] : []));
  }

  #showEnd() {
    const { message, actions } = this;
    const isLeaf = actions.isLeaf(message);
    const { error, stopped, finish, stats } = message;
    const key = JSON.stringify([Boolean(this.run), isLeaf, actions.siblings(message).length, error, stopped, finish, stats]);
    if (key === this.endKey) return; // what has the focus stays
    this.endKey = key;
    if (this.run) return this.end.replaceChildren();
    const copyButton = iconButton("copy", "Copy answer", () => copy(message.content, copyButton));
    const canContinue = isLeaf && message.content && !message.toolCalls?.length && (message.stopped || message.finish === "length" || message.error);
    this.end.replaceChildren(
      ...[problemCard(message, actions), endNote(message)].filter(Boolean),
      h("div", { class: "tools" }, branches(message, actions), copyButton,
        iconButton("redo", "Regenerate", () => actions.regenerate(message)),
        message.logprobs?.length ? iconButton("tokens", "Tokens and alternatives", (event) => this.#toggleTokens(event.currentTarget), { "aria-pressed": String(Boolean(this.tokens)) }) : null,
        canContinue ? button("Continue", () => actions.continue(message), { class: "button small" }) : null,
        figures(message)));
  }

  #toggleTokens(pressed) {
    if (this.tokens) {
      this.tokens.remove();
      this.tokens = null;
    } else {
      this.tokens = tokenView(this.message.logprobs);
      this.text.after(this.tokens);
    }
    this.text.hidden = Boolean(this.tokens);
    pressed.setAttribute("aria-pressed", String(Boolean(this.tokens)));
  }
}

function callCard(call) {
  let shown = call.arguments.slice(0, MAX_CARD_CHARS);
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // still being written, or cut off: as it is
  }
  const block = new CodeBlock("json");
  for (const line of shown.split("\n")) block.line(line);
  return h("details", { class: "call", open: true }, h("summary", {}, icon("tool"), "Calls ", h("code", {}, clean(call.name))), block.node);
}

function endNote(message) {
  let text = "";
  if (message.stopped) text = "Stopped.";
  else if (message.finish === "length") text = "The answer was cut off: its length or the context is used up.";
  else if (message.finish && !message.content && !message.toolCalls?.length) text = "The model had nothing to say.";
  return text ? h("p", { class: "muted small" }, text) : null;
}

// Speed and prefix hits, as a person reads them.
function figures(message) {
  const { stats } = message;
  if (!stats) return null;
  const parts = [`${number(stats.tokens)} tokens`];
  if (stats.rate) parts.push(`${number(stats.rate, stats.rate < 10 ? 1 : 0)} tokens/s`);
  parts.push(`first after ${seconds(stats.ttftMs)}`);
  if (stats.promptTokens !== undefined) parts.push(`${number(stats.cachedTokens)} of ${number(stats.promptTokens)} prompt tokens cached`);
  if (stats.thinkingTokens) parts.push(`${number(stats.thinkingTokens)} thinking`);
  return h("span", { class: "figures" }, parts.join(" · "));
}

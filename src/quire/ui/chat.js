// The chat: which conversation is open, what is asked, which answers are under way. Views are panes, composer, sidebar
// and panel; this is what their buttons call.

import { announce, byId, button, h, notice } from "./dom.js";
import { Composer } from "./composer.js";
import { Pane } from "./pane.js";
import { Panel } from "./panel.js";
import { BadParameter, cleanParams, requestFields, summary } from "./params.js";
import { Run } from "./run.js";
import { Sidebar } from "./sidebar.js";
import { addNode, firstSent, messagesOf, newConversation, newestLeaf, pathTo, siblings, titleOf } from "./tree.js";

const SAVE_MS = 3000; // between saves of an answer that is being written
const MAX_SAVED_LIVE = 200_000; // characters; longer answers are saved when they end
const PARAMS_KEY = "quire.params";
const EXAMPLES = ["Explain how a hash map works, with an example in Python.", "Write a short, kind reminder for an unpaid invoice.", "What should I ask before renting a flat?"];

function lastParams() {
  try {
    return cleanParams(JSON.parse(localStorage.getItem(PARAMS_KEY)));
  } catch {
    return cleanParams(null);
  }
}

function keepParams(params) {
  try {
    localStorage.setItem(PARAMS_KEY, JSON.stringify(params));
  } catch {
    // storage is switched off or full: the next conversation begins with defaults
  }
}

export class Chat {
  // shell: {model(): {name, maxLen}, closeSidebar(), togglePanel(on), shortcuts()}
  constructor(store, shell) {
    this.store = store;
    this.shell = shell;
    this.runs = new Map(); // by the id of the answer
    this.deleted = new Set(); // ids of conversations: an answer that was under way does not bring them back
    this.panes = [this.#newPane(0)];
    this.conversation = newConversation(lastParams());
    this.composer = new Composer(byId("composer"), {
      send: (text, files) => this.send(text, files), stop: () => this.stop(), compare: () => this.compare(!this.isComparing), editLast: () => this.editLast(),
    });
    this.sidebar = new Sidebar(byId("sidebar"), store, {
      open: (id) => { location.hash = `#chat/${id}`; }, create: () => this.create(), current: () => this.conversation.id, rename: (id, title) => this.rename(id, title),
      removed: (id) => this.#removed(id), flush: () => this.#saveLive(), shortcuts: shell.shortcuts,
    });
    this.panel = new Panel(byId("panel"), {
      paramsOf: (idx) => this.paramsOf(idx), changed: (idx, params) => this.#changed(idx, params), close: () => shell.togglePanel(false), compare: (on) => this.compare(on),
    });
    this.show();
    this.panel.show(1);
    this.sidebar.refresh();
    addEventListener("pagehide", () => this.#saveLive());
  }

  get isComparing() {
    return this.panes.length > 1;
  }

  paramsOf(idx) {
    return idx ? this.conversation.paramsB ?? this.conversation.params : this.conversation.params;
  }

  #leaf(idx) {
    return idx ? this.conversation.leafB : this.conversation.leaf;
  }

  #setLeaf(idx, id) {
    this.conversation[idx ? "leafB" : "leaf"] = id;
  }

  #changed(idx, params) {
    this.conversation[idx ? "paramsB" : "params"] = params;
    if (!idx) keepParams(params);
    if (this.#leaf(0)) this.#saveSoon();
    if (this.isComparing) this.show();
  }

  // -- what is shown ---------------------------------------------------------------------------------------------

  show() {
    const { conversation } = this;
    this.panes.forEach((pane, idx) => {
      const title = this.isComparing ? `${"AB"[idx]} · ${summary(this.paramsOf(idx))}` : null;
      pane.show(pathTo(conversation, this.#leaf(idx)), title);
    });
    const nodes = this.panes.map((pane) => pane.node);
    const shown = byId("panes").children;
    if (nodes.length !== shown.length || nodes.some((node, idx) => node !== shown[idx])) byId("panes").replaceChildren(...nodes); // forgets where they were scrolled to
    byId("panes").classList.toggle("two", this.isComparing);
    this.composer.compareButton.setAttribute("aria-pressed", String(this.isComparing));
    this.#showBusy();
    document.title = conversation.leaf ? `${titleOf(conversation)} · Quire` : "Quire";
  }

  #showBusy() {
    this.composer.refresh(this.#shownRuns().length > 0);
    const last = pathTo(this.conversation, this.#leaf(0)).findLast((node) => node.stats?.promptTokens !== undefined);
    this.composer.showRoom(last ? last.stats.promptTokens + last.stats.tokens : 0, this.shell.model().maxLen);
  }

  #shownRuns() {
    return [...this.runs.values()].filter((run) => run.conversation === this.conversation);
  }

  #newPane(idx) {
    const actions = {
      siblings: (node) => siblings(this.conversation, node),
      show: (node) => { this.#setLeaf(idx, newestLeaf(this.conversation, node)); this.#saveSoon(); this.show(); },
      runOf: (node) => this.runs.get(node.id),
      isLeaf: (node) => this.#leaf(idx) === node.id,
      edit: (node, text) => this.#edit(idx, node, text),
      regenerate: (node) => this.#regenerate(idx, node),
      continue: (node) => this.#continue(idx, node),
      toolResults: (node, results) => this.#toolResults(idx, node, results),
      canDrop: (node) => this.#droppable(node).length > 0,
      dropOldest: (node) => this.#dropOldest(idx, node),
      newConversation: () => this.create(),
    };
    return new Pane(actions, () => this.#empty(idx));
  }

  #empty(idx) {
    if (idx) return h("div", { class: "empty" }, h("p", { class: "muted" }, "This pane answers the same messages with its own parameters."));
    const examples = EXAMPLES.map((text) => button(text, () => this.composer.fill(text), { class: "example" }));
    return h("div", { class: "empty" },
      h("h1", {}, "What would you like to ask?"),
      h("p", { class: "muted" }, "Everything runs on this server. Conversations stay in this browser."),
      h("div", { class: "examples" }, ...examples));
  }

  compare(on) {
    if (on === this.isComparing) return;
    const { conversation } = this;
    if (on) {
      conversation.leafB ??= conversation.leaf;
      conversation.paramsB ??= structuredClone(conversation.params);
      this.panes.push(this.#newPane(1));
      this.panel.pane = 1;
      if (innerWidth > 1100) this.shell.togglePanel(true);
    } else {
      this.panes.pop();
      conversation.leafB = conversation.paramsB = null;
    }
    this.show();
    this.panel.show(this.panes.length);
    this.panes.forEach((pane) => pane.toEnd());
  }

  // -- conversations ---------------------------------------------------------------------------------------------

  create() {
    if (location.hash.startsWith("#chat/")) location.hash = "#chat"; // comes back here
    else this.#open(newConversation(lastParams()));
    this.shell.closeSidebar();
    this.composer.area.focus();
  }

  // Called when the address changes. `id`: empty for a new one.
  async open(id) {
    if (id === this.conversation.id) return;
    if (!id) return this.conversation.leaf ? this.#open(newConversation(lastParams())) : undefined;
    const live = [...this.runs.values()].find((run) => run.conversation.id === id)?.conversation;
    const found = live ?? (await this.store.get(id));
    if (!found) return this.create();
    this.deleted.delete(id); // deleting was undone
    if (!live) interrupted(found);
    this.#open(found);
    this.shell.closeSidebar();
  }

  #open(conversation) {
    this.#saveLive();
    this.conversation = conversation;
    conversation.params = cleanParams(conversation.params);
    this.panes = [this.#newPane(0)];
    if (conversation.leafB) this.panes.push(this.#newPane(1));
    this.show();
    this.panel.pane = 0;
    this.panel.show(this.panes.length);
    this.panes.forEach((pane) => pane.toEnd());
    this.sidebar.refresh();
  }

  async rename(id, title) {
    const conversation = id === this.conversation.id ? this.conversation : await this.store.get(id);
    conversation.title = title;
    await this.#save(conversation);
    this.show();
  }

  removeOpen() {
    if (this.conversation.leaf) this.sidebar.remove(this.conversation.id);
  }

  #removed(id) {
    this.deleted.add(id);
    for (const run of this.runs.values()) if (run.conversation.id === id) run.stop();
    if (id === this.conversation.id) this.create();
  }

  async #save(conversation) {
    if (this.deleted.has(conversation.id)) return;
    try {
      await this.store.put(conversation);
    } catch {
      notice("save", "The browser has no room for this conversation: export and delete some.", { kind: "problem" });
    }
    this.sidebar.refresh();
  }

  #saveSoon() {
    const { conversation } = this;
    clearTimeout(this.saveTimer);
    this.saveTimer = setTimeout(() => this.#save(conversation), 400);
  }

  async #saveLive() {
    for (const run of this.runs.values()) {
      run.store();
      await this.#save(run.conversation);
    }
  }

  // -- asking ----------------------------------------------------------------------------------------------------

  // False: it was not sent.
  send(text, files) {
    if (!this.#paramsAreGood()) return false;
    const { conversation } = this;
    const fields = { role: "user", content: text, ...(files.length && { files }) };
    const isShared = this.isComparing && this.#leaf(0) === this.#leaf(1);
    const first = addNode(conversation, this.#leaf(0), fields);
    const asked = this.panes.map((_, idx) => (idx && !isShared ? addNode(conversation, this.#leaf(1), fields) : first));
    asked.forEach((node, idx) => this.#answer(idx, node.id));
    if (location.hash !== `#chat/${conversation.id}`) history.pushState(null, "", `#chat/${conversation.id}`);
    return true;
  }

  #paramsAreGood() {
    try {
      this.panes.forEach((_, idx) => requestFields(this.paramsOf(idx)));
      return true;
    } catch (error) {
      if (!(error instanceof BadParameter)) throw error;
      notice("params", error.message, { kind: "problem", action: "Show parameters", onaction: () => this.shell.togglePanel(true) });
      return false;
    }
  }

  // Has the model answer the path to `parent`. `node`: an answer to be written anew or further.
  async #answer(idx, parent, node = null, extra = {}) {
    if (!this.#paramsAreGood()) return;
    const { conversation } = this;
    const params = this.paramsOf(idx);
    node ??= addNode(conversation, parent, { role: "assistant" });
    const path = pathTo(conversation, node.id);
    const sent = extra.continue_final_message ? path : path.slice(0, -1);
    const body = { model: this.shell.model().name, messages: messagesOf(sent, params.system, firstSent(path)), ...requestFields(params), ...extra };
    const run = new Run(conversation, node, body);
    this.runs.set(node.id, run);
    this.#setLeaf(idx, node.id);
    conversation.updated = Date.now();
    this.show();
    this.panes[idx].toEnd();
    this.#save(conversation);
    announce("Answering");
    this.#drawFrames();
    await run.go();
    this.runs.delete(node.id);
    conversation.updated = Date.now();
    if (conversation === this.conversation) this.show();
    announce(node.error ? `No answer: ${node.error.message}` : node.stopped ? "Stopped" : "The answer is complete");
    await this.#save(conversation);
  }

  #drawFrames() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    let savedMs = performance.now();
    const frame = () => {
      for (const run of this.#shownRuns()) this.panes.forEach((pane) => pane.grow(run.node));
      if (performance.now() - savedMs > SAVE_MS) {
        savedMs = performance.now();
        if ([...this.runs.values()].every((run) => run.content.length < MAX_SAVED_LIVE)) this.#saveLive();
      }
      this.isDrawing = this.runs.size > 0;
      if (this.isDrawing) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  stop() {
    for (const run of this.#shownRuns()) run.stop();
  }

  #edit(idx, node, text) {
    const edited = addNode(this.conversation, node.parent, { role: "user", content: text, ...(node.files && { files: node.files }) });
    this.#answer(idx, edited.id);
  }

  editLast() {
    const last = pathTo(this.conversation, this.#leaf(0)).findLast((node) => node.role === "user");
    if (last) this.panes[0].views.get(last.id)?.edit();
  }

  #regenerate(idx, node) {
    const isNothing = !node.content && !node.toolCalls?.length; // nothing worth a branch
    this.#answer(idx, node.parent, isNothing ? node : null);
  }

  regenerateLast() {
    const node = this.conversation.nodes[this.#leaf(0)];
    if (node?.role === "assistant" && !this.runs.has(node.id)) this.#regenerate(0, node);
  }

  #continue(idx, node) {
    this.#answer(idx, node.parent, node, { continue_final_message: true, add_generation_prompt: false });
  }

  #toolResults(idx, node, results) {
    let parent = node.id;
    for (const result of results) parent = addNode(this.conversation, parent, { role: "tool", ...result }).id;
    this.#answer(idx, parent);
  }

  // Messages of the user before which all could be left out, the oldest first.
  #droppable(node) {
    const path = pathTo(this.conversation, node.id);
    return path.slice(firstSent(path) + 1).filter((one) => one.role === "user");
  }

  async #dropOldest(idx, node) {
    for (const first of this.#droppable(node)) {
      node.firstId = first.id;
      await this.#answer(idx, node.parent, node);
      if (node.error?.code !== "context_length_exceeded") return;
    }
  }
}

// Answers that were being written when the page was closed.
function interrupted(conversation) {
  for (const node of Object.values(conversation.nodes)) {
    if (node.role === "assistant" && !node.finish && !node.error) node.stopped = true;
  }
}

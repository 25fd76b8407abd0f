// One answer under way: asks the server, collects what comes, measures it. Views read from it (`Growing`), drawn or not;
// it goes on while another conversation is shown.

import { askForKey } from "./keys.js";
import { ServerError, Unreachable, streamChat } from "./stream.js";
import { addNode } from "./tree.js";
import { lookForRestart, lost } from "./watch.js";

const CHUNK = 16384; // characters
const MAX_KEPT_LOGPROBS = 4096; // tokens
const MAX_WAITS = 40; // times a busy server is asked again
const STALL_MS = 1200;

// Text that grows: readers take what is new to them.
export class Growing {
  constructor(text = "") {
    this.chunks = [];
    this.last = text;
    this.length = text.length;
  }

  push(text) {
    this.last += text;
    this.length += text.length;
    if (this.last.length > CHUNK) {
      this.chunks.push(this.last);
      this.last = "";
    }
  }

  text() {
    return this.chunks.join("") + this.last;
  }

  // Up to `most` characters that the reader ({chunk: 0, at: 0} at first) has not seen; "" when there are none.
  read(reader, most) {
    for (; reader.chunk < this.chunks.length; reader.chunk += 1, reader.at = 0) {
      const chunk = this.chunks[reader.chunk];
      if (reader.at < chunk.length) return this.#take(reader, chunk, most);
    }
    return reader.at < this.last.length ? this.#take(reader, this.last, most) : "";
  }

  #take(reader, chunk, most) {
    const text = chunk.slice(reader.at, reader.at + most);
    reader.at += text.length;
    return text;
  }

  tail(most) {
    const text = (this.chunks.at(-1) ?? "") + this.last;
    return text.slice(-most);
  }
}

export class Run {
  // `node`: the message that is being written; what it has already (continuing an answer) stays.
  constructor(conversation, node, body) {
    Object.assign(this, { conversation, node, body, content: new Growing(node.content), reasoning: new Growing(node.reasoning ?? "") });
    this.calls = node.toolCalls ?? [];
    this.logprobs = node.logprobs ?? [];
    this.others = new Map(); // of n answers, those after the first: by index
    this.controller = new AbortController();
    this.numTokens = 0;
    this.maxGapMs = 0;
    this.isOver = false;
    this.status = "Waiting for the first token";
    node.run = undefined; // runs are never stored
    delete node.run;
    delete node.error;
    delete node.finish;
    delete node.stopped;
  }

  stop() {
    this.controller.abort();
  }

  // Resolves when the answer has ended, however it did.
  async go() {
    this.startedMs = this.lastMs = performance.now();
    const stalls = setInterval(() => this.#watchStall(), 400);
    try {
      await this.#askUntilTaken();
    } catch (error) {
      this.#fail(error);
    } finally {
      clearInterval(stalls);
    }
    this.isOver = true;
    this.status = "";
    this.store();
    Object.assign(this.node, { stats: this.#stats() });
    if (this.maxGapMs > STALL_MS / 3) lookForRestart();
  }

  // A busy server is asked again, and a key is asked for where one is needed.
  async #askUntilTaken() {
    for (let attempt = 0; ; attempt += 1) {
      try {
        return await streamChat({ ...this.body, stream: true, stream_options: { include_usage: true } }, this.controller.signal, (event) => this.#event(event));
      } catch (error) {
        if (this.firstMs || !(error instanceof ServerError)) throw error;
        if (error.status === 401 && (await askForKey())) continue;
        if (error.status !== 503 || attempt >= MAX_WAITS) throw error;
        this.status = error.code === "overloaded" ? "The server is busy: waiting for a place" : "The engine is starting: the question is kept";
        await this.#pause(Math.min(5, Math.max(1, error.retryAfterS)) * 1000);
      }
    }
  }

  #pause(ms) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, ms);
      this.controller.signal.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(new DOMException("stopped", "AbortError"));
      });
    });
  }

  #event(event) {
    if (event.usage) this.usage = event.usage;
    if (event.model) this.node.model = event.model;
    for (const choice of event.choices ?? []) this.#choice(choice);
  }

  #choice(choice) {
    const { delta = {} } = choice;
    if (choice.index > 0) return this.#otherChoice(choice);
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought || delta.content || delta.tool_calls) this.#tick();
    if (thought) {
      this.reasoning.push(thought);
      this.status = "Thinking";
    }
    if (delta.content) {
      if (!this.content.length && this.reasoning.length) this.thoughtMs = performance.now() - this.firstMs;
      this.content.push(delta.content);
      this.status = "";
    }
    for (const call of delta.tool_calls ?? []) this.#call(call);
    for (const token of choice.logprobs?.content ?? []) this.#logprob(token);
    if (choice.finish_reason) this.node.finish = choice.finish_reason;
  }

  #tick() {
    const now = performance.now();
    this.firstMs ??= now;
    this.maxGapMs = Math.max(this.maxGapMs, now - this.lastMs);
    this.lastMs = now;
    this.numTokens += 1;
  }

  #call({ index = 0, id, function: called = {} }) {
    this.calls[index] ??= { id: "", name: "", arguments: "" };
    const call = this.calls[index];
    if (id) call.id = id;
    if (called.name) call.name = called.name;
    if (called.arguments) call.arguments += called.arguments;
    this.status = "";
  }

  #logprob({ token, logprob, top_logprobs: top = [] }) {
    if (this.logprobs.length >= MAX_KEPT_LOGPROBS) return;
    this.logprobs.push([token, logprob, top.slice(0, 20).map((one) => [one.token, one.logprob])]);
  }

  // Further answers of n are kept as branches beside the first.
  #otherChoice({ index, delta = {}, finish_reason: finish }) {
    if (!this.others.has(index)) {
      this.others.set(index, { node: addNode(this.conversation, this.node.parent, { role: "assistant", model: this.node.model }), text: new Growing(), thoughts: new Growing() });
    }
    const other = this.others.get(index);
    if (delta.content) other.text.push(delta.content);
    if (delta.reasoning ?? delta.reasoning_content) other.thoughts.push(delta.reasoning ?? delta.reasoning_content);
    if (finish) other.node.finish = finish;
  }

  #watchStall() {
    const isStalled = performance.now() - this.lastMs > STALL_MS;
    if (!isStalled || document.hidden) return;
    if (this.firstMs && !this.status) this.status = "Waiting for the engine";
    if (!this.looking) this.looking = lookForRestart().finally(() => { setTimeout(() => { this.looking = null; }, 1000); });
  }

  #fail(error) {
    if (this.controller.signal.aborted) {
      this.node.stopped = true;
    } else if (error instanceof ServerError) {
      this.node.error = { message: error.message, code: error.code, status: error.status };
    } else if (error instanceof Unreachable) {
      this.node.error = { message: error.message, code: "unreachable", status: 0 };
      lost();
    } else {
      throw error;
    }
  }

  // Puts what there is into the message, to be stored.
  store() {
    const { node } = this;
    node.content = this.content.text();
    if (this.reasoning.length) node.reasoning = this.reasoning.text();
    if (this.calls.length) node.toolCalls = this.calls.filter(Boolean);
    if (this.logprobs.length) node.logprobs = this.logprobs;
    for (const other of this.others.values()) {
      other.node.content = other.text.text();
      if (other.thoughts.length) other.node.reasoning = other.thoughts.text();
    }
  }

  // Tokens a second, so far; 0 when unknown.
  get rate() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const numTokens = this.usage && !this.others.size ? this.usage.completion_tokens : this.numTokens;
    return seconds > 0.05 ? (numTokens - 1) / seconds : 0;
  }

  #stats() {
    if (!this.firstMs) return undefined;
    const stats = { ttftMs: this.firstMs - this.startedMs, rate: this.rate, tokens: this.usage?.completion_tokens ?? this.numTokens };
    if (this.usage) {
      stats.promptTokens = this.usage.prompt_tokens;
      stats.cachedTokens = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      stats.thinkingTokens = this.usage.completion_tokens_details?.reasoning_tokens ?? 0;
    }
    if (this.thoughtMs) stats.thoughtMs = this.thoughtMs;
    return stats;
  }
}

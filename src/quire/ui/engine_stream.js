// Reads /v1/engine/live with fetch, so that a key goes in a header, and opens it again when it ends.
// engine.js is told of updates and of how the connection stands; what an update means is not known here.

const URL_LIVE = "v1/engine/live";
const MAX_EVENT = 1 << 20; // characters; the server promises 32 KB
const SILENCE_MS = 8000; // updates come four times a second, whatever the engine does
const HIDDEN_MS = 30000; // a page nobody looks at lets go of its place among the watchers
const FIRST_WAIT_MS = 1000;
const MAX_WAIT_MS = 15000;

// The data of each event in a stream of bytes; `onBytes` is called for anything that arrives.
async function* events(body, onBytes) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (rest.length > MAX_EVENT) throw new Error("an event is too long");
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // not an update: the next one is a quarter of a second away
  }
}

// What an answer other than 200 means for a person who wants to watch.
const KINDS = { 401: "key", 403: "forbidden", 404: "missing", 503: "full" };
const LASTING = new Set(["key", "forbidden", "missing"]); // trying again by itself would change nothing

async function refusal(response) {
  const retry = Number(response.headers.get("retry-after"));
  let message = "";
  try {
    const text = await response.text();
    message = parse(text.slice(0, 4096))?.error?.message ?? "";
  } catch {
    // the status says enough
  }
  const waitMs = Number.isFinite(retry) && retry > 0 ? Math.min(retry, 60) * 1000 : 5000;
  return { kind: KINDS[response.status] ?? "failed", status: response.status, waitMs, message: String(message).slice(0, 300) };
}

// onState({kind}): connecting, live, key, forbidden, missing, full, failed, lost (these three with waitMs).
export class Connection {
  constructor({ headers, onUpdate, onState }) {
    Object.assign(this, { headers, onUpdate, onState });
    this.engine = 0; // which of the server's
    this.abort = null;
    this.timer = 0;
    this.hiddenTimer = 0;
    this.wait = FIRST_WAIT_MS;
    this.onVisibility = () => this.#visibility();
    document.addEventListener("visibilitychange", this.onVisibility);
  }

  // Connects now, whatever was waited for.
  async open() {
    this.#close();
    const abort = new AbortController();
    this.abort = abort;
    this.onState({ kind: "connecting" });
    let end = { kind: "lost" };
    try {
      const url = this.engine ? `${URL_LIVE}?engine=${this.engine}` : URL_LIVE;
      const response = await fetch(url, { headers: { ...this.headers(), Accept: "text/event-stream" }, cache: "no-store", signal: abort.signal });
      if (response.status === 200) await this.#read(response, abort);
      else end = await refusal(response);
    } catch {
      // the server is not there, or was; `lost` says so
    }
    if (this.abort === abort) this.#ended(end);
  }

  stop() {
    this.#close();
    clearTimeout(this.hiddenTimer);
    document.removeEventListener("visibilitychange", this.onVisibility);
  }

  async #read(response, abort) {
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort("silent"), SILENCE_MS);
    };
    alive();
    let isLive = false;
    try {
      for await (const data of events(response.body, alive)) {
        if (this.abort !== abort) return;
        if (!isLive) this.onState({ kind: "live" });
        isLive = true;
        this.wait = FIRST_WAIT_MS;
        this.onUpdate(parse(data));
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  #ended(end) {
    this.abort = null;
    if (LASTING.has(end.kind)) return this.onState(end);
    const waitMs = end.waitMs ?? this.wait;
    this.wait = Math.min(MAX_WAIT_MS, this.wait * 2);
    this.timer = setTimeout(() => this.open(), waitMs);
    this.onState({ ...end, waitMs });
  }

  #close() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.abort?.abort();
    this.abort = null;
  }

  #leave() {
    this.isAway = this.abort !== null || this.timer !== 0; // else it was refused, which a person has to change
    this.#close();
  }

  #visibility() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => this.#leave(), HIDDEN_MS);
    } else if (this.isAway) {
      this.isAway = false;
      this.open();
    }
  }
}

// Talks to the server: JSON calls, and answers as streams of events, read with fetch. Paths are relative to the page,
// so a server behind a path prefix works. Knows keys only as headers; asking for one is the caller's business.

import { userHeaders } from "./keys.js";

const SLICE_MS = 12; // of reading at a time; then clicks and drawing get their turn
const MAX_EVENT = 16 << 20; // characters

export class ServerError extends Error {
  constructor(status, detail, retryAfterS = 0) {
    super(detail.message || `The server answered ${status}.`);
    this.status = status;
    this.code = detail.code ?? "";
    this.retryAfterS = retryAfterS;
  }
}

export class Unreachable extends Error {}

export const pathTo = (path) => new URL(path, document.baseURI).href;

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(pathTo(path), { ...options, headers: { ...userHeaders(), ...options.headers }, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const detail = body && typeof body.error === "object" && body.error ? body.error : {};
  throw new ServerError(response.status, detail, Number(response.headers.get("retry-after")) || 0);
}

const posted = (body, signal) => ({ method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });

export const getJson = async (path) => (await request(path)).json();
export const getText = async (path) => (await request(path)).text();
export const postJson = async (path, body) => (await request(path, posted(body))).json();

// Calls onEvent with each event of a chat completion, parsed. Returns at [DONE]; an error in the stream is thrown.
export async function streamChat(body, signal, onEvent) {
  const response = await request("v1/chat/completions", posted(body, signal));
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let sliceStart = performance.now();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += decoder.decode(value, { stream: true });
      let from = 0;
      let end;
      while ((end = rest.indexOf("\n", from)) >= 0) {
        const line = rest.slice(from, end);
        from = end + 1;
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        onEvent(parsed(data));
        if (performance.now() - sliceStart > SLICE_MS) {
          await new Promise((resolve) => { setTimeout(resolve); });
          signal.throwIfAborted();
          sliceStart = performance.now();
        }
      }
      rest = rest.slice(from);
      if (rest.length > MAX_EVENT) throw new Unreachable("The server sent an event without an end.");
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError || error instanceof Unreachable) throw error;
    throw new Unreachable("The connection broke.");
  } finally {
    reader.cancel().catch(() => {}); // frees the connection where the loop was left early
  }
  throw new Unreachable("The connection broke.");
}

function parsed(data) {
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    throw new Unreachable("The server sent something that is not JSON.");
  }
  if (event?.error) throw new ServerError(500, event.error);
  return event ?? {};
}

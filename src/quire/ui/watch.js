// Whether the server is there, and whether its engine was replaced. The page says each once: a line while the server
// cannot be reached, a line for a restart of the engine, which answers survive.

import { notice } from "./dom.js";
import { getText, pathTo } from "./stream.js";

const POLL_MS = 2000;
const RESTARTS = /^\S*engine_restarts_total(?:\{[^}\n]*\})?\s+(\S+)$/gm;

let known = null; // restarts, when last looked
let isLost = false;
const waiting = []; // called when the server is there again

async function restarts() {
  const text = await getText("metrics");
  return [...text.matchAll(RESTARTS)].reduce((sum, [, count]) => sum + Number(count), 0);
}

export async function lookForRestart() {
  let count;
  try {
    count = await restarts();
  } catch {
    return; // no key, or not reachable: others say so
  }
  if (known !== null && count > known) {
    notice("restart", "The engine was restarted. Answers under way went on where they were.", { kind: "info" });
  }
  known = count;
}

export const onReturn = (callback) => waiting.push(callback);

// The server cannot be reached: says so until it can.
export function lost() {
  if (isLost) return;
  isLost = true;
  document.documentElement.dataset.connection = "lost";
  const remove = notice("lost", "The server cannot be reached. What you wrote is kept; this page tries again.", { kind: "problem" });
  const timer = setInterval(async () => {
    const isThere = await fetch(pathTo("live"), { cache: "no-store", credentials: "omit" }).then((answer) => answer.ok, () => false);
    if (!isThere) return;
    clearInterval(timer);
    isLost = false;
    known = null; // another server process counts from zero
    delete document.documentElement.dataset.connection;
    remove();
    notice("back", "Connected again.", { kind: "info", seconds: 4 });
    for (const callback of waiting) callback();
  }, POLL_MS);
}

// Conversations as files: export, and import that believes nothing it reads. check(text) gives conversations made of
// known fields only, with new ids; or throws an Error whose message is a sentence for the user.

import { newId } from "./tree.js";
import { cleanParams } from "./params.js";

export const MAX_BYTES = 32 << 20;
const MAX_CONVERSATIONS = 2000;
const MAX_NODES = 20000; // of one conversation
const FORMAT = "quire-conversations";

export function exported(conversations) {
  const plain = conversations.map(({ leafB, paramsB, ...rest }) => rest);
  return JSON.stringify({ format: FORMAT, version: 1, conversations: plain }, null, 1);
}

export function fileName(title) {
  const words = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40);
  return `${words || "conversations"}-${new Date().toISOString().slice(0, 10)}.json`;
}

export function check(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON: choose one that was exported here.");
  }
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) {
    throw new Error("This file holds no conversations of Quire: choose one that was exported here.");
  }
  if (data.conversations.length > MAX_CONVERSATIONS) throw new Error(`The file holds more than ${MAX_CONVERSATIONS} conversations: split it.`);
  return data.conversations.map(conversationOf);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const string = (value, most = 64 << 20) => (typeof value === "string" ? value.slice(0, most) : "");
const count = (value) => (Number.isFinite(value) && value >= 0 ? value : 0);
const broken = (idx, why) => new Error(`Conversation ${idx + 1} of the file is damaged (${why}): nothing was imported.`);

function conversationOf(source, idx) {
  if (!isObject(source) || !isObject(source.nodes)) throw broken(idx, "it has no messages");
  const entries = Object.entries(source.nodes);
  if (entries.length > MAX_NODES) throw broken(idx, `more than ${MAX_NODES} messages`);
  const ids = new Map(entries.map(([id]) => [id, newId()]));
  const nodes = {};
  for (const [id, node] of entries) {
    if (!isObject(node) || !["user", "assistant", "tool"].includes(node.role)) throw broken(idx, "a message has no known role");
    if (typeof node.content !== "string") throw broken(idx, "a message has no text");
    if (node.parent !== null && !ids.has(node.parent)) throw broken(idx, "a message answers one that is not there");
    nodes[ids.get(id)] = nodeOf(node, ids, id);
  }
  checkTree(nodes, idx);
  return {
    id: newId(),
    title: string(source.title, 200),
    created: count(source.created),
    updated: Math.min(Date.now(), count(source.updated)),
    nodes,
    leaf: ids.get(source.leaf) ?? null,
    leafB: null,
    params: cleanParams(source.params),
    paramsB: null,
  };
}

// Every message must lead to a beginning: a loop would never end.
function checkTree(nodes, idx) {
  const good = new Set();
  for (const start of Object.values(nodes)) {
    const way = new Set();
    for (let node = start; node && !good.has(node.id); node = nodes[node.parent]) {
      if (way.has(node.id)) throw broken(idx, "its messages run in a circle");
      way.add(node.id);
    }
    for (const id of way) good.add(id);
  }
}

function nodeOf(node, ids, id) {
  const made = {
    id: ids.get(id),
    parent: node.parent === null ? null : ids.get(node.parent),
    role: node.role,
    content: node.content,
    created: count(node.created),
  };
  if (node.reasoning) made.reasoning = string(node.reasoning);
  if (node.callId) made.callId = string(node.callId, 200);
  if (node.model) made.model = string(node.model, 200);
  if (node.finish) made.finish = string(node.finish, 40);
  if (ids.has(node.firstId)) made.firstId = ids.get(node.firstId);
  if (Array.isArray(node.files)) made.files = node.files.slice(0, 50).filter(isObject).map((file) => ({ name: string(file.name, 200), text: string(file.text) }));
  if (Array.isArray(node.toolCalls)) made.toolCalls = node.toolCalls.slice(0, 500).filter(isObject).map(callOf);
  if (isObject(node.stats)) made.stats = Object.fromEntries(Object.entries(node.stats).filter(([, value]) => Number.isFinite(value)).slice(0, 20));
  return made;
}

const callOf = (call) => ({ id: string(call.id, 200), name: string(call.name, 200), arguments: string(call.arguments) });

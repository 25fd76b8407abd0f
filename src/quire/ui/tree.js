// A conversation is a tree of messages: editing or regenerating adds a branch. A path runs from the beginning to a leaf.
// Knows nothing of how it is shown or stored.

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).reduce((text, part) => text + part.toString(36).padStart(7, "0"), "");

export function newConversation(params) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, nodes: {}, leaf: null, leafB: null, params, paramsB: null };
}

export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, created: Date.now(), content: "", ...fields };
  conversation.nodes[node.id] = node;
  return node;
}

// The messages that lead to a leaf, the first one first.
export function pathTo(conversation, leaf) {
  const path = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) path.push(node);
  return path.reverse();
}

// Those that have the same parent, the oldest first.
export function siblings(conversation, node) {
  return childrenOf(conversation, node.parent);
}

function childrenOf(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent); // in the order they were added
}

// The newest message below a node.
export function newestLeaf(conversation, node) {
  for (let child = node; child; child = childrenOf(conversation, node.id).at(-1)) node = child;
  return node.id;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.nodes).find((node) => node.role === "user");
  const text = first ? (first.content || first.files?.[0]?.name || "").replace(/\s+/g, " ").trim() : "";
  return text.slice(0, 80) || "New conversation";
}

// Where sending begins on a path: earlier messages were dropped when the context was full.
export function firstSent(path) {
  const from = path.findLast((node) => node.firstId)?.firstId;
  return Math.max(0, path.findIndex((node) => node.id === from));
}

// A path, from a message on, as the API's messages.
export function messagesOf(path, system, from) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of path.slice(from)) {
    if (node.role === "user") messages.push({ role: "user", content: withFiles(node) });
    else if (node.role === "tool") messages.push({ role: "tool", tool_call_id: node.callId, content: node.content });
    else if (node.toolCalls?.length) messages.push(callMessage(node));
    else if (node.content || !node.error) messages.push({ role: "assistant", content: node.content });
  }
  return messages;
}

function callMessage(node) {
  const calls = node.toolCalls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given || "{}" } }));
  const thinking = node.reasoning ? { reasoning_content: node.reasoning } : {};
  return { role: "assistant", content: node.content, ...thinking, tool_calls: calls };
}

function withFiles(node) {
  const files = (node.files ?? []).map(({ name, text }) => `File ${name}:\n${fenced(text)}`);
  return [...files, node.content].filter(Boolean).join("\n\n");
}

function fenced(text) {
  let mark = "```";
  while (text.includes(mark)) mark += "`";
  return `${mark}\n${text}\n${mark}`;
}

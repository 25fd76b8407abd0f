// Conversations in the browser: IndexedDB, and where that is switched off, memory (`store.lasts` is false).
// A list entry is {id, title, updated}; conversations are whole objects of tree.js. Other tabs are told of changes.

import { titleOf } from "./tree.js";

const NAME = "quire";
const OPEN_MS = 2000; // then the page does without
const channel = "BroadcastChannel" in window ? new BroadcastChannel("quire.conversations") : null;

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("entries", { keyPath: "id" });
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close(); // a newer page, or the reader clears it
      resolve(request.result);
    };
    setTimeout(() => reject(new Error("it does not open")), OPEN_MS);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

class Store {
  constructor(db) {
    this.db = db;
    this.lasts = db !== null;
    this.memory = new Map();
  }

  #in(mode, names) {
    const transaction = this.db.transaction(names, mode);
    return names.map((name) => transaction.objectStore(name));
  }

  // What there is, the newest first.
  async list() {
    const found = this.db ? await done(this.#in("readonly", ["entries"])[0].getAll()) : [...this.memory.values()].map(entryOf);
    return found.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    if (!this.db) return this.memory.get(id) ?? null;
    return (await done(this.#in("readonly", ["conversations"])[0].get(id))) ?? null;
  }

  async put(conversation) {
    if (!this.db) {
      this.memory.set(conversation.id, conversation);
    } else {
      const [conversations, entries] = this.#in("readwrite", ["conversations", "entries"]);
      conversations.put(conversation);
      await done(entries.put(entryOf(conversation)));
    }
    channel?.postMessage("changed");
  }

  async remove(id) {
    if (!this.db) {
      this.memory.delete(id);
    } else {
      const [conversations, entries] = this.#in("readwrite", ["conversations", "entries"]);
      conversations.delete(id);
      await done(entries.delete(id));
    }
    channel?.postMessage("changed");
  }

  // Calls visit with each conversation, one in memory at a time; visit returns false to stop.
  async each(visit) {
    for (const { id } of await this.list()) {
      const conversation = await this.get(id);
      if (conversation && visit(conversation) === false) return;
    }
  }

  // Entries whose title or messages hold the words. `isStale()`: the search is no longer wanted.
  async search(text, isStale) {
    const wanted = text.toLowerCase();
    const found = [];
    await this.each((conversation) => {
      const texts = [titleOf(conversation), ...Object.values(conversation.nodes).map((node) => node.content)];
      if (texts.some((one) => one.toLowerCase().includes(wanted))) found.push(entryOf(conversation));
      return !isStale();
    });
    return found;
  }

  onOthersChange(callback) {
    if (channel) channel.onmessage = callback;
  }
}

const entryOf = (conversation) => ({ id: conversation.id, title: titleOf(conversation), updated: conversation.updated });

export async function openStore() {
  try {
    return new Store(await open());
  } catch {
    return new Store(null);
  }
}

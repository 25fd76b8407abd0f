// What an answer shows that could not be finished: one sentence, and what can be done about it.

import { button, h } from "./dom.js";

export function problemCard(message, actions) {
  const { error } = message;
  if (!error) return null;
  if (error.code === "context_length_exceeded") return contextCard(message, actions);
  const titles = {
    unreachable: message.content ? "The connection broke" : "The server cannot be reached",
    invalid_api_key: "The server needs a key",
    rate_limit_exceeded: "Too much for this minute",
    overloaded: "The server is busy",
    not_ready: "The engine is not ready",
    deadline_exceeded: "The time was up",
  };
  const hint = error.code === "unreachable" ? (message.content ? "What arrived is kept." : "Your message is kept.") : error.message;
  return card(titles[error.code] ?? "No answer", hint, button("Try again", () => actions.regenerate(message), { class: "button primary" }));
}

function contextCard(message, actions) {
  const choices = [];
  if (actions.canDrop(message)) choices.push(button("Drop the oldest turns", () => actions.dropOldest(message), { class: "button primary" }));
  choices.push(button("New conversation", actions.newConversation));
  return card("The context is full", `${message.error.message} Dropped turns stay on this page and are no longer sent.`, ...choices);
}

function card(title, text, ...choices) {
  return h("div", { class: "problem", role: "alert" }, h("strong", {}, title), h("p", { dir: "auto" }, text), h("div", { class: "row" }, ...choices));
}

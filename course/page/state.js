// State: all that the reader has chosen, and its form in the address (after the #).

"use strict";

const PROTOCOLS = {
  "question-inside": "question inside: compressed with the facts",
  "context-first": "context first: the question comes afterwards",
};

const START = {
  facts: told.first.facts, question: told.first.question, method: "full", budget: 0.2, protocol: "context-first",
  evicted: [], step: null, layer: null, head: null, // step null: the one that says the answer's word
  theme: null, // "light" or "dark"; null: as the reader's system is
  bill: {}, // of the bill's choices (see panel.js) those that are not as at the start
};

/** The state that an address's hash names; what it does not name, or names wrongly, is as at the start. */
function fromHash(hash) {
  const given = new URLSearchParams(hash.slice(1)), state = { ...START };
  if (given.has("facts")) state.facts = given.get("facts");
  if (given.has("question")) state.question = given.get("question");
  if (Object.hasOwn(told.methods, given.get("method"))) state.method = given.get("method");
  if (Object.hasOwn(PROTOCOLS, given.get("protocol"))) state.protocol = given.get("protocol");
  const percent = Math.round(Number(given.get("budget")) / 5) * 5;
  if (percent >= 5 && percent <= 100) state.budget = percent / 100;
  if (["light", "dark"].includes(given.get("theme"))) state.theme = given.get("theme");
  const whole = (text) => (/^\d+$/.test(text) ? Number(text) : null);
  const evicted = (given.get("evicted") ?? "").split(",").map(whole).filter((position) => position !== null);
  state.evicted = [...new Set(evicted)];
  for (const name of ["step", "layer", "head"]) state[name] = whole(given.get(name) ?? "");
  const charged = [...given].filter(([name]) => name.startsWith("bill-"));
  state.bill = Object.fromEntries(charged.map(([name, value]) => [name.slice("bill-".length), value]));
  return state;
}

/** The hash that names a state: what is not as at the start. */
function toHash(state) {
  const said = {};
  for (const name of ["facts", "question", "method", "budget", "protocol", "evicted", "step", "layer", "head", "theme"]) {
    if (String(state[name]) !== String(START[name])) said[name] = name === "budget" ? Math.round(100 * state.budget) : state[name];
  }
  for (const [name, value] of Object.entries(state.bill)) said[`bill-${name}`] = value;
  return `#${new URLSearchParams(said)}`;
}

/** Whether an address asks for more than how the page looks and what its bill says. */
const asksFor = (state) => toHash({ ...state, theme: START.theme, bill: {} }) !== "#";

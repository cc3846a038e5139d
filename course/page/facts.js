// Facts: texts in the words that the model learned from, and what one can ask about a text.

"use strict";

const told = JSON.parse(carried("told")); // {names, colours, animals, places, forms, leads, first, methods}
const QUESTION = "\nQuestion: ";

const pick = (list) => list[Math.floor(Math.random() * list.length)];

/** So many different ones of a list. */
function sample(list, count) {
  const left = [...list];
  return Array.from({ length: count }, () => left.splice(Math.floor(Math.random() * left.length), 1)[0]);
}

/** Fresh facts: animals with names, all different. */
function freshFacts(count) {
  const names = sample(told.names, count), keys = new Set();
  while (keys.size < count) keys.add(`${pick(told.colours)} ${pick(told.animals)}`);
  const said = (key, n) => pick(told.forms)
    .replace("{key}", key).replace("{value}", names[n]).replace("{place}", pick(told.places));
  return [...keys].map(said).join(" ");
}

/** What a run says: the tokens before its answer's word ("is called" of "is called Tessa"), the word, what follows
 * on the same line; all of it in `whole`; at: how many tokens stand before the word; ids: the word's own. */
function saidBy(run) {
  const tokens = run.words.slice(run.ids.length);
  let at = 0;
  for (const lead of told.leads) {
    const count = tokens.findIndex((_, n) => tokens.slice(0, n + 1).join("") === lead) + 1;
    if (count < tokens.length) at = Math.max(at, count);
  }
  let end = at + 1;
  while (end < tokens.length && /^[\p{L}\p{N}]/u.test(tokens[end])) end++;
  const before = tokens.slice(0, at).join(""), word = tokens.slice(at, end).join("").trim() || "⏎";
  const after = tokens.slice(end).join("").split(/\n|<\|end\|>/)[0];
  return { before: before.trim(), word, after, whole: `${before} ${word}${after}`.trim(), at, ids: run.answer.slice(at, end) };
}

/** What a text tells of: "the brown dog", in the order of the text; the old pear trees of a lease only where no animal is. */
function subjectsOf(text) {
  const all = [...text.matchAll(new RegExp(`\\bthe (${told.colours.join("|")}) (\\w+)`, "gi"))];
  const animals = all.filter(([, , noun]) => told.animals.includes(noun.toLowerCase()));
  return [...new Set(Array.from(animals.length ? animals : all, ([, colour, noun]) => `the ${colour.toLowerCase()} ${noun}`))];
}

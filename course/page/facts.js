// Facts: texts in the words that the model learned from, and what one can ask about a text.

"use strict";

const told = JSON.parse(carried("told")); // {names, colours, animals, places, forms, first}
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

/** What a text tells of: "the brown dog", in the order of the text. */
function subjectsOf(text) {
  const found = text.matchAll(new RegExp(`\\bthe (${told.colours.join("|")}) (\\w+)`, "gi"));
  return [...new Set(Array.from(found, ([, colour, noun]) => `the ${colour.toLowerCase()} ${noun}`))];
}

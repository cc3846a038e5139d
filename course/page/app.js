// The page: controls to state, state to the worker, what it found to the eye.

"use strict";

const $ = (id) => document.getElementById(id);
const LAYERS = 8, HEADS = 8, DRAWN = ["found", "tokens-section", "heads-section"];

document.documentElement.classList.toggle("embedded", window !== window.parent);
const client = new Client();
const ready = client.load(new URLSearchParams(location.hash.slice(1)).has("plain"));
let state = fromHash(location.hash);
let shown = null; // {run, full, asked, places}: the run on the screen, what the full cache says to the same prompt, the
// state that asked for it, positions of the full cache's answer in the facts; null before the first answer, and where nothing could be read

const picture = new Picture($("heads"), LAYERS, HEADS, chooseHead, pointAt);
const tokens = new Tokens($("tokens"), (position) => {
  const out = state.evicted.includes(position);
  change({ evicted: out ? state.evicted.filter((p) => p !== position) : [...state.evicted, position] });
});
const tour = new Tour(change, factsOfTour, () => shown.run);
const panel = new Panel(state.bill, (bill) => look({ bill }));

// State to worker: one request at a time, the newest state when it is done.

let busy = null, again = false;

/** The address names the state that the reader chose, not those that the tour shows by itself. */
function address() {
  if (!tour.playing) history.replaceState(null, "", toHash(state));
}

/** Change the state and answer again; resolves when the page shows it. */
function change(part) {
  state = { ...state, ...part };
  address();
  controls();
  if (busy) {
    again = true;
    return busy;
  }
  busy = (async () => {
    do {
      again = false;
      await answer();
    } while (again);
    busy = null;
  })();
  return busy;
}

/** A change of what is looked at, not of what is asked. */
function look(part) {
  state = { ...state, ...part };
  address();
  draw();
}

const asked = ({ facts, question, method, budget, protocol, evicted }) => ({
  facts, question: QUESTION + question, method, budget, protocol, evicted,
});
const fulls = new Map(); // prompt -> what the full cache says

const promptOf = ({ facts, question, protocol }) => [facts, question, protocol].join("\u0000");

async function answer() {
  const now = { ...state };
  try {
    await ready;
    if (!shown) {
      status("Reading the text …");
      tokens.read((await client.ask("words", { text: now.facts })).found);
    }
    const { found: run, ms } = await client.ask("run", asked(now));
    if (!fulls.has(promptOf(now))) {
      const plain = now.method === "full" && !now.evicted.length;
      fulls.set(promptOf(now), plain ? run : (await client.ask("run", asked({ ...now, method: "full", evicted: [] }))).found);
    }
    const there = now.evicted.filter((position) => position < run.context), beyond = now.evicted.length - there.length;
    if (beyond && now.evicted === state.evicted) {
      state = { ...state, evicted: there };
      address();
    }
    const other = !shown || promptOf(now) !== promptOf(shown.asked), full = fulls.get(promptOf(now));
    shown = { run, full, asked: { ...now, evicted: there } };
    shown.places = lookedUp(full)?.places ?? [];
    status(`Answered in ${Math.round(ms)} ms.${beyond ? ` There is no token to evict at ${beyond} of the positions given.` : ""}`);
    draw();
    if (other) tokens.show(shown.places[0]);
  } catch (error) {
    nothing(error.message);
  }
}

/** There is no answer: none is left standing from before. */
function nothing(why) {
  shown = null;
  status(`This cannot be read: ${why}`);
  $("answer").textContent = "–";
  $("verdict").textContent = $("bar").textContent = `This cannot be read: ${why}`;
  $("likely").textContent = $("pointed").textContent = "";
  for (const name of DRAWN) $(name).hidden = true;
}

function status(text) {
  $("status").textContent = text;
}

// What was found, to the eye.

/** The step that says the answer's first token, and the one that says its word. */
const firstStep = (run) => run.steps.length - run.answer.length;
const wordStep = (run) => firstStep(run) + saidBy(run).at;
const stepShown = (run) => Math.min(state.step ?? wordStep(run), run.steps.length - 1);

function draw() {
  if (!shown) return;
  for (const name of DRAWN) $(name).hidden = false;
  const { run, full, asked, places } = shown, at = stepShown(run), step = run.steps[at];
  const one = state.layer !== null && state.head !== null && state.layer < LAYERS && state.head < HEADS;
  const rows = one ? [state.layer * HEADS + state.head] : Array.from({ length: LAYERS * HEADS }, (_, row) => row);
  drawAnswer(run, full, asked);
  drawStep(run, at);
  $("tokens-about").textContent = (one ? `Shown for layer ${state.layer}, head ${state.head}. ` : "Shown for all 64 heads together. ")
    + "Strong colour: many heads read it. A bar: attention from the newest token. Press a token to evict it.";
  tokens.draw(run, step, rows, asked.evicted, places);
  $("restore").hidden = asked.evicted.length === 0;
  picture.draw(step, run.total, one ? state : null);
  $("heads").setAttribute("aria-label", described(run, step));
  $("link").href = toHash(state);
  legend(run.steps[0].moved > 0);
}

function drawAnswer(run, full, { question, method, evicted }) {
  const { before, word, after, whole } = saidBy(run), strong = document.createElement("strong");
  strong.textContent = word;
  $("answer").replaceChildren(`${question} ${before ? `${before} ` : ""}`, strong, after);
  const theirs = saidBy(full);
  $("verdict").textContent = method === "full" && !evicted.length ? "This is the full cache's answer."
    : whole === theirs.whole ? "The same as the full cache says." : `The full cache says: ${question} ${theirs.whole}`;
  $("bar").textContent = `${word}. ${$("verdict").textContent}`;
  const percent = (chance) => `${Math.round(100 * chance)} %`, { likely } = run.steps[wordStep(run)];
  $("likely").textContent = `Likeliest ${before ? `words after “${before}”` : "first words"}: `
    + `${likely.map(([text, chance]) => `${text.trim() || "⏎"} ${percent(chance)}`).join(", ")}.`;
}

function drawStep(run, at) {
  const step = run.steps[at], all = step.seen * LAYERS * HEADS * 256, after = at - firstStep(run);
  Object.assign($("step"), { max: run.steps.length - 1, value: at });
  const what = at === 0 ? `${run.context} tokens have been read` : after < 0 ? "the question has been read, except its last token"
    : `“${run.words[step.seen - 1].trim() || "⏎"}” was fed, “${run.words[step.seen]?.trim() || "⏎"}” comes next`;
  $("step-said").textContent = `${at + 1} of ${run.steps.length}: ${what}.`;
  $("step").setAttribute("aria-valuetext", what);
  $("step-back").disabled = at === 0;
  $("step-on").disabled = at === run.steps.length - 1;
  const part = (bytes) => `${Math.round((100 * bytes) / all)} %`;
  $("held").value = step.held / all;
  $("held-said").textContent = `${size(step.held)}, ${part(step.held)} of the full cache${step.moved ? ", on the host" : ""}`;
  $("moved").value = step.moved / all;
  $("moved-said").textContent = step.moved ? `${size(step.moved)} between host and device, ${part(step.moved)}` : "nothing: all of it is on the device";
}

const size = (bytes) => (bytes < 999.5e3 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(2)} MB`);

/** The picture in one sentence. */
function described(run, step) {
  let held = 0, there = 0;
  for (const kind of step.states) {
    if (kind > 0) there++;
    if (kind > 1) held++;
  }
  return `${LAYERS} layers of ${HEADS} heads: of ${step.seen} tokens they hold ${Math.round((100 * held) / there)} percent`;
}

function legend(hosted) {
  const states = hosted ? [["fetched", "fetched in this step"], ["host-pale", "on the host"]] : [["held", "held, and looked at"], ["held-pale", "held"]];
  $("legend").replaceChildren(...[...states, ["gone", "gone"]].map(([name, text]) => {
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.style.background = `var(--${name})`;
    item.append(swatch, text);
    return item;
  }));
}

// Controls.

function controls() {
  document.documentElement.style.colorScheme = state.theme ?? "";
  if ($("facts").value !== state.facts) $("facts").value = state.facts;
  if ($("question").value !== state.question) $("question").value = state.question;
  for (const input of document.querySelectorAll("fieldset input")) input.checked = input.value === state[input.name];
  $("method-about").textContent = told.methods[state.method];
  const free = ["full", "int4", "int2"].includes(state.method);
  $("budget").disabled = free;
  $("budget").value = Math.round(100 * state.budget);
  $("budget-said").textContent = free ? "this method has none" : `${Math.round(100 * state.budget)} % of the tokens`;
  $("layer").value = state.layer ?? "";
  $("head").value = state.head ?? "";
  $("subjects").replaceChildren(...subjectsOf(state.facts).map((subject) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: subject });
    button.addEventListener("click", () => change({ question: subject, evicted: [], step: null }));
    return button;
  }));
}

function radios(fieldset, name, choices) {
  for (const [value, text] of Object.entries(choices)) {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, { type: "radio", name, value });
    input.addEventListener("change", () => change({ [name]: value, evicted: name === "protocol" ? [] : state.evicted }));
    label.append(input, text);
    fieldset.append(label);
  }
}

function options(select, name) {
  select.append(new Option("all", ""), ...Array.from({ length: 8 }, (_, n) => new Option(n, n)));
  select.addEventListener("change", () => {
    const chosen = select.value === "" ? null : Number(select.value), other = name === "layer" ? "head" : "layer";
    look(chosen === null ? { layer: null, head: null } : { [name]: chosen, [other]: state[other] ?? 0 });
    controls();
  });
}

function chooseHead(layer, head) {
  const same = state.layer === layer && state.head === head;
  look(same ? { layer: null, head: null } : { layer, head });
  controls();
}

function pointAt(layer, head, token) {
  if (!shown || token < 0) return;
  const { run } = shown, step = run.steps[stepShown(run)];
  if (token >= step.seen) return;
  const at = (layer * HEADS + head) * run.total + token, percent = Math.round(100 * step.weights[at]);
  $("pointed").textContent = `Layer ${layer}, head ${head}, “${run.words[token].trim() || "⏎"}”: ${SAID[step.states[at]]}, attention ${percent} %.`;
}

let toured = {}; // {prompt, found}: the tour's facts, as long as the reader writes no others

/** For the tour, what `lookedUp` finds. Where there is nothing to look up, the page's first facts take the place of
 * the reader's: `replaced`. */
async function factsOfTour() {
  if (toured.prompt === promptOf(state)) return toured.found;
  const plain = { method: "full", evicted: [], step: null, layer: null, head: null };
  await change(plain);
  let found = lookedUp();
  if (!found) {
    const { facts, question, protocol } = START;
    await change({ ...plain, facts, question, protocol });
    found = { ...lookedUp(), replaced: true };
  }
  toured = { prompt: promptOf(state), found: { ...found, replaced: false } };
  return found;
}

/** Of a run of the facts on the screen: the word it says, the token that was fed before it, the positions of the word in
 * the facts, and the head that looks most at one of them, by how much. Null where the facts do not have the word, or
 * are few. */
function lookedUp(run = shown?.run) {
  if (!run || run.context < 20) return null;
  const { asked } = shown, { word, ids } = saidBy(run), step = run.steps[wordStep(run)], starts = [];
  for (let at = 0, length = 0; length < asked.facts.length && at < run.context; length += run.words[at++].length) {
    if (ids.every((id, n) => run.ids[at + n] === id)) starts.push(at);
  }
  if (!starts.length || !/\p{L}/u.test(word)) return null;
  const weight = (row) => Math.max(...starts.map((at) => step.weights[row * run.total + at]));
  const best = Array.from({ length: LAYERS * HEADS }, (_, row) => row).reduce((a, b) => (weight(b) > weight(a) ? b : a));
  return {
    word, question: asked.question, fed: run.words[step.seen - 1].trim(), places: starts.flatMap((at) => ids.map((_, n) => at + n)),
    reader: { layer: Math.floor(best / HEADS), head: best % HEADS }, weight: weight(best),
  };
}

radios($("methods"), "method", Object.fromEntries(Object.keys(told.methods).map((name) => [name, name])));
radios($("protocols"), "protocol", PROTOCOLS);
options($("layer"), "layer");
options($("head"), "head");
let typing = 0;
for (const name of ["facts", "question"]) {
  $(name).addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => change({ [name]: $(name).value, evicted: [], step: null }), 400);
  });
}
$("new-facts").addEventListener("click", () => {
  const facts = freshFacts(Number($("how-many").value));
  change({ facts, question: pick(subjectsOf(facts)), evicted: [], step: null });
});
$("how-many").addEventListener("change", () => $("new-facts").click());
$("budget").addEventListener("input", () => change({ budget: Number($("budget").value) / 100 }));
$("step").addEventListener("input", () => look({ step: Number($("step").value) }));
$("step-back").addEventListener("click", () => look({ step: Number($("step").value) - 1 }));
$("step-on").addEventListener("click", () => look({ step: Number($("step").value) + 1 }));
$("restore").addEventListener("click", () => change({ evicted: [] }));
addEventListener("hashchange", () => {
  tour.play(false);
  change(fromHash(location.hash));
  panel.show(state.bill);
});
addEventListener("message", ({ source, data }) => { // the page around this one is light or dark
  if (source !== window.parent || !["light", "dark"].includes(data?.theme)) return;
  look({ theme: data.theme });
  controls();
  draw();
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
ready.then(({ found, ms }) => {
  document.documentElement.dataset.simd = found.simd;
  status(`The model is ready (${(ms / 1000).toFixed(1)} s).`);
}, () => {});
const preset = asksFor(state);
document.documentElement.classList.toggle("preset", preset);
change({}).then(() => { // it plays once it is in sight, where no other state was asked for and motion is welcome
  if (preset || !shown || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const seen = new IntersectionObserver(([{ isIntersecting }]) => {
    if (isIntersecting) seen.disconnect();
    if (isIntersecting && !tour.touched) tour.play(true);
  }, { rootMargin: "0px 0px -40% 0px" }); // in the upper part of the window: the story has been left
  seen.observe($("tokens-section"));
});

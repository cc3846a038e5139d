// The tour: six steps, each a state of the page and what to look at. What it says of the answer is looked up.

"use strict";

const quoted = (word) => `“${word}”`;

/** A step's `state` and `text` get what factsOfTour found; `text` also the run that the page then shows. */
const TOUR = [
  {
    title: "1 of 6: what a cache is",
    text: ({ replaced }) => (replaced ? "Your text leaves nothing to look up, so here are the first facts again. " : "")
      + "The model has read these tokens. For each of them every head of every layer holds a key and a value: 64 lines, one for each head. This is the KV cache. Nothing else of the text is left.",
    state: () => ({ method: "full", evicted: [], step: 0, layer: null, head: null }), at: "heads",
  },
  {
    title: "2 of 6: how it answers",
    text: ({ word, fed, reader, weight }) => `Now ${quoted(fed)} is fed, and every head looks back. Here are the tokens as layer ${reader.layer}, head ${reader.head} has them: ${quoted(word)} gets ${Math.round(100 * weight)} % of its attention, and no head gives it more. The model says: ${word}.`,
    state: ({ reader }) => ({ method: "full", evicted: [], step: null, ...reader }), at: "tokens",
  },
  {
    title: "3 of 6: take the answer away",
    text: ({ word }, run) => `${quoted(word)} has been evicted: its key and value left all 64 heads. `
      + (saidBy(run).word === word ? "The model says it all the same: tokens that were read later keep what they took from it. " : `The model does not say it any more, but ${quoted(saidBy(run).word)}. `)
      + "Click other tokens, and see which of them matter to this question.",
    state: ({ places }) => ({ method: "full", evicted: places, step: null, layer: null, head: null }), at: "answer-section",
  },
  {
    title: "4 of 6: keep a few",
    text: ({ word, places }, run) => "Sinks keeps the first four tokens and the most recent ones, a fifth of all, and drops the rest unseen. "
      + `${quoted(word)} is ${places.some((at) => run.steps[0].states[at] > 1) ? "among what stays" : "gone"}, whoever asks; the answer is ${quoted(saidBy(run).word)}.`,
    state: () => ({ method: "sinks", budget: 0.2, evicted: [], step: null, layer: null, head: null }), at: "heads",
  },
  {
    title: "5 of 6: keep all, but roughly",
    text: ({ word }, run) => "Here every token stays, and every number becomes one of 15 levels: int4. The cache is seven times smaller, "
      + `the answer is ${saidBy(run).word === word ? "the same" : `another one: ${quoted(saidBy(run).word)}`}. Try int2, with three levels.`,
    state: () => ({ method: "int4", evicted: [], step: null, layer: null, head: null }), at: "answer-section",
  },
  {
    title: "6 of 6: keep all elsewhere",
    text: () => "The cache lies in the host's large memory, and each step fetches what it needs. InfiniGen guesses it one layer ahead: strong dots are what was fetched. Now try snapkv and h2o, and let the question come afterwards (context first): then no method knows yet what will be asked.",
    state: () => ({ method: "infinigen", budget: 0.2, evicted: [], step: null, layer: null, head: null }), at: "heads",
  },
];

class Tour {
  /** show(change): make it the page's state, resolved when it is drawn; facts(): what is looked up in the prompt;
   * run(): the one that the page shows. */
  constructor(show, facts, run) {
    const find = (name) => document.getElementById(name);
    Object.assign(this, { show, facts, run, box: find("tour"), title: find("tour-title"), text: find("tour-text") });
    this.at = null; // the step; null: there is no tour
    this.moving = false;
    this.opener = find("tour-start");
    this.opener.addEventListener("click", () => this.go(0));
    find("tour-back").addEventListener("click", () => this.go(this.at - 1));
    find("tour-next").addEventListener("click", () => (this.at + 1 < TOUR.length ? this.go(this.at + 1) : this.end()));
    find("tour-end").addEventListener("click", () => this.end());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.at !== null && this.end());
    // What has the focus scrolls into what the panel leaves free (page.css).
    new ResizeObserver(() => document.documentElement.style.setProperty("--tour", `${this.box.offsetHeight}px`)).observe(this.box);
  }

  /** Show a step. A step that is still on its way comes first. */
  async go(at) {
    if (this.moving) return;
    Object.assign(this, { at, moving: true });
    const { title, text, state, at: where } = TOUR[at];
    try {
      const found = await this.facts();
      await this.show(state(found));
      if (this.at === null) return; // ended meanwhile
      this.title.textContent = title;
      this.text.textContent = text(found, this.run());
    } finally {
      this.moving = false;
    }
    this.box.hidden = false;
    document.getElementById("tour-back").disabled = at === 0;
    document.getElementById("tour-next").textContent = at + 1 < TOUR.length ? "Next" : "Done";
    document.getElementById("tour-next").focus({ preventScroll: true });
    document.documentElement.style.setProperty("--tour", `${this.box.offsetHeight}px`);
    this.point(where);
  }

  point(name) {
    document.querySelectorAll(".pointed").forEach((element) => element.classList.remove("pointed"));
    const element = name && document.getElementById(name);
    if (!element) return;
    element.classList.add("pointed");
    element.scrollIntoView({ block: "center" });
  }

  end() {
    this.at = null;
    this.box.hidden = true;
    this.point(null);
    this.opener.focus({ preventScroll: true });
  }
}

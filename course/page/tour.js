// The tour: six steps, each a state of the page and what it shows. What it says of the answer is looked up.
// The page opens with it, playing; whatever the reader does elsewhere pauses it.

"use strict";

const quoted = (word) => `“${word}”`;

/** A step's `state` and `text` get what factsOfTour found; `text` also the run that the page then shows. */
const TOUR = [
  {
    title: "1 of 6: what a cache is",
    text: ({ replaced, question, word }, run) => (replaced ? "Your text leaves nothing to look up, so here are the first facts again. " : "")
      + `The model has read ${run.context} tokens. Each of its 64 heads keeps a key and a value for every one of them. This is the KV cache, and nothing else of the text is left. Asked about “${question}”, it says: ${word}.`,
    state: () => ({ method: "full", evicted: [], step: 0, layer: null, head: null }),
  },
  {
    title: "2 of 6: how it answers",
    text: ({ word, fed, reader, weight }) => `Now ${quoted(fed)} is fed, and every head looks back. Here are the tokens as layer ${reader.layer}, head ${reader.head} has them: ${quoted(word)} gets ${Math.round(100 * weight)} % of its attention, and no head gives it more. The model says: ${word}.`,
    state: ({ reader }) => ({ method: "full", evicted: [], step: null, ...reader }),
  },
  {
    title: "3 of 6: take the answer away",
    text: ({ word }, run) => `${quoted(word)} has been evicted: its key and value left all 64 heads. `
      + (saidBy(run).word === word ? "The model says it all the same: tokens that were read later keep what they took from it." : `The model does not say it any more, but ${quoted(saidBy(run).word)}.`),
    state: ({ places }) => ({ method: "full", evicted: places, step: null, layer: null, head: null }),
  },
  {
    title: "4 of 6: keep a few",
    text: ({ word, places }, run) => "No server evicts by hand. H2O keeps a fifth of the tokens in each head: those that got the most attention, and the newest. "
      + `${quoted(word)} is left in ${holders(run, places)} of 64 heads; the answer is ${quoted(saidBy(run).word)}.`,
    state: () => ({ method: "h2o", budget: 0.2, evicted: [], step: null, layer: null, head: null }),
  },
  {
    title: "5 of 6: keep all, but roughly",
    text: ({ word }, run) => "Here every token stays, and every number becomes one of 15 levels: int4. The cache is seven times smaller, "
      + `and the answer is ${saidBy(run).word === word ? "the same" : `another one: ${quoted(saidBy(run).word)}`}.`,
    state: () => ({ method: "int4", evicted: [], step: null, layer: null, head: null }),
  },
  {
    title: "6 of 6: keep all elsewhere",
    text: ({ word }, run) => "The cache is in the host's large memory, and each step fetches what it needs. InfiniGen guesses one layer ahead what that will be. "
      + `The answer is ${saidBy(run).word === word ? "right again" : quoted(saidBy(run).word)}. Now it is your turn: click tokens away, or choose a method below.`,
    state: () => ({ method: "infinigen", budget: 0.2, evicted: [], step: null, layer: null, head: null }),
  },
];

/** How many heads hold all of these positions once the prompt was compressed. */
function holders({ steps: [{ states }], total }, places) {
  const rows = Array.from({ length: states.length / total }, (_, row) => row * total);
  return rows.filter((row) => places.every((at) => states[row + at] > 1)).length;
}

class Tour {
  /** show(change): make it the page's state, resolved when it is drawn; facts(): what is looked up in the prompt;
   * run(): the one that the page shows. */
  constructor(show, facts, run) {
    const find = (name) => document.getElementById(`tour-${name}`);
    Object.assign(this, { show, facts, run, title: find("title"), text: find("text"), button: find("play"), back: find("back") });
    this.at = null; // the step; null: before the first
    this.moving = this.playing = this.touched = false;
    this.button.addEventListener("click", () => this.play(!this.playing));
    this.back.addEventListener("click", () => this.turn(-1));
    find("next").addEventListener("click", () => this.turn(1));
    for (const event of ["click", "input"]) { // the reader takes over
      document.addEventListener(event, ({ target }) => {
        if (target.closest("#tour")) return;
        this.touched = true;
        this.play(false);
      }, true);
    }
    this.said();
  }

  /** Start or stop. A step stays for as long as its text takes to read. */
  async play(on) {
    clearTimeout(this.waiting);
    this.playing = on;
    this.said();
    if (!on) return;
    await this.go(this.at === null || this.last ? 0 : this.at);
    this.wait();
  }

  wait() {
    clearTimeout(this.waiting);
    if (!this.playing) return;
    const seconds = 2.5 + this.text.textContent.split(" ").length / 3;
    this.waiting = setTimeout(() => (this.last ? this.play(false) : this.go(this.at + 1).then(() => this.wait())), 1000 * seconds);
  }

  get last() {
    return this.at === TOUR.length - 1;
  }

  /** A step on or back, by hand. */
  turn(by) {
    this.play(false);
    return this.go(this.at === null || (this.last && by > 0) ? 0 : this.at + by);
  }

  said() {
    this.button.textContent = this.playing ? "Pause" : this.last ? "Again" : "Play";
    this.back.disabled = !this.at;
  }

  /** Show a step. A step that is still on its way comes first; one that the reader interrupts is not shown. */
  async go(at) {
    if (this.moving) return;
    const played = this.playing;
    this.moving = true;
    const { title, text, state } = TOUR[at];
    try {
      const found = await this.facts();
      if (played && !this.playing) return;
      await this.show(state(found));
      this.at = at;
      this.title.textContent = title;
      this.text.textContent = text(found, this.run());
    } finally {
      this.moving = false;
    }
    this.said();
  }
}

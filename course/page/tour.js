// The tour: six steps, each a state of the page and what to look at.

"use strict";

/** answer: the position, in the facts, of the token that is the answer; reader: {layer, head} that looks at it. */
const TOUR = [
  {
    title: "1 of 6: what a cache is",
    text: "The model has read these tokens. For each of them every head of every layer holds a key and a value: 64 lines, one for each head. This is the KV cache. Nothing else of the text is left.",
    state: { method: "full", evicted: [], step: 0, layer: null, head: null }, at: "heads",
  },
  {
    title: "2 of 6: how it answers",
    text: "Now the question's last word is fed, and every head looks back. Here are the tokens as one head has them: the bar shows that it looks straight at the name that was asked for. So the model says it.",
    state: ({ reader }) => ({ method: "full", evicted: [], step: null, ...reader }), at: "tokens",
  },
  {
    title: "3 of 6: take the answer away",
    text: "The name's token has been evicted: its key and value left all 64 heads. The model can no longer say it. Click other tokens and see that most of them do not matter to this question.",
    state: ({ answer }) => ({ method: "full", evicted: [answer], step: null, layer: null, head: null }), at: "answer-section",
  },
  {
    title: "4 of 6: keep a few",
    text: "Sinks keeps the first four tokens and the most recent ones, a fifth of all, and drops the rest unseen. If the name lay in between, it is gone, whoever asks.",
    state: { method: "sinks", budget: 0.2, evicted: [], step: null, layer: null, head: null }, at: "heads",
  },
  {
    title: "5 of 6: keep all, but roughly",
    text: "Here every token stays, and every number becomes one of 15 levels: int4. The cache is seven times smaller, the answer is the same. Try int2, with three levels.",
    state: { method: "int4", evicted: [], step: null, layer: null, head: null }, at: "answer-section",
  },
  {
    title: "6 of 6: keep all elsewhere",
    text: "The cache lies in the host's large memory, and each step fetches what it needs. InfiniGen guesses it one layer ahead: a few strong dots in most lines. Now try snapkv and h2o, and let the question come afterwards (context first): then no method knows yet what will be asked.",
    state: { method: "infinigen", budget: 0.2, evicted: [], step: null, layer: null, head: null }, at: "heads",
  },
];

class Tour {
  /** show(change): make it the page's state, resolved when it is drawn; facts(): {answer, reader} of the prompt. */
  constructor(show, facts) {
    const find = (name) => document.getElementById(name);
    Object.assign(this, { show, facts, box: find("tour"), title: find("tour-title"), text: find("tour-text") });
    this.opener = find("tour-start");
    this.opener.addEventListener("click", () => this.go(0));
    find("tour-back").addEventListener("click", () => this.go(this.at - 1));
    find("tour-next").addEventListener("click", () => (this.at + 1 < TOUR.length ? this.go(this.at + 1) : this.end()));
    find("tour-end").addEventListener("click", () => this.end());
    document.addEventListener("keydown", (event) => event.key === "Escape" && !this.box.hidden && this.end());
  }

  async go(at) {
    this.at = at;
    this.moving = true;
    const { title, text, state, at: where } = TOUR[at];
    const change = typeof state === "function" ? state(await this.facts()) : state;
    this.title.textContent = title;
    this.text.textContent = text;
    this.box.hidden = false;
    document.getElementById("tour-back").disabled = at === 0;
    document.getElementById("tour-next").textContent = at + 1 < TOUR.length ? "Next" : "Done";
    document.getElementById("tour-next").focus({ preventScroll: true });
    await this.show(change);
    this.point(where);
    this.moving = false;
  }

  point(name) {
    document.querySelectorAll(".pointed").forEach((element) => element.classList.remove("pointed"));
    const element = name && document.getElementById(name);
    if (!element) return;
    element.classList.add("pointed");
    element.scrollIntoView({ block: "center" });
  }

  end() {
    this.box.hidden = true;
    this.point(null);
    this.opener.focus({ preventScroll: true });
  }
}

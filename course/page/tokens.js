// The tokens as text: one button each; pressing it evicts the token.

"use strict";

const SAID = ["not there yet", "gone", "held", "fetched", "on the host, not fetched"];

/** What the heads in sight have of a token: `reads`, how many of them can read it in this step; `there`, whether
 * some hold it, be it on a host; weight: the largest that it gets. */
function inSight(step, total, token, rows) {
  let reads = 0, there = false, weight = 0;
  for (const row of rows) {
    const at = row * total + token, state = step.states[at];
    if (state === 2 || state === 3) reads++;
    there ||= state > 1;
    weight = Math.max(weight, step.weights[at]);
  }
  return { reads, there, weight };
}

class Tokens {
  /** toggle(position): the reader evicts a token, or brings it back. */
  constructor(box, toggle) {
    this.box = box;
    this.current = 0;
    box.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      this.current = Number(button.dataset.at);
      if (button.getAttribute("aria-disabled") !== "true") toggle(this.current);
    });
    box.addEventListener("keydown", (event) => this.move(event));
  }

  /** One token is in the order of tabs, arrow keys go to the others. */
  move(event) {
    const buttons = this.box.children, last = buttons.length - 1;
    const to = { ArrowLeft: this.current - 1, ArrowRight: this.current + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    buttons[this.current].tabIndex = -1;
    this.current = Math.max(0, Math.min(last, to));
    buttons[this.current].tabIndex = 0;
    buttons[this.current].focus();
  }

  /** A text's tokens while they are read, before a cache is there to look at. */
  read(words) {
    this.box.replaceChildren(...words.map((word, at) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", className: "new", textContent: word.replace("\n", "⏎"), tabIndex: -1 });
      button.setAttribute("aria-disabled", true);
      button.style.animationDelay = `${4 * at}ms`;
      return button;
    }));
  }

  /** Bring a position into the middle of the box. */
  show(at) {
    const { box } = this, button = box.children[at];
    if (button) box.scrollTop = button.offsetTop - (box.clientHeight - button.offsetHeight) / 2;
  }

  /** run: what the worker found; rows: lines of the picture in sight; evicted: positions; asked: positions of what
   * the full cache answers. */
  draw(run, step, rows, evicted, asked) {
    const { box } = this, { states } = colours(), focused = box.contains(document.activeElement);
    const hosted = run.steps[0].moved > 0, tint = hosted ? [states[4][0], states[3][0]] : [states[1][0], states[2][0]];
    while (box.children.length > step.seen) box.lastChild.remove();
    while (box.children.length < step.seen) box.append(document.createElement("button"));
    this.current = Math.min(this.current, step.seen - 1);
    Array.from(box.children).forEach((button, at) => {
      const { reads, there, weight } = inSight(step, run.total, at, rows), out = evicted.includes(at);
      const word = run.words[at], percent = Math.round(100 * weight), fixed = at >= run.context;
      button.type = "button";
      button.dataset.at = at;
      button.tabIndex = at === this.current ? 0 : -1;
      button.className = `${there ? "" : "gone"} ${asked.includes(at) ? "asked" : ""}`;
      button.setAttribute("aria-pressed", out);
      button.setAttribute("aria-disabled", fixed);
      const where = rows.length === 1 ? SAID[step.states[rows[0] * run.total + at]]
        : `${hosted ? "fetched by" : "in"} ${reads} of ${rows.length} heads`;
      const does = fixed ? "read after the eviction" : out ? "evicted; press to bring it back" : "press to evict";
      button.setAttribute("aria-label", `${word.trim() || "line break"}, ${where}, attention up to ${percent} %, ${does}`);
      button.title = `${where}, attention up to ${percent} %`;
      button.style.background = there ? shade(tint, reads / rows.length) : "";
      button.textContent = word.replace("\n", "⏎");
      if (percent >= 3) {
        const bar = document.createElement("i");
        bar.style.height = `${Math.round(9 * Math.sqrt(weight))}px`;
        button.append(bar);
      }
    });
    if (focused) box.children[this.current].focus();
  }
}

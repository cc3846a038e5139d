// Slides: the speaker's window (key s), and the countdown of an exercise (key t).

"use strict";

const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// The countdown. Where motion is unwelcome it says whole minutes, and nothing else changes.
class Countdown {
  constructor(element) {
    this.element = element;
    this.button = element.querySelector("button");
    this.said = element.querySelector("[role=timer]");
    this.bar = element.querySelector("progress");
    this.total = this.left = 60 * Number(element.dataset.minutes);
    this.until = null; // when it ends, while it runs
    this.begun = false;
    this.button.addEventListener("click", () => {
      this.button.blur(); // or the space bar would press it again
      this.toggle();
    });
    this.show();
  }

  toggle() {
    this.begun = true;
    if (this.until === null) {
      if (this.left <= 0) this.left = this.total;
      this.until = Date.now() + 1000 * this.left;
    } else {
      this.left = (this.until - Date.now()) / 1000;
      this.until = null;
    }
    this.show();
    tell(); // the plan of the hour counts the exercises that were begun
  }

  tick() {
    if (this.until === null) return;
    this.left = Math.max(0, (this.until - Date.now()) / 1000);
    if (this.left === 0) this.until = null;
    this.show();
  }

  show() {
    const running = this.until !== null;
    this.said.textContent =
      this.left <= 0 ? "Time is up" : calm.matches ? `${Math.ceil(this.left / 60)} min` : clock(Math.ceil(this.left));
    this.button.textContent = running ? "Pause (t)" : "Start (t)";
    this.bar.value = this.left / this.total;
    this.element.classList.toggle("calm", calm.matches);
    this.element.classList.toggle("over", this.left <= 0);
  }
}

const countdowns = new Map([...document.querySelectorAll(".timer")].map((one) => [one, new Countdown(one)]));

function toggle() {
  countdowns.get(Reveal.getCurrentSlide()?.querySelector(".timer"))?.toggle();
}

// The speaker's window: what to say, wrong answers to expect, minutes, and what comes next.
let speaker = null, opened = 0;

function open_speaker() {
  if (speaker && !speaker.closed) return speaker.focus();
  speaker = window.open("", "kvlab-speaker", "popup,width=760,height=820");
  if (!speaker) return alert("The browser holds the speaker's window back: allow pop-ups for this page.");
  opened = Date.now();
  const page = speaker.document;
  page.title = `Speaker: ${document.title}`;
  page.head.innerHTML = `<style>body { font: 20px/1.45 system-ui, sans-serif; margin: 1.2em; color: #1f2328; background: #fff }
    h1 { font-size: 1.3em; margin: 0 } h2 { font-size: 1em; margin: 1em 0 .3em } .clock { color: #59636e }
    ul { padding-left: 1.2em } .next { border-top: 1px solid #d1d9e0; margin-top: 1em; padding-top: .6em }</style>`;
  page.onkeydown = (event) => {
    if (["ArrowRight", "ArrowDown", "PageDown", " "].includes(event.key)) Reveal.next();
    else if (["ArrowLeft", "ArrowUp", "PageUp"].includes(event.key)) Reveal.prev();
    else if (event.key === "t") toggle();
    else return;
    event.preventDefault();
  };
  tell();
}

function tell() {
  if (!speaker || speaker.closed) return;
  const all = Reveal.getHorizontalSlides(), here = Reveal.getIndices().h, slide = all[here];
  const begun = (one) => countdowns.get(one.querySelector(".timer"))?.begun; // a room does not do every exercise
  const each = (one) => Number(one.dataset.minutes) + (begun(one) ? Number(one.dataset.work) : 0);
  const minutes = (some) => some.reduce((sum, one) => sum + each(one), 0);
  const heading = (one) => one.querySelector("h1, h2")?.innerHTML ?? "";
  const by = clock(60 * minutes(all.slice(0, here + 1))), work = Number(slide.dataset.work);
  const own = `${slide.dataset.minutes} min to speak${work ? `, ${work} to work` : ""}`;
  const next = all[here + 1];
  speaker.document.body.innerHTML = `<h1>${heading(slide)}</h1>
    <p class="clock">Slide ${here + 1} of ${all.length} · ${own} · done by ${by} of ${clock(60 * minutes(all))}
    · now <b id="now"></b></p>${slide.querySelector("aside.notes")?.innerHTML ?? ""}
    <p class="next">${next ? `Next: ${heading(next)}` : "The last slide"}</p>`;
  now();
}

function now() {
  const told = speaker && !speaker.closed && speaker.document.getElementById("now");
  if (told) told.textContent = clock((Date.now() - opened) / 1000);
}

Reveal.addKeyBinding({ keyCode: 83, key: "S", description: "Speaker's window" }, open_speaker);
Reveal.addKeyBinding({ keyCode: 84, key: "T", description: "Start or pause the countdown" }, toggle);
Reveal.on("slidechanged", tell);
calm.addEventListener("change", () => countdowns.forEach((one) => one.show()));
setInterval(() => {
  countdowns.forEach((one) => one.tick());
  now();
}, 250);

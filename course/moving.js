// The moving picture: it plays, pauses and goes to any second. Without this script the picture is a still.
// Where less motion is wanted it opens as the still, and goes from the end of a scene to the end of the next.

(() => {
  "use strict";

  const svg = document.currentScript?.ownerSVGElement ?? document.documentElement, alone = svg === document.documentElement;
  const { length, scenes } = JSON.parse(svg.querySelector("metadata").textContent); // scenes: [end in seconds, sentence]
  const parts = Array.from(svg.querySelectorAll("[data-frames]"), (part) => [part, JSON.parse(part.dataset.frames)]);
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let at = length, playing = false, last = 0;

  const html = (name, style, given = {}) => {
    const made = document.createElementNS("http://www.w3.org/1999/xhtml", name);
    made.style.cssText = style;
    return Object.assign(made, given);
  };
  const box = document.createElementNS("http://www.w3.org/2000/svg", "foreignObject");
  const said = html("p", "margin: 0 0 6px; min-height: 52px; font: 19px/26px system-ui, sans-serif; color: #1f2328;");
  const row = html("div", "display: flex; gap: 12px; align-items: center; font: 19px system-ui, sans-serif; color: #1f2328;");
  const button = html("button", "font: inherit; min-width: 104px; padding: 3px 12px; cursor: pointer;", { type: "button" });
  const slider = html("input", "flex: 1; accent-color: #0072b2;", { type: "range", min: 0, max: length, step: 0.5 });
  const clock = html("output", "min-width: 104px; text-align: right; font-variant-numeric: tabular-nums;");
  for (const element of [button, slider]) element.style.colorScheme = "light";
  said.setAttribute("aria-live", "polite");
  slider.setAttribute("aria-label", "seconds of the story");
  row.append(button, slider, clock);
  box.append(said, row);

  /** [opacity, dx, dy] of a part at a time: its frames are [seconds, opacity, dx, dy], in their order. */
  function placed(frames, time) {
    const next = frames.findIndex(([second]) => second > time);
    if (next <= 0) return (next ? frames.at(-1) : frames[0]).slice(1);
    const [from, to] = [frames[next - 1], frames[next]], share = (time - from[0]) / (to[0] - from[0]);
    const eased = share * share * (3 - 2 * share);
    return from.slice(1).map((value, i) => value + (to[i + 1] - value) * eased);
  }

  function draw() {
    const scene = scenes.find(([end]) => at < end) ?? scenes.at(-1), time = calm.matches ? scene[0] : at;
    for (const [part, frames] of parts) {
      const [opacity, dx, dy] = placed(frames, time);
      part.setAttribute("opacity", opacity);
      part.setAttribute("transform", `translate(${dx} ${dy})`);
    }
    if (said.textContent !== scene[1]) said.textContent = scene[1];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `${Math.round(at)} seconds. ${scene[1]}`);
    clock.textContent = `${Math.round(at)} of ${length} s`;
    button.textContent = playing ? "Pause" : at < length ? "Play" : "Again";
  }

  function play(on) {
    if (on && at >= length) at = 0;
    if (on && !playing) requestAnimationFrame((now) => tick((last = now)));
    playing = on;
    draw();
  }

  function tick(now) {
    if (!playing) return;
    at = Math.min(length, at + Math.min(now - last, 250) / 1000);
    last = now;
    if (at >= length) playing = false;
    else requestAnimationFrame(tick);
    draw();
  }

  function go(second) {
    playing = false;
    at = Math.max(0, Math.min(length, second));
    draw();
  }

  for (const [name, value] of Object.entries(JSON.parse(svg.querySelector("[data-words]").dataset.words))) box.setAttribute(name, value);
  svg.querySelector("[data-words]").replaceWith(box);
  svg.setAttribute("role", "group"); // an image would hide the controls from a screen reader
  button.addEventListener("click", () => play(!playing));
  slider.addEventListener("input", () => go(Number(slider.value)));
  addEventListener("beforeprint", () => go(length));
  if (alone) addEventListener("keydown", ({ key, target }) => {
    if (target === button || target === slider) return;
    if (key === " ") play(!playing);
    if (key === "ArrowLeft" || key === "ArrowRight") go(at + (key === "ArrowLeft" ? -5 : 5));
  });
  draw();
  if (calm.matches) return;
  const seen = new IntersectionObserver(([{ isIntersecting }]) => { // it plays once it is in sight
    if (!isIntersecting) return;
    seen.disconnect();
    if (!playing && at >= length) play(true);
  }, { threshold: 0.4 });
  seen.observe(svg);
})();

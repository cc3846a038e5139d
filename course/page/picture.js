// The picture: every head's cache as a line of tokens, on a canvas.

"use strict";

/** The colours of the style sheet, those of the reader's light or dark mode. */
function colours() {
  const probe = document.body.appendChild(document.createElement("span"));
  const named = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const parts = (name) => named(name).match(/\d+/g).map(Number);
  const pairs = { 0: ["none", "none"], 1: ["gone", "gone"], 2: ["held-pale", "held"], 3: ["fetched-pale", "fetched"],
    4: ["host-pale", "host-pale"] };
  const states = Object.values(pairs).map(([weak, strong]) => [parts(weak), parts(strong)]);
  const found = { ink: named("ink"), strong: named("strong"), states };
  probe.remove();
  return found;
}

/** Between two colours [r, g, b], by how much attention: square roots, so that little is seen too. */
function mixed([weak, strong], weight) {
  const part = Math.sqrt(weight);
  return weak.map((from, i) => Math.round(from + (strong[i] - from) * part));
}

const shade = (pair, weight) => `rgb(${mixed(pair, weight).join()})`;

const GAP = 5, MARGIN = 62; // CSS pixels: between layers, for the layers' names

class Picture {
  /** choose(layer, head): the reader clicked a line; point(layer, head, token): the pointer is there. */
  constructor(canvas, layers, heads, choose, point) {
    Object.assign(this, { canvas, layers, heads });
    const there = (event) => {
      const { line } = this, box = canvas.getBoundingClientRect(), y = event.clientY - box.top, x = event.clientX - box.left;
      const layer = Math.min(layers - 1, Math.max(0, Math.floor(y / (heads * line + GAP))));
      const head = Math.min(heads - 1, Math.max(0, Math.floor((y - layer * (heads * line + GAP)) / line)));
      return [layer, head, Math.floor(((x - MARGIN) / (box.width - MARGIN)) * this.total)];
    };
    canvas.addEventListener("click", (event) => choose(...there(event)));
    canvas.addEventListener("pointermove", (event) => point(...there(event)));
  }

  /** step: one entry of a run's steps; chosen: {layer, head} or null; seen: tokens there are so far. */
  draw(step, total, chosen) {
    const { canvas, layers, heads } = this, { states, ink, strong } = colours();
    const wide = canvas.clientWidth, line = (this.line = wide < 600 ? 6 : 7); // CSS pixels of a head's line
    const high = layers * (heads * line + GAP) - GAP, fine = window.devicePixelRatio || 1;
    canvas.style.height = `${high}px`;
    canvas.width = Math.round(wide * fine);
    canvas.height = Math.round(high * fine);
    this.total = total;
    const brush = canvas.getContext("2d"), lines = this.lines(step, total, states);
    brush.scale(fine, fine);
    brush.imageSmoothingEnabled = false;
    brush.font = "13px system-ui, sans-serif";
    for (let layer = 0; layer < layers; layer++) {
      const top = layer * (heads * line + GAP);
      brush.fillStyle = ink;
      brush.fillText(`layer ${layer}`, 0, top + (heads * line) / 2 + 4);
      for (let head = 0; head < heads; head++) {
        const row = layer * heads + head;
        brush.drawImage(lines, 0, row, total, 1, MARGIN, top + head * line, wide - MARGIN, line - 1);
      }
      if (chosen && chosen.layer === layer) {
        brush.strokeStyle = strong;
        brush.lineWidth = 2;
        brush.strokeRect(MARGIN - 1, top + chosen.head * line - 1, wide - MARGIN, line + 1);
      }
    }
  }

  /** The heads as an image with one dot per token, which is then drawn larger: quicker than rectangles. */
  lines(step, total, states) {
    const image = new OffscreenCanvas(total, this.layers * this.heads), brush = image.getContext("2d");
    const dots = brush.createImageData(total, image.height);
    step.states.forEach((state, at) => {
      if (state) dots.data.set([...mixed(states[state], step.weights[at]), 255], 4 * at);
    });
    brush.putImageData(dots, 0, 0);
    return image;
  }
}

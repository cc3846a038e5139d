// The model: a Llama with int8 weights. One pass takes tokens and a cache, and gives the last token's logits.

"use strict";

class Engine {
  /** config: {layers, heads, width, hidden, middle, vocabulary, theta, epsilon}; room: most tokens of a text. */
  constructor(config, weights, kernel, room) {
    this.config = config;
    this.weights = weights;
    this.kernel = kernel;
    this.room = room;
    const { hidden, middle, vocabulary, layers } = config;
    const floats = (width) => kernel.floats(room * width);
    this.x = floats(hidden); // the residual stream [tokens, hidden]
    this.normed = floats(hidden);
    this.qkv = floats(3 * hidden);
    this.mixed = floats(hidden); // what the heads bring back
    this.added = floats(hidden);
    this.gateUp = floats(2 * middle);
    this.active = floats(middle);
    this.logits = kernel.floats(vocabulary);
    this.queries = Array.from({ length: layers }, (_, l) => rows(weights.get(`${l}.qkv`), hidden));
    this.turns = turns(config, room);
  }

  /** Bytes of a kernel's memory that the weights and a text of `room` tokens need. */
  static bytes({ hidden, middle, vocabulary }, weights, room) {
    return weights + 4 * (room * (7 * hidden + 3 * middle) + vocabulary) + 4096;
  }

  /** Feed `ids` at positions start, start + 1, ...; returns the last one's logits [vocabulary]. */
  forward(ids, start, cache) {
    const { config, weights, x, mixed } = this, { hidden, layers, middle } = config, tokens = ids.length;
    if (start + tokens > this.room) throw new Error(`${start + tokens} tokens; the page takes ${this.room}`);
    const embedding = weights.get("embedding");
    ids.forEach((id, t) => {
      const scale = embedding.scale[id];
      for (let i = 0; i < hidden; i++) x[t * hidden + i] = embedding.codes[id * hidden + i] * scale;
    });
    for (let l = 0; l < layers; l++) {
      if (tokens === 1 && cache.speculates(l + 1)) cache.speculate(l + 1, this.query(l + 1, start));
      this.norm(`${l}.norm1`, tokens);
      this.kernel.multiply(weights.get(`${l}.qkv`), this.normed, this.qkv, tokens);
      const [q, k, v] = [0, 1, 2].map((part) => this.third(part, tokens));
      this.turn(q, tokens, start);
      this.turn(k, tokens, start);
      cache.attend(l, q, k, v, tokens, mixed);
      this.add(`${l}.out`, mixed, tokens);
      this.norm(`${l}.norm2`, tokens);
      this.kernel.multiply(weights.get(`${l}.gate_up`), this.normed, this.gateUp, tokens);
      for (let t = 0; t < tokens; t++) {
        for (let i = 0, g = 2 * t * middle; i < middle; i++) {
          const gate = this.gateUp[g + i];
          this.active[t * middle + i] = (gate / (1 + Math.exp(-gate))) * this.gateUp[g + middle + i];
        }
      }
      this.add(`${l}.down`, this.active, tokens);
    }
    x.copyWithin(0, (tokens - 1) * hidden, tokens * hidden);
    this.norm("norm", 1);
    this.kernel.multiply(embedding, this.normed, this.logits, 1); // tied: the embedding is the head, too
    return this.logits;
  }

  /** What layer l would ask if the residual stream of one token were its input now, [hidden]. */
  query(l, position) {
    const out = this.qkv.subarray(0, this.config.hidden);
    this.norm(`${l}.norm1`, 1);
    this.kernel.multiply(this.queries[l], this.normed, out, 1);
    const query = out.slice();
    this.turn(query, 1, position);
    return query;
  }

  /** q, k or v: columns of qkv [tokens, 3 * hidden] as a matrix of their own [tokens, hidden]. */
  third(part, tokens) {
    const { hidden } = this.config, out = new Float32Array(tokens * hidden);
    for (let t = 0; t < tokens; t++) {
      const from = (3 * t + part) * hidden;
      out.set(this.qkv.subarray(from, from + hidden), t * hidden);
    }
    return out;
  }

  /** RMSNorm of x into normed. */
  norm(name, tokens) {
    const { hidden, epsilon } = this.config, gain = this.weights.get(name), { x, normed } = this;
    for (let t = 0, at = 0; t < tokens; t++, at += hidden) {
      let sum = 0;
      for (let i = 0; i < hidden; i++) sum += x[at + i] * x[at + i];
      const factor = 1 / Math.sqrt(sum / hidden + epsilon);
      for (let i = 0; i < hidden; i++) normed[at + i] = x[at + i] * factor * gain[i];
    }
  }

  /** x += from times a matrix. */
  add(name, from, tokens) {
    this.kernel.multiply(this.weights.get(name), from, this.added, tokens);
    for (let i = 0; i < tokens * this.config.hidden; i++) this.x[i] += this.added[i];
  }

  /** RoPE, in place: y [tokens, hidden] at positions from `start` on. */
  turn(y, tokens, start) {
    const { hidden, width } = this.config, half = width / 2, { cos, sin } = this.turns;
    for (let t = 0; t < tokens; t++) {
      const at = (start + t) * half;
      for (let head = t * hidden; head < (t + 1) * hidden; head += width) {
        for (let i = 0; i < half; i++) {
          const a = y[head + i], b = y[head + half + i], c = cos[at + i], s = sin[at + i];
          y[head + i] = a * c - b * s;
          y[head + half + i] = b * c + a * s;
        }
      }
    }
  }
}

/** The first rows of a matrix. */
function rows({ codes, scale, cols }, count) {
  return { codes: codes.subarray(0, count * cols), scale: scale.subarray(0, count), rows: count, cols };
}

/** Cosines and sines [positions, width / 2], computed in fp32 as transformers does. */
function turns({ width, theta }, positions) {
  const half = width / 2, cos = new Float32Array(positions * half), sin = new Float32Array(positions * half);
  for (let i = 0; i < half; i++) {
    const speed = Math.fround(1 / Math.fround(theta ** ((2 * i) / width)));
    for (let at = 0; at < positions; at++) {
      const angle = Math.fround(at * speed);
      cos[at * half + i] = Math.cos(angle);
      sin[at * half + i] = Math.sin(angle);
    }
  }
  return { cos, sin };
}

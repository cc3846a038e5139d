// Record: a prompt that was read, once for all methods: its attention does not depend on what a cache does later.

"use strict";

const VOTERS = 16; // last queries of a prompt that vote under SnapKV

/** Stands where a cache stands while the prompt is read; layers[i] has what Layer.fill takes. */
class Record {
  constructor(config) {
    this.config = config;
    this.layers = [];
  }

  speculates() {
    return false;
  }

  /** Causal attention of the prompt over itself. All [tokens, heads * width]. */
  attend(index, queries, keys, values, tokens, out) {
    const { heads, width, hidden } = this.config, scaling = width ** -0.5;
    const read = { tokens, received: [], votes: [], last: [] };
    [read.queries, read.keys, read.values] = [queries, keys, values].map((x) => x.slice());
    for (let h = 0; h < heads; h++) {
      const received = new Float32Array(tokens), votes = new Float32Array(tokens), weights = new Float64Array(tokens);
      for (let t = 0; t < tokens; t++) {
        causal(queries, keys, values, t, h * width, hidden, width, scaling, weights, out);
        for (let j = 0; j <= t; j++) received[j] += weights[j];
        if (t >= tokens - VOTERS) for (let j = 0; j <= t; j++) votes[j] += weights[j];
      }
      read.received.push(received);
      read.votes.push(votes);
      read.last.push(Float32Array.from(weights));
    }
    this.layers[index] = read;
  }
}

/** Query t of the head whose numbers begin at `first` attends to tokens 0..t: writes weights [0..t] and out. */
function causal(queries, keys, values, t, first, hidden, width, scaling, weights, out) {
  const q = t * hidden + first;
  let most = -Infinity, total = 0;
  for (let j = 0, k = first; j <= t; j++, k += hidden) {
    let score = 0;
    for (let i = 0; i < width; i++) score += queries[q + i] * keys[k + i];
    weights[j] = score * scaling;
    if (weights[j] > most) most = weights[j];
  }
  for (let j = 0; j <= t; j++) total += weights[j] = Math.exp(weights[j] - most);
  const sum = new Float64Array(width);
  for (let j = 0, v = first; j <= t; j++, v += hidden) {
    const weight = (weights[j] /= total);
    for (let i = 0; i < width; i++) sum[i] += weight * values[v + i];
  }
  out.set(sum, q);
}

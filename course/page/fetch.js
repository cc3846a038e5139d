// Fetch: K and V live on a host, and a step fetches some of them. As kvlab/place, for one row.

"use strict";

/** The `count` slots with the highest score, in any order. */
function best(score, count) {
  const order = Array.from(score, (_, slot) => slot);
  return order.sort((a, b) => score[b] - score[a]).slice(0, count);
}

/** The oracle: the largest true scores of this step (Gupta et al. 2021). */
class TopK {
  fullLayers = 0;
  speculates = false;

  constructor(budget) {
    this.budget = budget;
  }

  /** Slots of past tokens to fetch, per head; null: all of them. query [heads * width]. */
  select(layer, query) {
    const past = layer.slots - 1;
    if (past < 1) return null;
    const cap = Math.min(allowed(this.budget, layer.seen), past);
    return layer.heads.map((head, h) => best(layer.scores(head, query, h, past), cap));
  }
}

/** A guess one layer ahead (Lee et al. 2024): rehearse layer i's attention with the input of block i - 1, on
 * the few columns of skewed K that carry most of the score. */
class InfiniGen {
  fullLayers = 2;
  speculates = true;
  alpha = 4;
  ratio = 0.3;

  /** skewing: the matrices A [layers, heads, width, width]. */
  constructor(budget, skewing) {
    this.budget = budget;
    this.skewing = skewing;
  }

  /** After the prompt: choose every head's columns by the sums of |Q A| + |K A|, and keep those of K A.
   * queries, keys [tokens, heads * width] before the store. */
  prefill(layer, queries, keys) {
    const { width, hidden } = layer, count = Math.max(1, Math.round(this.ratio * width));
    layer.heads.forEach((head, h) => {
      const sums = new Float32Array(width);
      for (const x of [queries, keys]) {
        for (let at = h * width; at < x.length; at += hidden) {
          const skewed = this.skewed(layer, h, x.subarray(at, at + width));
          for (let c = 0; c < width; c++) sums[c] += Math.abs(skewed[c]);
        }
      }
      head.columns = best(sums, count);
      head.partial = [];
    });
    this.append(layer, keys);
  }

  /** New keys [tokens, heads * width] join the partial key cache. */
  append(layer, keys) {
    const { width, hidden } = layer;
    layer.heads.forEach((head, h) => {
      for (let at = h * width; at < keys.length; at += hidden) {
        head.partial.push(this.columnsOf(layer, h, keys.subarray(at, at + width)));
      }
    });
  }

  /** x A of one head, x [width]. */
  skewed(layer, h, x) {
    const { width } = layer, out = new Float32Array(width);
    const start = (layer.index * layer.heads.length + h) * width * width;
    for (let c = 0; c < width; c++) {
      let sum = 0;
      for (let i = 0; i < width; i++) sum += x[i] * this.skewing[start + i * width + c];
      out[c] = sum;
    }
    return out;
  }

  columnsOf(layer, h, x) {
    const skewed = this.skewed(layer, h, x);
    return Float32Array.from(layer.heads[h].columns, (column) => skewed[column]);
  }

  /** Before the layer's turn, with the query it would ask: n = the mean over the heads of how many guessed
   * scores lie within alpha of the best, at most the budget; each head its own best n. */
  speculate(layer, query) {
    const { width, scaling } = layer, past = layer.slots;
    let near = 0;
    const scores = layer.heads.map((head, h) => {
      const asked = this.columnsOf(layer, h, query.subarray(h * width, (h + 1) * width));
      const guessed = Float32Array.from(head.partial, (key) => key.reduce((sum, k, i) => sum + k * asked[i], 0) * scaling);
      const threshold = Math.fround(guessed.reduce((a, b) => Math.max(a, b), -Infinity) - this.alpha);
      near += guessed.filter((score) => score > threshold).length;
      return guessed;
    });
    const cap = Math.min(allowed(this.budget, layer.seen + 1), past);
    const count = Math.max(1, Math.min(cap, Math.ceil(near / layer.heads.length)));
    layer.guessed = scores.map((guessed) => best(guessed, count));
  }

  select(layer) {
    return layer.guessed;
  }
}

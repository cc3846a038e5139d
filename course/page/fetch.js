// Fetch: K and V live on a host, and a step fetches some of them. As kvlab/place, for one row.

"use strict";

/** The `count` slots with the highest score, in any order. */
function best(score, count) {
  const order = Array.from(score, (_, slot) => slot);
  return order.sort((a, b) => score[b] - score[a]).slice(0, count);
}

/** The oracle: the largest true scores of this step (Gupta et al. 2021). */
class TopK {
  fullLayers = DEFAULTS.topk.full_layers;
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
  fullLayers = DEFAULTS.infinigen.full_layers;
  speculates = true;
  alpha = DEFAULTS.infinigen.alpha;
  ratio = DEFAULTS.infinigen.ratio;

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
      head.partial = new Float32Array((head.keys.length / width) * count); // [slots, columns]
    });
    this.append(layer, keys);
  }

  /** New keys [tokens, heads * width] join the partial key cache. */
  append(layer, keys) {
    const { width, hidden } = layer, tokens = keys.length / hidden;
    layer.heads.forEach((head, h) => {
      for (let t = 0, slot = head.count - tokens; t < tokens; t++, slot++) {
        const from = t * hidden + h * width, key = keys.subarray(from, from + width);
        head.partial.set(this.skewed(layer, h, key, head.columns), slot * head.columns.length);
      }
    });
  }

  /** Some columns (all of them, if none are named) of x A in one head, x [width]. */
  skewed(layer, h, x, columns) {
    const { width } = layer, out = new Float32Array(columns ? columns.length : width);
    const start = (layer.index * layer.heads.length + h) * width * width;
    for (let n = 0; n < out.length; n++) {
      let sum = 0;
      for (let i = 0, at = start + (columns ? columns[n] : n); i < width; i++, at += width) sum += x[i] * this.skewing[at];
      out[n] = sum;
    }
    return out;
  }

  /** The scores that one head would give, by the chosen columns; query [heads * width]. */
  guess(layer, h, query) {
    const { width, scaling } = layer, { partial, columns, count } = layer.heads[h], scores = new Float32Array(count);
    const asked = this.skewed(layer, h, query.subarray(h * width, (h + 1) * width), columns);
    for (let slot = 0, at = 0; slot < count; slot++) {
      let sum = 0;
      for (let n = 0; n < asked.length; n++, at++) sum += asked[n] * partial[at];
      scores[slot] = sum * scaling;
    }
    return scores;
  }

  /** Before the layer's turn, with the query it would ask: n = the mean over the heads of how many guessed
   * scores lie within alpha of the best, at most the budget; each head its own best n. */
  speculate(layer, query) {
    const past = layer.slots;
    let near = 0;
    const scores = layer.heads.map((_, h) => {
      const guessed = this.guess(layer, h, query);
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

// Keep: which tokens stay. As kvlab/keep, for one row; a keep scores the slots of one head. DEFAULTS: build.py.

"use strict";

/** Tokens that a budget, a fraction in (0, 1], allows out of `tokens`; 1 is no limit. */
function allowed(budget, tokens) {
  return budget === 1 ? Infinity : Math.max(1, Math.floor(budget * tokens + 1e-6));
}

/** The base: every token stays. `once`: the prompt is compressed, and what comes later stays. */
class KeepAll {
  evicts = false;
  once = false;
}

class Keep {
  evicts = true;
  once = false;

  constructor(budget) {
    this.budget = budget;
  }

  /** The prompt has ended: tokens that each head may hold from now on. */
  limit(tokens) {
    return allowed(this.budget, tokens);
  }

  /** Slots that stay, in their order: the `limit` best, the newest token always. Ties go to the older one. */
  choose(head, limit, length) {
    if (head.count <= limit) return null;
    const score = this.score(head, limit, length), newest = head.count - 1;
    const order = Array.from({ length: newest }, (_, slot) => slot);
    // Two infinities are equal, though their difference is not a number.
    order.sort((a, b) => (score[a] === score[b] ? a - b : score[b] - score[a]));
    return [...order.slice(0, limit - 1).sort((a, b) => a - b), newest];
  }
}

/** The first tokens and the most recent ones (StreamingLLM, Xiao et al. 2023). */
class Sinks extends Keep {
  sinks = DEFAULTS.sinks.sinks;

  score({ positions, count }) {
    return Array.from(positions.subarray(0, count), (at) => (at < this.sinks ? Infinity : at));
  }
}

/** Most attention received so far, and a recent window, a part of the budget (H2O, Zhang et al. 2023). */
class H2O extends Keep {
  observes = true;

  score({ positions, received, count }, limit, length) {
    const recent = length - Math.floor(limit * DEFAULTS.h2o.recent);
    return Array.from({ length: count }, (_, slot) => (positions[slot] >= recent ? Infinity : received[slot]));
  }
}

/** What the last queries of the prompt look at, pooled over neighbours (SnapKV, Li et al. 2024). */
class SnapKV extends Keep {
  once = true;
  window = DEFAULTS.snapkv.window;
  reach = Math.floor(DEFAULTS.snapkv.kernel / 2);

  score({ positions, votes, count }, limit, length) {
    const own = (slot) => positions[slot] >= length - this.window;
    const score = [];
    for (let slot = 0; slot < count; slot++) {
      if (own(slot)) {
        score.push(this.window + 1 + positions[slot]);
        continue;
      }
      let most = 0; // the window votes for others
      for (let near = Math.max(0, slot - this.reach); near <= Math.min(count - 1, slot + this.reach); near++) {
        if (!own(near)) most = Math.max(most, votes[near]);
      }
      score.push(most);
    }
    return score;
  }
}

// The cache: what every head of every layer holds, step by step. As kvlab/layer.py, for one row.

"use strict";

/** Softmax attention of one query over some slots of a head.
 *
 * query [width] at qAt; slots: numbers of slots; out [width] at outAt is written. Returns the slots' weights. */
function attendSlots(head, width, scaling, query, qAt, slots, out, outAt) {
  const { keys, values } = head, weights = new Float32Array(slots.length);
  let most = -Infinity, total = 0;
  for (let n = 0; n < slots.length; n++) {
    let score = 0;
    for (let i = 0, k = slots[n] * width; i < width; i++) score += query[qAt + i] * keys[k + i];
    weights[n] = score * scaling;
    if (weights[n] > most) most = weights[n];
  }
  for (let n = 0; n < slots.length; n++) total += weights[n] = Math.exp(weights[n] - most);
  const sum = new Float64Array(width);
  for (let n = 0; n < slots.length; n++) {
    const weight = (weights[n] /= total);
    for (let i = 0, v = slots[n] * width; i < width; i++) sum[i] += weight * values[v + i];
  }
  out.set(sum, outAt);
  return weights;
}

/** One layer. method: {format, keep, fetch} (session.js); room: tokens that it can hold at most. */
class Layer {
  constructor(config, index, method, room) {
    this.index = index;
    this.width = config.width;
    this.hidden = config.hidden;
    this.scaling = config.width ** -0.5;
    this.method = method;
    this.whole = !method.fetch || index < method.fetch.fullLayers; // every step reads everything
    this.seen = 0;
    this.moved = 0; // bytes that crossed between host and device in the last pass
    this.heads = Array.from({ length: config.heads }, () => ({
      keys: new Float32Array(room * config.width), // [slots, width], after RoPE, as the format gives it back
      values: new Float32Array(room * config.width),
      positions: new Int32Array(room), // of the token in each slot
      received: new Float32Array(room), // attention so far (H2O)
      votes: null, // attention of the prompt's last queries (SnapKV)
      partial: null, // chosen columns of K A, [slots, columns] (InfiniGen)
      columns: [],
      count: 0,
      last: null, // {positions, weights}: what the newest query attended to
    }));
  }

  get slots() {
    return this.heads[0].count;
  }

  /** Bytes of one token's K and V in one head. */
  get slotBytes() {
    return 2 * this.method.format.bytes(this.width);
  }

  /** Bytes of K and V that are held. */
  get held() {
    return this.heads.reduce((sum, head) => sum + head.count, 0) * this.slotBytes;
  }

  /** Scaled scores of the first `count` slots, [count]. */
  scores({ keys }, query, h, count) {
    const out = new Float32Array(count), { width } = this;
    for (let slot = 0; slot < count; slot++) {
      let score = 0;
      for (let i = 0; i < width; i++) score += query[h * width + i] * keys[slot * width + i];
      out[slot] = score * this.scaling;
    }
    return out;
  }

  /** Take a prompt that was read (record.js), and let the keep decide. */
  fill(read) {
    const { keep, fetch } = this.method;
    this.append(read.keys, read.values, read.tokens);
    this.limit = keep.evicts ? keep.limit(this.seen) : Infinity;
    this.heads.forEach((head, h) => {
      head.received.set(read.received[h]);
      head.votes = read.votes[h];
      head.last = { positions: head.positions.slice(0, head.count), weights: read.last[h] };
    });
    if (fetch) {
      this.moved = this.held;
      if (!this.whole && fetch.speculates) fetch.prefill(this, read.queries, read.keys);
    }
    if (keep.evicts) this.evict();
  }

  /** Another pass. queries, keys, values, out [tokens, heads * width]. holdsOn: what comes after the prompt is
   * held on top of the budget, and evicts nothing. */
  attend(queries, keys, values, tokens, out, holdsOn) {
    const { keep, fetch } = this.method, { width, hidden } = this, before = this.slots;
    this.append(keys, values, tokens);
    const step = tokens === 1;
    const chosen = step && !this.whole ? fetch.select(this, queries) : null;
    if (fetch) {
      const fetched = chosen ? chosen.reduce((sum, slots) => sum + slots.length, 0) : before * this.heads.length;
      this.moved = (fetched + tokens * this.heads.length) * this.slotBytes;
      if (!this.whole && fetch.speculates) fetch.append(this, keys);
    }
    const observes = keep.observes && !keep.once;
    this.heads.forEach((head, h) => {
      for (let t = 0; t < tokens; t++) {
        const end = head.count - tokens + t + 1; // a query sees itself and what came before
        const slots = chosen ? [...chosen[h], end - 1] : Array.from({ length: end }, (_, slot) => slot);
        const at = t * hidden + h * width;
        const weights = attendSlots(head, width, this.scaling, queries, at, slots, out, at);
        if (observes) slots.forEach((slot, n) => (head.received[slot] += weights[n]));
        if (t === tokens - 1) head.last = { positions: slots.map((slot) => head.positions[slot]), weights };
      }
    });
    if (keep.evicts && !keep.once && !holdsOn) this.evict();
  }

  /** New tokens go into the store, encoded. */
  append(keys, values, tokens) {
    const { width, hidden } = this, { format } = this.method;
    this.heads.forEach((head, h) => {
      for (let t = 0; t < tokens; t++) {
        const from = t * hidden + h * width, to = head.count * width;
        for (const [held, x] of [[head.keys, keys], [head.values, values]]) {
          held.set(x.subarray(from, from + width), to);
          format.write(held.subarray(to, to + width));
        }
        head.received[head.count] = 0;
        head.positions[head.count++] = this.seen + t;
      }
    });
    this.seen += tokens;
  }

  evict() {
    for (const head of this.heads) {
      const stays = this.method.keep.choose(head, this.limit, this.seen);
      if (stays) this.only(head, stays);
    }
  }

  /** The reader's own eviction: these positions leave every head. */
  drop(positions) {
    for (const head of this.heads) {
      const slots = Array.from({ length: head.count }, (_, slot) => slot);
      this.only(head, slots.filter((slot) => !positions.includes(head.positions[slot])));
    }
  }

  /** Only these slots of a head stay, in this order; it is ascending. */
  only(head, slots) {
    const { width } = this;
    slots.forEach((slot, to) => {
      head.keys.copyWithin(to * width, slot * width, (slot + 1) * width);
      head.values.copyWithin(to * width, slot * width, (slot + 1) * width);
      head.positions[to] = head.positions[slot];
      head.received[to] = head.received[slot];
      const few = head.columns.length;
      if (few) head.partial.copyWithin(to * few, slot * few, (slot + 1) * few);
    });
    head.count = slots.length;
  }
}

/** All layers, with one method. */
class Cache {
  constructor(config, method, room, holdsOn) {
    this.holdsOn = holdsOn;
    this.layers = Array.from({ length: config.layers }, (_, index) => new Layer(config, index, method, room));
  }

  /** Whether layer `index` guesses before its turn, and by what: the query that it would ask. */
  speculates(index) {
    const layer = this.layers[index];
    return layer !== undefined && !layer.whole && layer.method.fetch.speculates;
  }

  speculate(index, query) {
    this.layers[index].method.fetch.speculate(this.layers[index], query);
  }

  attend(index, queries, keys, values, tokens, out) {
    this.layers[index].attend(queries, keys, values, tokens, out, this.holdsOn);
  }
}

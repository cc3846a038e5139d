// Session: a prompt is read once; then any method, budget, protocol and eviction answers from what was read.

"use strict";

const METHODS = {
  full: () => ({}),
  int4: () => ({ format: integers(4) }),
  int2: () => ({ format: integers(2) }),
  sinks: (budget) => ({ keep: new Sinks(budget) }),
  h2o: (budget) => ({ keep: new H2O(budget) }),
  snapkv: (budget) => ({ keep: new SnapKV(budget) }),
  topk: (budget) => ({ fetch: new TopK(budget) }),
  infinigen: (budget, skewing) => ({ fetch: new InfiniGen(budget, skewing) }),
};

/** What a head knows of a token, in the pictures. */
const STATE = { none: 0, gone: 1, held: 2, fetched: 3, onHost: 4 };

class Session {
  constructor(engine, tokenizer, skewing) {
    this.engine = engine;
    this.tokenizer = tokenizer;
    this.skewing = skewing;
    this.reads = new Map(); // token numbers -> Record, the last few
  }

  /** What is compressed, what follows it in one pass, and the last token, which is decoded as a step of its own,
   * so that the answer's first word comes through the method. */
  cut(facts, question, protocol) {
    const ids = this.tokenizer.encode(facts + question);
    const context = protocol === "context-first" ? this.tokenizer.encode(facts).length : ids.length - 1;
    const end = Math.min(context, ids.length - 1);
    return { ids, context: ids.slice(0, end), rest: ids.slice(end, -1), last: ids.at(-1) };
  }

  /** The prompt, read now or found. */
  read(ids) {
    const key = ids.join();
    if (!this.reads.has(key)) {
      const record = new Record(this.engine.config);
      this.engine.forward(ids, 0, record);
      if (this.reads.size >= 4) this.reads.delete(this.reads.keys().next().value);
      this.reads.set(key, record);
    }
    return this.reads.get(key);
  }

  /** Answer. evicted: positions in what is compressed that leave every head right after it was read; count:
   * tokens to decode. Returns the prompt's tokens, the answer, and one entry per pass in `steps`. */
  run({ facts, question, protocol, method, budget, evicted = [], count = 16 }) {
    const { engine, tokenizer } = this, { config } = engine;
    const { ids, context, rest, last } = this.cut(facts, question, protocol);
    if (context.length === 0) throw new Error("there is nothing to read yet: write a fact");
    const policies = { format: EXACT, keep: new KeepAll(), fetch: null, ...METHODS[method](budget, this.skewing) };
    if (policies.keep.budget === 1) policies.keep = new KeepAll();
    const total = ids.length + count, cache = new Cache(config, policies, total, protocol === "context-first");
    const read = this.read(context);
    cache.layers.forEach((layer, l) => layer.fill(read.layers[l]));
    if (evicted.length) cache.layers.forEach((layer) => layer.drop(evicted));
    const steps = [this.look(cache, context.at(-1), total)];
    let seen = context.length;
    if (rest.length) {
      engine.forward(rest, seen, cache);
      seen += rest.length;
      steps.push(this.look(cache, rest.at(-1), total));
    }
    const answer = [];
    for (let fed = last; answer.length < count; fed = answer.at(-1)) {
      const logits = engine.forward([fed], seen++, cache), likely = likeliest(logits, 3);
      answer.push(likely[0].id);
      const words = likely.map(({ id, chance }) => [tokenizer.decode([id]), chance]);
      steps.push({ ...this.look(cache, fed, total), likely: words });
    }
    const words = [...ids, ...answer].map((id) => tokenizer.decode([id]));
    return { ids, words, context: context.length, answer, text: tokenizer.decode(answer), steps, total };
  }

  /** What every head holds and looks at after a pass: states and weights [layers * heads, total], by position. */
  look(cache, fed, total) {
    const { layers, heads } = this.engine.config, hosted = cache.layers[0].method.fetch !== null;
    const states = new Uint8Array(layers * heads * total), weights = new Float32Array(layers * heads * total);
    cache.layers.forEach((layer, l) => layer.heads.forEach((head, h) => {
      const at = (l * heads + h) * total;
      states.fill(STATE.gone, at, at + layer.seen);
      for (let slot = 0; slot < head.count; slot++) {
        states[at + head.positions[slot]] = hosted ? STATE.onHost : STATE.held;
      }
      head.last.positions.forEach((position, n) => {
        weights[at + position] = head.last.weights[n];
        if (states[at + position] === STATE.onHost) states[at + position] = STATE.fetched;
      });
    }));
    const sum = (name) => cache.layers.reduce((all, layer) => all + layer[name], 0);
    return { fed, seen: cache.layers[0].seen, states, weights, held: sum("held"), moved: sum("moved") };
  }
}

/** The likeliest next tokens with their probabilities. */
function likeliest(logits, count) {
  let most = -Infinity, total = 0;
  for (const logit of logits) most = Math.max(most, logit);
  for (const logit of logits) total += Math.exp(logit - most);
  const found = [];
  for (let n = 0; n < count; n++) {
    let id = -1;
    for (let i = 0; i < logits.length; i++) {
      if ((id < 0 || logits[i] > logits[id]) && !found.some((other) => other.id === i)) id = i;
    }
    found.push({ id, chance: Math.exp(logits[id] - most) / total });
  }
  return found;
}

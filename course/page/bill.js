// The bill: what a released model's cache costs on a device, method by method. As kvlab/bill, formula by formula;
// what a method is comes from its policies (recipes.py).

"use strict";

/** Tokens that a budget allows; 1 is no limit. */
const resolved = (budget, tokens) => (budget === 1 ? Infinity : Math.max(1, Math.floor(budget * tokens + 1e-6)));

/** Tokens that a layer has any use for: W - 1 of a window of W. */
const useful = (kind, tokens) => (kind.window ? Math.min(tokens, kind.window - 1) : tokens);

/** Tokens that a keep lets stay in layer `order` of `layers`. */
function stays(keep, kind, tokens, order, layers) {
  if (!keep) return useful(kind, tokens);
  const prompt = Math.min(tokens, kind.window ?? tokens);
  let limit = resolved(keep.budget, prompt);
  if (keep.beta) {
    const least = 1 / keep.beta, share = layers > 1 ? 2 - least + (order / (layers - 1)) * (2 * least - 2) : 1;
    limit = Math.min(prompt, Math.max(keep.window, Math.floor(limit * share + 1e-6)));
  }
  return Math.min(limit, useful(kind, tokens));
}

const divisor = (a, b) => (b ? divisor(b, a % b) : a);

/** Bits of one token's key and value in one head, where `held` tokens are held. */
function slotBits(bits, kind, held) {
  if (bits.codes === undefined) {
    const found = bits[`${kind.heads},${kind.key},${kind.value}`];
    if (typeof found === "string") throw new Error(found);
    return found[0] + found[1] / held;
  }
  if (kind.window) throw new Error("kivi: keys are written in blocks of tokens, so a sliding window cannot let single ones go; use int2 or int4");
  const written = Math.max(0, held - bits.recent), perBlock = 32 * Math.ceil(written / bits.group);
  return ["key", "value"].reduce((sum, side) => {
    if (!written) return sum + 16 * kind[side];
    const keys = bits.codes + perBlock / written, values = bits.codes + 32 / divisor(bits.group, kind[side]);
    return sum + (kind[side] * (((keys + values) / 2) * written + 16 * (held - written))) / held;
  }, 0);
}

/** Tokens that a step fetches at least, if the last `held` of `tokens` are on the host: the smallest pages. */
function smallestPages({ page, fewest }, budget, held, tokens) {
  const first = tokens - held, there = Math.floor(tokens / page) - Math.floor(first / page) + 1;
  const count = Math.max(fewest, Math.floor(budget / page));
  return count >= there ? held : page - (first % page) + (tokens % page) + (count - 2) * page;
}

/** One layer that holds `held` of `tokens` tokens: bytes on device and host, moved, read, operations, and
 * `staged`, what a host sends it in a step. An Error where kvlab refuses the method. */
function layerCost(recipe, kind, held, whole, tokens, context) {
  const { bits, place, buffer } = recipe, per = slotBits(bits, kind, Math.max(held, 1));
  const bytes = (slots) => (slots * kind.heads * per) / 8, index = held * kind.index * 2;
  const reads = Math.min(held, kind.reads || held);
  if (place) {
    if (kind.latent) throw new Error("K and V are made of a latent after the cache: a host has nothing to fetch by");
    let attended = held, partial = 0; // tokens; bytes of what a step chooses by
    if (!whole) {
      const budget = resolved(place.budget, Math.min(tokens, kind.window || tokens));
      attended = place.page ? smallestPages(place, budget, held, tokens) : Math.min(budget, held);
      if (place.page) partial = Math.ceil(tokens / place.page) * kind.heads * 2 * kind.key * 2;
      if (place.ratio) partial = held * kind.heads * Math.max(1, halfEvenWhole(place.ratio * kind.key)) * 2;
    }
    return {
      device: partial + index, host: bytes(held), moved: bytes(attended) + bytes(1),
      read: (whole ? bytes(reads) : bytes(attended) + partial) + index,
      operations: 2 * kind.scores * attended, staged: bytes(attended),
    };
  }
  const slots = buffer === "all" ? context ?? tokens : buffer ? Math.ceil(held / buffer) * buffer : held;
  const operations = 2 * kind.scores * reads + 2 * kind.index_scores * held;
  return { device: bytes(slots) + index, host: 0, moved: 0, read: bytes(reads) + index, operations, staged: 0 };
}

/** Python's round: halves go to the even number. */
const halfEvenWhole = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

/** A static graph's buffers: (1 + spare) * (S - 1) rows in every layer, of which S - 1 are read. */
function padded({ spare, bits }, model, tokens) {
  const kinds = [...model.layers].map((letter) => model.kinds[letter]), rows = (model.context ?? tokens) - 1;
  if (Object.values(model.kinds).some((kind) => kind.window || kind.index || kind.state || kind.shares || kind.latent)) {
    throw new Error("a static graph knows full attention alone");
  }
  const read = kinds.reduce((sum, kind) => sum + (rows * kind.heads * (kind.key + kind.value) * bits) / 8, 0);
  const operations = 2 * rows * kinds.reduce((sum, kind) => sum + kind.scores, 0);
  return { device: (1 + spare) * read, host: 0, moved: 0, read, operations };
}

/** All layers of one row of `tokens` tokens. */
function account(recipe, model, tokens) {
  if (recipe.recompute) return { device: 0, host: 0, moved: 0, read: 0, operations: prefillOperations(model, tokens) };
  if (recipe.padded) return padded(recipe.padded, model, tokens);
  const total = { device: 0, host: 0, moved: 0, read: 0, operations: 0 }, last = {}, known = new Map();
  const layers = [...model.layers], attending = layers.filter((letter) => model.kinds[letter].heads > 0).length;
  let largest = 0, order = 0;
  for (const letter of layers) {
    const kind = model.kinds[letter];
    total.device += kind.state;
    total.read += kind.state;
    if (kind.shares) {
      total.read += last[kind.shares].read;
      total.operations += last[kind.shares].operations;
    }
    if (!kind.heads) continue;
    const held = stays(recipe.keep, kind, tokens, order, attending);
    const whole = !recipe.place || recipe.place.budget === undefined || order < recipe.place.full;
    const key = `${letter} ${held} ${whole}`;
    if (!known.has(key)) known.set(key, layerCost(recipe, kind, held, whole, tokens, model.context));
    const part = (last[letter] = known.get(key));
    for (const name of Object.keys(total)) total[name] += part[name];
    largest = Math.max(largest, part.staged);
    order++;
  }
  total.device += largest;
  return { ...total, pages: Boolean(recipe.place?.pages) };
}

/** Bytes of weights, or of those that are read `when`. */
function weightBytes(model, ...when) {
  const rows = model.weights.filter(([, , , read]) => !when.length || when.includes(read));
  return rows.reduce((sum, [, count, bits]) => sum + (count * bits) / 8, 0);
}

const parameters = (model, when) => model.weights.reduce((sum, [, count, , read]) => sum + (read === when ? count : 0), 0);

/** Bytes of weights that a step of `rows` rows reads: of experts those that some row takes. */
function stepWeights(model, rows) {
  const read = weightBytes(model, "step", "head");
  if (!model.experts) return read;
  const [all, taken] = model.experts;
  return read + weightBytes(model, "experts") * (1 - (1 - taken / all) ** rows);
}

/** Parameters of the blocks that one token meets. */
function met(model) {
  const [all, taken] = model.experts ?? [1, 1];
  return parameters(model, "step") + (parameters(model, "experts") * taken) / all;
}

/** Pairs of a query and a key that it sees. */
function pairs(tokens, window) {
  const outside = window ? Math.max(0, tokens - window) : 0;
  return (tokens * (tokens + 1) - outside * (outside + 1)) / 2;
}

function prefillOperations(model, tokens) {
  let scored = 0;
  for (const letter of model.layers) {
    const kind = model.kinds[letter], limit = Math.min(kind.window || tokens, kind.reads || tokens);
    scored += kind.scores * pairs(tokens, limit) + kind.index_scores * pairs(tokens, kind.window);
  }
  return 2 * (tokens * met(model) + parameters(model, "head") + scored);
}

/** Seconds that reading one user's context takes at least. */
const prefillSeconds = (model, device, tokens) =>
  Math.max(prefillOperations(model, tokens) / device.flops, stepWeights(model, tokens) / device.bandwidth);

/** The longest context whose cache of `users` rows fits into `left` bytes; null where none is known. */
function longest(recipe, model, left, users) {
  const fits = (tokens) => tokens === 0 || users * account(recipe, model, tokens).device <= left;
  if (model.context === null) return null;
  if (fits(model.context)) return model.context;
  let low = 0, high = model.context;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

/** The recipe with another budget, if it has one. */
function withBudget(recipe, budget) {
  if (recipe.budget === null) return recipe;
  const { keep, place } = recipe;
  return { ...recipe, keep: keep && { ...keep, budget }, place: place?.budget === undefined ? place : { ...place, budget } };
}

/** One line of the bill: bytes of all users, users and tokens that fit (null: any), floors of seconds per token of
 * the users that fit, and what runs out first; or {refused}. */
function billLine(recipe, model, device, context, users) {
  let row;
  try {
    row = account(recipe, model, context);
  } catch (error) {
    return { refused: error.message };
  }
  const left = device.memory - weightBytes(model), fit = row.device ? Math.floor(left / row.device) : null;
  if (row.pages && users * row.host <= left) row = { ...row, device: row.host, host: 0, moved: 0 };
  const served = fit === null ? users : Math.min(users, fit);
  const line = {
    device: users * row.device, host: users * row.host, moved: users * row.moved,
    users: fit, tokens: longest(recipe, model, left, users), seconds: null, served, first: "memory",
  };
  if (!served) return line;
  const others = recipe.recompute ? 0 : 2 * (met(model) + parameters(model, "head")), operations = served * (row.operations + others);
  const floors = {
    bandwidth: (stepWeights(model, served) + served * row.read) / device.bandwidth,
    link: (served * row.moved) / device.link, "FLOP/s": operations / device.flops,
  };
  const bound = Object.keys(floors).reduce((a, b) => (floors[b] > floors[a] ? b : a));
  return { ...line, seconds: floors[bound], first: served === users ? bound : "memory" };
}

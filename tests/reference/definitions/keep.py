"""Keep: which tokens one KV head holds. Where two tokens are equally good, the older one stays."""

import math

import torch
from torch import Tensor


def budget(part: float | int, tokens: int) -> int:
    """Tokens that may be held: a count as it is, or a fraction below 1 of the prompt's, at least one."""
    return part if part > 1 else max(1, int(part * tokens + 1e-6))


def sinks(tokens: int, budget: int, first: int) -> list[int]:
    """StreamingLLM (Xiao et al. 2023, section 3.2): the first tokens, and the newest ones.

    tokens: seen so far. At least one of the budget is for the newest token.
    """
    if tokens <= budget:
        return list(range(tokens))
    first = min(first, budget - 1)
    return [*range(first), *range(tokens - (budget - first), tokens)]


def h2o(acc: dict[int, float], given: dict[int, float], budget: int, recent: float) -> dict[int, float]:
    """H2O (Zhang et al. 2023, section 4): one pass, from what tokens got before it to what is held after it.

    acc: position -> attention received so far, for the tokens held. given: position -> what this pass's
    queries gave, for these and the new ones. recent: part of the budget that is for the newest tokens.
    Returns acc of the tokens that stay: the newest, and those outside that window that got most.
    """
    acc = {token: acc.get(token, 0.0) + weight for token, weight in given.items()}
    first = max(acc) + 1 - max(1, int(budget * recent))
    newest = [token for token in acc if token >= first]
    others = [token for token in acc if token < first]
    heavy = sorted(others, key=lambda token: (-acc[token], token))[: budget - len(newest)]
    return {token: acc[token] for token in sorted([*heavy, *newest])}


def snapkv(votes: list[float], budget: int, window: int, kernel: int) -> list[int]:
    """SnapKV (Li et al. 2024, listing 1): once, after the prompt.

    votes: what every token of the prompt got from its last `window` queries. A token before the window counts
    as much as the best of the `kernel` around it there; the window itself stays, its newest tokens where the
    budget is smaller.
    """
    tokens, reach = len(votes), kernel // 2
    earlier = votes[: max(0, tokens - window)]
    pooled = [max(earlier[max(0, token - reach) : token + reach + 1]) for token in range(len(earlier))]
    newest = list(range(max(0, tokens - min(window, budget)), tokens))
    best = sorted(range(len(earlier)), key=lambda token: (-pooled[token], token))
    return sorted([*best[: max(0, budget - len(newest))], *newest])


def pyramid(mean: int, layer: int, layers: int, window: int, tokens: int, beta: float) -> int:
    """PyramidKV (Cai et al. 2024, section 4.1): the budget of a layer, from the mean over layers.

    The highest layer gets mean / beta, the lowest what makes the mean right, the others lie on the line
    between; never less than the window, nor more than the prompt's `tokens`.
    """
    least = mean / beta
    most = 2 * mean - least
    share = most + (least - most) * layer / (layers - 1) if layers > 1 else mean
    return min(tokens, max(window, int(share + 1e-6)))


def tova(weights: dict[int, float], budget: int) -> list[int]:
    """TOVA (Oren et al. 2024, section 3.2): after every pass, for all heads of a layer alike.

    weights: position -> weight that the newest query gave, mean over the layer's heads. The newest stays.
    """
    earlier = sorted(weights)[:-1]
    best = sorted(earlier, key=lambda token: (-weights[token], token))[: budget - 1]
    return sorted([*best, max(weights)])


def adakv(scores: list[list[float]], budget: int, safeguard: float) -> list[int]:
    """AdaKV (Feng et al. 2024, section 3.2): tokens that each KV head of a layer holds, budget on average.

    scores: by head, of every token; the newest token of every head stays, and so do the best safeguard *
    budget of each; the others compete. Where nothing has to go yet, every head may hold the budget.
    """
    if len(scores[0]) <= budget:
        return [budget] * len(scores)
    newest = len(scores[0]) - 1
    held = []
    for mine in scores:
        order = [newest, *sorted(range(newest), key=lambda token: (-mine[token], token))]
        held.append(order[: max(1, int(safeguard * budget + 1e-6))])
    return _compete(scores, held, budget * len(scores))


def kvzip_score(query: Tensor, keys: Tensor, held: list[int], chunk: range, scaling: float, first: int):
    """KVzip (Kim et al. 2025, section 3.2): a score for every token of a chunk that one KV head holds.

    query `[group, n, head_dim]`: of what is read again; keys `[tokens + n, head_dim]`: of the prompt, and of
    that. held: tokens of the prompt that are there, chunk: those that are read again, first: so many of the
    prompt's first tokens are seen besides. The score is the largest weight that any of the queries gives.
    """
    group, fed, _ = query.shape
    tokens = len(keys) - fed
    best = {token: 0.0 for token in held if token in chunk}
    for head in range(group):
        for at in range(fed):
            seen = [t for t in held if t in chunk or t < first] + list(range(tokens, tokens + at + 1))
            weights = (query[head, at] @ keys[seen].T * scaling).softmax(-1).tolist()
            for token, weight in zip(seen, weights, strict=True):
                if token in best:
                    best[token] = max(best[token], weight)
    return best


def kvzip(scores: list[list[float]], total: int, first: int) -> list[list[int]]:
    """KVzip, once after the prompt: which tokens the KV heads of all layers hold, `total` together.

    scores: by head, of every token that it holds. The newest stays, and so do the `first` tokens.
    """
    ranked = [[first + 1.0 - at if at < first else score for at, score in enumerate(mine)] for mine in scores]
    shares = _compete(ranked, [[len(mine) - 1] for mine in ranked], total)
    found = []
    for mine, share in zip(ranked, shares, strict=True):
        best = sorted(range(len(mine) - 1), key=lambda token: (-mine[token], token))[: share - 1]
        found.append(sorted([*best, len(mine) - 1]))
    return found


def _compete(scores: list[list[float]], held: list[list[int]], total: int) -> list[int]:
    """How many tokens each head holds when the best of all that none holds yet fill up to `total`; where two
    are equally good, the first head's."""
    others = [
        (-score, head, token)
        for head, mine in enumerate(scores)
        for token, score in enumerate(mine)
        if token not in held[head]
    ]
    counts = [len(mine) for mine in held]
    for _, head, _ in sorted(others)[: max(0, total - sum(counts))]:
        counts[head] += 1
    return counts


def keydiff(keys: Tensor, budget: int) -> list[int]:
    """KeyDiff (Park et al. 2025, section 3.2): once, after the prompt.

    keys `[tokens, head_dim]` of one KV head. The anchor is the mean of the keys at unit length; the keys that
    make the smallest cosine with it stay, and the newest token.
    """
    units = [key / key.norm() for key in keys]
    anchor = sum(units) / len(units)
    likeness = [float(unit @ anchor / anchor.norm()) for unit in units]
    return _least(likeness, budget)


def keynorm(keys: Tensor, budget: int) -> list[int]:
    """Key norm (Devoto et al. 2024, section 3): once, after the prompt, the newest and the shortest keys
    `[tokens, head_dim]` stay, compared to three decimals."""
    return _least([round(float(key.norm()), 3) for key in keys], budget)


def rotation(position: int, frequencies: list[float], head_dim: int) -> Tensor:
    """RoPE (Su et al. 2021, section 3.4.2) as Llama pairs channels, i with i + head_dim / 2: `[head_dim,
    head_dim]`."""
    turn, pairs = torch.eye(head_dim, dtype=torch.float64), len(frequencies)
    for i, frequency in enumerate(frequencies):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        turn[i, i] = turn[i + pairs, i + pairs] = cos
        turn[i, i + pairs], turn[i + pairs, i] = -sin, sin
    return turn


def expected(
    queries: Tensor, keys: Tensor, values: Tensor, frequencies: list[float], scaling: float, future: int,
    budget: int, first: int,
) -> list[int]:  # fmt: skip
    """Expected Attention (Devoto et al. 2025, section 3): once, after the prompt.

    queries `[group, tokens, head_dim]`, the query heads of one KV head, and keys and values `[tokens,
    head_dim]`, all after RoPE with these frequencies. The `first` tokens stay and the newest, and those with
    the largest expected weight, mean over the group, times the norm of their value.
    """
    tokens, width = keys.shape
    turns = [rotation(position, frequencies, width) for position in range(tokens + future)]
    mean_turn = sum(turns[tokens:]) / future
    total = torch.zeros(tokens - first, dtype=torch.float64)
    for head in queries.double():
        before = torch.stack([turns[at].T @ head[at] for at in range(first, tokens)])
        mean = before.mean(0)
        spread = sum(torch.outer(q - mean, q - mean) for q in before) / len(before)
        mean, spread = mean_turn @ mean, mean_turn @ spread @ mean_turn.T
        scores = [float(scaling * k @ mean + scaling**2 / 2 * k @ spread @ k) for k in keys[first:].double()]
        total += torch.tensor(scores, dtype=torch.float64).softmax(0) / len(queries)
    worth = total * values[first:].double().norm(dim=1)
    start, newest = list(range(min(first, tokens, budget - 1))), tokens - 1
    best = sorted(range(first, newest), key=lambda token: (-float(worth[token - first]), token))
    return sorted([*start, *best[: max(0, budget - len(start) - 1)], newest])


def lagkv(keys: Tensor, values: Tensor, budget: int, lag: int, first: int) -> list[int]:
    """LagKV (Liang et al. 2025, section 3.2): once, after the prompt.

    keys and values `[tokens, head_dim]` of one KV head. Blocks of `lag` tokens after the `first` ones; a
    token counts as much as its channels vary on the scale of the next block. The first tokens stay, and the
    last whole block with what follows it; of the other blocks the best of each, then the second best, ...
    """
    tokens, points = len(keys), {}
    blocks = max(0, (tokens - first) // lag - 1)
    for block in range(blocks):
        mine = [first + block * lag + i for i in range(lag)]
        after = [token + lag for token in mine]
        total = [0.0] * lag
        for x in (keys, values):
            least, most = x[after].min(0).values, x[after].max(0).values
            varied = torch.stack([((x[token] - least) / (most - least)).std() for token in mine])
            total = [a + float(b) for a, b in zip(total, varied.softmax(0), strict=True)]
        for rank, i in enumerate(sorted(range(lag), key=lambda i: (total[i], i))):
            points[mine[i]] = rank
    newest = [token for token in range(first, tokens) if token not in points]
    start = list(range(min(first, tokens, budget - 1)))
    end = newest[max(0, len(newest) - (budget - len(start))) :]
    best = sorted(points, key=lambda token: (-points[token], token))
    return sorted([*start, *end, *best[: max(0, budget - len(start) - len(end))]])


def random(tokens: int, head: int, layer: int, seed: int, budget: int) -> list[int]:
    """The floor: once, after the prompt, the tokens with the largest hashes stay, and the newest token."""
    drawn = [_hash(_hash(seed ^ _hash(head + (layer << 16))) ^ token) >> 8 for token in range(tokens)]
    return _least([-value for value in drawn], budget)


def _least(values: list[float], budget: int) -> list[int]:
    """The newest token, and those with the smallest values."""
    newest = len(values) - 1
    best = sorted(range(newest), key=lambda token: (values[token], token))
    return sorted([*best[: budget - 1], newest])


def _hash(x: int) -> int:
    """A 32-bit number from a 32-bit number: twice xor with its upper half, and a multiplication."""
    for _ in range(2):
        x = (x ^ x >> 16) * 0x045D9F3B & 0xFFFFFFFF
    return x ^ x >> 16


def by_chunk(values: list[float], stays: set[int], chunk: int, budget: int) -> list[int]:
    """ChunkKV (Liu et al. 2025, section 3.1): what stays of a prompt whose tokens are worth `values`.

    stays: tokens that a rule holds; the newest does in any case. What others of a chunk are worth is their
    mean; the best chunks stay, the last of them in part, its first tokens, where the budget ends.
    """
    newest = len(values) - 1
    stays = {*stays, newest}
    chunks = {}
    for token in range(newest):
        if token not in stays:
            chunks.setdefault(token // chunk, []).append(token)
    worth = {key: sum(values[token] for token in mine) / len(mine) for key, mine in chunks.items()}
    best = sorted(chunks, key=lambda key: (-worth[key], key))
    chosen = [token for key in best for token in chunks[key]]
    return sorted([*stays, *chosen[: max(0, budget - len(stays))]])


def renumbered(keys: Tensor, positions: list[int], frequencies: list[float]) -> Tensor:
    """StreamingLLM (Xiao et al. 2023, section 3.2): keys `[tokens, head_dim]` that were rotated for these
    positions, as if they had been rotated for 0, 1, 2, ..."""
    width, found = keys.shape[1], []
    for place, (position, key) in enumerate(zip(positions, keys.double(), strict=True)):
        before = rotation(position, frequencies, width).T @ key
        found.append(rotation(place, frequencies, width) @ before)
    return torch.stack(found)


def rkv(queries: Tensor, keys: Tensor, budget: int, scaling: float, kernel: int, share: float) -> list[int]:
    """R-KV (Cai et al. 2025, section 3, and the official code), one KV head, each time that it compresses.

    queries `[group, window, head_dim]`: the last ones; keys `[tokens, head_dim]` of all that is held. The
    last `window` tokens stay; of the others those that these queries look at, and that are not said again.
    """
    tokens, window, reach = len(keys), min(queries.shape[1], len(keys)), kernel // 2
    first = tokens - window
    newest = list(range(max(first, tokens - budget), tokens))
    if first == 0:
        return newest
    scores = torch.stack([keys[:first] @ queries[:, at].T * scaling for at in range(queries.shape[1])])
    looked = scores.amax(2).softmax(1).mean(0).tolist()  # [queries, tokens, group] -> [tokens]
    pooled = [max(looked[max(0, token - reach) : token + reach + 1]) for token in range(first)]
    units = [key / key.norm() for key in keys]
    said = [0.0] * tokens
    for token in range(tokens):
        cosines = [0.0 if other == token else float(units[token] @ units[other]) for other in range(tokens)]
        alike = [other for other in range(tokens) if cosines[other] > 0.5]
        if alike:
            cosines[alike[-1]] = 0.0  # the latest is spared
        said = [sum(pair) for pair in zip(said, cosines, strict=True)]
    again = (torch.tensor(said, dtype=torch.float64) / tokens).softmax(0).tolist()
    worth = [share * pooled[token] - (1 - share) * again[token] for token in range(first)]
    best = sorted(range(first), key=lambda token: (-worth[token], token))
    return sorted([*best[: max(0, budget - len(newest))], *newest])


def merge(keys: dict[int, Tensor], values: dict[int, Tensor], kept: list[int], threshold: float | None):
    """D2O's merging (Wan et al. 2024, section 3.3, and the official code), one KV head: what the tokens that
    stay become when all others go.

    keys, values: position -> `[head_dim]`, of all that is there. threshold: after the last time, None before
    the first. Returns (keys, values, threshold) of now; the same where nothing goes.
    """
    going = [token for token in sorted(keys) if token not in kept]
    if not going:
        return keys, values, threshold
    cosine = lambda a, b: float(keys[a] @ keys[b] / keys[a].norm() / keys[b].norm())
    nearest = {token: max(kept, key=lambda other: cosine(token, other)) for token in going}
    likeness = {token: cosine(token, nearest[token]) for token in going}
    mean = sum(likeness.values()) / len(going)
    threshold = mean if threshold is None else 0.5 * threshold + 0.5 * mean
    found = []
    for held in (keys, values):
        merged = {}
        for other in kept:
            joining = [t for t in going if nearest[t] == other and likeness[t] >= threshold]
            merged[other] = (held[other] + sum(likeness[t] * held[t] for t in joining)) / (1 + len(joining))
        found.append(merged)
    return *found, threshold


def pool(last: dict[int, int], count: dict[int, int], policy: str, capacity: int) -> list[int]:
    """InfiniGen's pool (Lee et al. 2024, section 4.4): victims leave from the older half, worst first.

    last: position -> pass of its last fetch, count: position -> fetches, for every token held. policy:
    "fifo" (the oldest leaves), "lru" (the longest unused), "counter" (the least used); ties: the oldest.
    Where more must leave than the older half, the others follow by age.
    """
    value = {"fifo": lambda token: token, "lru": last.get, "counter": count.get}[policy]
    held = sorted(count)
    half = (len(held) + 1) // 2
    victims = sorted(held[:half], key=lambda token: (value(token), token)) + held[half:]
    return sorted(victims[max(0, len(held) - capacity) :])


def duo(held: list[int], retrieves: bool, first: int, recent: int) -> list[int]:
    """DuoAttention (Xiao et al. 2024, section 3.3): a head that retrieves holds every token, another one the
    first ones and the newest. held: positions."""
    return [p for p in held if retrieves or p < first or p > max(held) - recent]


def kvzap(held: list[int], guess, before: int, threshold: float, recent: int) -> list[int]:
    """KVzap (Jegou and Jeblick 2026, section 3): tokens behind the newest `recent` ones are judged, once.

    held: positions in one head. guess(position) -> what the surrogate says of a token (`surrogate`). before:
    tokens of the text that have been judged.
    """
    judged = range(before, max(held) + 1 - recent)
    return [p for p in held if p not in judged or guess(p) >= threshold]


def surrogate(
    keys: Tensor, values: Tensor, position: int, frequencies: list[float], weight: Tensor, bias: float
) -> float:
    """What a linear model guesses of a token's score in one KV head, from the token's keys after RoPE and
    values in all of them, `[kv_heads, head_dim]`. weight `[kv_heads * 2 * head_dim]`."""
    turn = rotation(position, frequencies, keys.shape[1])
    numbers = [x for key, value in zip(keys, values, strict=True) for x in (*(turn.T @ key), *value)]
    return math.exp(sum(w * x for w, x in zip(weight.tolist(), map(float, numbers), strict=True)) + bias)


def ridge(rows: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Ridge regression: (weight `[numbers]`, bias) with the least sum of (target - weight x - bias)^2 over
    the rows x `[n, numbers]`, + penalty * |weight|^2, for which more rows stand. targets `[n]`."""
    size = rows.shape[1]
    more = torch.cat([penalty**0.5 * torch.eye(size), torch.zeros(size, 1)], 1).to(rows)
    extended = torch.cat([torch.cat([rows, torch.ones_like(rows[:, :1])], 1), more])
    found = torch.linalg.lstsq(extended, torch.cat([targets, targets.new_zeros(size)])[:, None]).solution[
        :, 0
    ]
    return found[:-1], found[-1]

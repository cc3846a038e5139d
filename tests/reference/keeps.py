"""What every keep holds by its definition, after the prompt and after each later pass.

A new keep adds a `by_...` and a line in `KEEPS`; test_keep.py drives them.
`held_after(new, present, attended)` returns the positions held by every KV head after a pass; new:
positions of the pass's own tokens; present: what each KV head held, and these; attended: what its queries
saw of them.
"""

from reference.definitions import keep, place
from reference.driven import keep_all


def by_sinks(budget, first):
    def start(row):
        limit = keep.budget(budget, row.prompt)

        def held_after(new, present, attended):
            kept = [keep.sinks(new[-1] + 1, limit, first)] * len(present)
            if row.window is None:
                return kept
            gone = [limit - len(set(mine) & set(one)) for mine, one in zip(present, kept, strict=True)]
            assert not any(set(range(first)) & set(mine) for mine in present)  # room for newer ones
            return [
                mine[-limit:] if count else one for mine, one, count in zip(present, kept, gone, strict=True)
            ]

        return held_after

    return start


def by_h2o(budget, recent):
    def start(row):
        limit, acc = keep.budget(budget, row.prompt), [{} for _ in row.keys]

        def held_after(new, present, attended):
            for head, over in enumerate(attended):
                given, mine = row.given(head, new, over), present[head]
                before = {token: total for token, total in acc[head].items() if token in mine}
                acc[head] = keep.h2o(before, {token: given.get(token, 0.0) for token in mine}, limit, recent)
            return [list(mine) for mine in acc]

        return held_after

    return start


def once(budget, choose):
    """Of the prompt alone: choose(row, KV head, positions held, limit) -> those that stay."""

    def start(row):
        limit = keep.budget(budget, row.prompt)

        def held_after(new, present, attended):
            if new[0] > 0:
                return present
            return [choose(row, head, mine, limit) for head, mine in enumerate(present)]

        return held_after

    return start


def by_snapkv(budget, window, kernel, limit_of=lambda limit, tokens: limit):
    def choose(row, head, mine, limit):
        tokens = list(range(row.prompt))
        votes = row.given(head, tokens, tokens, window)
        kept = keep.snapkv([votes[token] for token in mine], limit_of(limit, row.prompt), window, kernel)
        return [mine[index] for index in kept]

    return once(budget, choose)


def by_tova(budget):
    def start(row):
        limit = keep.budget(budget, row.prompt)

        def held_after(new, present, attended):
            shares = [row.given(head, new, over, 1) for head, over in enumerate(attended)]
            mean = {t: sum(mine.get(t, 0.0) for mine in shares) / len(shares) for t in present[0]}
            return [keep.tova(mean, limit)] * len(present)

        return held_after

    return start


def by_pool(capacity, policy):
    def start(row):
        limit, step = keep.budget(capacity, row.prompt), [0]
        last, count = [{} for _ in row.keys], [{} for _ in row.keys]

        def held_after(new, present, attended):
            step[0] += 1
            held = []
            for head, over in enumerate(attended):
                for token in over:
                    last[head][token] = step[0]
                    count[head][token] = count[head].get(token, 0) + 1
                held.append(keep.pool(last[head], count[head], policy, limit))
                last[head] = {token: last[head][token] for token in held[-1]}
                count[head] = {token: count[head][token] for token in held[-1]}
            return held

        return held_after

    return start


def by_topk(budget):
    def start(row):
        def fetch(new, held):
            (at,), found = new, []
            for head, past in enumerate(held):
                count = min(keep.budget(budget, at + 1), len(past))
                queries, keys = row.query[row.group(head), at].double(), row.keys[head, past].double()
                found.append([past[i] for i in place.topk(queries, keys, row.scaling, count)])
            return found

        return fetch

    return start


def by_keys(budget, choose):
    """choose(keys `[tokens, head_dim]`, KV head, limit) -> what stays of the prompt."""
    return once(
        budget,
        lambda row, head, mine, limit: [
            mine[i] for i in choose(row.keys[head, mine].double(), head, min(limit, len(mine)))
        ],
    )


def by_keydiff(budget):
    return by_keys(budget, lambda keys, head, limit: keep.keydiff(keys, limit))


def by_keynorm(budget):
    return by_keys(budget, lambda keys, head, limit: keep.keynorm(keys, limit))


def by_cur(budget, window, first):
    """CurDKV as kvpress has it: squared norms as shares of a window's, the keys' times the values'."""

    def shares(row, x):
        weights = [float(token.double() @ token.double()) for token in x[: row.prompt]]
        return [w / sum(weights[i - i % window : i - i % window + window]) for i, w in enumerate(weights)]

    def choose(row, head, mine, limit):
        pairs = zip(shares(row, row.keys[head]), shares(row, row.values[head]), strict=True)
        score = [2 if i < first else round(k * v, 6) for i, (k, v) in enumerate(pairs)]
        best = sorted(mine[:-1], key=lambda i: (-score[i], i))
        return sorted([mine[-1], *best[: limit - 1]])

    return once(budget, choose)


def by_lagkv(budget, lag, first):
    def choose(row, head, mine, limit):
        keys, values = row.keys[head, mine].double(), row.values[head, mine].double()
        block = lag if lag > 1 else max(2, keep.budget(lag, limit))
        begins = sum(token < first for token in mine)
        return [mine[i] for i in keep.lagkv(keys, values, min(limit, len(mine)), block, begins)]

    return once(budget, choose)


def by_expected(budget, future, first):
    """Llama's frequencies: its model rotates nothing here, but says how it would."""

    def choose(row, head, mine, limit):
        width, prompt = row.keys.shape[-1], slice(row.prompt)
        frequencies = [10000.0 ** (-2 * i / width) for i in range(width // 2)]
        given = row.query[row.group(head), prompt], row.keys[head, prompt], row.values[head, prompt]
        return keep.expected(*given, frequencies, row.scaling, future, min(limit, len(mine)), first)

    return once(budget, choose)


def by_random(budget, seed=0):
    return by_keys(budget, lambda keys, head, limit: keep.random(len(keys), head, 0, seed, limit))


def by_adakv(budget, scored, after, safeguard=0.2):
    """scored(row, head, new, mine) -> a score for each of `mine`; after(limit, share, row) -> how a head goes
    on within its share, made once for every head: (head, new, mine, over) -> what it holds."""

    def start(row):
        limit, heads = keep.budget(budget, row.prompt), []

        def held_after(new, present, attended):
            if new[0] == 0:
                scores = [scored(row, head, new, mine) for head, mine in enumerate(present)]
                heads[:] = [after(limit, share, row) for share in keep.adakv(scores, limit, safeguard)]
            return [
                one(head, new, mine, over)
                for head, (one, mine, over) in enumerate(zip(heads, present, attended, strict=True))
            ]

        return held_after

    return start


def snapkv_score(window, kernel):
    def scored(row, head, new, mine):
        votes, reach = list(row.given(head, new, mine, window).values()), kernel // 2
        earlier = votes[: max(0, len(votes) - window)]
        pooled = [max(earlier[max(0, at - reach) : at + reach + 1]) for at in range(len(earlier))]
        return pooled + [window + 1.0 + at for at in range(len(earlier), len(votes))]

    def after(limit, share, row):
        def go_on(head, new, mine, over):
            if new[0] > 0:
                return mine
            votes = list(row.given(head, new, over, window).values())
            return keep.snapkv(votes, share, window, kernel)

        return go_on

    return scored, after


def h2o_score(budget, recent):
    def scored(row, head, new, mine):
        given, first = row.given(head, new, mine), len(mine) - int(keep.budget(budget, row.prompt) * recent)
        return [float("inf") if token >= first else weight for token, weight in given.items()]

    def after(limit, share, row):
        acc, part = {}, (int(limit * recent) + 0.25) / share  # the window is part of an even share

        def go_on(head, new, mine, over):
            given = row.given(head, new, over)
            before = {token: total for token, total in acc.items() if token in mine}
            left = keep.h2o(before, {token: given.get(token, 0.0) for token in mine}, share, part)
            acc.clear()
            acc.update(left)
            return list(acc)

        return go_on

    return scored, after


def keydiff_score():
    def scored(row, head, new, mine):
        units = [key / key.norm() for key in row.keys[head, mine].double()]
        anchor = sum(units) / len(units)
        return [-float(unit @ anchor / anchor.norm()) for unit in units]

    def after(limit, share, row):
        return lambda head, new, mine, over: (
            mine if new[0] > 0 else [mine[i] for i in keep.keydiff(row.keys[head, mine].double(), share)]
        )

    return scored, after


def by_rkv(budget, every, window, kernel, share=0.07):
    def start(row):
        limit = keep.budget(budget, row.prompt)

        def follow(new, present, attended):
            if len(present[0]) - limit < (1 if new[0] == 0 else every):
                return present
            last = slice(max(0, new[-1] + 1 - window), new[-1] + 1)
            return [
                [
                    mine[i]
                    for i in keep.rkv(
                        row.query[row.group(head), last].double(), row.keys[head, mine].double(), limit,
                        row.scaling, kernel, share,
                    )
                ]
                for head, mine in enumerate(present)
            ]  # fmt: skip

        return follow

    return start


KEEPS = {
    "sinks:budget=0.3,sinks=3": by_sinks(0.3, 3),
    "sinks:budget=3,sinks=4": by_sinks(3, 4),
    "h2o:budget=0.3,recent=0.5": by_h2o(0.3, 0.5),
    "h2o:budget=11,recent=0.3": by_h2o(11, 0.3),
    "h2o:budget=0.13,recent=0": by_h2o(0.13, 0),
    "h2o:budget=7,recent=1": by_h2o(7, 1),
    "h2o:budget=0.01,recent=0.5": by_h2o(0.01, 0.5),  # one token, the newest
    "snapkv:budget=0.4,window=5,kernel=3": by_snapkv(0.4, 5, 3),
    "snapkv:budget=9,window=4,kernel=7": by_snapkv(9, 4, 7),
    "snapkv:budget=5,window=8,kernel=1": by_snapkv(5, 8, 1),
    "tova:budget=0.3": by_tova(0.3),
    "tova:budget=9": by_tova(9),
    "lagkv:budget=0.4,lag=3,sinks=2": by_lagkv(0.4, 3, 2),
    "lagkv:budget=0.7": by_lagkv(0.7, 0.25, 4),
    "lagkv:budget=4,lag=4,sinks=5": by_lagkv(4, 4, 5),
    "expected:budget=0.3,future=40,sinks=2": by_expected(0.3, 40, 2),
    "expected:budget=9": by_expected(9, 512, 4),
    "keydiff:budget=0.3": by_keydiff(0.3),
    "curdkv:budget=0.3,window=4": by_cur(0.3, 4, 4),
    "curdkv:budget=9,window=7,sinks=2": by_cur(9, 7, 2),
    "keydiff:budget=9": by_keydiff(9),
    "keynorm:budget=0.3": by_keynorm(0.3),
    "random:budget=0.3": by_random(0.3),
    "random:budget=9,seed=5": by_random(9, 5),
    "full": keep_all,
}

"""A cache driven layer by layer with tensors drawn at random, and every row of them as tensors of its own.

No model runs: K, V and the queries go into `layer.update` and `layer.attend` directly, as attention would
hand them over, and the rehearsed query into `cache.speculate`. So the definition knows every number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from reference.definitions import attention
from tiny import tiny
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

import kvlab
from kvlab.visibility import Visibility

KV_HEADS, GROUP = 2, 3
STEPS = 40


def model_of(layers: int, head_dim: int, family: str = "llama", group: int = GROUP):
    heads = KV_HEADS * group
    shape = {"hidden_size": 8 * heads, "head_dim": head_dim} if family == "llama" else {}
    return tiny(
        family, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=KV_HEADS, **shape
    )


@dataclass
class Row:
    """One row of one layer without its padding: query `[heads, tokens, head_dim]`, asked (what the layer is
    guessed to ask) the same, keys and values `[kv_heads, tokens, head_dim]`, all fp32."""

    query: Tensor
    asked: Tensor
    keys: Tensor
    values: Tensor
    prompt: int
    scaling: float
    window: int | None

    def group(self, head: int) -> slice:
        """The query heads of a KV head."""
        heads = range(len(self.query))
        mine = [q for q in heads if attention.kv_head(q, len(heads), len(self.keys)) == head]
        return slice(mine[0], mine[-1] + 1)

    def given(self, head: int, new: list[int], over: list[int], last: int | None = None) -> dict[int, float]:
        """Position -> what the queries of the new tokens (or the last of them) gave to these tokens."""
        total = dict.fromkeys(over, 0.0)
        for at in new if last is None else new[-last:]:
            seen = [p for p in over if p in attention.seen(at, self.window)]
            queries, keys = self.query[self.group(head), at].double(), self.keys[head, seen].double()
            shares = attention.group_weights(queries, keys, self.scaling).tolist()
            for position, share in zip(seen, shares, strict=True):
                total[position] += share
        return total

    def out(self, new: list[int], over: list[list[int]], keys=None, values=None) -> Tensor:
        """What every query head returns for the new tokens, `[heads, new, head_dim]`."""
        keys, values = self.keys if keys is None else keys, self.values if values is None else values
        found = torch.empty(len(self.query), len(new), keys.shape[-1])
        for q in range(len(self.query)):
            head = attention.kv_head(q, len(self.query), len(self.keys))
            for i, at in enumerate(new):
                seen = [p for p in over[head] if p in attention.seen(at, self.window)]
                mine = keys[head, seen].double(), values[head, seen].double()
                found[q, i] = attention.attend(self.query[q, at].double(), *mine, self.scaling)
        return found


@dataclass
class Seen:
    """What a layer did in one pass. attended, kept: positions by row and KV head; out `[batch, heads, new,
    head_dim]`; moved: bytes."""

    attended: list[list[list[int]]]
    kept: list[list[list[int]]]
    out: Tensor
    moved: int


class Driven:
    """method: a spec, or the parts of a `KVCache`. sizes: prompt lengths of a left-padded batch. passes: new
    tokens of every later pass. noted: what a pass attends to is noted by `on_read`; without it, it is what
    was held before, and its own tokens, and a step may go in one call. After `run`, `seen[pass][layer]`."""

    def __init__(
        self, method="full", sizes=(33, 7), passes=(1,) * STEPS, *, head_dim=20, layers=1, window=None,
        family="llama", group=GROUP, seed=0, noted=True,
    ):  # fmt: skip
        self.model = model_of(layers, head_dim, family, group)
        made = kvlab.make_cache(self.model, method) if isinstance(method, str) else None
        self.cache = made or kvlab.KVCache(self.model, **method)
        for layer in self.cache.layers:
            layer.local = window
        self.noted = noted
        self.sizes, self.passes, self.window, self.scaling = sizes, passes, window, head_dim**-0.5
        self.longest, self.norms = max(sizes), set()
        tokens, generator = self.longest + sum(passes), torch.Generator().manual_seed(seed)

        def draw(heads: int, size: float = 1.0) -> list[Tensor]:
            shape = layers, len(sizes), heads, tokens, head_dim
            return list(torch.randn(shape, generator=generator) * size)

        self.query, self.asked = draw(KV_HEADS * group, 1.5), draw(KV_HEADS * group, 1.5)
        self.keys, self.values = draw(KV_HEADS), draw(KV_HEADS)
        self.seen: list[list[Seen]] = []

    def run(self, after=None) -> Driven:
        """after(step, layer) is called when a layer has done its pass."""
        end = 0
        for step, new in enumerate((self.longest, *self.passes)):
            start, end = end, end + new
            mask = torch.arange(end) >= self.longest - torch.tensor(self.sizes)[:, None]
            rule = None if self.window is None else sliding_window_causal_mask_function(self.window)
            self.visibility = Visibility(None if bool(mask.all()) else mask, rule, self.window)
            self.seen.append([])
            for layer in self.cache.layers:
                if new == 1 and layer.index + 1 < len(self.cache.layers):
                    self._speculate(layer.index + 1, start)
                self.seen[-1].append(self._pass(layer, slice(start, end)))
                if after is not None:
                    after(step, layer)
        return self

    def _speculate(self, index: int, at: int) -> None:
        def query(norm=None):
            self.norms.add((index, norm))
            return self.asked[index][:, :, at : at + 1]

        self.cache.speculate(index, query)

    def _pass(self, layer, new: slice) -> Seen:
        attended = []

        def note(_, held, slots, query):
            positions = layer.positions
            if slots is not None:
                positions = positions.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, -1)
            attended.append(_lists(positions))

        if self.noted:
            layer.on_read = note
        elif layer.lengths:
            own = range(new.start - self.longest, new.stop - self.longest)
            attended.append([
                [[*head, *(size + at for at in own)] for head in row]
                for row, size in zip(_lists(layer.positions), self.sizes, strict=True)
            ])  # fmt: skip
        tensors = (x[layer.index][:, :, new] for x in (self.keys, self.values, self.query))
        keys, values, query = tensors
        layer.update(keys, values)
        out = layer.attend(query, self.visibility, self.scaling)
        if not attended:  # the prompt
            attended.append([[list(range(size))] * KV_HEADS for size in self.sizes])
        return Seen(attended[0], _lists(layer.positions), out, layer.moved_bytes)

    def rows(self, layer: int = 0) -> list[Row]:
        found = []
        for row, size in enumerate(self.sizes):
            own = (x[layer][row, :, self.longest - size :] for x in self._tensors)
            found.append(Row(*own, size, self.scaling, self.window))
        return found

    @property
    def _tensors(self):
        return self.query, self.asked, self.keys, self.values

    def positions_of(self, row: int):
        """(pass, positions of its new tokens) of a row."""
        end = 0
        for step, new in enumerate((self.sizes[row], *self.passes)):
            yield step, list(range(end, end + new))
            end += new


def _lists(positions: Tensor) -> list[list[list[int]]]:
    """`[batch, kv_heads, slots]` -> sorted positions by row and head, without padding."""
    return [[sorted(p for p in head if p >= 0) for head in row] for row in positions.tolist()]


def check(run: Driven, keep, fetch=None, layer: int = 0) -> None:
    """Hold a layer's attended sets, kept sets and outputs, after every pass, against their definition.

    keep(row, step, new, attended) -> the positions that every KV head holds on to, `attended` being those of
    every head that this pass's queries saw, and what else is held when a fetch chose; made by `keep(row)`.
    fetch(row, new, held) -> past positions that every KV head fetches (default: all).
    """
    for index, row in enumerate(run.rows(layer)):
        held_after, choose = keep(row), None if fetch is None else fetch(row)
        held = [[] for _ in row.keys]
        for step, new in run.positions_of(index):
            past = held if choose is None or step == 0 or len(new) > 1 else choose(new, held)
            attended = [[*mine, *new] for mine in past]
            found = run.seen[step][layer]
            where = f"pass {step}, row {index}"
            assert found.attended[index] == attended, where
            expected = row.out(new, attended)
            assert torch.allclose(found.out[index, :, -len(new) :], expected, atol=1e-5), where
            present = [[*mine, *new] for mine in held]
            if row.window is not None:
                present = [[at for at in mine if at > new[-1] + 1 - row.window] for mine in present]
            held = held_after(new, present, attended)
            assert found.kept[index] == held, where


def keep_all(row: Row):
    return lambda new, present, attended: present

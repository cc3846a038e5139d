"""PaddedCache: the static-graph engine in the form of a cache, for decode and the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from weakref import proxy

import torch
from torch import Tensor

from ..bound import Bound
from ..contents import StandIn
from ..one_thread import OneThread
from ..parameters import check_batch, check_kind, check_rows
from ..stats import Stats


class PaddedCache(Bound):
    """The rows of a batch, each with a KV manager of its own; the engine runs them one after the other.

    `kvlab.decode` and the harness call `forward` in place of the model. `model.generate` would run the model
    itself, so there a ValueError says what to use. engine: a `StaticGraphEngine`.
    """

    def __init__(self, engine):
        super().__init__(layers=[_Layer(self, index) for index in range(engine.shape.layers)])
        self.engine, self.thread = engine, OneThread()
        self.reset()

    @property
    def model(self):
        """The model that it was made for."""
        return self.engine.model

    def __deepcopy__(self, memo) -> PaddedCache:
        memo[id(self)] = twin = PaddedCache(self.engine)
        with self.thread.alone():
            twin.managers, twin.real = [manager.copy() for manager in self.managers], self.real
        twin._filled, twin.fed, twin.broken, twin.spec = list(self._filled), self.fed, self.broken, self.spec
        return twin

    @property
    def lengths(self) -> list[int]:
        """Real tokens seen, per row."""
        return [manager.held for manager in self.managers]

    def reset(self) -> None:
        """Forget everything."""
        with self.thread.alone():
            self.managers, self._filled, self.fed, self.broken = [], [], False, False
            self.real = torch.ones(0, 0, dtype=torch.bool, device="cpu")  # [batch, tokens seen], else padding

    @property
    def columns(self) -> int:
        """Tokens seen, padding included."""
        return self.real.shape[1]

    def _saw(self, real: Tensor | None, tokens: int) -> None:
        """The rows were fed so many tokens, of which these are real (None: all)."""
        new = torch.ones(len(self.managers), tokens, dtype=torch.bool, device="cpu")
        self.real = torch.cat([self.real, new if real is None else new & real.cpu()], 1)

    @contextmanager
    def _row_by_row(self) -> Iterator[list]:
        """Yields a list for the rows that are done: what breaks off after the first leaves a broken cache."""
        with self.thread.alone():
            self.check_whole()
            self.broken, done = True, []
            try:
                yield done
            except ValueError:  # a refusal changes nothing of its own row
                self.broken = bool(done)
                raise
            self.broken = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, logits_to_keep: int = 0, **_):
        """What a model's forward returns: `.logits` `[batch, tokens, vocabulary]` of the last tokens.

        input_ids `[batch, new tokens]`; attention_mask `[batch, tokens seen + new]`. Padding is not fed; its
        logits are 0.
        """
        batch, tokens = input_ids.shape
        real = None if attention_mask is None else attention_mask[:, -tokens:].bool()
        with self._row_by_row() as found:
            self.fed = True
            self._open(batch)
            for row, manager in enumerate(self.managers):
                mine = slice(None) if real is None else real[row]
                logits = torch.zeros(tokens, self.engine.vocabulary, dtype=torch.float32, device="cpu")
                if ids := input_ids[row][mine].tolist():
                    logits[mine] = torch.from_numpy(self.engine.feed(manager, ids, self.prefilling))
                found.append(logits[-logits_to_keep:])
            self._saw(real, tokens)
        return SimpleNamespace(logits=torch.stack(found))

    def _open(self, batch: int) -> None:
        if not self.managers:
            self.managers = [self.engine.manager() for _ in range(batch)]
            self.real = self.real.new_ones(batch, 0)
        check_batch(batch, len(self.managers))

    def fill(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Take a layer's K and V of a whole prompt, `[batch, kv_heads, tokens, D]`; layers come in order."""
        self._filled.append((keys, values))
        if len(self._filled) < len(self.layers):
            return
        self._open(len(keys))
        engine = self.engine
        with self._row_by_row() as done:
            for row, manager in enumerate(self.managers):
                real = slice(None) if mask is None else mask[row].bool()
                parts = [part for pair in self._filled for x in pair for part in x[row].chunk(engine.parts)]
                rows = torch.stack(parts)[:, :, real]  # [sequences, heads, tokens, D]
                engine.check_prompt(rows.shape[2])
                manager.append(engine.written(rows).numpy())
                done.append(row)
            self._saw(None if mask is None else mask.bool(), keys.shape[2])
            self._filled = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of the old row `beam_idx[i]`; any number of rows (a fork) is allowed."""
        check_rows("beam_idx", beam_idx, len(self.managers))
        with self.thread.alone():
            taken, rows = set(), []
            for row in beam_idx.tolist():
                rows.append(self.managers[row].copy() if row in taken else self.managers[row])
                taken.add(row)
            self.managers, self.real = rows, self.real[beam_idx.cpu()]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row, padding included."""
        check_kind("tokens_to_remove", tokens_to_remove, int, "a whole number")
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected a negative number of tokens to remove")
        with self._row_by_row() as done:
            for manager in self.managers:
                manager.check_crop()
            left = max(0, self.columns + tokens_to_remove)
            for manager, real in zip(self.managers, self.real, strict=True):
                manager.crop(int(real[left:].sum()))
                done.append(manager)
            self.real = self.real[:, :left]

    def stats(self) -> Stats:
        """Bytes allocated by all rows' managers; tokens seen (padding included) and held."""
        return Stats(
            device_bytes=sum(manager.allocated_bytes for manager in self.managers),
            host_bytes=0,
            moved_bytes=0,
            tokens_seen=self.columns,
            tokens_held=max((manager.held for manager in self.managers), default=0),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        raise ValueError(
            "padded runs in an engine of its own: use kvlab.decode(model, ids, cache, n), or "
            "StaticGraphEngine(model).generate(ids, n)"
        )


class _Layer(StandIn):
    """What the harness sees of a layer: a place to put a prompt's K and V."""

    observes = False  # nothing here asks which token received attention
    seen = property(lambda self: self.cache.columns)

    def __init__(self, cache: PaddedCache, index: int):
        super().__init__()
        self.cache, self.index = proxy(cache), index  # no circle: what is let go frees its bytes at once

    def fill(self, given, received=None) -> None:
        """As `Layer.fill`."""
        self.cache.fill(given.keys, given.values, given.visibility.padding)

    def update(self, key_states, value_states, *args, **kwargs):
        return self.cache.update(key_states, value_states, self.index)

    def get_max_length(self) -> int:
        return self.cache.engine.length

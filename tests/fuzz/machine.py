"""A state machine that does to a cache what people do, in any order, and knows what must come of it.

Every row of a batch must give the logits, and hold the tokens, that it gives and holds alone: a fresh cache
of one row, without padding, fed the row's own text; the prompt in one pass where the store is exact (as
`tests/reference` compares with the definitions), in the same pieces where it is coarse. Methods that lose
nothing are held against transformers' own attention, without any cache.
What a fresh cache holds is compared with its definition in `tests/reference`.

`python -m fuzz SECONDS` (`make fuzz`) goes on with new seeds for so long.
"""

import copy
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fast import replayed
from fuzz.alone import PAD, Alone, Row, Turn, bare, positions
from fuzz.cases import METHODS, NOT_BARE, Case
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tiny import VOCABULARY, tiny
from transformers import DynamicCache, StaticCache

import kvlab
from kvlab.faster import engine_of, lodger
from kvlab.layer import Layer

LONGEST, ROWS = 70, 4
ACTIONS = (
    "prompt in pieces", "left padding", "right padding", "copy amid the prompt", "step", "continue", "turn",
    "later padding", "fork", "reorder", "crop", "reset", "deepcopy", "original", "save", "outlier",
    "autocast", "guest",
)  # fmt: skip
WAYS = ("at once", "compiled", "graph")  # what else is counted: a layer's step in one call, a compiled one
OUTLIERS = (1e-42, 1e-9, -30.0, 447.0, 900.0, -1e4, 7e4, 1e7, -1e30, float("inf"), float("nan"))
met: Counter = Counter()  # (method, action) -> times


@dataclass
class Driven:
    """A cache in use: what feeds it, and what its rows must be."""

    stepper: kvlab.Stepper
    rows: list[Row] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """One method at one setting."""

    def __init__(self, case: Case):
        super().__init__()
        self.case, self.method = case, case.method
        self.alone, self.kept = Alone(case), []

    def meet(self, action: str) -> None:
        met[self.method, action] += 1

    def tokens(self, data, rows: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
        return torch.randint(2, VOCABULARY, (rows, count), generator=generator)

    @property
    def longest(self) -> int:
        return max(len(row.text) for row in self.now.rows)

    @initialize(data=st.data())
    def begin(self, data):
        self.now = Driven(kvlab.Stepper(self.case.model, self.case.fresh()))
        self.prompt(data)

    def prompt(self, data) -> None:
        """A prompt of up to three rows, padded on either side, in up to four pieces."""
        sizes = data.draw(st.lists(st.integers(2, 23), min_size=1, max_size=3))
        cuts = data.draw(st.sets(st.integers(1, max(sizes) - 1), max_size=3))
        right = data.draw(st.booleans()) and not self.method.startswith("kivi")  # blocks end there
        copied = data.draw(st.booleans())
        ids, mask = self.tokens(data, len(sizes), max(sizes)), torch.zeros(len(sizes), max(sizes)).long()
        ends = [0, *sorted(cuts), max(sizes)]
        if self.case.coarse and not right:  # every row begins in the first piece, seen as it is
            ends = [0, *(end for end in sorted(cuts) if end > max(sizes) - min(sizes)), max(sizes)]
        for row, size in enumerate(sizes):
            mask[row, slice(0, size) if right else slice(max(sizes) - size, None)] = 1
        pieces = [slice(*pair) for pair in pairwise(ends)]
        stepper, twin = self.now.stepper, None
        with stepper.cache.prefill():
            for index, piece in enumerate(pieces):
                logits = stepper.feed(ids[:, piece], mask[:, piece])
                if copied and index == 0 and len(pieces) > 1:
                    twin = stepper.copied()
        if twin is not None:  # the copy's prompt is open still
            self.now = Driven(twin)
            with twin.cache.prefill():
                for piece in pieces[1:]:
                    logits = twin.feed(ids[:, piece], mask[:, piece])
            self.meet("copy amid the prompt")
        self.meet("prompt in pieces" if len(pieces) > 1 else "prompt")
        if not bool(mask.all()):
            self.meet("right padding" if right else "left padding")
        self.now.rows = []
        for row in range(len(sizes)):
            own = [tuple(ids[row, piece][mask[row, piece].bool()].tolist()) for piece in pieces]
            self.now.rows.append(Row(tuple(part for part in own if part)))
        last = mask[:, pieces[-1]].bool()
        self.check([logits[row][last[row]] for row in range(len(sizes))])

    @property
    def replays(self) -> bool:
        """Whether the last step was a captured one."""
        forward = self.case.model.forward
        return hasattr(forward, "replays") and forward.replays(self.now.stepper.cache)

    def padded(self, data, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens for every row, and which of them are real: the last ones, or none."""
        ids = self.tokens(data, len(self.now.rows), count)
        empty = list(range(count + 1))
        if self.method.startswith("kivi"):  # a block is full at once
            empty = [0]
        elif count > 1 and any(one.place.chooses for one in getattr(self.now.stepper.cache, "attending", ())):
            empty.remove(count - 1)  # one token alone would be a decode step, and fetch
        mask = torch.ones_like(ids)
        for row in mask:
            row[: data.draw(st.sampled_from(empty))] = 0
        mask[data.draw(st.integers(0, len(mask) - 1))] = 1
        return ids, mask

    def fed(self, ids, mask, kind, logits) -> None:
        """The rows were fed a pass of this kind, and answered."""
        if not bool(mask.all()):
            self.meet("later padding")
        for row, tokens in zip(self.now.rows, ids.where(mask > 0, PAD).tolist(), strict=True):
            row.passes = (*row.passes, kind(tokens))
        ends = mask[:, -logits.shape[1] :]
        self.check([one[real > 0] for one, real in zip(logits, ends, strict=True)])

    def feed(self, data, count: int) -> None:
        ids, mask = self.padded(data, count)
        mask = None if bool(mask.all()) and data.draw(st.booleans()) else mask
        layers = self.now.stepper.cache.layers
        made = getattr(lodger(), "made", lambda layer: None)  # how a layer's step goes in one call
        before = [(layer, made(layer)) for layer in layers if isinstance(layer, Layer)]
        logits = self.now.stepper.feed(ids, mask)
        if any(one is not None and made(layer) is one for layer, one in before):
            self.meet("at once")
        if count == 1 and engine_of(self.case.model) == "compiled":
            self.meet("compiled")
        if self.replays:
            self.meet("graph")
        self.fed(ids, torch.ones_like(ids) if mask is None else mask, tuple, logits)

    @rule(data=st.data(), steps=st.integers(1, 3))
    @precondition(lambda self: self.longest + 3 < LONGEST)
    def step(self, data, steps):
        for _ in range(steps):
            self.feed(data, 1)
        self.meet("step")

    @rule(data=st.data(), count=st.integers(2, 6))
    @precondition(lambda self: self.longest + 6 < LONGEST)
    def go_on(self, data, count):
        self.feed(data, count)
        self.meet("continue")

    @rule(data=st.data(), count=st.integers(2, 9), cut=st.integers(2, 7))
    @precondition(lambda self: self.longest + 9 < LONGEST and self.method not in NOT_BARE)
    def turn(self, data, count, cut):
        """A later turn, in bare passes; what rereads refuses it."""
        (ids, mask), stepper, model = self.padded(data, count), self.now.stepper, self.case.model
        self.meet("turn")
        if self.method == "kvzip":
            try:
                bare(stepper, model, ids, mask)
            except ValueError as error:
                assert "expected turns=first" in str(error)
                self.check()
                return
            raise AssertionError("kvzip took a later turn")
        whole = cut >= count - 1 or self.method.startswith("kivi")  # a block is rounded once it is full
        cuts = [count] if whole else [cut, count - cut]
        for pair in zip(ids.split(cuts, 1), mask.split(cuts, 1), strict=True):
            logits = bare(stepper, model, *pair)
        self.fed(ids, mask, Turn, logits)

    def pick(self, rows: list[int]) -> None:
        self.now.stepper.fork(torch.tensor(rows))
        self.now.rows = [copy.copy(self.now.rows[row]) for row in rows]
        self.check()

    @rule(data=st.data())
    def fork(self, data):
        rows = st.lists(st.integers(0, len(self.now.rows) - 1), min_size=1, max_size=ROWS)
        self.pick(data.draw(rows))
        self.meet("fork")

    @rule(data=st.data())
    def reorder(self, data):
        self.pick(data.draw(st.permutations(range(len(self.now.rows)))))
        self.meet("reorder")

    @rule(count=st.integers(1, 4))
    def crop(self, count):
        """Back to a point after the prompt; not where tokens have been evicted, or blocks written."""
        stepper, rows = self.now.stepper, self.now.rows
        written = sum(len(part) for part in rows[0].passes)
        if self.method.startswith("kivi"):  # what a block has been written for stays so
            count = min(count, 1)
            if written and any(layer.store.window[0].shape[2] <= 3 for layer in stepper.cache.layers):
                return
            written = min(written, 0)
        evicts = any(getattr(layer, "evicts", False) for layer in stepper.cache.layers)
        left = "window" in self.case.kind and self.longest > 7
        if left and "graph" in self.case.kind:  # what left the window may be there, until an eager step
            return
        rounded = self.method == "quest+int8"  # its bounds are of keys before they were rounded
        if evicts or left or rounded:
            try:
                stepper.cache.crop(-count)
            except ValueError as error:
                why = "Quest has bounds" if rounded else "the window has left tokens"
                assert "evicted" in str(error) or why in str(error)
            else:
                raise AssertionError("crop: evicted tokens came back")
            self.check()
        elif count <= written:
            last = [row.passes[-1] for row in rows]
            count = min(count, len(last[0]))
            if len(last[0]) > 1 and any(sum(token != PAD for token in one[:-count]) == 1 for one in last):
                count = len(last[0])  # one token that is left of several is a step if it is fed alone
            stepper.cache.crop(-count)
            stepper.ids, stepper.mask = stepper.ids[:, :-count], stepper.mask[:, :-count]
            for row in rows:
                row.shorten(count)
            self.check()
        else:
            stepper.cache.crop(0)
        self.meet("crop")

    @rule(data=st.data())
    def reset(self, data):
        self.now.stepper.cache.reset()
        stats = self.now.stepper.cache.stats()
        assert stats.tokens_seen == stats.tokens_held == stats.device_bytes + stats.host_bytes == 0
        self.now = Driven(kvlab.Stepper(self.case.model, self.now.stepper.cache))
        self.prompt(data)
        self.meet("reset")

    @rule()
    def deepcopy(self):
        """Go on with the copy; the original waits for its turn."""
        stepper = copy.copy(self.now.stepper)
        stepper.cache = copy.deepcopy(self.now.stepper.cache)
        self.kept = [*self.kept[-1:], self.now]
        self.now = Driven(stepper, [copy.copy(row) for row in self.now.rows])
        self.check()
        self.meet("deepcopy")

    @rule()
    @precondition(lambda self: self.kept)
    def original(self):
        """Back to what was copied, which knows nothing of what the copy did."""
        self.now, self.kept = self.kept[-1], [*self.kept[:-1], self.now]
        self.check()
        self.meet("original")

    @rule()
    @precondition(lambda self: self.method not in NOT_BARE)
    def save(self):
        """Go on with what was saved and loaded."""
        stepper = copy.copy(self.now.stepper)
        with tempfile.TemporaryDirectory() as folder:
            try:
                stepper.cache.save(Path(folder) / "cache")
            except ValueError as error:
                assert re.search(r"not hold just K and V|from a method's name$", str(error)), error
            else:
                stepper.cache = kvlab.load_cache(Path(folder) / "cache", self.case.model)
                self.same_bytes(stepper.cache)
                self.now = Driven(stepper, self.now.rows)
                self.check()
        self.meet("save")

    def same_bytes(self, loaded) -> None:
        """Of what is loaded; of blocks their number, since a copy of the cache may hold some of them, too."""
        found = []
        if engine_of(self.case.model) == "graph":  # its buffers have room for steps to come
            return
        for cache in (self.now.stepper.cache, loaded):
            tables = [one.store.table.unique() for one in cache.attending if hasattr(one.store, "pool")]
            stats = cache.stats()
            found.append([*map(len, tables)] or [stats.device_bytes, stats.host_bytes])
        assert found[0] == found[1], "bytes of a loaded cache"

    def on_a_copy(self, data) -> torch.Tensor | str:
        """The logits of one more token in a copy that is thrown away, or the line that refuses it."""
        stepper = copy.copy(self.now.stepper)
        stepper.cache = copy.deepcopy(self.now.stepper.cache)
        stepper.late = type(stepper.late)()
        try:
            return stepper.feed(self.tokens(data, len(self.now.rows), 1), last=True)
        except ValueError as error:
            assert "\n" not in str(error)
            return str(error)

    @rule(data=st.data(), size=st.sampled_from(OUTLIERS), layer=st.integers(0, 1), side=st.booleans())
    @precondition(lambda self: self.longest + 3 < LONGEST and self.case.method != "padded")
    def outlier(self, data, size, layer, side):
        """Some channels of one token's K or V in one layer are far off: stored, or refused with a line that
        names the layer; the cache itself knows nothing of it. (A graph is exported anew for a hook.)"""
        attention = self.case.model.model.layers[layer].self_attn
        at = data.draw(st.integers(0, 19))
        far_off = lambda module, args, out: out.index_fill(-1, torch.tensor([at]), size)
        with (attention.k_proj if side else attention.v_proj).register_forward_hook(far_off):
            found = self.on_a_copy(data)
        if isinstance(found, str):
            assert re.search(r"layer \d: ", found) or "not finite" in found, found
        else:
            assert found.isfinite().all()
        self.check()
        self.meet("outlier")

    @rule(data=st.data())
    @precondition(lambda self: self.longest + 3 < LONGEST)
    def autocast(self, data):
        """A step in which q, k and v come in different dtypes."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self.on_a_copy(data)
        assert not isinstance(found, str), found
        assert found.isfinite().all()
        self.check()
        self.meet("autocast")

    @rule(data=st.data(), own=st.sampled_from((None, DynamicCache, StaticCache)), train=st.booleans())
    def guest(self, data, own, train):
        """Without a kvlab cache the model is, bit by bit, one that kvlab has never touched."""
        family, dtype, changes = self.case.changes
        ids, found = self.tokens(data, 2, 9), []
        for model in (self.case.model, tiny(family, "sdpa", dtype, **changes)):
            room = {"max_cache_len": 12} if own is StaticCache else {}
            cache = {} if own is None else {"past_key_values": own(config=model.config, **room)}
            with torch.no_grad():
                found.append(model.train(train)(ids, use_cache=own is not None, **cache).logits)
            model.eval()
        assert torch.equal(*found)
        self.check()
        self.meet("guest")

    def check(self, logits: list[torch.Tensor] | None = None) -> None:
        cache = self.now.stepper.cache
        cache.stats()
        for index, row in enumerate(self.now.rows):
            expected, held = self.alone.after(row)
            if logits is not None and len(logits[index]):
                count = len(logits[index])
                off = float((logits[index] - expected[-count:]).abs().max())
                assert off <= self.case.tolerance, f"row {index}: logits are {off:.1g} off"
            if held is not None:
                assert positions(cache, index) == held, f"row {index}: tokens held"


def run(case: Case, examples: int, steps: int, seed: int | None = None) -> None:
    """So many runs of so many actions; seed None: always the same."""
    wanted = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=seed is None,
        database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] + [Phase.shrink] * (seed is not None),
    )  # fmt: skip
    factory = lambda: Machine(case)
    if seed is not None:
        factory = seeded(seed)(factory)
    with pytest.MonkeyPatch.context() as patch:
        if lodger() is not None:
            patch.setattr("kvlab.fast.graph.FIRST", 0)  # every step that can be is captured
            for where in ("moves", "blocks"):  # turns are longer than the room behind a captured step
                patch.setattr(f"kvlab.fast.{where}.LEAST_ROOM", 8)
            if not torch.cuda.is_available():
                patch.setattr("kvlab.fast.graph.captured", replayed.captured)
        stateful.run_state_machine_as_test(factory, settings=wanted)


def table() -> str:
    """How often each action met each method."""
    lines = [f"{'':15}" + " ".join(f"{action:>{len(action)}}" for action in (*ACTIONS, *WAYS))]
    for method in METHODS:
        lines.append(f"{method:15}" + " ".join(f"{met[method, a]:>{len(a)}}" for a in (*ACTIONS, *WAYS)))
    return "\n".join(lines)

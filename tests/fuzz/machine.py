"""A state machine that does to a cache what people do, in any order, and knows what must come of it.

Every row of a batch must give the logits, and hold the tokens, that it gives and holds alone: a fresh cache
of one row, without padding, fed the row's own text; the prompt in one pass where the store is exact (as
`tests/reference` compares with the definitions), in the same pieces where it is coarse. Methods that lose
nothing are held against transformers' own attention, without any cache.
What is held is compared with `kvlab.reference` where a definition says it of the whole history (`naive.py`).

`python -m fuzz.machine SECONDS` (`make fuzz`) goes on with new seeds for so long.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from families.profiles import profiled
from fuzz import naive
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny import VOCABULARY, tiny
from transformers import DynamicCache, StaticCache

import kvlab
from kvlab.fast.compiled import compiled, engine_of
from kvlab.finding import METHODS as NAMED
from kvlab.finding import PROFILED
from kvlab.static_graph import PaddedCache, StaticGraphEngine
from kvlab.visibility import own_positions

# Every method of kvlab, with parameters that make it do something: its own, or these at these sizes.
KNOWN = NAMED | PROFILED
METHODS = {name: one.spec((one.same or "") if one.less is None else one.less) for name, one in KNOWN.items()}
METHODS |= {
    "static": "static",
    "paged": "paged:block=4",
    "padded": "padded:length=100,chunk=1",
    "int8": "int8:group=4",
    "int4": "int4:group=10,sinks=2",
    "int5": "int5:rotate=true",
    "int2": "int2:symmetric=false",
    "kivi2": "kivi2:group=4,recent=6",
    "kivi4": "kivi4:group=5,recent=3",
    "fp8": "fp8",
    "nvfp4": "nvfp4:largest=4over6",
    "mxfp4": "mxfp4:skip_layers=1",
    "turboquant": "turboquant:bits=3",
    "kvquant": "kvquant:bits=2,outliers=0.06",
    "mixed": "mixed:k=int8,v=turboquant",
    "pyramidkv": "pyramidkv:budget=0.5,window=3,beta=4",
    "adakv": "adakv:of=h2o,budget=0.5",
    "lagkv": "lagkv:budget=0.5,lag=0.3,sinks=2",
    "expected": "expected:budget=0.5,sinks=2,future=9",
    "rkv": "rkv:budget=0.5,window=3,every=3",
    "duo": "duo:heads=0.5",
    "offload": "offload:link=1e10",
    "offload+int4": "offload+int4:link=1e10",
    "offload+h2o": "offload+h2o:budget=0.5,link=1e10",
    "uvm": "uvm:memory=20,link=1e10",
    "uvm+h2o": "uvm+h2o:budget=0.5,memory=20",
    "topk": "topk:budget=0.4,link=1e10",
    "infinigen": "infinigen:budget=0.5,alpha=2.0,full_layers=1,pool=0.8",
    "infinigen+int4": "infinigen+int4:budget=0.5,alpha=2.0,full_layers=1",
    "quest": "quest:budget=0.4,page=3,full_layers=1",
    "quest+int8": "quest+int8:budget=0.4,page=4,full_layers=0,link=1e10",
    "shadowkv": "shadowkv:budget=0.3,rank=0.4,chunk=3,recent=1",
}
MORE = {  # further settings of a method, and the models they run on, which take turns with the first
    "full": [("full", "fp32"), ("full", "compiled"), ("full", "window")],
    "static": [("static", "fp32")],
    "int8": [("int8", "fp32"), ("int8", "compiled")],
    "int4": [("int4", "fp32"), ("int4:group=32", "fp32, 96")],
    "fp8": [("fp8", "fp32")],
    "sinks": [("sinks:budget=0.4,sinks=2,renumber=true", "fp64"), ("sinks:budget=5", "window")],
    "h2o": [("h2o:budget=0.5,every=3,renumber=true", "fp64"), ("h2o:budget=5", "window")],
    "snapkv": [
        ("snapkv:budget=0.5,window=3,every=3,chunk=2", "fp64"), ("snapkv:budget=5,window=3", "window"),
    ],
    "tova": [("tova:budget=0.4,every=3,renumber=true", "fp64")],
    "pyramidkv": [("pyramidkv:budget=0.5,window=4,every=4", "fp64")],
    "adakv": [
        ("adakv:budget=6", "fp64"), ("adakv:of=keydiff,budget=0.5", "fp64"),
        ("adakv:of=h2o,budget=9,safeguard=0.5", "fp64"),
    ],
    "kvzip": [("kvzip:budget=0.5,over=layer", "fp64"), ("kvzip:budget=7,over=head", "fp64")],
    "keydiff": [("keydiff:budget=0.4,chunk=3,every=2", "fp64")],
    "keynorm": [("keynorm:budget=7,every=5", "fp64")],
    "expected": [("expected:budget=0.5,sinks=2,future=9,chunk=2", "fp64")],
    "random": [("random:budget=7,every=2,seed=3", "fp64")],
    "duo": [("duo:heads=0.2,every=3", "fp64"), ("duo:heads=0.5", "window")],
    "kvzap": [("kvzap:every=3", "fp64"), ("kvzap", "window")],
}  # fmt: skip
LOSSLESS = {"full", "recompute", "static", "paged", "padded", "offload", "uvm"}
COARSE = {
    "int8",
    "int4",
    "int5",
    "int2",
    "nvfp4",
    "mxfp4",
    "turboquant",
    "kvquant",
    "mixed",
    "kivi2",
    "kivi4",
    "fp8",
    "offload+int4",
    "infinigen+int4",
    "quest+int8",
}  # the prompt sees its stored pieces
NOT_BARE = ("recompute", "padded")  # whose passes are no model's
SHAPE = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20}
LONGEST, ROWS = 70, 4
ACTIONS = (
    "prompt in pieces", "left padding", "right padding", "copy amid the prompt", "step", "continue", "turn",
    "fork", "reorder", "crop", "reset", "deepcopy", "original", "outlier", "autocast",
    "guest",
)  # fmt: skip
MODELS = {  # three KV heads, two query heads each -> (family, dtype, what differs from SHAPE)
    "fp64": ("llama", torch.float64, {}),  # rounding decides nothing
    "fp32": ("llama", torch.float32, {"head_dim": 32}),  # read by the kernels, and stepped at once
    "fp32, 96": ("llama", torch.float32, {"head_dim": 96}),
    "compiled": ("llama", torch.float32, {"head_dim": 32, "num_hidden_layers": 2}),
    "window": ("mistral", torch.float64, {"sliding_window": 7}),
    "padded": ("llama", torch.float32, None),  # its engine computes in fp32
}
WAYS = ("at once", "compiled")  # what else is counted: steps of a layer in one call, and of the compiled body
OUTLIERS = (1e-42, 1e-9, -30.0, 447.0, 900.0, -1e4, 7e4, 1e7, -1e30, float("inf"), float("nan"))
met: Counter = Counter()  # (method, action) -> times


@dataclass(frozen=True)
class Case:
    """A method at a setting, on a model."""

    method: str
    spec: str
    kind: str = "fp64"

    @property
    def changes(self) -> tuple:
        """(family, dtype, sizes) of its model."""
        family, dtype, changes = MODELS[self.kind]
        if changes is None:
            return family, dtype, {"num_hidden_layers": 2}
        return family, dtype, {"hidden_size": 48, **SHAPE, **changes}

    @property
    def model(self):
        return _model(self.kind)

    @property
    def lossless(self) -> bool:
        return self.method in LOSSLESS

    @property
    def coarse(self) -> bool:
        return self.method in COARSE

    @property
    def tolerance(self) -> float:
        """In fp32 a number at the border between two codes may fall on either side."""
        return 0.05 if self.coarse and self.kind != "fp64" else 1e-3

    def fresh(self):
        if self.method == "padded":
            return PaddedCache(_engine())
        return kvlab.make_cache(self.model, profiled(self.spec, self.model))


def cases(method: str) -> list[Case]:
    """A method's settings, the one of METHODS first."""
    first = Case(method, METHODS[method], "padded" if method == "padded" else "fp64")
    return [first, *(Case(method, *more) for more in MORE.get(method, []))]


@functools.cache
def _model(kind: str):
    family, dtype, changes = Case("", "", kind).changes
    model = tiny(family, dtype=dtype, **changes)
    if kind == "compiled":
        model = compiled(copy.deepcopy(model))
        assert engine_of(model) == "compiled"
    return model


@functools.cache
def _engine():
    return StaticGraphEngine(_model("padded"), 100, chunk=1)


@dataclass
class Row:
    """A row's own text: the pieces of its prompt and the passes after it, as tuples of tokens."""

    pieces: tuple = ()
    passes: tuple = ()

    @property
    def prompt(self) -> tuple:
        return tuple(token for piece in self.pieces for token in piece)

    @property
    def text(self) -> list[int]:
        return [token for part in (*self.pieces, *self.passes) for token in part]


@dataclass
class Driven:
    """A cache in use: what feeds it, and what its rows must be."""

    stepper: kvlab.Stepper
    rows: list[Row] = field(default_factory=list)


class Alone:
    """What a row gives and holds alone."""

    def __init__(self, case: Case):
        self.case, self.known = case, {}

    def after(self, row: Row):
        """(logits `[tokens of the last pass, vocabulary]`, positions by layer and head or None)."""
        if self.case.lossless:
            return self._uncached(row), None
        key = row.pieces, row.passes
        if key not in self.known:
            before = self.known.pop((row.pieces, row.passes[:-1]), None) if row.passes else None
            stepper = before[0] if before is not None else self._prompt(row)
            logits = before[1] if before is not None else stepper.first
            for tokens in row.passes[-1:] if before is not None else row.passes:
                turn, ids = isinstance(tokens, naive.Turn), torch.tensor([tokens])
                logits = (bare(stepper, self.case.model, ids) if turn else stepper.feed(ids))[0]
            stepper.cache.stats()
            if len(self.known) > 12:
                self.known.clear()
            self.known[key] = stepper, logits, positions(stepper.cache, 0)
        return self.known[key][1:]

    def _prompt(self, row: Row) -> kvlab.Stepper:
        stepper = kvlab.Stepper(self.case.model, self.case.fresh())
        with stepper.cache.prefill() if self.case.coarse else contextlib.nullcontext():
            for piece in row.pieces if self.case.coarse else (row.prompt,):
                stepper.first = stepper.feed(torch.tensor([piece]))[0]
        return stepper

    def _uncached(self, row: Row):
        family, dtype, changes = self.case.changes
        with torch.no_grad():
            logits = tiny(family, "sdpa", dtype, **changes)(torch.tensor([row.text]), use_cache=False).logits[
                0
            ]
        return logits[-len((row.passes or row.pieces)[-1]) :].float()


def bare(stepper: kvlab.Stepper, model, ids: torch.Tensor) -> torch.Tensor:
    """A pass of somebody who does not say what a prompt is; the stepper learns of it."""
    mask = torch.cat([stepper.mask, torch.ones_like(ids)], 1)
    where = own_positions(mask)[:, -ids.shape[1] :].clamp(min=0)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=where, past_key_values=stepper.cache)
    stepper.ids, stepper.mask = torch.cat([stepper.ids, ids], 1), mask
    return out.logits


def positions(cache, row: int):
    """Positions held by layer and KV head, without padding; None where layers hold none."""
    if not all(hasattr(layer, "positions") for layer in cache.layers):
        return None
    return [[[p for p in head if p >= 0] for head in layer.positions[row].tolist()] for layer in cache.layers]


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
                    twin = copy.deepcopy(stepper.cache)
                    break
        if twin is not None:  # the copy's prompt is open still
            stepper.cache = twin
            with twin.prefill():
                for piece in pieces[1:]:
                    logits = stepper.feed(ids[:, piece], mask[:, piece])
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

    def feed(self, data, count: int) -> None:
        ids = self.tokens(data, len(self.now.rows), count)
        layers = self.now.stepper.cache.layers
        before = [getattr(layer, "fused", None) for layer in layers]
        logits = self.now.stepper.feed(ids)
        pairs = zip(layers, before, strict=True)
        if any(one is not None and layer.fused is one for layer, one in pairs):
            self.meet("at once")
        if count == 1 and engine_of(self.case.model) == "compiled":
            self.meet("compiled")
        for row, tokens in zip(self.now.rows, ids.tolist(), strict=True):
            row.passes = (*row.passes, tuple(tokens))
        self.check(list(logits))

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
        ids, stepper, model = self.tokens(data, len(self.now.rows), count), self.now.stepper, self.case.model
        self.meet("turn")
        if self.method == "kvzip":
            try:
                bare(stepper, model, ids)
            except ValueError as error:
                assert "expected turns=first" in str(error)
                self.check()
                return
            raise AssertionError("kvzip took a later turn")
        whole = cut >= count - 1 or self.method.startswith("kivi")  # a block is rounded once it is full
        for piece in ids.split([count] if whole else [cut, count - cut], 1):
            logits = bare(stepper, model, piece)
        for row, tokens in zip(self.now.rows, ids.tolist(), strict=True):
            row.passes = (*row.passes, naive.Turn(tokens))
        self.check(list(logits))

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
        left = self.case.kind == "window" and self.longest > 7
        if evicts or left:
            try:
                stepper.cache.crop(-count)
            except ValueError as error:
                assert "evicted" in str(error) or (left and "the window has left tokens" in str(error))
            else:
                raise AssertionError("crop: evicted tokens came back")
            self.check()
        elif count <= written:
            stepper.cache.crop(-count)
            stepper.ids, stepper.mask = stepper.ids[:, :-count], stepper.mask[:, :-count]
            for row in rows:
                row.passes = _shorter(row.passes, count)
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
    @precondition(lambda self: self.longest + 3 < LONGEST)
    def outlier(self, data, size, layer, side):
        """Some channels of one token's K or V in one layer are far off: stored, or refused with a line that
        names the layer; the cache itself knows nothing of it."""
        attention = self.case.model.model.layers[layer].self_attn
        at = data.draw(st.integers(0, 19))
        hook = (attention.k_proj if side else attention.v_proj).register_forward_hook(
            lambda module, args, out: out.index_fill(-1, torch.tensor([at]), size)
        )
        found = self.on_a_copy(data)
        hook.remove()
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
                defined = naive.held(self.case.spec, self.case.kind, self.case.model, row)
                assert defined is None or held == defined, f"row {index}: tokens held, by definition"


def _shorter(passes: tuple, count: int) -> tuple:
    """Without the last `count` tokens."""
    while count:
        last = passes[-1]
        passes, count = (*passes[:-1], last[:-count]), max(0, count - len(last))
        passes = passes if passes[-1] else passes[:-1]
    return passes


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
    run_state_machine_as_test(factory, settings=wanted)


def table() -> str:
    """How often each action met each method."""
    lines = [f"{'':15}" + " ".join(f"{action:>{len(action)}}" for action in (*ACTIONS, *WAYS))]
    for method in METHODS:
        lines.append(f"{method:15}" + " ".join(f"{met[method, a]:>{len(a)}}" for a in (*ACTIONS, *WAYS)))
    return "\n".join(lines)


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    until = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < until:
            for method in METHODS:
                if time.monotonic() < until:
                    run(random.choice(cases(method)), 10, 30, random.randrange(2**32))
    print(table())


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 600)

"""What the state machine tries: every method, at settings that make it do something, and models for them."""

import copy
import functools
from dataclasses import dataclass

import torch
from every import COMPOSED, make
from fast import replayed
from tiny import LOSSY, rounds, tiny

from kvlab.faster import compiled, engine_of, lodger
from kvlab.finding import METHODS as NAMED
from kvlab.finding import PROFILED
from kvlab.spec import name_of
from kvlab.static_graph import PaddedCache, StaticGraphEngine

# Every method of kvlab, with parameters that make it do something: its own, or these at these sizes.
KNOWN = NAMED | PROFILED
METHODS = {name: one.spec((one.same or "") if one.less is None else one.less) for name, one in KNOWN.items()}
METHODS |= {
    "composed": "policies of every kind, put together in other ways",
    "padded": "padded:length=100,chunk=1",
    "int8": "int8:group=4",
    "int4": "int4:group=10,sinks=2",
    "kivi4": "kivi4:group=5,recent=3",
    "kvquant": "kvquant:bits=2,outliers=0.06",
    "mixed": "mixed:k=int8,v=turboquant",
    "adakv": "adakv:of=h2o,budget=0.5",
    "expected": "expected:budget=0.5,sinks=2,future=9",
    "rkv": "rkv:budget=0.5,window=3,every=3",
    "duo": "duo:heads=0.5",
    "offload": "offload:link=1e10",
    "uvm": "uvm:memory=20,link=1e10",
    "uvm+h2o": "uvm+h2o:budget=0.5,memory=20",
    "infinigen": "infinigen:budget=0.5,alpha=2.0,full_layers=1,pool=0.8",
    "infinigen+int4": "infinigen+int4:budget=0.5,alpha=2.0,full_layers=1",
    "quest+int8": "quest+int8:budget=0.4,page=4,full_layers=0,link=1e10",
}
MORE = {  # further settings of a method, and the models they run on, which take turns with the first
    "full": [("full", "fp32"), ("full", "compiled"), ("full", "window"), ("full", "graph"),
             ("full", "graph, window")],
    "static": [("static", "fp32"), ("static", "graph")],
    "int8": [("int8", "fp32"), ("int8", "compiled"), ("int8:group=4", "graph")],
    "kivi2": [("kivi2:group=4,recent=6", "graph"), ("kivi2:group=5,recent=3", "graph")],
    "int4": [("int4", "fp32"), ("int4:group=32", "fp32, 96")],
    "fp8": [("fp8", "fp32")],
    "sinks": [("sinks:budget=0.4,sinks=2,renumber=true", "fp64"), ("sinks:budget=5", "window"),
              ("sinks:budget=0.4,sinks=2", "graph")],
    "h2o": [("h2o:budget=0.5,every=3,renumber=true", "fp64"), ("h2o:budget=5", "window"),
            ("h2o:budget=0.5", "graph")],
    "snapkv": [
        ("snapkv:budget=0.5,window=3,every=3,chunk=2", "fp64"), ("snapkv:budget=5,window=3", "window"),
        ("snapkv:budget=0.4,window=4,merge=true,chunk=3", "fp64"),
    ],
    "tova": [("tova:budget=0.4,every=3,renumber=true", "fp64"), ("tova:budget=7", "graph")],
    "pyramidkv": [("pyramidkv:budget=0.5,window=4,every=4", "fp64")],
    "adakv": [
        ("adakv:budget=6", "fp64"), ("adakv:of=keydiff,budget=0.5", "fp64"),
        ("adakv:of=h2o,budget=9,safeguard=0.5", "fp64"),
    ],
    "kvzip": [("kvzip:budget=0.5,over=layer", "fp64"), ("kvzip:budget=7,over=head", "fp64")],
    "keydiff": [("keydiff:budget=0.4,chunk=3,every=2", "fp64"), ("keydiff:budget=0.4", "graph")],
    "keynorm": [("keynorm:budget=7,every=5", "fp64")],
    "expected": [("expected:budget=0.5,sinks=2,future=9,chunk=2", "fp64")],
    "random": [("random:budget=7,every=2,seed=3", "fp64")],
    "duo": [("duo:heads=0.2,every=3", "fp64"), ("duo:heads=0.5", "window")],
    "kvzap": [("kvzap:every=3", "fp64"), ("kvzap", "window")],
}  # fmt: skip
LOSSLESS = {"full", "recompute", "static", "paged", "padded", "offload", "uvm"}
NO_SUCH = "turboquant:bits=3,sketch=true"  # of such heads
NOT_BARE = ("recompute", "padded")  # whose passes are no model's
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20}
LONGEST, ROWS = 70, 4
MODELS = {  # three KV heads, two query heads each -> (family, dtype, what differs from SHAPE)
    "fp64": ("llama", torch.float64, {}),  # rounding decides nothing
    "fp32": ("llama", torch.float32, {"head_dim": 32}),  # read by the kernels, and stepped at once
    "fp32, 96": ("llama", torch.float32, {"head_dim": 96}),
    "compiled": ("llama", torch.float32, {"head_dim": 32}),
    "graph": ("llama", torch.float64, {}),  # captured steps: on a CPU they are recorded (fast/replayed.py)
    "window": ("mistral", torch.float64, {"sliding_window": 7}),
    "graph, window": ("mistral", torch.float64, {"sliding_window": 7}),
    "padded": ("llama", torch.float32, None),  # its engine computes in fp32
}


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
        """A prompt sees its earlier pieces as they are stored, rounded."""
        return self.method != "padded" and rounds(COMPOSED[self.spec]() if self.composed else self.spec)

    @property
    def composed(self) -> bool:
        return self.spec in COMPOSED

    @property
    def tolerance(self) -> float:
        """In fp32 a number at the border between two codes may fall on either side."""
        return 0.05 if self.coarse and self.kind != "fp64" else 1e-3

    def fresh(self):
        if self.method == "padded":
            return PaddedCache(_engine())
        return make(self.model, self.spec)


def cases(method: str) -> list[Case]:
    """A method's settings, the one of METHODS first."""
    if method == "composed":
        return [Case(method, spec) for spec in COMPOSED if spec != "kivi2"]  # which is a method
    first = Case(method, METHODS[method], "padded" if method == "padded" else "fp64")
    known = [first, *(Case(method, *more) for more in MORE.get(method, []))]
    others = [Case(method, spec) for spec in LOSSY if name_of(spec) == method and spec != NO_SUCH]
    return [*known, *(one for one in others if one.spec not in {case.spec for case in known})]


@functools.cache
def _model(kind: str):
    family, dtype, changes = Case("", "", kind).changes
    model = tiny(family, dtype=dtype, **changes)
    if kind == "compiled" and lodger() is not None:
        model = compiled(copy.deepcopy(model))
        assert engine_of(model) == "compiled"
    if kind.startswith("graph") and lodger() is not None:
        model = replayed.replaying(model)
    return model


@functools.cache
def _engine():
    return StaticGraphEngine(_model("padded"), 100, chunk=1)

"""Graph: a decode step on a GPU whose kernels are captured once in a CUDA graph and then replayed.

Launching a step's kernels from Python takes several times as long as running them. `move_of` says how each
layer's step goes in buffers that stay where they are; around it are the model's own modules. What a step is
given (token, position, slots) is on the device, and the host keeps its own counts.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..attention import attending
from ..contents import StandIn
from ..devices import entry_of
from ..late import Late
from ..layer import Layer
from ..models import cache_name
from ..models.stamp import Stamp
from ..modes import keeping
from ..store.growing import GrowingState
from ..store.kivi import KiviState
from ..store.static import StaticState
from ..visibility import CAUSAL
from .blocks import Blocks
from .forward import Replaced, answer
from .known import GOES_BY, coded, on_device, one_goes
from .moves import Appends, Move, Replaces
from .recorder import check_repeats
from .suited import Later, Unsuited, check_configuration, check_windows, of_ours

AGAIN = 32  # steps after which a cache is looked at again that is not as a graph needs it yet
NEVER = -math.inf  # of a cache that no graph will serve
FIRST = 2  # steps of a cache that are eager: a fork with a short ending is over before a graph would pay


def graphed(model):
    """Let decode steps of this prepared model be replayed, where they can; returns the model.

    They can on a GPU, for caches in which every layer decides on the device (`moves.py`). A step is tried
    before it is captured: two in a row have to be the same operators on the same numbers and addresses. Where
    they are not the model decodes eagerly, and a warning says why, once. ValueError for a model elsewhere.
    """
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        raise ValueError("engine='graph': the model is not on a GPU; use 'eager', or on a CPU 'compiled'")
    if not isinstance(model.forward, Forward):
        model.forward = Forward(model)
    return model


class Forward(Replaced):
    """A decode step is replayed, all else goes through the model's own forward.

    When the model's stamp changes, all graphs are let go. served: cache -> its `Graph`, or how many steps it
    has made without one; said: why others decode eagerly.
    """

    engine = "graph"

    def __init__(self, model):
        super().__init__(model)
        self.served, self.said = weakref.WeakKeyDictionary(), set()

    def replays(self, cache) -> bool:
        """Whether this cache's last step was replayed, or captured."""
        return isinstance(self.served.get(cache), Graph)

    @keeping()
    def step_of(self, model, cache) -> Graph | None:
        """The graph of this cache's next step; None where it is eager."""
        if self.stamp is None or not self.stamp.same_step(model):
            self.stamp = Stamp(model)
            self.served.clear()
        graph = self.served.get(cache, 0)
        try:
            if isinstance(graph, Graph) and not graph.ready():
                graph = self.served[cache] = graph.full()  # it is let go before another is made
            if not isinstance(graph, Graph):
                if graph < FIRST:
                    self.served[cache] = graph + 1
                    return None
                if any(not of_ours(hook) for hook in self.stamp.hooking):
                    raise Unsuited("a hook is on a module of it")
                graph = self.served[cache] = Graph(model, cache)
            graph.capture()
            return graph
        except Unsuited as error:
            later = isinstance(error, Later)
            self.served[cache] = FIRST - AGAIN if later else NEVER
            if not later and str(error) not in self.said:
                self.said.add(str(error))
                warnings.warn(f"{type(model).__name__} decodes with the eager engine: {error}", stacklevel=4)
        return None


def move_of(layer, slot: Tensor, count: Tensor, flag: Tensor) -> Move:
    """How the next steps of a layer go. slot, count: int32 [1] on the device, where the next token goes, and
    how many slots are in use then; flag: bool [1], becomes true where a number cannot be stored. Unsuited, a
    line, for a layer that decides on the host."""
    keep, store, named = layer.keep.policy, layer.store, type(layer.store).__name__.removesuffix("State")
    if type(layer) is not Layer or layer.ranks > 1:
        raise Unsuited("a layer of it holds more than K and V, or shares its heads with other processes")
    if not on_device(layer.place):
        raise Unsuited("K and V are on a host" if layer.place.on_host else "its place is a class of your own")
    if type(store) is KiviState:
        return Blocks(layer, flag)
    if type(store) not in (GrowingState, StaticState) or store.exact is not None:
        raise Unsuited(f"a store of kind {named} is written by the host")
    if not all(store.begun or [True]):
        raise Unsuited("a row of it has no token yet")
    if layer.evicts and keep.renumber:
        raise Unsuited("it renumbers the tokens that it holds")
    if layer.settled or (layer.local is not None and not (layer.in_prompt or layer.evicts)):
        return Appends(layer, slot, count, flag)
    if layer.in_prompt or layer.keep.longest is None or max(layer.rows_held) < min(layer.keep.longest):
        raise Later(f"{type(keep).__name__} lets nothing go yet")
    if type(keep) not in GOES_BY or keep.chunk_length > 1 or keep.renumber or not one_goes(layer, coming=1):
        raise Unsuited(f"{type(keep).__name__} lets go of other tokens than one of every head")
    if layer.slots > max(layer.keep.longest):
        raise Later("slots of it are empty that a step will close")
    return Replaces(layer, flag)


class Graph:
    """The decode step of one cache, captured. Unsuited, with one line, if it cannot be."""

    def __init__(self, model, cache):
        check_configuration(model.config)
        layers = cache.attending
        if cache.switch.tokens is not None or len(layers) < len(cache.layers):
            raise Unsuited("it holds more than K and V, or rotates by the text's length")
        if any(layer.local is not None for layer in layers):
            check_windows(model, len(layers))
        self.cache, self.model, self.late = weakref.ref(cache), weakref.ref(model), Late()
        rows, device = len(cache.lengths), entry_of(model)
        self.ids, self.position = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in "ip")
        self.slots = torch.empty(len(layers), dtype=torch.int32, device=device)
        self.counts, self.flags = self.slots + 1, torch.zeros(len(layers), dtype=torch.bool, device=device)
        own = zip(*(x.split(1) for x in (self.slots, self.counts, self.flags)), strict=True)
        self.moves = [move_of(layer, *one) for layer, one in zip(layers, own, strict=True)]
        self.told: list[tuple] = []  # tokens of every layer, as the device has them
        self.stand = _Cache(self.moves, cache.get_seq_length())
        self.given, self.replays = {"use_cache": True, cache_name(model): self.stand}, {}
        if "position_ids" in inspect.signature(model.forward).parameters:
            self.given["position_ids"] = self.position

    @torch.no_grad()
    def capture(self) -> None:
        """Try and capture the next step, unless one like it exists. Unsuited if it cannot be."""
        if self.moves[0].due in self.replays:
            return
        self.position.fill_(self.cache().get_seq_length())
        self._tell()
        before = [x.clone() for move in self.moves for x in move.state()]
        try:
            check_repeats(self._run, lambda: self._undo(before))
        except Unsuited:
            self.given["attention_mask"] = CAUSAL  # else OPT makes a mask as long as the text
            check_repeats(self._run, lambda: self._undo(before))
        self._tell()
        self.replays[self.moves[0].due] = captured(self._run, self.ids.device)
        self.flags.zero_()

    def _run(self) -> Tensor:
        model = self.model()
        with attending():
            out = type(model).forward(model, input_ids=self.ids, **self.given)
        self.slots += 1
        self.counts += 1
        self.stand.go_on()
        return out.logits

    def _undo(self, before: list[Tensor]) -> None:
        for now, then in zip((x for move in self.moves for x in move.state()), before, strict=True):
            now.copy_(then)
        self.stand.go_on(self.cache().get_seq_length() - self.stand.get_seq_length())
        self.told = []

    def _tell(self) -> None:
        """Tell the device which slots are in use, if it does not know."""
        if (now := self._held()) != self.told:
            self.slots.copy_(torch.tensor(now, dtype=torch.int32, device="cpu")[:, 0])
            torch.add(self.slots, 1, out=self.counts)
            for move in self.moves:
                move.tell()
            self.told = now

    def _held(self) -> list[tuple]:
        """Of every layer, the slots in use of its buffer, and its tokens."""
        return [(move.store.filled, move.store.length) for move in self.moves]

    def ready(self) -> bool:
        """Whether it fits the present cache."""
        if len(self.cache().lengths) != len(self.ids) or not all(move.ready() for move in self.moves):
            return False
        return len({move.due for move in self.moves}) == 1

    def full(self) -> int:
        """The number of eager steps to count: enough for another graph if only room is missing, except for
        one step in which windows move on."""
        same = len(self.cache().lengths) == len(self.ids) and all(move.still() for move in self.moves)
        return (FIRST - any(move.layer.local is not None for move in self.moves)) if same else 0

    def takes(self, input_ids, attention_mask=None, position_ids=None, **others) -> bool:
        """Whether it serves such a step: of as many rows, with a token in each."""
        if input_ids.shape != self.ids.shape or input_ids.is_floating_point():
            return False
        if position_ids is not None and position_ids.dim() != 2:
            return False
        if attention_mask is None:
            return True
        held, lengths = self.cache().get_seq_length(), self.cache().lengths
        if attention_mask.shape != (len(self.ids), held + 1):
            return False
        real = attention_mask.bool()
        told = torch.stack([real.sum(-1), real[:, held].long()]).tolist()  # one copy to the host
        if told != [[length + 1 for length in lengths], [1] * len(lengths)]:
            return False
        return min(lengths) == held or position_ids is not None

    @keeping()
    def step(self, input_ids, position_ids=None, **others):
        """As the model's own forward, for one new token of every row."""
        self.late.tell()
        cache = self.cache()
        self._tell()
        self.ids.copy_(input_ids)
        if position_ids is None:
            self.position.fill_(cache.get_seq_length())
        else:
            self.position.copy_(position_ids.expand(len(self.ids), 1))
        replay, made = self.replays[self.moves[0].due]
        first = self.moves[0].layer
        first._busy = True  # until the host has counted what the device has done
        replay()
        logits = made.clone()
        self.late.ask(self.flags, self._refuse)
        for move in self.moves:
            move.done()
        first._busy = False
        self.told = self._held()
        return answer(logits, cache)

    def _refuse(self) -> None:
        index = int(self.flags.nonzero()[0, 0])
        named = type(coded(self.moves[index].store.format)).__name__.lower()
        raise ValueError(
            f"layer {index}: {named}: the last token but one held NaN, infinity or a value above what the "
            "format stores; start again with cache.reset()"
        )


def captured(run, device: torch.device):
    """(What replays it, what it returned): `run` as a CUDA graph. Unsuited on another device, of which it
    would hold nothing."""
    if device.type != "cuda":
        raise Unsuited("the model is not on a GPU any more")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()
    return graph.replay, made


class _Cache(Cache):
    """Replaces the cache while the model's step is tried and captured."""

    def __init__(self, moves, seen: int):
        super().__init__(layers=[_Layer(move, seen) for move in moves])

    def go_on(self, tokens: int = 1) -> None:
        for layer in self.layers:
            layer.seen += tokens


class _Layer(StandIn):
    """A layer of it."""

    def __init__(self, move, seen: int):
        super().__init__()
        self.move, self.seen = move, seen

    def attend(self, query: Tensor, visibility, *given) -> Tensor:
        if not visibility.known or (visibility.rule is not None) != (self.move.layer.local is not None):
            raise Unsuited("its layers see by a rule of their own")
        numbers = self.move.layer.in_its_dtype(query, *self.new)
        return self.move.attend(*numbers, *given).to(query.dtype)

"""StaticGraphEngine: a language model decoded by an engine without a cache (ONNX Runtime).

    engine = StaticGraphEngine(model, max_length=512, policy="double")
    trace = engine.generate(ids, 200)          # the same Trace as kvlab.decode

The engine gets addresses only: weights are read where the model has them, past K and V where the KV manager
holds them, and the new K and V of a token are written where it says (IO binding; nothing is copied on the
way in or out). A prompt goes through a second graph, some tokens at a time, over the same buffers; of the
rows that it writes the manager takes those that are of real tokens, by one copy.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from ..decode import Trace, decode
from ..devices import refuse_offloaded
from ..models import ModelShape, Switch, is_latent, layers_of, prepare
from ..models.passes import others_hooks
from ..models.stamp import Stamp
from ..modes import evaluating
from ..parameters import check_one_of, check_whole
from ..saved import model_digest
from .cache import PaddedCache
from .export import FORMS, GraphSpec, graph_file, scales_digest, session, weights
from .graph import GRAPH, NUMBERS, sequence_names
from .kv_manager import KVManager, spare_part
from .quantized import calibrate, half, quantize

CHUNK = 64
PROBE = 3  # tokens that a graph and the model are given, to compare their logits
DIFFERENCE = {"fp32": 1e-3, "fp16": 1e-2}  # of the largest logit, at most; more where codes are rounded


class StaticGraphEngine:
    """The static graphs of a model, for one token and for `chunk` tokens, and the buffers they work on.

    model: float32, on the CPU. max_length: S, tokens a step attends to, the new one included (default: the
    model's context). policy, extra: see `KVManager`. numbers: K and V are held as `fp32`, as `fp16`, as
    `int8` with one scale per KV head, calibrated before, or as `integers`, int8 that are multiplied as such.
    form: `single`, each KV head a tensor `[1, 1, S - 1, D]` of its own, or `multi`, `[1, KV heads, S - 1,
    D]`. chunk: width of the graph for several tokens: a prompt, or what was guessed (1: there is none, and
    they go one by one). threads: of the graphs' engine (default: torch's). cache: folder for graphs.

    Weights are held once, by the model: what is changed there is changed for the graph; weights that were
    moved or replaced are found at the next step or manager.

    A prompt may hold S tokens. Generation past S slides the window: each step attends to the newest S
    tokens, and every token keeps the position it was first given, up to the model's context.
    Raises ValueError for parameters that do not fit the model, and when onnxruntime is missing.
    """

    def __init__(
        self, model, max_length: int | None = None, policy: str = "double", *, numbers: str = "fp32",
        extra: float | None = None, form: str = "multi", chunk: int = CHUNK, threads: int | None = None,
        cache: Path | None = None,
    ):  # fmt: skip
        check_parameters(max_length, policy, numbers, extra, form, chunk)
        refuse_offloaded(model, "a static graph")
        self.model, self.shape = prepare(model), ModelShape.of(model)
        self.length = _length(model, max_length)
        _check_layers(model, self.length)
        self.policy, self.extra, self.form, self.numbers = policy, extra, form, numbers
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(
                f"the static-graph engine runs float32 models on the CPU; this one is {weight.dtype} on "
                f"{weight.device}: load it with device='cpu', dtype='float32'"
            )
        self.parts = self.shape.kv_heads if form == "single" else 1
        self.scales = calibrate(model, self.parts) if NUMBERS[numbers].dtype == torch.int8 else None
        self.digest, self.cache, self.chunk = model_digest(model), cache, chunk
        self.threads = threads or torch.get_num_threads()
        self.graphs: dict[int, _Graph] = {}
        self.stamp: Stamp | None = None  # of the model when its graphs were compared with it, and
        self.hooks: list = []  # the hooks on the model itself
        self.made_of = self._made_of()
        self.lock = threading.RLock()  # a graph has one binding and one set of arrays
        self.switch, self.vocabulary = Switch(model), model.config.get_text_config().vocab_size
        self._graph(1)

    def _graph(self, width: int) -> _Graph:
        """The graph for so many tokens, made when the first are there. One that does not compute what the
        model does now is exported again: hooks, buffers and attributes are part of a graph, but not of its
        name. ValueError if that does not help. One with hooks is no other process's: a few tokens would not
        tell that their hooks are others."""
        if width not in self.graphs:
            self.graphs[width] = self._made(width, afresh=bool(self.made_of[1]))
            if self._differs(width):
                self.graphs[width] = self._made(width, afresh=True)
                if self._differs(width) and self.numbers in DIFFERENCE:
                    name = type(self.model).__name__
                    raise ValueError(f"the static graph of this {name} computes other logits")
        return self.graphs[width]

    def _made(self, width: int, afresh: bool) -> _Graph:
        """The graph of so many tokens from its folder, exported first when it is not there, or afresh."""
        spec = GraphSpec(self.digest, self.form, width, self.numbers, scales_digest(self.scales))
        with TemporaryDirectory() if afresh else nullcontext() as folder:
            path = graph_file(self.model, spec, self.scales, Path(folder) if afresh else self.cache)
            made = session(path, self.length, width, self.threads)
        return _Graph(made, weights(self.model), sequence_names(self.shape.layers, self.parts))

    @torch.no_grad()
    def _differs(self, width: int) -> bool:
        """Whether a few tokens have other logits in the graph than in the model."""
        ids = torch.arange(1, 1 + min(PROBE, self.length), device="cpu") % self.vocabulary
        ids = ids[:width] if width > 1 else ids
        with evaluating(self.model), torch.autocast("cpu", enabled=False):  # of which a graph knows nothing
            own = self.model(ids[None], use_cache=False).logits[0]
        if not own.isfinite().all():  # there is no right answer
            return False
        manager, graph = self._buffers(), self.graphs[width]
        pieces = [ids.tolist()] if width > 1 else ids[:, None].tolist()
        found = torch.from_numpy(np.concatenate([self._run(graph, manager, piece) for piece in pieces]))
        return not float((found - own).abs().max() / own.abs().max()) <= DIFFERENCE.get(self.numbers, 0.25)

    def manager(self) -> KVManager:
        """Empty buffers for one row of text."""
        with self.lock:
            self._look()
            return self._buffers()

    def _look(self) -> None:
        """Find weights that went elsewhere, and let go of graphs that are not the model's any more."""
        hooks = [*self.model._forward_pre_hooks.values(), *self.model._forward_hooks.values()]
        if self.stamp is not None and self.stamp.same(self.model) and hooks == self.hooks:
            return
        made_of = self._made_of()
        if changed := made_of != self.made_of:
            self.made_of, self.digest = made_of, model_digest(self.model)
        for graph in () if changed else self.graphs.values():
            graph.read(weights(self.model))
        if changed or self._differs(1):
            self.graphs.clear()
            self._graph(1)
        self.stamp, self.hooks = Stamp(self.model), hooks

    def _made_of(self) -> tuple:
        """What a graph is made of that a few tokens may not show: the names of its weights, and what
        others have hooked into the model, or put in the place of a part's forward."""
        inside = map(vars, [*self.model.modules()][1:])
        forwards = [part["forward"] for part in inside if "forward" in part]
        return weights(self.model).keys(), others_hooks(self.model) + forwards

    def _buffers(self) -> KVManager:
        return KVManager(
            2 * self.shape.layers * self.parts,
            self.length,
            self.shape.head_dim,
            heads=self.shape.kv_heads // self.parts,
            policy=self.policy,
            extra=self.extra,
            dtype=self.graphs[1].dtype,
        )

    def written(self, rows: Tensor) -> Tensor:
        """Rows `[sequences, heads, tokens, D]` that were made elsewhere, as they are held."""
        if self.scales is not None:
            return quantize(rows, torch.stack(self.scales))
        return half(rows) if self.numbers == "fp16" else rows

    def feed(self, manager: KVManager, tokens: list[int], prompt: bool = False) -> np.ndarray:
        """Feed tokens of one row through its manager; returns logits `[tokens, vocabulary]`. prompt: whether
        more tokens of a prompt may follow."""
        seen = manager.seen + len(tokens)
        if prompt or (len(tokens) > 1 and not manager.seen):
            self.check_prompt(seen)
        if self.switch.check_lengths([seen]):
            self.switch.refuse("a static graph rotates all texts in one way")
        pieces = [tokens[i : i + self.chunk] for i in range(0, len(tokens), self.chunk)]
        return np.concatenate([self._pass(manager, piece) for piece in pieces])

    def check_prompt(self, tokens: int) -> None:
        """ValueError for a prompt that is longer than S."""
        if tokens > self.length:
            raise ValueError(f"a prompt of {tokens} tokens is longer than max_length={self.length}")

    def generate(self, ids: Tensor, n: int, attention_mask: Tensor | None = None) -> Trace:
        """Greedy decoding of `n` tokens after `ids` `[batch, tokens]`, row by row; see `kvlab.decode`."""
        return decode(self.model, ids, PaddedCache(self), n, attention_mask)

    def _pass(self, manager: KVManager, tokens: list[int]) -> np.ndarray:
        """One token, or up to `chunk`, through the graph of that width: logits `[tokens, vocabulary]`."""
        with self.lock:
            self._look()
            return self._run(self._graph(1 if len(tokens) == 1 else self.chunk), manager, tokens)

    def _run(self, graph: _Graph, manager: KVManager, tokens: list[int]) -> np.ndarray:
        """As `_pass`, with the graph at hand."""
        count, one = len(tokens), graph.width == 1
        mask, places = (manager.mask, manager.place()) if one else (graph.mask, graph.places)
        graph.token[0, :count] = tokens  # no real token sees the rest
        graph.position[0] = manager.seen + np.minimum(np.arange(graph.width), count - 1)
        if not one:
            mask[:] = chunk_mask(manager.positions(), manager.seen, graph.width, self.length)
        graph.bind(mask, manager.past_addresses(), places)
        graph.run()
        if one:
            manager.commit()
        else:
            manager.append(graph.rows[:, :, :count])
        return graph.logits[:count].copy()


class _Graph:
    """A session, its arrays, and the addresses it is bound to."""

    def __init__(self, engine, weights: dict[str, Tensor], names: list[str]):
        self.engine, self.binding = engine, engine.io_binding()
        inputs = {node.name: node for node in engine.get_inputs()}
        outputs = {node.name: node for node in engine.get_outputs()}
        self.past = [(f"past.{name}", tuple(inputs[f"past.{name}"].shape)) for name in names]
        self.new = [(f"new.{name}", tuple(outputs[f"new.{name}"].shape)) for name in names]
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
        self.dtype, (_, self.width) = kinds[inputs[self.past[0][0]].type], inputs["token"].shape
        self.token, self.position = np.zeros((2, 1, self.width), np.int64)
        self.mask = np.zeros(inputs["mask"].shape, np.float32)  # of several tokens; a manager has one token's
        self.logits = np.zeros(outputs["logits"].shape[1:], np.float32)
        self.rows = np.zeros((len(names), *self.new[0][1][1:]), self.dtype)  # new ones, of several tokens
        self.places = [row.ctypes.data for row in self.rows]
        for name, array in {"token": self.token, "position": self.position}.items():
            self.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.inputs = inputs.keys()
        self.read(weights)
        self.binding.bind_output(
            "logits", "cpu", 0, np.float32, outputs["logits"].shape, self.logits.ctypes.data
        )
        self.bound: dict[str, int] = {}

    def read(self, weights: dict[str, Tensor]) -> None:
        """Bind the weights where they are now. ValueError for those that are no float32 on the CPU now."""
        found = {name: weight for name, weight in weights.items() if name in self.inputs}
        for name, weight in found.items():
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                became = f"{weight.dtype} on {weight.device}"
                raise ValueError(f"{name} is {became} now: a static graph needs float32 on the CPU")
        for name, weight in found.items():
            self.binding.bind_input(name, "cpu", 0, np.float32, tuple(weight.shape), weight.data_ptr())
        self.weights = found

    def bind(self, mask: np.ndarray, past: list[int], new: list[int]) -> None:
        """Say where to read and write; what has not moved since the last pass stays bound."""
        bound, dtype = self.bound, self.dtype
        if bound.get("mask") != mask.ctypes.data:
            bound["mask"] = mask.ctypes.data
            self.binding.bind_input("mask", "cpu", 0, np.float32, self.mask.shape, mask.ctypes.data)
        for bind, nodes, addresses in (
            (self.binding.bind_input, self.past, past),
            (self.binding.bind_output, self.new, new),
        ):
            for (name, shape), address in zip(nodes, addresses, strict=True):
                if bound.get(name) != address:
                    bound[name] = address
                    bind(name, "cpu", 0, dtype, shape, address)

    def run(self) -> None:
        self.engine.run_with_iobinding(self.binding)


def chunk_mask(positions: np.ndarray, seen: int, count: int, window: int) -> np.ndarray:
    """What the queries of a chunk may see, `[count, past + count]`: 0, or -inf.

    positions `[past]`: of the tokens in the buffers, -1 for padding. The chunk's `count` tokens begin at
    position `seen`. A query sees itself and tokens before it, `window` in all.
    """
    asked = np.arange(seen, seen + count)
    at = np.concatenate([positions, asked])
    distance = asked[:, None] - at
    seen_by = (at >= 0) & (distance >= 0) & (distance < window)
    return np.where(seen_by, np.float32(0), np.float32(-np.inf))


def check_parameters(max_length, policy, numbers, extra, form, chunk) -> None:
    """What can be said about parameters without a model (ValueError)."""
    spare_part(policy, extra)
    check_one_of("numbers", numbers, NUMBERS)
    check_one_of("form", form, FORMS)
    if max_length is not None:
        check_whole("max_length", max_length, 2)
    check_whole("chunk", chunk, 1)


def _check_layers(model, length: int) -> None:
    """ValueError for layers that see less than the newest `length` tokens, or that hold something else."""
    known = {"DynamicLayer", "DynamicSlidingWindowLayer"}
    layers = layers_of(model)
    if (
        is_latent(model)
        or any(type(layer).__name__ not in known for layer in layers)
        or any(getattr(layer, "sliding_window", length) < length for layer in layers)
        or getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None)
    ):
        raise ValueError(GRAPH)


def _length(model, asked: int | None) -> int:
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    limits = {"context": ModelShape.of(model).context, "sliding window": window}
    limits = {name: most for name, most in limits.items() if most}
    if asked is None and not limits:
        raise ValueError("max_length: this model states no context length, so name one")
    length = min(limits.values()) if asked is None else asked
    for name, most in limits.items():
        if length > most:
            raise ValueError(f"max_length={length}: more than the model's {name} of {most} tokens")
    return length

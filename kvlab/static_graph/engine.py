"""StaticGraphEngine: a language model decoded by an engine without a cache (ONNX Runtime).

    engine = StaticGraphEngine(model, max_length=512, policy="double")
    trace = engine.generate(ids, 200)          # the same Trace as kvlab.decode

The engine gets addresses only: weights are read where the model has them, past K and V where the KV manager
holds them, and the new K and V are written where it says (IO binding; nothing is copied on the way in or
out). A prompt goes through the model itself, in chunks that attend to the same buffers.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..decode import Trace, decode
from ..devices import refuse_offloaded
from ..models import ModelShape, is_latent, layers_of, prepare
from ..parameters import check_bool, check_one_of, check_whole
from ..saved import model_digest
from .cache import PaddedCache
from .export import (
    FORMS,
    GraphSpec,
    graph_file,
    require_engine,
    scales_digest,
    session,
    weights,
)
from .graph import GRAPH, StaticStep, sequence_names
from .kv_manager import KVManager, spare_part
from .quantized import calibrate

CHUNK = 64


class StaticGraphEngine:
    """The static graph of a model's decode step, and the buffers that it and the prompt's chunks work on.

    model: float32, on the CPU. max_length: S, tokens a step attends to, the new one included (default: the
    model's context). policy, extra: see `KVManager`. quantized: K and V are held as int8 with one scale per
    KV head, calibrated before. form: `single`, each KV head a tensor `[1, 1, S - 1, D]` of its own, or
    `multi`, `[1, KV heads, S - 1, D]`. chunk: tokens per pass of a prompt, which torch runs (1: token by
    token, through the graph). threads: of the graph's engine (default: torch's). cache: folder for graphs.

    Weights are held once, by the model: what is changed there is changed for the graph; weights that were
    moved or replaced are found at the next step or manager.

    A prompt may hold S tokens. Generation past S slides the window: each step attends to the newest S
    tokens, and every token keeps the position it was first given, up to the model's context.
    Raises ValueError for parameters that do not fit the model, and when onnxruntime is missing.
    """

    def __init__(
        self, model, max_length: int | None = None, policy: str = "double", quantized: bool = False, *,
        extra: float | None = None, form: str = "multi", chunk: int = CHUNK, threads: int | None = None,
        cache: Path | None = None,
    ):  # fmt: skip
        check_parameters(max_length, policy, quantized, extra, form, chunk)
        require_engine()
        refuse_offloaded(model, "a static graph")
        self.model, self.shape = prepare(model), ModelShape.of(model)
        self.length = _length(model, max_length)
        _check_layers(model, self.length)
        self.policy, self.extra, self.form, self.quantized = policy, extra, form, quantized
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(
                f"the static-graph engine runs float32 models on the CPU; this one is {weight.dtype} on "
                f"{weight.device}: load it with device='cpu', dtype='float32'"
            )
        self.parts = self.shape.kv_heads if form == "single" else 1
        self.scales = calibrate(model, self.parts) if quantized else None
        spec = GraphSpec(model_digest(model), form, scales_digest(self.scales))
        path = graph_file(model, spec, self.scales, cache)
        engine = session(path, self.length, threads or torch.get_num_threads())
        names = sequence_names(self.shape.layers, self.parts)
        self.graph = _Graph(engine, weights(model), names, self.length)
        self.chunk = min(chunk, self.length - 1)
        self.eager = StaticStep(model, self.parts, self.scales)
        self.steps, self.step_seconds, self.manage_seconds = 0, 0.0, 0.0  # of passes with one token

    def manager(self) -> KVManager:
        """Empty buffers for one row of text."""
        self.graph.read(weights(self.model))
        return KVManager(
            2 * self.shape.layers * self.parts,
            self.length,
            self.shape.head_dim,
            heads=self.shape.kv_heads // self.parts,
            policy=self.policy,
            extra=self.extra,
            dtype=np.int8 if self.quantized else np.float32,
        )

    def feed(self, manager: KVManager, tokens: list[int]) -> np.ndarray:
        """Feed tokens of one row through its manager; returns logits `[tokens, vocabulary]`."""
        if len(tokens) > 1 and not manager.seen:
            self.check_prompt(len(tokens))
        pieces = [tokens[i : i + self.chunk] for i in range(0, len(tokens), self.chunk)]
        passes = [self._step if len(piece) == 1 else self._chunk for piece in pieces]
        return np.concatenate([run(manager, piece) for run, piece in zip(passes, pieces, strict=True)])

    def check_prompt(self, tokens: int) -> None:
        """ValueError for a prompt that is longer than S."""
        if tokens > self.length:
            raise ValueError(f"a prompt of {tokens} tokens is longer than max_length={self.length}")

    def generate(self, ids: Tensor, n: int, attention_mask: Tensor | None = None) -> Trace:
        """Greedy decoding of `n` tokens after `ids` `[batch, tokens]`, row by row; see `kvlab.decode`."""
        return decode(self.model, ids, PaddedCache(self), n, attention_mask)

    def _step(self, manager: KVManager, tokens: list[int]) -> np.ndarray:
        """One token through the graph, `[1, vocabulary]`."""
        started, graph = time.perf_counter(), self.graph
        if graph.moved():
            graph.read(weights(self.model))
        graph.token[0, 0], graph.position[0, 0] = tokens[0], manager.seen
        graph.bind(manager.mask, manager.past_addresses(), manager.place())
        ready = time.perf_counter()
        graph.run()
        ran = time.perf_counter()
        manager.commit()
        self.steps += 1
        self.step_seconds += time.perf_counter() - started
        self.manage_seconds += ready - started + time.perf_counter() - ran
        return graph.logits[0].copy()

    @torch.no_grad()
    def _chunk(self, manager: KVManager, tokens: list[int]) -> np.ndarray:
        """Several tokens through the model's own modules, `[tokens, vocabulary]`: torch takes tensors of any
        size, so they attend to the rows that hold tokens."""
        count, used = len(tokens), manager.used
        mask = torch.from_numpy(chunk_mask(manager.positions()[used], manager.seen, count, self.length))
        positions = torch.arange(manager.seen, manager.seen + count)
        past = list(torch.from_numpy(manager.past)[:, None, :, used])  # of a sequence [1, heads, held, D]
        logits, *new = self.eager(torch.tensor([tokens]), positions[None], mask[None, None], past)
        manager.append(torch.cat(new).numpy())
        return logits[0].numpy()


class _Graph:
    """A session, its arrays, and the addresses it is bound to."""

    def __init__(self, engine, weights: dict[str, Tensor], names: list[str], length: int):
        self.engine = engine
        self.binding = engine.io_binding()
        inputs = {node.name: node for node in engine.get_inputs()}
        outputs = {node.name: node for node in engine.get_outputs()}
        self.past = [(f"past.{name}", tuple(inputs[f"past.{name}"].shape)) for name in names]
        self.new = [(f"new.{name}", tuple(outputs[f"new.{name}"].shape)) for name in names]
        self.dtype = {"tensor(float)": np.float32, "tensor(int8)": np.int8}[inputs[self.past[0][0]].type]
        self.token, self.position = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
        self.mask_shape = (1, 1, 1, length)
        self.logits = np.zeros(outputs["logits"].shape, np.float32)
        for name, array in {"token": self.token, "position": self.position}.items():
            self.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.inputs = inputs.keys()
        self.read(weights)
        self.binding.bind_output("logits", "cpu", 0, np.float32, self.logits.shape, self.logits.ctypes.data)
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
        self.weights, self.places = found, [weight.data_ptr() for weight in found.values()]

    def moved(self) -> bool:
        """Whether a weight is elsewhere than it was read: the model was moved or shared with processes, and
        what is there now may be somebody else's."""
        return [weight.data_ptr() for weight in self.weights.values()] != self.places

    def bind(self, mask: np.ndarray, past: list[int], new: list[int]) -> None:
        """Say where to read and write; what has not moved since the last pass stays bound."""
        bound, dtype = self.bound, self.dtype
        if bound.get("mask") != mask.ctypes.data:
            bound["mask"] = mask.ctypes.data
            self.binding.bind_input("mask", "cpu", 0, np.float32, self.mask_shape, mask.ctypes.data)
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
    """What the queries of a chunk may see, `[count, held + count]`: 0, or -inf.

    positions `[held]`: of the past tokens. The chunk's `count` tokens begin at position `seen`. A query sees
    itself and tokens before it, `window` in all.
    """
    asked = np.arange(seen, seen + count)
    distance = asked[:, None] - np.concatenate([positions, asked])
    return np.where((distance >= 0) & (distance < window), np.float32(0), np.float32(-np.inf))


def check_parameters(max_length, policy, quantized, extra, form, chunk) -> None:
    """What can be said about parameters without a model (ValueError)."""
    spare_part(policy, extra)
    check_bool("quantized", quantized)
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

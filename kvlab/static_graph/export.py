"""Export: a model's step as an ONNX file without weights, kept in the user's cache folder.

The file holds operations. Weights are inputs of the graph, which a session reads where the model has them.
S is a name in the file, which a session replaces by a number: so a file serves every S, and what the engine
compiles has fixed sizes.

A graph is named by what it was made from: the digest of the model's weights and configuration, the form, the
width and how K and V are held. It is written to a temporary folder and renamed, so a folder that is there is
whole; what is inside is checked against its checksums before it is used.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from .. import scratch
from ..errors import first_line
from ..extras import EXTRAS, needs
from ..models import ModelShape, prepare, preparing
from ..models.files import damage, write_sums
from ..modes import evaluating
from . import graph
from .graph import NUMBERS, OPSET, StaticStep, sequence_names

FORMS = ("single", "multi")
FILE = "graph.onnx"
ROWS, TOTAL = "rows", "total"  # the two sizes that a session fixes: S - 1 and S - 1 + width
TRACED = 7  # rows of the past while the step is traced: nothing but `StaticLayer` sees how many there are
CODE = (graph.__file__, __file__)  # what is traced, and what is made of it
MADE_WITH = f"{torch.__version__} {transformers.__version__}".encode()  # whose names a graph's inputs have
MAKER = hashlib.sha256(MADE_WITH + b"".join(Path(file).read_bytes() for file in CODE)).hexdigest()[:8]


@dataclass(frozen=True)
class GraphSpec:
    """What a graph was made for. model: digest; form: `single` (each KV head an input of its own) or `multi`;
    width: tokens of a pass; numbers: of K and V, see `NUMBERS`; scales: digest of those of int8, or empty;
    maker: of kvlab's graph code and of the versions of torch and transformers."""

    model: str
    form: str
    width: int = 1
    numbers: str = "fp32"
    scales: str = ""
    maker: str = MAKER

    @property
    def folder(self) -> str:
        return f"{self.model}-{self.form}-{self.width}-{self.numbers}{self.scales[:8]}-{self.maker}"


def require_engine() -> None:
    """ValueError with what to install when the engine's packages are missing."""
    needs(*EXTRAS["static-graph"])


def scales_digest(scales: list[Tensor] | None) -> str:
    """Digest of quantization scales, empty for none."""
    if scales is None:
        return ""
    return hashlib.sha256(torch.cat(scales).float().numpy().tobytes()).hexdigest()


def graph_file(model, spec: GraphSpec, scales: list[Tensor] | None = None, cache: Path | None = None) -> Path:
    """The graph of `spec`, exported first when it is not there. Raises ValueError for a damaged one."""
    folder = (scratch.folder("static_graph") if cache is None else Path(cache)) / spec.folder
    if not folder.is_dir():
        with scratch.unfinished(folder.parent) as work:
            export(model, spec, work / "graph", scales)
            scratch.move(work / "graph", folder)
    if wrong := damage(folder):
        raise ValueError(f"{wrong}: delete that folder, the graph is made again")
    return folder / FILE


def export(model, spec: GraphSpec, folder: Path, scales: list[Tensor] | None = None) -> None:
    """Trace one step of `model` and write the graph and its checksums into a new folder."""
    require_engine()
    import onnx_ir

    shape = ModelShape.of(prepare(model))
    parts = shape.kv_heads if spec.form == "single" else 1
    names = sequence_names(shape.layers, parts)
    width, form = spec.width, NUMBERS[spec.numbers]
    token = torch.zeros(1, width, dtype=torch.long, device="cpu")
    mask = torch.zeros(1, 1, width, TRACED + width, device="cpu")
    heads = shape.kv_heads // parts
    past = [torch.zeros((1, heads, TRACED, shape.head_dim), dtype=form.dtype, device="cpu") for _ in names]
    step = StaticStep(model, parts, [form(scale) for scale in scales or [None] * len(names)])
    with preparing, evaluating(step), torch.no_grad(), torch.autocast("cpu", enabled=False), _undisturbed():
        try:
            program = torch.onnx.export(
                step,
                (token, token.clone(), mask, past),
                input_names=["token", "position", "mask", *(f"past.{name}" for name in names)],
                output_names=["logits", *(f"new.{name}" for name in names)],
                dynamo=True,
                opset_version=OPSET,
                optimize=False,  # the session does it, in a tenth of the time
                verbose=False,
            )
        except Exception as error:
            raise ValueError(
                f"torch cannot export {type(model).__name__} as a static graph: {first_line(error)}"
            ) from error
        _open(program.model.graph, set(weights(model)))
        folder.mkdir()
        onnx_ir.save(program.model, folder / FILE)
    write_sums(folder)


def weights(model) -> dict[str, Tensor]:
    """A model's parameters by the names that they have in a graph: those of `StaticStep`. ValueError if one
    is not contiguous in memory, since a graph would read a copy of it."""
    found = dict(model.named_parameters(remove_duplicate=False))
    if torn := [name for name, weight in found.items() if not weight.is_contiguous()]:
        raise ValueError(
            f"a static graph reads weights where they are, and {torn[0]} is not contiguous there: set its "
            "data to data.contiguous()"
        )
    return {f"model.{name}": weight for name, weight in found.items()}


def _open(traced, weights: set[str]) -> None:
    """Make inputs of a traced graph's weights, and names of the two sizes that depend on S."""
    from onnx_ir import Shape

    for name in sorted(weights & set(traced.initializers)):
        value = traced.initializers.pop(name)
        value.const_value = None
        traced.inputs.append(value)
    for value in traced.inputs:
        if value.name == "mask":
            value.shape = Shape([*value.shape[:3], TOTAL])
        elif value.name.startswith("past."):
            value.shape = Shape([*value.shape[:2], ROWS, value.shape[3]])
    for node in traced:
        for value in set(node.outputs) - set(traced.outputs):
            value.shape = None  # for the session to find out


def session(path: Path, length: int, width: int, threads: int):
    """An ONNX Runtime session on the CPU with `threads` threads, every size fixed: S = `length`."""
    require_engine()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_free_dimension_override_by_name(ROWS, length - 1)
    options.add_free_dimension_override_by_name(TOTAL, length - 1 + width)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"graph file {path} cannot be loaded: {first_line(error)}") from error


@contextlib.contextmanager
def _undisturbed():
    """The exporter tells about optional packages that it did not find; and it makes millions of objects that
    stay: looking through them again and again would cost a third."""
    logger = logging.getLogger("torch.onnx")
    with warnings.catch_warnings(), contextlib.ExitStack() as afterwards:
        warnings.simplefilter("ignore")
        afterwards.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        if gc.isenabled():
            afterwards.callback(gc.enable)
        gc.disable()
        yield

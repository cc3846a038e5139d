"""Export: a model's pass as an ONNX file of fixed sizes, kept in the user's cache folder.

A graph is named by what it was made from: the digest of the model's weights and configuration, S, the form,
the width of a pass and the quantization scales. It is written to a temporary folder and renamed, so a folder
that is there is whole; what is inside is checked against its manifest before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import scratch
from ..errors import first_line
from ..models import ModelShape, prepare
from . import graph
from .graph import StaticStep, sequence_names

OPSET = 18
FORMS = ("single", "multi")
PACKAGES = ("onnxruntime", "onnx", "onnxscript")
FILE, MANIFEST = "graph.onnx", "manifest.json"
MAKER = hashlib.sha256(Path(graph.__file__).read_bytes()).hexdigest()[:8]  # of the code that is traced


@dataclass(frozen=True)
class GraphSpec:
    """What a graph was made for. form: `single` (each KV head an input of its own) or `multi`; width: tokens
    per pass; scales: digest of the quantization scales, empty for float32; maker: of kvlab's graph code."""

    model: str
    length: int
    form: str
    width: int = 1
    scales: str = ""
    opset: int = OPSET
    maker: str = MAKER

    @property
    def folder(self) -> str:
        kind = f"int8-{self.scales[:8]}" if self.scales else "float32"
        return f"{self.model[:16]}-S{self.length}-{self.form}-w{self.width}-{kind}-{self.maker}"


def require_engine() -> None:
    """ValueError with what to install when the engine's packages are missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the static-graph engine needs {', '.join(missing)}: pip install {' '.join(PACKAGES)}"
        )


def model_digest(model) -> str:
    """SHA-256 of a model's configuration and weights."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("transformers_version", "dtype")}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def scales_digest(scales: list[Tensor] | None) -> str:
    """Digest of quantization scales, empty for none."""
    if scales is None:
        return ""
    return hashlib.sha256(torch.cat(scales).float().numpy().tobytes()).hexdigest()


def graph_file(model, spec: GraphSpec, scales: list[Tensor] | None = None, cache: Path | None = None) -> Path:
    """The graph of `spec`, exported first when it is not there. Raises ValueError for a damaged one."""
    cache = scratch.folder("static_graph") if cache is None else Path(cache)
    folder = cache / spec.folder
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=cache, ignore_cleanup_errors=True) as new:
            made = Path(new) / "graph"
            made.mkdir()
            export(model, spec, made, scales)
            with contextlib.suppress(OSError):  # another process was faster: theirs is as good
                made.rename(folder)
    return check(folder, spec)


def export(model, spec: GraphSpec, folder: Path, scales: list[Tensor] | None = None) -> None:
    """Trace one pass of `model` and write the graph and its manifest into `folder`."""
    require_engine()
    shape = ModelShape.of(prepare(model))
    parts = shape.kv_heads if spec.form == "single" else 1
    names = sequence_names(shape.layers, parts)
    dtype = torch.int8 if spec.scales else torch.float32
    past_shape = (1, shape.kv_heads // parts, spec.length - 1, shape.head_dim)
    tokens = torch.zeros(1, spec.width, dtype=torch.long)
    mask = torch.zeros(1, 1, spec.width, spec.length - 1 + spec.width)
    past = [torch.zeros(past_shape, dtype=dtype) for _ in names]
    step = StaticStep(model, parts, scales, spec.opset).eval()
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            step,
            (tokens, tokens.clone(), mask, past),
            input_names=["token", "position", "mask", *(f"past.{name}" for name in names)],
            output_names=["logits", *(f"new.{name}" for name in names)],
            dynamo=True,
            opset_version=spec.opset,
            verbose=False,
        )
        program.save(folder / FILE)
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    manifest = {"spec": asdict(spec), "files": files, "torch": torch.__version__}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def check(folder: Path, spec: GraphSpec) -> Path:
    """The graph file in `folder`; ValueError when it is damaged or was made for something else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        made_for, files = manifest["spec"], manifest["files"]
        whole = FILE in files and all(_sha256(folder / name) == sha for name, sha in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"graph file {folder / FILE} is damaged: delete that folder, it is made again")
    for name, wanted in asdict(spec).items():
        if made_for.get(name) != wanted:
            raise ValueError(
                f"graph file {folder / FILE} was made for another {name} ({made_for.get(name)!r}, not "
                f"{wanted!r}): delete that folder, it is made again"
            )
    return folder / FILE


def session(path: Path, threads: int):
    """An ONNX Runtime session on the CPU with `threads` threads."""
    require_engine()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"graph file {path} cannot be loaded: {first_line(error)}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _quiet():
    """The exporter tells about optional packages it did not find; nobody needs that here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

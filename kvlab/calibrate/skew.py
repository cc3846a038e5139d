"""Skewing: the rotation that gathers a head's scores in few columns (InfiniGen, Lee et al. 2024)."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from .. import scratch
from ..attention import recorded
from ..devices import entry_of
from ..models import calibration_ids, prepare
from ..models.remembered import Remembered
from ..models.shape import ModelShape, check_ids
from ..ranks import ranks_of
from ..saved import contents_digest, inside, model_digest

SMALL = 50_000_000  # parameters: below, calibrating again is quicker than reading a file
_skews = Remembered()  # by calibration text and dtype


def skewing_matrices(queries: Tensor) -> Tensor:
    """A_h = V of the singular value decomposition Q_h = U S V^T, one per KV head.

    queries `[kv_heads, tokens, head_dim]`, as attention sees them (after RoPE) -> `[kv_heads, head_dim,
    head_dim]`, fp32. A is orthogonal, so (Q A)(K A)^T = Q K^T.
    """
    device, queries = queries.device, queries.float().cpu()  # a GPU's is less exact, and takes longer
    if not queries.isfinite().all():
        raise ValueError("the model's queries of a calibration text are not finite: try dtype=float32")
    few = queries.shape[1] < queries.shape[2]
    return torch.linalg.svd(queries, full_matrices=few).Vh.transpose(-1, -2).contiguous().to(device)


def skew(model, ids: list | None = None) -> list[Tensor]:
    """The skewing matrices of every layer, from one pass over calibration tokens (`[[id, ...]]`).

    Without ids: `models.calibration_ids(model)`. Computed once for each text, as long as the model stays as
    it is; those of a larger model are also written to `scratch.folder("skew")`, under a hash of model,
    text and this file, and found there next time.
    """
    ids = calibration_ids(model) if ids is None else torch.tensor(ids, device="cpu")
    check_ids(ids, ModelShape.of(model).vocabulary)
    key = (tuple(ids.flatten().tolist()), model.dtype)
    known = _skews.of(model)
    if key not in known:
        small = sum(weight.numel() for weight in model.parameters()) < SMALL
        hidden = ranks_of(model) > 1 or any(weight.is_meta for weight in model.parameters())
        if small or hidden:  # no hash tells weights apart that are not all here
            matrices = _calibrate(model, ids)
        else:
            made_by = Path(__file__).read_bytes() + repr(ids.tolist()).encode()
            name = f"{model_digest(model)}-{hashlib.sha256(made_by).hexdigest()[:16]}.safetensors"
            file = scratch.folder("skew") / name
            matrices = _read(file, model)
            if matrices is None:
                matrices = _calibrate(model, ids)
                _write(file, matrices)
        known[key] = matrices
    return known[key]


def _calibrate(model, ids: Tensor) -> list[Tensor]:
    made = []
    for layer in recorded(prepare(model), ids):
        kv_heads = layer.keys.shape[1]
        queries = layer.query[0].unflatten(0, (kv_heads, -1)).flatten(1, 2)  # [kv_heads, group * tokens, d]
        made.append(skewing_matrices(queries))
    return made


def _read(file: Path, model) -> list[Tensor] | None:
    try:
        about, matrices = inside(file, "")
    except ValueError:  # not there, or damaged: made again
        return None
    if about != {"digest": contents_digest({}, matrices)}:
        return None
    where = entry_of(model)  # once: a step that copies them waits for it
    return [matrix.to(where) for _, matrix in sorted(matrices.items())]


def _write(file: Path, matrices: list[Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    named = {f"{layer:05}": matrix.cpu() for layer, matrix in enumerate(matrices)}
    with contextlib.suppress(OSError, SafetensorError):  # a cache that cannot be written is no reason to stop
        file.parent.mkdir(parents=True, exist_ok=True)
        with scratch.written_whole(file) as part:
            save_file(named, part, metadata={"digest": contents_digest({}, named)})

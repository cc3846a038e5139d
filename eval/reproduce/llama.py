"""llama.cpp in this process: its library, called as llama-cpp-python calls it, and a model file for it.

The sources of llama-cpp-python hold both llama.cpp and the ctypes declarations of its functions. They are
unpacked into `.llama/` in the project's folder and llama.cpp's target `llama` is built there, with the
commands in docs/performance.md at commit eeeb4001; nothing is installed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import types
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvlab.models import ModelShape

from ..core.digests import ROOT

HOME = ROOT / ".llama"
LIBRARY = HOME / "build" / "bin"
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q5_0": 6, "q4_0": 2}  # of K and V, by their numbers in ggml.h
CHUNK = 512  # tokens of a sequence with which a cache is filled
SPARE = 256  # slots beyond the tokens asked for: llama.cpp pads to as many


@cache
def bindings():
    """The module of llama-cpp-python that declares the library's functions, and the library, silent."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(LIBRARY)
    package = types.ModuleType("llama_cpp")  # without its __init__, which needs packages for chat and servers
    package.__path__ = [str(HOME / "llama_cpp")]
    sys.modules.setdefault("llama_cpp", package)
    found = importlib.import_module("llama_cpp.llama_cpp")
    found.silence = found.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
    found.llama_log_set(found.silence, ctypes.c_void_p(0))
    found.llama_backend_init()
    return found


def features() -> str:
    """What the library says of the machine and of how it was built."""
    return bindings().llama_print_system_info().decode().strip()


class Model:
    """A GGUF file's model, in the CPU's memory. RuntimeError where llama.cpp cannot read it."""

    def __init__(self, file: Path):
        self.api = bindings()
        self.model = self.api.llama_model_load_from_file(
            str(file).encode(), self.api.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {file}")

    def close(self) -> None:
        self.api.llama_model_free(self.model)


class Context:
    """A run (see `turns.Run`) with a cache for one sequence, K and V both of a type of `TYPES`. RuntimeError
    where llama.cpp does not make it: quantized V needs flash attention."""

    def __init__(self, model: Model, shape: ModelShape, kind: str, flash: bool, tokens: int, threads: int):
        self.api, self.vocabulary = model.api, shape.vocabulary
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens + SPARE, CHUNK, CHUNK
        params.n_seq_max, params.kv_unified = max(1, -(-tokens // CHUNK)), True
        params.type_k = params.type_v = TYPES[kind]
        params.flash_attn_type = int(flash)
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = self.api.llama_init_from_model(model.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context with {kind}, flash attention {flash}")
        self.memory = self.api.llama_get_memory(self.context)
        self.batch = self.api.llama_batch_init(CHUNK, 0, 1)
        self.position = 0

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)

    def feed(self, ids: Tensor) -> Tensor:
        """The next tokens `[1, tokens]` of sequence 0 -> logits `[vocabulary]` after the last one."""
        for chunk in ids[0].split(CHUNK):
            self._next(chunk.tolist())
        return torch.tensor(self.api.llama_get_logits_ith(self.context, -1)[: self.vocabulary])

    def _next(self, ids: list[int]) -> None:
        self._decode(ids, self.position, 0)
        self.position += len(ids)

    def _decode(self, ids: list[int], position: int, sequence: int) -> None:
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i == len(ids) - 1
        if error := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with code {error}")

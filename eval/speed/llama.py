"""llama.cpp in this process: its library, called as llama-cpp-python calls it, and a model file for it.

The sources of llama-cpp-python hold both llama.cpp and the ctypes declarations of its functions. They are
unpacked into `.llama/` in the project's folder and llama.cpp's target `llama` is built there, with the
commands in docs/performance.md; nothing is installed.
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

from kvlab.extras import version

from ..core.digests import ROOT

HOME = ROOT / ".llama"
LIBRARY = HOME / "build" / "bin"
TYPES = {"f32": 0, "q8_0": 8, "q4_0": 2}  # of K and V, by their numbers in ggml.h
BITS = {"f32": 32.0, "q8_0": 8.5, "q4_0": 4.5}  # of a value, the scales of its block included
CHUNK = 512  # tokens of a prompt that pass at once
SPARE = 256  # slots beyond the tokens asked for: llama.cpp pads to as many
OF_WEIGHTS = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}  # their name for weights that are as narrow
BLOCK = 32  # weights of a row that share a scale in q8_0


def there() -> bool:
    """Whether the library has been built, and what writes its files is installed."""
    return any(LIBRARY.glob("libllama.*")) and version("gguf") is not None


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


def takes(config, weights: str) -> bool:
    """Whether llama.cpp is built, and runs a model of this configuration of transformers with weights as
    narrow: a Llama whose positions are rotated in the plain way."""
    rows = (getattr(config, name, 1) for name in ("hidden_size", "intermediate_size"))
    plain = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default"
    fits = weights != "int8" or all(row % BLOCK == 0 for row in rows)
    return there() and config.model_type == "llama" and plain and fits


def write(model, file: Path, kind: str = "f32") -> int:
    """Write a Llama model of transformers as a GGUF file, without its tokenizer, its matrices in a type of
    `OF_WEIGHTS`, all else in fp32. Returns the bytes that a step reads: all but an input embedding of its
    own."""
    import gguf

    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    narrow, read = gguf.GGMLQuantizationType[kind.upper()], 0
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            weight = interleaved(weight, heads) if part in name else weight
        stem, _, ending = name.rpartition(".")
        numbers, of = weight.float().contiguous().numpy(), gguf.GGMLQuantizationType.F32
        if weight.dim() > 1:
            numbers, of = gguf.quants.quantize(numbers, narrow), narrow
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", numbers, raw_dtype=of)
        if config.tie_word_embeddings or "embed_tokens" not in name:
            read += numbers.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection `[heads * head_dim, hidden]` in llama.cpp's order: it rotates neighbouring
    channels, transformers those half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class Model:
    """A GGUF file's model, in the CPU's memory. RuntimeError where llama.cpp cannot read it."""

    def __init__(self, file: Path):
        self.api = bindings()
        self.model = self.api.llama_model_load_from_file(
            str(file).encode(), self.api.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {file}")


class Context:
    """A cache for one sequence of so many tokens, K and V both of a type of `TYPES`. RuntimeError where
    llama.cpp does not make it: quantized V needs flash attention."""

    def __init__(self, model: Model, kind: str, flash: bool, tokens: int, threads: int):
        self.api = model.api
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens + SPARE, CHUNK, CHUNK
        params.type_k = params.type_v = TYPES[kind]
        params.flash_attn_type = int(flash)
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = self.api.llama_init_from_model(model.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context with {kind}, flash attention {flash}")
        self.batch = self.api.llama_batch_init(CHUNK, 0, 1)
        self.held = 0

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)

    def feed(self, ids: list[int]) -> None:
        """The next tokens of the sequence. The logits after the last one are made, but not read, since they
        would be copied."""
        for start in range(0, len(ids), CHUNK):
            part, batch = ids[start : start + CHUNK], self.batch
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, self.held + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = i == len(part) - 1
            if error := self.api.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode failed with code {error}")
            self.held += len(part)

    def logits(self, vocabulary: int) -> Tensor:
        """Those after the last token, `[vocabulary]`."""
        return torch.tensor(self.api.llama_get_logits_ith(self.context, -1)[:vocabulary])

"""Models: load one, look up its shape, and read the query that a layer would ask."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import attention
from .arithmetic import Shape

WORKSHOP = Path(__file__).parent / "workshop"
EMBEDDED = {"workshop": WORKSHOP / "checkpoint", "workshop-opt": WORKSHOP / "checkpoint-opt"}
_tokenizers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> its tokenizer
_watched: weakref.WeakSet = weakref.WeakSet()  # models whose blocks report their inputs


def load(name_or_path=None, *, device=None, dtype=None):
    """Load a model ready for kvlab caches, and its tokenizer.

    name_or_path: "workshop" (default) or "workshop-opt", the embedded models (no network), else a folder or
    a hub id. device: "cpu", "cuda", ... (default: cuda where there is one). dtype: torch dtype or its name
    (default: float32 on the CPU, the checkpoint's own elsewhere). Returns (model in eval mode, tokenizer).
    Raises ValueError when the folder holds no model or no tokenizer, a file of an embedded model is missing
    or damaged, weights are missing or of another shape than the model's, or the model does not use
    transformers' attention interface.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    source = source_of(name_or_path)
    embedded = source in EMBEDDED.values()
    if embedded:
        check_files(source)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    elif isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype={dtype!r}: expected a torch dtype such as float32 or bfloat16")
        dtype = getattr(torch, dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise ValueError(
            f"no tokenizer could be loaded from {str(source)!r}: {_first_line(error)}"
        ) from error
    bars = logging.is_progress_bar_enabled()
    try:
        if embedded:
            logging.disable_progress_bar()  # a bar for a fifth of a second
        model, found = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except Exception as error:
        raise ValueError(f"no model could be loaded from {str(source)!r}: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if absent := sorted(found["missing_keys"]):
        raise ValueError(
            f"{str(source)!r} lacks {len(absent)} of the model's weights, {absent[0]!r} first: it is no "
            f"checkpoint of a {type(model).__name__}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = prepare(model.to(device).eval())
    _tokenizers[model] = tokenizer
    return model, tokenizer


def source_of(name_or_path=None):
    """The folder of an embedded model (None: workshop); anything else as it is."""
    return EMBEDDED.get("workshop" if name_or_path is None else name_or_path, name_or_path)


def check_files(folder: Path) -> None:
    """Compare an embedded model's files with `sha256.txt` (as `sha256sum` writes it).

    Raises ValueError naming the first file that is missing or damaged.
    """
    again = "install kvlab again, or restore the file from its repository"
    listed = folder / "sha256.txt"
    if not listed.is_file():
        raise ValueError(f"the embedded model {folder} is incomplete: sha256.txt is missing; {again}")
    for line in listed.read_text(encoding="utf-8").splitlines():
        expected, name = line.split()
        file = folder / name
        if not file.is_file():
            raise ValueError(f"the embedded model {folder} is incomplete: {name} is missing; {again}")
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError(
                f"{file} is damaged: its {len(content):,} bytes have another sha256 than sha256.txt says; "
                f"{again}"
            )


def prepare(model):
    """Let the model attend through kvlab; ValueError for a model that cannot."""
    if model.config._attn_implementation != attention.NAME:
        try:
            if not model.config.is_encoder_decoder:
                model.set_attn_implementation(attention.NAME)
        except (ValueError, ImportError) as error:
            raise ValueError(_cannot(model)) from error
        if model.config._attn_implementation != attention.NAME:
            raise ValueError(_cannot(model))
    return model


def _cannot(model) -> str:
    return (
        f"{type(model).__name__} does not use transformers' attention interface as a decoder, so kvlab "
        "caches cannot serve it; families that work include " + ", ".join(sorted(FAMILIES))
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def calibration_ids(model) -> Tensor:
    """Default calibration tokens `[1, tokens]`: the text shipped with the package through the tokenizer
    that `load` found, or, for a model made otherwise, 256 random tokens from a fixed seed."""
    limit = Anatomy(model).context or 2048
    tokenizer = _tokenizers.get(model)
    if tokenizer is not None:
        text = (WORKSHOP / "calibration.txt").read_text(encoding="utf-8")
        return tokenizer(text, return_tensors="pt").input_ids[:, : min(limit, 512)]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (1, min(limit, 256)), generator=generator)


@dataclass(frozen=True)
class Family:
    """What InfiniGen must know of a model family to ask a layer's question ahead of time."""

    blocks: str  # path of the list of decoder layers
    norm: str  # the norm before attention, in a decoder layer
    attention: str  # the attention module, in a decoder layer
    query: Callable[
        [torch.nn.Module, Tensor], Tensor
    ]  # (attention, normed input) -> [batch, tokens, heads * d]


def _phi_query(attn, x):
    query = attn.q_proj(x).unflatten(-1, (-1, attn.head_dim))
    return (attn.q_layernorm(query) if attn.qk_layernorm else query).flatten(-2)


def _neox_query(attn, x):
    return attn.query_key_value(x).unflatten(-1, (-1, 3 * attn.head_size))[..., : attn.head_size].flatten(-2)


_LLAMA = Family("model.layers", "input_layernorm", "self_attn", lambda attn, x: attn.q_proj(x))
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Family(
        "model.layers", "input_layernorm", "self_attn",
        lambda attn, x: attn.q_norm(attn.q_proj(x).unflatten(-1, (-1, attn.head_dim))).flatten(-2),
    ),
    "phi": Family("model.layers", "input_layernorm", "self_attn", _phi_query),
    "opt": Family(
        "model.decoder.layers", "self_attn_layer_norm", "self_attn",
        lambda attn, x: attn.q_proj(x) * attn.scaling,
    ),
    "gpt2": Family(
        "transformer.h", "ln_1", "attn", lambda attn, x: attn.c_attn(x)[..., : attn.embed_dim]
    ),
    "gpt_neox": Family("gpt_neox.layers", "input_layernorm", "attention", _neox_query),
}  # fmt: skip


class Anatomy:
    """A model's shape, by one set of names for all families."""

    def __init__(self, model):
        config = model.config.get_text_config()
        self.model = model
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden: int = config.hidden_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def shape(self) -> Shape:
        """What the formulas of `arithmetic` ask for."""
        vocabulary = self.model.config.get_text_config().vocab_size
        return Shape(self.layers, self.hidden, self.heads, self.kv_heads, vocabulary)

    @property
    def family(self) -> Family:
        kind = self.model.config.model_type
        if kind not in FAMILIES:
            raise ValueError(f"infinigen knows no {kind!r} models; it knows {', '.join(sorted(FAMILIES))}")
        return FAMILIES[kind]

    def query(self, layer: int, block_input: Tensor, rotary=None, norm: int | None = None) -> Tensor:
        """The query layer `layer` would ask if `block_input` `[batch, tokens, hidden]` were its input.

        rotary: (cos, sin), each `[batch, tokens, rotary dims]`, or None. norm: the layer whose norm is used
        (default: its own). Returns `[batch, heads, tokens, head_dim]`.
        """
        family = self.family
        blocks = self.model.get_submodule(family.blocks)
        block, normer = blocks[layer], blocks[layer if norm is None else norm]
        post_norm = not getattr(block, "do_layer_norm_before", True)  # OPT-350m
        normed = block_input if post_norm else getattr(normer, family.norm)(block_input)
        query = family.query(getattr(block, family.attention), normed)
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return query if rotary is None else _rotate(query, *rotary)

    def watch_block_inputs(self) -> None:
        """Let every block's input reach the next layer of the cache in use (`Layer.foresee`)."""
        if self.model in _watched:
            return
        _watched.add(self.model)
        for index, block in enumerate(self.model.get_submodule(self.family.blocks)):
            block.register_forward_pre_hook(_Foresight(self, index + 1), with_kwargs=True)


class _Foresight:
    """A forward pre-hook of block i - 1: offers the block's input to layer i of the kvlab cache in use."""

    def __init__(self, anatomy: Anatomy, layer: int):
        self.anatomy, self.layer = anatomy, layer

    def __call__(self, block, args, kwargs) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] != 1:
            return
        rotary = kwargs.get("position_embeddings")
        for value in (*args[1:], *kwargs.values()):
            if hasattr(value, "foresee") and self.layer < len(value.layers):
                value.foresee(
                    self.layer, lambda norm=None: self.anatomy.query(self.layer, hidden, rotary, norm)
                )


def _rotate(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on the first dimensions of `[batch, heads, tokens, head_dim]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = query[..., : cos.shape[-1]], query[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

"""GGUF: a model file of llama.cpp, written once as the folder of files that transformers reads."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
from pathlib import Path

import torch

from .. import scratch
from ..errors import first_line
from ..extras import EXTRAS, needs
from . import fields, files
from .files import sha256, unlike, write_sums

MAGIC = b"GGUF"  # what such a file begins with
# What `tokenizer.ggml.pre` says of how text is cut before merges apply, where transformers itself cuts as
# GPT-2 does: every digit alone first (so llama.cpp's src/llama-vocab.cpp), or indeed as GPT-2.
DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
CODE = (__file__, fields.__file__, files.__file__)  # what an older state of this made, is made again
# Where llama.cpp takes a word of the vocabulary whole, whatever its merges, and a text begins with the first
# token unless the file denies it.
WHOLE = (
    "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral",
    "tekken",
)  # fmt: skip
CONTROL, USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`: taken whole in a text, as `<|im_start|>`
AS_GPT2 = ("gpt-2", "gpt2", "jais", "mpt", "olmo", "phi-2", "trillion")


def folder_of(given: str | os.PathLike) -> Path:
    """The folder that a GGUF file is converted to, in the user's cache folder; made at the first call for a
    file of this path, size and time by the code that is here, in place of those made of this path before.
    ValueError where there is no such file, or it cannot be converted."""
    file = Path(given).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {str(given)!r}")
    stat = file.stat()
    code = [sha256(Path(part)) for part in CODE]
    where, made = (
        hashlib.sha256(said).hexdigest()[:12]
        for said in (os.fsencode(file), f"{stat.st_size} {stat.st_mtime_ns} {code}".encode())
    )
    models = scratch.folder("models")
    name = file.stem.strip(".").encode(errors="replace").decode() or "model"
    home = models / f"{where}-{made}" / name
    if not home.is_dir():
        _checked(file)
        print(f"kvlab: converting {file.name}, once: to {home}", file=sys.stderr, flush=True)
        with scratch.unfinished(models) as work:
            convert(file, work / "model" / name)
            scratch.move(work / "model", home.parent)
            for older in {*models.glob(f"{where}-*")} - {home.parent}:
                with contextlib.suppress(OSError):  # read by somebody, on Windows
                    older.rename(work / older.name)  # which goes, now or with the next one
    return home


def package():
    """The package gguf, which reads and decodes. ValueError where its extra is not installed."""
    needs(*EXTRAS["gguf"])
    import gguf

    return gguf


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model into a new folder: config.json, model.safetensors (fp32, the decoded numbers
    of the file's blocks, not rounded again), the tokenizer with its chat template, and checksums.

    Raises ValueError for a file that is no GGUF file, a part of a model, or one without all of its tensors, a
    quantization type that the package gguf cannot decode, an architecture that transformers cannot read from
    GGUF, and a tokenizer whose way to cut text is not known.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    reader = _checked(file)
    ends = _ends(reader, file)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            begin = f"{_field(reader, 'general.architecture')}."
            said = {name: _field(reader, name) for name in reader.fields if name.startswith(begin)}
            fields.settle(config, {name.removeprefix(begin): value for name, value in said.items()})
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _check_size(plain, reader, file)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model, found = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, config=config, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:
        raise ValueError(f"{file} cannot be converted: {first_line(error)}") from error
    if why := unlike(found):
        raise ValueError(f"{file} {why}: it is no whole {type(model).__name__}")
    pre, begins = (_field(reader, f"tokenizer.ggml.{name}") for name in ("pre", "add_bos_token"))
    _cut(tokenizer.backend_tokenizer, pre, file)
    if pre in WHOLE:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        tokenizer.add_bos_token = begins is not False
    _check_tokens(tokenizer, reader, file)
    if _field(reader, "tokenizer.ggml.add_space_prefix") is False and _put_space(tokenizer):
        raise ValueError(f"{file}: its tokenizer puts no space before a text, and transformers would")
    config = model.config
    _check_positions(model, reader, file)
    if hasattr(config, "quantization_config"):  # these weights are plain now
        del config.quantization_config
    if most := getattr(config.get_text_config(), "max_position_embeddings", None):  # Bloom's is any
        tokenizer.model_max_length = most
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    plain.generation_config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    for name in ("is_local", "local_files_only"):  # said of this machine, not of the model
        tokenizer.init_kwargs.pop(name, None)
    folder.mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):
        plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_sums(folder)


def _checked(file: Path):
    """A reader of the file, whose tensors can all be decoded."""
    with open(file, "rb") as opened:
        begins = opened.read(len(MAGIC))
    if begins != MAGIC:
        raise ValueError(f"{file}: this is no GGUF file: it begins with {begins!r} instead of {MAGIC!r}")
    gguf = package()
    try:
        reader = gguf.GGUFReader(file)
    except Exception as error:  # numpy's errors too, where the file is cut off
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            why = f"its quantization type {unknown[1]} is unknown to the package gguf"
        elif other := re.search(r"version (\d\d?) which", str(error)):
            why = f"its format is of version {other[1]}, which the package gguf does not read"
        else:
            why = f"the package gguf cannot read it ({type(error).__name__}): it is damaged, or was cut off"
        raise ValueError(f"{file}: {why}") from error
    _check_blocks(reader, file)
    samples = {tensor.tensor_type: tensor for tensor in reader.tensors}
    for kind, tensor in samples.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except Exception as error:  # numpy's errors too, where such a type does not fit the shape
            raise ValueError(
                f"{file}: {tensor.name} is of quantization type {kind.name}, which the package gguf cannot "
                "decode; use a file of another type, such as Q8_0, Q4_1 or Q4_K_M"
            ) from error
    _check_places(reader, file)
    return reader


def _check_places(reader, file: Path) -> None:
    """Each tensor must begin where the one before it ends, and the last one end with the file: another type
    or place would read other numbers."""
    whole = int(reader.alignment)  # a file that says it says a number of numpy's, of 32 bits
    aligned = lambda at: -(-int(at) // whole) * whole
    end = reader.data_offset
    for tensor in sorted(reader.tensors, key=lambda one: one.data_offset):
        if tensor.data_offset != end:
            raise ValueError(f"{file}: {tensor.name} does not begin where the tensor before it ends")
        end = aligned(tensor.data_offset + tensor.n_bytes)
    if aligned(file.stat().st_size) != end:
        raise ValueError(f"{file}: it does not end where its last tensor ends")


def _field(reader, name: str):
    """What a GGUF file says under this name, None where it says nothing."""
    found = reader.fields.get(name)
    return None if found is None else found.contents()


def _check_blocks(reader, file: Path) -> None:
    """transformers fills what a file lacks with random numbers, and passes over what is too much."""
    if (parts := _field(reader, "split.count")) not in (None, 0, 1):
        raise ValueError(f"{file}: it is one of {parts} parts; join them with llama.cpp's gguf-split --merge")
    blocks = {int(at[1]) for tensor in reader.tensors if (at := re.match(r"blk\.(\d+)\.", tensor.name))}
    said = _field(reader, f"{_field(reader, 'general.architecture')}.block_count")
    if said is not None and (len(blocks) != said or max(blocks, default=-1) != said - 1):
        raise ValueError(f"{file}: it says that it has {said} blocks, but holds tensors of {len(blocks)}")
    if not any(re.search(r"\.layer_norm(_rms)?_epsilon$", name) for name in reader.fields):
        raise ValueError(f"{file}: it lacks the epsilon of its norms, and transformers would guess one")
    if not isinstance(_field(reader, "tokenizer.ggml.tokens"), list):
        raise ValueError(f"{file}: it lacks the list of its tokenizer's tokens")


def _check_size(model, reader, file: Path) -> None:
    """Are there as many numbers as the model has, before room is made for them?"""
    wanted = sum(weight.numel() for weight in model.parameters())
    tied = model.config.get_text_config().tie_word_embeddings
    apart = ("rope_", "output.weight") if tied else ("rope_",)
    held = sum(int(tensor.n_elements) for tensor in reader.tensors if not tensor.name.startswith(apart))
    if held != wanted:
        raise ValueError(
            f"its tensors hold {held:,} numbers, where a {type(model).__name__} of its configuration has "
            f"{wanted:,}"
        )


def _check_positions(model, reader, file: Path) -> None:
    """transformers drops scaled rotary embeddings (Llama 3.1, YaRN) from most GGUF files, and from some how
    many channels of a head are rotated; refuse those."""
    said = lambda name: _field(reader, f"{_field(reader, 'general.architecture')}.rope.{name}")
    kind, factors = said("scaling.type"), (said("scaling.factor"), said("scale_linear"))
    scaled = kind not in (None, "none") or any(t.name.startswith("rope_f") for t in reader.tensors)
    scaled |= kind is None and any(factor not in (None, 0, 1) for factor in factors)
    config = model.config.get_text_config()
    rotation = getattr(config, "rope_parameters", None) or {}
    if scaled and rotation.get("rope_type", "default") == "default":
        raise ValueError(
            f"{file}: it scales its rotary embedding, which transformers does not read from a GGUF file of "
            "this architecture; load the model's own folder or hub id instead"
        )
    rotated = [2 * part.numel() for name, part in model.named_buffers() if name.endswith("inv_freq")]
    whole = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotated and (channels := said("dimension_count") or whole) not in rotated:
        raise ValueError(
            f"{file}: it rotates {channels} channels of a head, and a {type(model).__name__} rotates "
            f"{max(rotated)}"
        )


def _ends(reader, file: Path) -> list[int]:
    """The tokens that end a text, a turn or a message, as the file names them."""
    count, found = len(_field(reader, "tokenizer.ggml.tokens") or []), []
    for name in ("eos", "eot", "eom"):
        end = _field(reader, f"tokenizer.ggml.{name}_token_id")
        if end is not None and not (isinstance(end, int) and 0 <= end < count):
            raise ValueError(f"{file}: it says {name}_token_id = {end}, and has {count} tokens")
        found += [] if end is None else [end]
    return list(dict.fromkeys(found))


def _check_tokens(tokenizer, reader, file: Path) -> None:
    """These tokens must be themselves in a text: transformers spells some of a byte-level vocabulary anew."""
    tokens, kinds = (_field(reader, f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        whole = kind in (CONTROL, USER_DEFINED)
        if whole and tokenizer.encode(token, add_special_tokens=False) != [index]:
            raise ValueError(
                f"{file}: transformers would cut its token {token!r} into pieces; load the model's own "
                "folder or hub id instead"
            )


def _put_space(tokenizer) -> bool:
    """Whether a text that begins with a letter gets a space before it."""
    return tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith("▁")


def _cut(tokenizer, pre: str | None, file: Path) -> None:
    """Let a byte-level tokenizer cut text before its merges as the one it was made from did."""
    from tokenizers import pre_tokenizers as cuts

    if not isinstance(tokenizer.pre_tokenizer, cuts.ByteLevel):
        return  # transformers knows how
    if pre in DIGITS:
        digits = cuts.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = cuts.Sequence([digits, cuts.ByteLevel(add_prefix_space=False)])
    elif pre not in AS_GPT2:
        raise ValueError(
            f"{file}: how its tokenizer cuts text ({pre!r}) is not known here, so its tokens would be wrong; "
            "load the model's own folder or hub id instead"
        )

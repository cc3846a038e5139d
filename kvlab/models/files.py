"""Files: the checksums beside a model's files, the first file that no longer agrees with them, and what no
loader notices."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import first_line
from ..parameters import check_file, from_json, shown

SUMS = "sha256.txt"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
# What transformers passes over without a word when it cannot read it: end tokens, penalties, special tokens.
SAID = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
UNMADE = 16  # words of a vocabulary that need no merge, such as special tokens, or one in 500


def unlike(found: dict) -> str | None:
    """What a checkpoint has otherwise than its model, by transformers' loading report, the first such weight;
    None: nothing. It would be a random number, or nowhere, without anyone noticing."""
    if absent := sorted(found["missing_keys"]):
        return f"lacks {len(absent)} of the model's weights, {absent[0]!r} first"
    if other := sorted(found["mismatched_keys"]):
        name, theirs, ours = other[0]
        return f"has {name!r} of shape {tuple(theirs)}, where the model has {tuple(ours)}"
    if more := sorted(found["unexpected_keys"]):
        return f"holds {more[0]!r}, {len(more)} such in all, for which the model has no place"
    return None


def whole_numbers(folder: Path, model) -> str | None:
    """The first weight of the model that holds whole (or complex) numbers in a folder's files: without a
    quantization to decode them, transformers uses them as the model's own. Masks of four dimensions in old
    checkpoints are no weights."""
    ends = tuple({f".{name.rpartition('.')[2]}" for name, _ in model.named_parameters()})
    for name, numbers, dimensions in _tensors(folder):
        if numbers and dimensions < 4 and f".{name}".endswith(ends):
            return name
    return None


def _tensors(folder: Path) -> Iterator[tuple[str, bool, int]]:
    """(Name, whether it holds whole numbers, dimensions) of the tensors in a folder's files."""
    from safetensors import safe_open

    for file in weights(folder):
        if file.suffix != ".safetensors":
            for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
                yield name, not tensor.is_floating_point(), tensor.dim()
            continue
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                held = opened.get_slice(name)
                kind = held.get_dtype()  # such as F32, BF16, I8, BOOL
                yield name, not kind.startswith(("F", "BF")), len(held.get_shape())


def weights(folder: Path) -> list[Path]:
    """The files of a folder from which transformers reads weights: the first of `WEIGHTS` that is there, or
    the files that its index names. ValueError for one that is no file, or that an index names outside of the
    folder."""
    for name in WEIGHTS:
        index, named = folder / f"{name}.index.json", {name}
        if not (folder / name).is_file():
            if not index.is_file():
                continue
            try:
                named = {*from_json(index.read_text(encoding="utf-8"))["weight_map"].values()}
                outside = any(Path(one).is_absolute() or ".." in Path(one).parts for one in named)
            except (AttributeError, KeyError, TypeError):
                raise ValueError(
                    f"{index.name}: expected the file of every weight in its weight_map"
                ) from None
            if outside:
                raise ValueError(f"{index.name} names a file outside of the folder")
        files = [folder / one for one in sorted(named)]
        for file in files:
            check_file(file)
        return files
    return []


def sha256(file: Path) -> str:
    """Of a file's content, 64 hex digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """List every file of a model's folder in `sha256.txt`, as `sha256sum` writes it."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir()) if file.name != SUMS]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is missing from a folder or not as `sha256.txt` says, the first such file; None: nothing."""
    listed = folder / SUMS
    if not listed.is_file():
        return f"{folder} is incomplete: {SUMS} is missing"
    for line in listed.read_text(encoding="utf-8", errors="replace").splitlines():
        expected, _, name = line.partition("  ")
        file = folder / name
        if not file.is_file():
            return f"{folder} is incomplete: {name} is missing"
        if sha256(file) != expected:
            return (
                f"{file} is damaged: its {file.stat().st_size:,} bytes have another sha256 than {SUMS} says"
            )
    return None


def check_said(folder: Path, special: set[str]) -> None:
    """ValueError naming the first of `SAID` that is there and is no JSON object, a chat template that is
    empty, or merges that do not make their own parts or a vocabulary's words: a text would become other
    tokens. special: the tokenizer's words that need no merge."""
    for file in (folder / name for name in SAID):
        if not os.path.lexists(file):
            continue
        try:
            check_file(file)
            said = json.loads(file.read_text(encoding="utf-8"))  # bytes would take what transformers does not
        except (OSError, ValueError) as error:
            raise ValueError(f"{file.name}: {first_line(error)}") from error
        if not isinstance(said, dict):
            raise ValueError(f"{file.name}: expected an object, not {type(said).__name__}")
    template, words, merges = (folder / name for name in ("chat_template.jinja", "vocab.json", "merges.txt"))
    if template.is_file() and not template.read_text(encoding="utf-8").strip():
        raise ValueError(f"{template.name} is empty")
    if words.is_file() and merges.is_file() and not (folder / "tokenizer.json").exists():
        _check_words(json.loads(words.read_text(encoding="utf-8")), merges, special)


def _check_words(ids: dict[str, int], merges: Path, special: set[str]) -> None:
    """ValueError for merges that lack a line or words that share an id. special: words that need no merge."""
    if len(set(ids.values())) < len(ids):
        raise ValueError("vocab.json gives two words one id")
    made = set(special)
    of_bytes = "Ġ" in ids  # the space of tokenizers of bytes, where a merge follows its parts
    for line in merges.read_text(encoding="utf-8").splitlines():
        parts = line.split(" ")
        for part in parts if len(parts) == 2 and of_bytes and not line.startswith("#version") else ():
            if len(part) > 1 and part not in made:
                raise ValueError(f"{merges.name}: no line before {line!r} makes {shown(part)}")
        made.add("".join(parts))
    lost = [word for word in ids if len(word) > 1 and word not in made]
    for word in lost if of_bytes else ():
        if any(word[:at] in ids and word[at:] in ids for at in range(1, len(word))):
            raise ValueError(f"{merges.name}: no line makes {shown(word)}")
    if len(lost) > max(UNMADE, len(ids) // 500):
        raise ValueError(f"{merges.name} makes none of {len(lost)} words of vocab.json: it is cut")

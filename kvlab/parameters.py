"""Parameters: checks of a policy's parameters, with one line that says what is expected."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

MOST = 2**24  # of tokens, bytes, blocks ...: more than any context, but a loop over them still ends
FEW = 2**16  # of things that are reserved, or visited one by one


def shown(value) -> str:
    """A value for a message: on one line, and not too long."""
    said = " ".join(repr(value).split())
    return said if len(said) <= 80 else f"{said[:77]}..."


def once(pairs: list[tuple[str, object]]) -> dict:
    """An object of JSON, as `object_pairs_hook`. ValueError if it says a name twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name in found if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"it says {shown(twice)} twice")
    return found


def from_json(text: str | bytes, **how):
    """What JSON says. ValueError for what is none, says a name twice, or holds lists in lists without end."""
    try:
        return json.loads(text, object_pairs_hook=once, **how)
    except RecursionError as error:
        raise ValueError("it holds lists in lists without end") from error


def check_kind(name: str, value, kind, expected: str) -> None:
    """TypeError for a value of another kind."""
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise TypeError(f"{name} is {given}: expected {expected}")


def check_text(name: str, value) -> None:
    """TypeError or ValueError for what is no text that a tokenizer takes."""
    check_kind(name, value, str, "a text")
    if value != value.encode(errors="ignore").decode():  # half a character
        raise ValueError(f"{shown(value)}: expected text in UTF-8")


def check_tokenizer(tokenizer) -> None:
    """TypeError for what is no tokenizer of transformers."""
    from transformers import PreTrainedTokenizerBase

    check_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "the tokenizer of the model")


def check_one_of(name: str, value, allowed) -> None:
    """ValueError for a parameter that is none of these."""
    plain = isinstance(value, str | int | float | None)
    if not plain or value not in tuple(allowed):
        raise ValueError(f"{name}={shown(value)}: expected one of {', '.join(map(str, allowed))}")


def check_rows(name: str, rows, count: int) -> None:
    """TypeError or ValueError for what are no rows of so many; any, where none is held yet."""
    import torch

    check_kind(name, rows, torch.Tensor, "a tensor of rows")
    whole = rows.dim() == 1 and len(rows) and rows.dtype in (torch.int64, torch.int32)
    if not whole or (count and not all(0 <= row < count for row in rows.tolist())):
        held = f"one or more rows of {count}, as int64 [rows]"
        raise ValueError(f"{name} is {rows.dtype} {tuple(rows.shape)}: expected {held}")


def check_batch(rows: int, held: int) -> None:
    """ValueError for a pass of other rows than a cache holds, if it holds any."""
    if held and rows != held:
        raise ValueError(f"batch of {rows} rows, but the cache holds {held}: use reset()")


def check_file(path) -> None:
    """ValueError for an existing path that is no file: opening a pipe would wait for ever."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("it is no file")


def text_of(path: str | Path) -> str:
    """The text in a file; ValueError for an empty file or one that is no text."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path}: expected text in UTF-8")
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    return text


def check_bool(name: str, value) -> None:
    """ValueError for a parameter that is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: expected true or false")


def check_whole(name: str, value, least: int, unit: str = "tokens", most: int = MOST) -> None:
    """ValueError for a parameter that is no whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        above = "" if not isinstance(value, int) or value <= most else f", at most {most}"
        if least == 1:
            unit = f"{unit[:-3]}y" if unit.endswith("ies") else unit.removesuffix("s")
        raise ValueError(f"{name}={shown(value)}: expected a whole number of at least {least} {unit}{above}")


def check_within(name: str, value, context: int | None) -> None:
    """ValueError for more tokens than a model's context has (None: it states none)."""
    if context is not None and value is not None and value > context:
        raise ValueError(f"{name}={value}: expected at most the model's context, {context} tokens")


def check_odd(name: str, value) -> None:
    """ValueError for a parameter that is no odd number of tokens."""
    check_whole(name, value, 1)
    if value % 2 == 0:
        raise ValueError(f"{name}={value}: expected an odd number of tokens")


def check_number(name: str, value, within: Callable[[float], bool], expected: str) -> None:
    """ValueError for a parameter that is no number, out of range, or above `MOST` (inf is allowed)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not within(value):
        raise ValueError(f"{name}={shown(value)}: expected {expected}")
    if MOST < value < math.inf:
        raise ValueError(f"{name}={shown(value)}: expected {expected}, at most {MOST}")


def check_fraction_or_count(name: str, value) -> float | int:
    """A budget: a fraction in (0, 1] or a count of tokens >= 2 (1 is the fraction: everything)."""
    check_number(
        name, value, lambda x: 0 < x <= 1 or (1 < x < math.inf and x == int(x)),
        "a fraction of tokens in (0, 1] or a whole number of tokens",
    )  # fmt: skip
    return float(value) if value <= 1 else int(value)


def resolve_budget(budget: float | int, tokens: int) -> int | None:
    """The tokens that a budget allows out of `tokens`; None for a budget of 1 (no limit)."""
    if budget == 1:
        return None
    if isinstance(budget, int):
        return budget
    return max(1, int(budget * tokens + 1e-6))


def count_of(context) -> int:
    """Tokens of a context: a number, or text such as "32k" (k: 1,024). ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*([kK]?)\s*", str(context))
    count = int(found[1]) * (1024 if found[2] else 1) if found and not isinstance(context, bool) else 0
    if count < 1:
        raise ValueError(f"context={shown(context)}: expected tokens, such as 8192 or 32k")
    return count

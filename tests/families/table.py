"""The table of families: what every method gives on every family, and what a planted fault does."""

import copy
import inspect
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import DynamicCache

import kvlab
from kvlab.place import Host, InfiniGen, Quest, Whole
from kvlab.store import Growing, Int, Skipping
from kvlab.visibility import own_positions

from . import profiles
from .models import REFUSED, VOCABULARY, family, refused

FILE = Path(__file__).parents[2] / "docs" / "families.md"
PROMPT, STEPS, PADDING = 20, 5, 6
TOLERANCE = 1e-4  # of a logit, whose standard deviation is about 1.3
FAULT = 1e-2
# method -> the setting at which it gives nothing up
SAME = {name: one.spec(one.same) for name, one in kvlab.METHODS.items() if one.same is not None}
EXACT = {bits: Skipping(Growing(Int(bits)), [0, -1]) for bits in (4, 8)}  # all of two layers
ROUNDED = {  # method -> the setting at which it gives nothing up, or policies where no text says it
    "int5": SAME["int5"],
    **{name: f"{name}:skip_layers=0+-1" for name in ("fp8", "nvfp4", "mxfp4", "turboquant")},
    "kvquant": SAME["kvquant"],
    "mixed": SAME["mixed"],
    "offload+int4": {"store": EXACT[4], "place": Host(Whole())},
    "infinigen+int4": {"store": EXACT[4], "place": Host(InfiniGen(1, math.inf, 1, 1))},
    "quest+int8": {"store": EXACT[8], "place": Host(Quest(80, 1, 4))},
}
SPECS = {name: spec for name, spec in SAME.items() if name not in ROUNDED}
PROFILED = {"duo": "duo:heads=1", "kvzap": "kvzap:threshold=1e-300"}  # with a profile of the tiny model
METHODS = SPECS | PROFILED | ROUNDED
REASONS = {  # the closed list: letter -> how its one line is known; the page says what it means
    "a": "a sliding window cannot let single ones go",
    "b": "made of a latent after the cache",
    "c": "no layer of it holds keys and values",
    "d": "attention interface",
    "e": "of its own",
    "f": "forgets its text",
    "g": "reads the prompt again",
    "h": "(RoPE)",
    "i": "there are no keys",
    "j": "latents are cached: all heads share them",
}


@dataclass
class Row:
    """What was found of a family. cells: {method: "=" or a letter of REASONS}; worst: the largest difference
    of a logit among the equal ones; fault: what was planted, and the difference it made; pieces: a cell for
    the prompt in two passes."""

    cells: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0
    fault: tuple[str, float] = ("", 0.0)
    pieces: str = ""


def texts():
    """A batch of two rows, one padded on the left: ids and mask `[2, tokens]`."""
    ids = torch.randint(2, VOCABULARY, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return ids, mask


@torch.no_grad()
def logits(model, cache, ids, mask) -> torch.Tensor:
    """Of the prompt's real tokens and of each step, `[tokens, vocabulary]`."""
    stepper = kvlab.Stepper(model, cache)
    found = [stepper.feed(ids[:, :PROMPT], mask[:, :PROMPT])]
    found += [stepper.feed(ids[:, at : at + 1], mask[:, at : at + 1]) for at in range(PROMPT, ids.shape[1])]
    return torch.cat(found, 1)[mask.bool()]


@torch.no_grad()
def whole(model, ids, mask) -> torch.Tensor:
    """Of all real tokens in one pass without a cache, `[tokens, vocabulary]`."""
    positions = {"position_ids": own_positions(mask).clamp(min=0)}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        positions = {}
    return model(ids, attention_mask=mask, use_cache=False, **positions).logits[mask.bool()]


@torch.no_grad()
def own_logits(model, ids, mask) -> torch.Tensor:
    """The same by the model's own attention and cache."""
    cache, found = DynamicCache(config=model.config), []
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, ids.shape[1]))]:
        said = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
        if takes_positions:
            said["position_ids"] = own_positions(mask)[:, start:end].clamp(min=0)
        found.append(model(ids[:, start:end], **said).logits)
    return torch.cat(found, 1)[mask.bool()]


def find(name: str, methods=METHODS) -> Row:
    """One row of the table. AssertionError for a method that is neither equal nor refused with a reason."""
    own, (ids, mask), row = family(name), texts(), Row()
    expected = own_logits(own, ids, mask)
    ours = kvlab.prepare(copy.deepcopy(own))
    for method in methods:
        try:
            how = METHODS[method]
            if isinstance(how, str):
                cache = kvlab.make_cache(ours, profiles.profiled(how, ours))
            else:
                cache = kvlab.KVCache(ours, **how)
        except ValueError as error:
            row.cells[method] = reason(error)
            continue
        if method == "recompute":  # transformers' own passes with and without a cache may differ by more
            off = difference(whole(ours, ids, mask), whole(own, ids, mask))
        else:
            off = difference(logits(ours, cache, ids, mask), expected)
        assert off < TOLERANCE, f"{name}, {method}: off by {off:.1e}"
        row.cells[method] = "="
        row.worst = max(row.worst, off)
    row.pieces = in_pieces(ours, ids, mask, expected)
    row.fault = planted(own, ids, mask, expected)
    return row


def in_pieces(model, ids, mask, expected) -> str:
    """The cell of a prompt in two pieces and a question of two tokens after it, through `full`. Where that is
    refused, nothing has been written: what follows token by token is right."""
    stepper, end, found = kvlab.Stepper(model, kvlab.make_cache(model, "full")), PROMPT + 2, []
    cuts, cell = [PROMPT // 2, PROMPT, end], "="
    for start, stop in zip([0, *cuts], cuts, strict=False):
        try:
            parts = [stepper.feed(ids[:, start:stop], mask[:, start:stop])]
        except ValueError as error:
            cell, each = reason(error), range(start, stop)
            parts = [stepper.feed(ids[:, at : at + 1], mask[:, at : at + 1]) for at in each]
        found += parts
    wanted = expected.new_zeros(*ids.shape, expected.shape[-1])
    wanted[mask.bool()] = expected
    real = mask[:, :end].bool()
    off = difference(torch.cat(found, 1)[real], wanted[:, :end][real])
    assert off < TOLERANCE, f"{type(model).__name__}, in pieces: off by {off:.1e}"
    return cell


def difference(found, expected) -> float:
    return float((found - expected).abs().max())


def reason(error) -> str:
    """The letter of a refusal."""
    assert "\n" not in str(error)
    letters = [letter for letter, known in REASONS.items() if known in str(error)]
    assert letters, f"refused for a reason that is not on the list: {error}"
    return letters[0]


def planted(own, ids, mask, expected) -> tuple[str, float]:
    """Plant what kvlab could most likely get wrong on this family: (fault, difference of a logit)."""
    wrong, config = copy.deepcopy(own), own.config
    hidden = [layer for layer in DynamicCache(config=config).layers if getattr(layer, "is_sliding", False)]
    modules = list(wrong.modules())
    if getattr(config, "attn_logit_softcapping", None):
        what = "soft cap off"
        for module in modules:
            if hasattr(module, "attn_logit_softcapping"):
                module.attn_logit_softcapping = None
    elif any(hasattr(module, "sinks") for module in modules):
        what = "sink scores off"
        for module in modules:
            if hasattr(module, "sinks"):
                module.sinks.data.fill_(-1e9)
    elif hidden and hidden[0].sliding_window < PROMPT:
        names = {"sliding_window": "window", "attention_chunk_size": "chunk"}
        name = next(name for name in names if getattr(config, name, None))
        what = f"{names[name]} + 1"
        for one in {id(m.config): m.config for m in modules if hasattr(m, "config")}.values():
            if getattr(one, name, None):
                setattr(one, name, getattr(one, name) + 1)
    else:
        cache = kvlab.make_cache(kvlab.prepare(wrong), f"sinks:budget={PROMPT + STEPS - PADDING - 1},sinks=0")
        return "oldest token gone", difference(logits(wrong, cache, ids, mask), expected)
    cache = kvlab.make_cache(kvlab.prepare(wrong), "full")
    return what, difference(logits(wrong, cache, ids, mask), expected)


def page(rows: dict[str, Row], refused: dict[str, tuple[str, str]]) -> str:
    """docs/families.md with what was found in its two tables and its list of those that are refused."""
    both = zip(*(lines(name, row) for name, row in rows.items()), strict=True)
    tables = (head + "".join(body) for head, body in zip(heads(), both, strict=True))
    text = re.sub(r"(^\|.*\n)+", lambda _: next(tables), FILE.read_text(encoding="utf-8"), flags=re.M)
    listed = "".join(f"- {name}: {letter}\n" for name, (_, letter) in refused.items())
    return re.sub(r"(?<=that holds something:\n\n)(- .*\n)+", listed, text)


def heads() -> tuple[str, str]:
    """Of the table of methods that hold exact numbers, and of those that round."""
    return columns(SPECS | PROFILED, "in pieces", "fault"), columns(ROUNDED)


def lines(name: str, row: Row) -> tuple[str, str]:
    """A family's line in each of the tables."""
    what, off = row.fault
    shown = 10.0 ** math.floor(math.log10(off))
    last = row.pieces, f"{what}: over {shown:g}"
    return cells(name, row, SPECS | PROFILED, *last), cells(name, row, ROUNDED)


def columns(methods, *more: str) -> str:
    names = ["family", *methods, *more]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"


def cells(name: str, row: Row, methods, *more: str) -> str:
    return f"| {' | '.join([name, *(row.cells[method] for method in methods), *more])} |\n"


def refusals() -> dict[str, tuple[str, str]]:
    """{family: (the one line, letter of its reason)}, of those that no method serves."""
    found = {}
    for name in REFUSED:
        try:
            kvlab.make_cache(refused(name), "full")
        except ValueError as error:
            found[name] = str(error), reason(error)
    assert list(found) == list(REFUSED)
    return found

"""The table of families: what every method gives on every family, and what a planted fault does."""

from __future__ import annotations

import copy
import inspect
import math
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
PROMPT, STEPS, PADDING = 20, 12, 6
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
REASONS = {  # the closed list: letter -> how its one line is known; HEAD says what it means
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


HEAD = """# Families

Which methods are right on which families. `python -m tests.families` writes this page; a test checks it.

Every row is a tiny random model, odd on purpose (head dimension other than hidden / heads, 3 KV heads of 9,
window 7, partial rotary embedding, biases). A batch with one row padded on the left goes through a prompt of
{prompt} tokens and {steps} decode steps, and is compared with the model's own attention and transformers' own
cache.

- `=`: no logit differs by more than {tolerance:.0e}, with the method at a setting where it gives nothing up.
  The profiles of `duo` and `kvzap` are random numbers in the model's shape.
- `in pieces`: `full`, with the prompt in two pieces and then a question of two tokens.
- `fault`: a planted fault. It must change a logit by at least {fault:.0e}, or the row would prove nothing.
- A letter: refused in one line, when the cache is made or, in pieces, before anything is written.

Why a method is refused:

- **a**: it writes keys in blocks of tokens, but a sliding window drops single tokens.
- **b**: it fetches from a host, which would hold latents; keys are computed from them only after the cache,
  so there are none to choose by. `offload` and `uvm` do not choose; for them this has not been built.
- **c**: the model has no keys and values to hold.
- **d**: the model is not a decoder that uses transformers' attention interface.
- **e**: the model does something of its own with K, V or masks.
- **f**: the model's own states forget the text at a later pass of several tokens, so the prompt must come in
  one pass. This happens under transformers' own cache too, so there is nothing right to compare with.
- **g**: it reads the prompt twice. A convolution or a recurrent state cannot read again without moving on;
  expanding latents for the second reading has not been built.
- **h**: it undoes rotary embeddings (RoPE). The model has none, or (MLA) caches the rotated part beside the
  latent, where these methods do not look.
- **i**: it compares or merges keys, but the model caches latents.
- **j**: its heads hold different tokens, as trained, but all heads share the cached latents.

"""


def page(rows: dict[str, Row], refused: dict[str, tuple[str, str]]) -> str:
    """docs/families.md."""
    text = HEAD.format(prompt=PROMPT, steps=STEPS, tolerance=TOLERANCE, fault=FAULT)
    text += columns(SPECS | PROFILED, "in pieces", "fault")
    for name, row in rows.items():
        what, off = row.fault
        shown = 10.0 ** math.floor(math.log10(off))
        text += cells(name, row, SPECS | PROFILED, row.pieces, f"{what}: over {shown:g}")
    text += FORMS + columns(ROUNDED)
    text += "".join(cells(name, row, ROUNDED) for name, row in rows.items())
    text += "\nRefused with every method that holds something:\n\n"
    text += "".join(f"- {name}: {letter}\n" for name, (_, letter) in refused.items())
    return text + TAIL


def columns(methods, *more: str) -> str:
    names = ["family", *methods, *more]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"


def cells(name: str, row: Row, methods, *more: str) -> str:
    return f"| {' | '.join([name, *(row.cells[method] for method in methods), *more])} |\n"


FORMS = """
The other methods that round, on the same models. These settings keep everything exact: the first 80 tokens,
which are all (`sinks=80`: `int5`, `kvquant`), both layers (`skip_layers=0+-1`: `fp8`, `nvfp4`, `mxfp4`,
`turboquant`, and the three pairs with a host, whose stores were built by hand), or both sides
(`mixed:k=full,v=full`). So a `=` checks everything around the rounding: positions, rows, windows, fetched
tokens, and, for `kvquant`, the way to keys before RoPE and back. The rounding itself is the same on every
family; `tests/store` and `tests/reference` compare it with its definition.

"""

TAIL = """
`padded` runs in a graph of its own. That graph handles only layers that see all the tokens it holds, without
soft caps or sink scores; other models are refused.

A model that is not on this page is tried when a cache is made for it: first its layers' kinds and masks, then
a small random model of its configuration class, against that model's own cache.
`kvlab doctor --model NAME` prints its row, or why it is refused.
"""


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

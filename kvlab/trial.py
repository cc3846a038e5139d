"""Trial: a method on a tiny random model, before you spend an hour on a large one. One line per check."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from .decode import Stepper
from .errors import kind_and_line
from .finding import METHODS, Method, imported
from .make import make_cache
from .models import prepare
from .parameters import resolve_budget
from .spec import Spec, name_of, parse

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "vocab_size": 96, "head_dim": 32}
SIZES |= {"max_position_embeddings": 128, "initializer_range": 0.3}
PROMPTS, STEPS = (90, 53, 71), 5  # tokens of each row; decode steps
TOLERANCE = 1e-3  # of the logits' standard deviation
CODES = 0.5  # the same, in fp32, where a row beside others may round to the neighbouring code
WHOLE = "whole cache"  # the family of a class that attends by itself
Check = tuple[str, Callable[[], str]]


class Failed(Exception):
    """What a check has found wrong."""


def must(holds: bool, why: str) -> None:
    """As `assert`, but also where Python leaves those out (-O)."""
    if not holds:
        raise Failed(why)


def run(method: str) -> int:
    """Print a line for each check of a method; returns 0 if all are well, else 1. ValueError for an unknown
    name."""
    spec, failed = parse(method, whole(name_of(method))), 0
    for label, check in checks(spec):
        try:
            print(f"[ok] {label}: {check()}", flush=True)
        except Exception as error:  # a user's code can raise anything
            failed += 1
            why = str(error) if isinstance(error, Failed) else kind_and_line(error)
            print(f"[!!] {label}: {why}", flush=True)
    return 1 if failed else 0


def whole(name: str) -> Method | None:
    """`module.Class` of a whole cache as a method; None for any other name.

    Such a class attends by itself, `attend(layer, q, k, v)` for one text, and has `stats()`. Its classmethod
    `begun(model)` returns what feeds tokens through a fresh cache: `feed(ids, last=True)` gives logits `[1,
    vocabulary]`, and `cache` is the cache. Its parameters are its settings: the attributes of the class that
    has `begun`, which there are such that nothing is given up.
    """
    kind = imported(name) if "." in name else None
    if not (inspect.isclass(kind) and hasattr(kind, "attend") and hasattr(kind, "begun")):
        return None

    def begun(model, **given):
        return type(kind.__name__, (kind,), given).begun(model)

    off = next(vars(one) for one in kind.__mro__ if "begun" in vars(one))
    begun.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in off.items()
        if name[0] != "_" and (value is None or isinstance(value, int | float | str))
    )
    return Method(name, "", WHOLE, policies=begun)


def begun(model, spec):
    """What feeds tokens through a fresh cache of a method, and has it as `cache`."""
    if isinstance(spec, Spec) and spec.method.family == WHOLE:
        return spec.method.policies(model, **spec.parameters)
    return Stepper(model, make_cache(model, spec))


def checks(spec: Spec) -> list[Check]:
    """The checks of a method, as (label, function that returns its finding or raises)."""
    rows = [torch.randint(2, 96, (n + STEPS,), generator=_seed(n), device="cpu").tolist() for n in PROMPTS]
    model = tiny(kv_heads=2)
    found: list[Check] = [
        ("runs, scores of the right shape and finite", lambda: runs(model, spec, rows[:1])),
        ("grouped heads", lambda: "; ".join(runs(tiny(heads), spec, rows[:1]) for heads in (1, 4))),
        ("a row of a padded batch is the row alone", lambda: padded(spec, rows)),
        ("bytes", lambda: counted(model, spec, rows[0])),
    ]
    if spec.method.family == WHOLE:  # for one text at a time
        off = Spec(spec.name, spec.method, spec.method.parameters)
        found[0] = "runs, outputs of the right shape and finite", found[0][1]
        found[2] = "without its settings it is full", lambda: equal(model, off, rows[:1])
        if spec.parameters.get("keep") and "budget" in spec.parameters:
            found.insert(2, ("budget", lambda: fewer(model, spec, rows[0], spec.parameters["budget"])))
        return found
    budget = spec.parameters.get("budget", spec.method.parameters.get("budget"))
    evicts = any(layer.keep.policy.evicts for layer in make_cache(model, spec).attending)
    if budget is not None and evicts and spec.name not in METHODS:  # not one of a fetch, nor kvlab's own
        found.insert(2, ("budget", lambda: within(model, spec, rows[0], budget)))
    if same := nothing_given_up(spec):
        found.append((f"{same} is full", lambda: equal(model, same, rows[1:2])))
    return found


def tiny(kv_heads: int, dtype: torch.dtype = torch.float32):
    """A random Llama of 4 heads on `kv_heads` KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=kv_heads)
    return prepare(AutoModelForCausalLM.from_config(config).eval().to(dtype))


def nothing_given_up(spec: Spec) -> str | None:
    """The method at its lossless setting; None if none is stated."""
    if (one := METHODS.get(spec.name)) is not None:
        return None if one.same is None else one.spec(one.same)
    if "budget" not in spec.method.parameters:
        return None
    given = spec.parameters | {"budget": 1}
    return f"{spec.name}:{','.join(f'{name}={value}' for name, value in given.items())}"


def logits(model, spec, rows: list[list[int]]) -> tuple[Tensor, object]:
    """Logits of the prompts' last tokens and all later steps, `[rows, steps + 1, vocabulary]`; the cache.
    Rows are padded on the left; the last tokens of each are fed one by one."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device="cpu")
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device="cpu")
    stepper = begun(model, spec)
    padding = {"attention_mask": mask[:, :-STEPS]} if len(rows) > 1 else {}
    told = [stepper.feed(ids[:, :-STEPS], **padding, last=True)]
    told += [stepper.feed(ids[:, at : at + 1], last=True) for at in range(longest - STEPS, longest)]
    return torch.stack(told, 1), stepper.cache


def runs(model, spec: Spec, rows: list[list[int]]) -> str:
    found, _ = logits(model, spec, rows)
    must(bool(found.isfinite().all()), "the logits are not finite")
    heads = model.config.num_key_value_heads
    return f"a prompt of {PROMPTS[0]} tokens and {STEPS} steps on {heads} KV head{'s' if heads > 1 else ''}"


def within(model, spec: Spec, row: list[int], budget) -> str:
    """The tokens held after the prompt, mean over layers and KV heads, are at most the budget."""
    cache = make_cache(model, spec)
    prompt = torch.tensor([row[:-STEPS]], device="cpu")
    Stepper(model, cache).feed(prompt, last=True)
    held = sum(layer.mean_held[0] for layer in cache.attending) / len(cache.attending)
    limit = resolve_budget(budget, prompt.shape[1])
    must(held <= limit, f"{held:g} tokens a head are held after the prompt, of {limit} at most")
    return f"{held:g} of {prompt.shape[1]} tokens a head are held after the prompt, of {limit} at most"


def fewer(model, spec: Spec, row: list[int], budget) -> str:
    """A whole cache lets tokens of the prompt go, if its budget is less than the prompt."""
    reader = begun(model, spec)
    reader.feed(torch.tensor([row[:-STEPS]], device="cpu"), last=True)
    stats = reader.cache.stats()
    held, seen = stats.tokens_held, stats.tokens_seen
    limit = seen if budget == 1 else resolve_budget(budget, seen)
    must(held < seen or limit >= seen, f"all of {seen} tokens are held after the prompt, with {budget=}")
    return f"{held} of {seen} tokens are held after the prompt"


def padded(spec: Spec, rows: list[list[int]]) -> str:
    """Each row of a left-padded batch gives the same logits as alone: in fp64, and nearly so in fp32, which
    compiled code takes; the static graph is of fp32 alone."""
    exact, near = (torch.float64, TOLERANCE), (torch.float32, CODES)
    for dtype, most in ((torch.float32, TOLERANCE),) if spec.name == "padded" else (exact, near):
        model = tiny(2, dtype)
        try:
            together = logits(model, spec, rows)[0]
        except Exception as error:  # a user's code may be of another dtype
            raise Failed(f"in {dtype}: {kind_and_line(error)}") from error
        for row, found in zip(rows, together, strict=True):
            alone = logits(model, spec, [row])[0][0]
            off = float((found - alone).abs().max() / alone.std())
            must(
                off < most,
                f"the row of {len(row) - STEPS} tokens differs by {off:.2g} of the logits' standard "
                "deviation; a score must not read other rows or places in the buffer, nor differ by "
                "rounding alone",
            )
    return f"{len(rows)} rows of {', '.join(str(len(row) - STEPS) for row in rows)} tokens"


def counted(model, spec: Spec, row: list[int]) -> str:
    """The bytes counted, beside those of `full`; a whole cache counts fewer with bits than without."""
    held, whole = (logits(model, one, [row])[1].stats().device_bytes for one in (spec, "full"))
    must(math.isfinite(held) and held >= 0, f"{held} bytes are counted")
    if bits := spec.method.family == WHOLE and spec.parameters.get("bits"):
        plain = Spec(spec.name, spec.method, spec.parameters | {"bits": 0})
        seen = [logits(model, one, [row])[1].stats() for one in (spec, plain)]
        few, many = (stats.device_bytes + stats.host_bytes for stats in seen)
        must(few < many, f"{few} with {bits=}, {many} without: its numbers take more values than {bits} bits")
    return f"{held} of the {whole} that full holds, {held / whole:.0%}"


def equal(model, spec: str, rows: list[list[int]]) -> str:
    found, expected = (logits(model, one, rows)[0] for one in (spec, "full"))
    off = float((found - expected).abs().max() / expected.std())
    must(off < TOLERANCE, f"the logits differ by {off:.2g} of their standard deviation")
    return "the same logits"


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)

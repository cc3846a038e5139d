"""Told: what a user tells tasks and their generation, of which a name that nobody reads would be passed over
in silence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvlab.errors import nearest
from kvlab.parameters import from_json

from ..core.errors import Problem
from . import boundaries

MADE = "needles_"  # how the names of local tasks begin whose rows are made for a length and a tokenizer
NAMES = ("lengths", "documents", "tokenizer")  # the settings of these
RULER = ("niah", "ruler", "longcxt")  # how the names of RULER's tasks begin, and of their group and their tag
LENGTHS = "max_seq_lengths"  # tokens of RULER's prompts
HEARD = {  # tasks whose rows are made as they are told: how their names begin, and what they may be told
    f"{MADE}*": (MADE, NAMES),
    "RULER's tasks": (RULER, (LENGTHS, "tokenizer", "pretrained", "model")),
}

ANYWHERE = (boundaries.FIELD, "chance")  # what is read of every task
LIMITS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # one thing, as lm-eval says
GREEDY = {  # what may be said of how tokens are chosen: what is done anyway
    "do_sample": False,
    "temperature": 0,
    "top_p": 1,
    "top_k": 1,
    "num_beams": 1,
    "repetition_penalty": 1,
}
UNHEARD = ("temperature", "top_p", "top_k")  # a task may say them: nothing is sampled


def check(ours: Collection[str], others: Collection[str], metadata: Iterable[str]) -> None:
    """Problem where a user's own --metadata has a name that our needles, or RULER's tasks, do not know. ours:
    kvlab's own tasks that are asked; others: the rest. Where strangers are among these, which may know more
    names, only for a name that is nearly a known one."""
    tasks = [*ours, *others]
    asked = [who for who, (begins, _) in HEARD.items() if any(task.startswith(begins) for task in tasks)]
    if not asked:
        return
    known = list(dict.fromkeys(name for who in asked for name in HEARD[who][1]))
    strangers = any(not task.startswith(RULER) for task in others)
    for name in metadata:
        near = nearest(name, known, 0.8 if strangers else 0.5)
        if name not in known and (near or not strangers):
            raise Problem(
                f"--metadata {name}: {' and '.join(asked)} do not know it{near}; expected one of "
                f"{', '.join(known)}"
            )


def lengths(tasks: Iterable[str], metadata: Mapping) -> dict:
    """What a user tells these tasks, in which one length for RULER's is a list of one. Problem for what is no
    number of tokens."""
    if LENGTHS not in metadata or not any(task.startswith(RULER) for task in tasks):
        return dict(metadata)
    said = metadata[LENGTHS]
    found = list(said) if isinstance(said, list | tuple) else [said]
    if not found or any(type(one) is not int or one < 1 for one in found):
        expected = f'whole numbers of tokens above 0, as {{"{LENGTHS}": [1024, 4096]}}'
        raise Problem(f"--metadata {LENGTHS}={said!r}: expected {expected}")
    return {**metadata, LENGTHS: found}


def generation(said: Mapping, option: str) -> dict:
    """Options of generation by the names that tasks use. option: what they were said with. Problem for one
    that kvlab does not apply, whose numbers would be stated beside it all the same."""
    if len(limits := [name for name in said if name in LIMITS]) > 1:
        raise Problem(f"{option} {', '.join(limits)}: they all mean {LIMITS[0]}; expected one of them")
    for name, value in said.items():
        if name in LIMITS:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise Problem(f"{option} {name}={value}: expected tokens, at least 1")
        elif name == "until":
            if not all(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
                raise Problem(f"{option} {name}={value}: expected a text, or a list of texts")
        elif name not in GREEDY:
            near = nearest(name, (*LIMITS, *GREEDY, "until"), 0.5)
            raise Problem(f"{option} {name}: kvlab does not apply it{near}; expected until or {LIMITS[0]}")
        elif value != GREEDY[name]:
            raise Problem(f"{option} {name}={value}: kvlab decodes greedily; expected {name}={GREEDY[name]}")
    return {LIMITS[0] if name in LIMITS else name: value for name, value in said.items()}


def documents(text: str) -> dict[str, list[int]]:
    """--samples, JSON or a file of it: {task: the numbers of its documents}, in their order, as lm-eval asks
    them."""
    if not text:
        return {}
    try:
        found = from_json(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
        right = all(type(one) is int and one >= 0 for numbers in found.values() for one in numbers)
    except (OSError, ValueError, TypeError, AttributeError):
        right = False
    if not right:
        raise Problem(
            f'--samples {text}: expected {{"TASK": [0, 7]}}, numbers of documents, or a file of that'
        )
    return {task: sorted({*numbers}) for task, numbers in found.items()}


def shard(text: str | None) -> tuple[int, int]:
    """--shard I/N as two numbers."""
    part, _, parts = (text or "1/1").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts) < 10**6):
        raise Problem(f"--shard {text}: expected I/N, as 1/4")
    return int(part), int(parts)


def context_until(task: str, metadata) -> str | None:
    """The text before which a task's YAML says to cut; Problem for a name that is nearly the right one."""
    about = metadata if isinstance(metadata, dict) else {}
    for name in about:
        if name != boundaries.FIELD and nearest(boundaries.FIELD, [str(name)], 0.8):
            raise Problem(
                f"task {task}: {name} under metadata: in its YAML; did you mean {boundaries.FIELD}?"
            )
    until = about.get(boundaries.FIELD)
    return until if until is None else boundaries.text(task, until)

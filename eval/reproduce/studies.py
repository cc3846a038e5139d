"""Studies: what is made again: which models, tasks, protocols and budgets each stored study stands on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..accuracy.measurement import Accuracy
from ..accuracy.protocols import FIRST, INSIDE, MANY, REUSE
from ..core.errors import Problem
from ..core.measurement import Measurement
from ..studies.measurements import Perplexity

EXACT = ("full", "int8", "int4", "kivi2", "fp8")
CHOOSING = ("sinks", "h2o", "snapkv", "pyramidkv", "tova", "keydiff", "random", "topk", "infinigen")
FORMATS = (
    "full", "int8", "int8:rotate=true", "fp8", "mixed", "mixed:k=int4,v=int8", "int5", "int5:rotate=true",
    "int4:symmetric=false,group=32", "int4:group=32", "nvfp4", "nvfp4:largest=4over6", "mxfp4", "int4",
    "int4:rotate=true", "int4:rotate=signs", "int4:axis=channel", "kivi4", "turboquant",
    "turboquant:sketch=true", "kvquant", "turboquant:bits=3", "kivi2", "int2:symmetric=false,group=32",
    "turboquant:bits=2", "int2",
)  # fmt: skip
BESIDE = ("random", "sinks", "snapkv", "topk")
BUDGETED = (
    "full", "sinks", "h2o", "snapkv", "pyramidkv", "tova", "keydiff", "random", "topk", "quest",
)  # fmt: skip
SINCE = ("keydiff", "keynorm", "lagkv", "adakv:of=keydiff", "d2o", "quest", "rkv", "kvzip")
UNTURNED = ("expected", "shadowkv")  # which read keys before RoPE
ROUNDED = ("int4", "int4:rotate=true", "int5", "mixed", "nvfp4", "mxfp4", "turboquant")
THRESHOLDS = ("0.03", "0.06", "0.12", "0.24")
BUDGETS, ONE = ("0.05", "0.1", "0.2", "0.4"), ("0.2",)
WRAPPED = (
    "keydiff", "keydiff:chunk=8", "keydiff:merge=true", "keydiff:renumber=true", "keydiff:every=8", "quest",
    "quest:digest=centre", "quest+int8", "infinigen", "infinigen+int4",
)  # fmt: skip
SHARES = ("0.1", "0.25", "0.5")
NEEDLES = ("needles_single", "needles_multikey", "needles_two_hops")
SHAPES = ("needles_multivalue", "needles_multiquery", "needles_tracking")
SHAPED = ("full", "int8", "int4", "h2o", "snapkv", "keydiff", "kvzip", "topk")
RULER = ("niah_single_1", "niah_multikey_2", "ruler_vt")
WORDS = ("ruler_cwe", "ruler_fwe")
SHOTS = 5
ASKED_AGAIN = ("full", "kvzip", "keydiff", "snapkv", "h2o", "adakv:of=keydiff", "random")
READ_ON = ("full", "int8", "int4", "kivi2", "sinks", "h2o", "snapkv", "tova", "topk", "infinigen")
RENUMBERED = ("full", "sinks:budget=512", "sinks:budget=512,renumber=true")


@dataclass(frozen=True)
class Study:
    """about: a sentence. parts: (quick, folder of the user's rows or None) -> {folder: Measurement}, none
    where the study needs rows. points: it is drawn although its methods have one budget."""

    about: str
    parts: Callable[[bool, Path | None], dict[str, Measurement]]
    points: bool = False


def passages(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """Facts in documents of 125 to 900 tokens, one question each."""
    shared = {"methods": EXACT + CHOOSING, "budgets": ONE if quick else BUDGETS, "jobs": 0, "batch_size": 192}
    shared |= {"model": "smollm2", "dtype": "bfloat16", "limit": 8 if quick else None}
    shared |= {"tasks": ("recall",) if quick else ("recall", "needle", "chain")}
    return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}


def needles(
    length: int,
    documents: int,
    methods: tuple[str, ...],
    tasks: tuple[str, ...] = NEEDLES[:1],
    budgets=ONE,
    hops: bool = False,
) -> Callable:
    """RULER's shapes in text of our own, of so many tokens each; `hops` adds what only `full` is asked."""

    def parts(quick: bool, rows: Path | None) -> dict[str, Measurement]:
        asked = {"methods": methods, "budgets": ONE if quick else budgets, "tasks": tasks}
        made = shaped(quick, length, documents, **asked)
        if hops:
            alone = shaped(quick, length, documents, methods=("full",), tasks=NEEDLES[2:])
            made["two-hops"] = alone[INSIDE]
        return made

    return parts


def needles_shapes(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """RULER's other shapes: several numbers of one thing, of several things, and a chain of variables."""
    tasks = SHAPES[:1] if quick else SHAPES
    return shaped(quick, 1024, 50, answer=48, methods=SHAPED, budgets=ONE, tasks=tasks)


def shaped(quick: bool, length: int, documents: int, answer: int = 20, **asked) -> dict[str, Measurement]:
    """One of these under both protocols, with answers of so many tokens."""
    shared = {"jobs": 0, "model": "smollm2", "dtype": "bfloat16", "batch_size": 25}
    shared |= {"limit": 4 if quick else None, "gen_kwargs": f"max_gen_toks={answer}"}
    shared |= {"metadata": json.dumps({"lengths": [length], "documents": documents})}
    shared |= asked
    return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}


def ruler(length: int, documents: int, tasks: tuple[str, ...] = RULER, budgets=ONE) -> Callable:
    """RULER's own tasks, those that need no data set and ask for something in the text; its word counts ask
    about all of it and take 120 tokens an answer."""

    def parts(quick: bool, rows: Path | None) -> dict[str, Measurement]:
        shared = {"methods": EXACT + CHOOSING + ("quest",), "jobs": 0, "batch_size": 25}
        shared |= {"budgets": ONE if quick else budgets}
        shared |= {"model": "smollm2", "dtype": "bfloat16", "limit": 2 if quick else documents}
        shared |= {"tasks": tasks[:1] if quick else tasks, "gen_kwargs": "max_gen_toks=30"}
        shared |= {"metadata": json.dumps({"max_seq_lengths": [length]})}
        return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}

    return parts


def ruler_words(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """RULER's word counts: what is said most often in 1,024 tokens, asked of the full cache, for which
    protocols make no difference; 120 tokens an answer take more hours than all else of RULER."""
    shared = {"methods": ("full",), "jobs": 0, "batch_size": 25, "protocol": INSIDE}
    shared |= {"model": "smollm2", "dtype": "float32", "limit": 2 if quick else 100}
    shared |= {"tasks": WORDS[1:] if quick else WORDS, "metadata": json.dumps({"max_seq_lengths": [1024]})}
    return {INSIDE: Accuracy(**shared)}


def lambada(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The last word of a passage, which is compressed before its last sentence is read."""
    shared = {"methods": EXACT + CHOOSING + ("quest", "kvzip"), "budgets": ONE if quick else BUDGETS}
    shared |= {"model": "smollm2", "dtype": "bfloat16", "limit": 8 if quick else 200}
    shared |= {"tasks": ("lambada_openai",), "jobs": 0}
    if rows is not None:
        shared["data"] = (f"lambada_openai={found(rows, 'lambada', '.jsonl')}",)
    return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}


def after(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The same facts through what came after, beside what it should be compared with."""
    return since(quick, model="smollm2", dtype="bfloat16", batch_size=192)


def toy(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The same of the workshop model, on the tasks that it was trained for."""
    shared = {"methods": EXACT + CHOOSING, "budgets": ONE if quick else BUDGETS, "jobs": 0}
    shared |= {"tasks": ("recall",) if quick else ("recall", "needle", "chain")}
    return {
        protocol: Accuracy(protocol=protocol, limit=16 if quick else None, **shared)
        for protocol in (FIRST, INSIDE)
    }


def toy_after(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The workshop model through what came after."""
    return since(quick)


def since(quick: bool, **model) -> dict[str, Measurement]:
    """Short documents at every budget, longer ones, which cost most of the hours, at one."""
    methods = ("full", *ROUNDED, "kvquant", *BESIDE, *SINCE, *UNTURNED)
    shared = {"methods": methods, "jobs": 0, "limit": 8 if quick else None} | model
    asked = {"recall": ONE} if quick else {"recall": BUDGETS, "needle": ONE}
    return {
        f"{protocol}-{task}": Accuracy(protocol=protocol, tasks=(task,), budgets=budgets, **shared)
        for task, budgets in asked.items()
        for protocol in (FIRST, INSIDE)
    }


def opt(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The other workshop model, which has learned positions and no RoPE, through whatever suits it."""
    methods = tuple(dict.fromkeys(EXACT + ROUNDED + CHOOSING + SINCE))
    shared = {"methods": methods, "budgets": ONE if quick else BUDGETS, "jobs": 0}
    shared |= {"tasks": ("recall",) if quick else ("recall", "needle"), "model": "workshop-opt"}
    return {
        protocol: Accuracy(protocol=protocol, limit=16 if quick else None, **shared)
        for protocol in (FIRST, INSIDE)
    }


def wrapped(**model) -> Callable[..., dict[str, Measurement]]:
    """What any keep can be told besides, and fetches over packed stores, at one budget."""

    def parts(quick: bool, rows: Path | None) -> dict[str, Measurement]:
        shared = {"methods": ("full", "random", *WRAPPED), "budgets": ONE, "jobs": 0, "tasks": ("recall",)}
        shared |= {"limit": 8 if quick else None} | model
        return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}

    return parts


def learned(model: str, budget: str) -> Callable[..., dict[str, Measurement]]:
    """What stands on numbers trained for a model, in float32, as recipes read it; `kvzap` needs RoPE."""

    def parts(quick: bool, rows: Path | None) -> dict[str, Measurement]:
        if rows is None:
            return {}
        profile = found(rows, f"{model}-duo", ".safetensors")
        methods = [f"duo:profile={profile},heads={share}" for share in SHARES]
        if model != "workshop-opt":
            profile = found(rows, f"{model}-kvzap", ".safetensors")
            methods += [f"kvzap:profile={profile},threshold={at},recent=4" for at in THRESHOLDS]
        shared = {
            "methods": ("full", "random", "keydiff", "kvzip", *methods),
            "budgets": (budget,),
            "jobs": 0,
        }
        shared |= {"model": model, "tasks": ("recall",), "limit": 8 if quick else None}
        return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}

    return parts


def fewshot(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """Short commonsense questions behind five others, as in InfiniGen's figure of accuracies."""
    tasks = ("copa",) if quick else ("copa", "piqa", "hellaswag")
    shared = {"methods": EXACT + CHOOSING, "budgets": ONE, "tasks": tasks, "num_fewshot": SHOTS, "jobs": 0}
    shared |= {"model": "smollm2", "dtype": "bfloat16", "limit": 8 if quick else 200}
    if rows is not None:
        shared["data"] = tuple(f"{task}={found(rows, task, '.jsonl')}" for task in tasks)
    return {protocol: Accuracy(protocol=protocol, **shared) for protocol in (FIRST, INSIDE)}


def perplexity(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """WikiText-2's test text in chunks of 2,048 tokens, of which the last 256 are decoded."""
    if rows is None:
        return {}
    shared = {
        "methods": (*EXACT, "int2", *CHOOSING),
        "budgets": ONE,
        "text": found(rows, "wikitext2", ".txt"),
    }
    shared |= (
        {"chunk": 256, "prompt": 192, "limit": 2} if quick else {"chunk": 2048, "prompt": 1792, "limit": 8}
    )
    return {
        "smollm2": Perplexity(model="smollm2", dtype="bfloat16", **shared),
        "workshop": Perplexity(**shared),
        "workshop-opt": Perplexity(model="workshop-opt", **shared),
    }


def perplexity_4k(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The same text in chunks of 4,096 tokens, of which the second half is decoded."""
    if rows is None:
        return {}
    shared = {"methods": READ_ON[:2] if quick else READ_ON, "budgets": ONE}
    asked = (256, 192, 2) if quick else (4096, 2048, 4)
    shared |= dict(zip(("chunk", "prompt", "limit"), asked, strict=True))
    text = found(rows, "wikitext2", ".txt")
    return {"smollm2": Perplexity(model="smollm2", dtype="float32", text=text, **shared)}


def formats(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """WikiText-2's test text in chunks of 1,024 tokens, of which the last 64 are decoded, in every format."""
    if rows is None:
        return {}
    shared = {"methods": FORMATS[:4] if quick else FORMATS, "text": found(rows, "wikitext2", ".txt")}
    shared |= (
        {"chunk": 256, "prompt": 240, "limit": 2} if quick else {"chunk": 1024, "prompt": 960, "limit": 8}
    )
    return {"smollm2": Perplexity(model="smollm2", dtype="float32", **shared)}


def found(rows: Path, name: str, ending: str) -> Path:
    """A task's file in the user's folder. Raises Problem where there is none."""
    names = [f"{name}{part}{ending}" for part in ("", "_validation", "_test")]
    for file in names:
        if (rows / file).is_file():
            return rows / file
    raise Problem(f"--rows {rows}: expected {' or '.join(names)} in this folder")


def reuse(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """Four questions on a context: it is compressed without them, with another one, with the one asked."""
    shared = {"methods": ASKED_AGAIN, "budgets": ONE, "jobs": 0, "tasks": ("recall_many",), "batch_size": 48}
    models = {
        "workshop": {"limit": 8 if quick else None},
        "smollm2": {"limit": 8 if quick else 48, "model": "smollm2", "dtype": "bfloat16"},
    }
    return {
        f"{name}-{protocol}": Accuracy(protocol=protocol, **shared, **model)
        for name, model in models.items()
        for protocol in (REUSE, MANY, INSIDE)
    }


def beyond(quick: bool, rows: Path | None) -> dict[str, Measurement]:
    """The workshop model, trained on 2,048 tokens at most, reads on to three times that."""
    shared = {"methods": RENUMBERED, "beyond_context": True}
    shared |= {"chunk": 2112, "prompt": 1984, "limit": 1} if quick else {"chunk": 6144, "prompt": 1024}
    return {"workshop": Perplexity(**shared)}


STUDIES = {
    "passages": Study(
        "SmolLM2-135M-Instruct answers one question on a document, for every method and budget", passages
    ),
    "needles": Study(
        "SmolLM2-135M-Instruct finds what stands in 1,024 tokens of other text",
        needles(1024, 100, EXACT + CHOOSING + ("quest", "kvzip"), NEEDLES[:2], hops=True),
        points=True,
    ),
    "needles_budgets": Study(
        "SmolLM2-135M-Instruct finds what stands in 1,024 tokens of other text, at four budgets",
        needles(1024, 100, BUDGETED, NEEDLES[:2], BUDGETS),
    ),
    "needles_2k": Study(
        "SmolLM2-135M-Instruct finds what stands in 2,048 tokens of other text",
        needles(2048, 100, EXACT + CHOOSING),
        points=True,
    ),
    "needles_4k": Study(
        "SmolLM2-135M-Instruct finds what stands in 4,096 tokens of other text",
        needles(4096, 50, EXACT + CHOOSING),
        points=True,
    ),
    "needles_8k": Study(
        "SmolLM2-135M-Instruct finds what stands in 8,192 tokens of other text, all that it was trained for",
        needles(8192, 25, EXACT + CHOOSING),
        points=True,
    ),
    "needles_shapes": Study(
        "SmolLM2-135M-Instruct names several of what stands in 1,024 tokens of other text",
        needles_shapes,
        points=True,
    ),
    "ruler": Study(
        "SmolLM2-135M-Instruct on RULER's own tasks that need no data set, 1,024 tokens",
        ruler(1024, 100, budgets=BUDGETS),
    ),
    "ruler_2k": Study(
        "SmolLM2-135M-Instruct on RULER's single needle in 2,048 tokens",
        ruler(2048, 100, RULER[:1]),
        points=True,
    ),
    "ruler_4k": Study(
        "SmolLM2-135M-Instruct on RULER's single needle in 4,096 tokens",
        ruler(4096, 50, RULER[:1]),
        points=True,
    ),
    "ruler_8k": Study(
        "SmolLM2-135M-Instruct on RULER's single needle in 8,192 tokens, all that it was trained for",
        ruler(8192, 25, RULER[:1]),
        points=True,
    ),
    "ruler_words": Study("SmolLM2-135M-Instruct on RULER's word counts in 1,024 tokens", ruler_words),
    "lambada": Study("SmolLM2-135M-Instruct says the last word of a passage", lambada),
    "after": Study("SmolLM2-135M-Instruct on the same documents, for methods of 2024 and 2025", after),
    "toy": Study("The workshop model answers one question on a document", toy),
    "toy_after": Study("The workshop model on the same documents, for methods of 2024 and later", toy_after),
    "opt": Study(
        "The workshop's OPT-shaped model on the same documents, for every method that suits it", opt
    ),
    "learned": Study("The workshop model with trained heads and guessed scores", learned("workshop", "0.1")),
    "learned_opt": Study("The OPT-shaped workshop model with trained heads", learned("workshop-opt", "0.1")),
    "learned_smollm2": Study(
        "SmolLM2-135M-Instruct with trained heads and guessed scores", learned("smollm2", "0.2")
    ),
    "wrapped": Study("The workshop model with chunks, merging, renumbering, packed stores", wrapped()),
    "wrapped_smollm2": Study(
        "SmolLM2-135M-Instruct with chunks, merging, renumbering, packed stores",
        wrapped(model="smollm2", dtype="bfloat16", batch_size=192),
    ),
    "fewshot": Study(
        "SmolLM2-135M-Instruct on short commonsense questions behind five others, 20 % budget", fewshot
    ),
    "formats": Study("Perplexity of WikiText-2 against the bits that a number of K and V takes", formats),
    "perplexity": Study("Perplexity of WikiText-2 against the position in a chunk, 20 % budget", perplexity),
    "perplexity_4k": Study(
        "Perplexity of WikiText-2 at positions from 2,048 to 4,095, SmolLM2-135M-Instruct, 20 % budget",
        perplexity_4k,
    ),
    "reuse": Study("Both models answer four questions on one context that was compressed once", reuse),
    "beyond": Study("The workshop model's perplexity beyond the length that it was trained on", beyond),
}

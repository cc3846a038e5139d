"""Measure what the chapters show of SmolLM2-135M: `python -m course smollm2 [STUDY ...]`, minutes each.

Each study returns a caption, the names of its columns, and its rows. They are written to
course/teaching/smollm2.json after each study, with the package that the model came in and the digest of its
files. In a workshop's kit they are only shown: what is installed there stays as it came.
"""

from __future__ import annotations

import datetime
import json
import random

import torch

import kvlab
from kvlab import attention
from kvlab.arithmetic import count_flops, kv_bytes_per_token
from kvlab.bill import data as bill_data
from kvlab.extras import kit_folder
from kvlab.measure.studies import read, similarity
from kvlab.models import ModelShape, calibration_ids
from kvlab.models.fetching import PACKAGES

from .harness import harness
from .teaching import lease, lesson
from .teaching.smollm2 import STORED, drawn

NEEDLES = 12
BUDGET = 0.2
QUESTION = (
    "\nQuestion: In which city does the secret meeting of clause 17 take place?"
    "\nAnswer: The secret meeting takes place in"
)


# Goal, what reaches it, what does not: questions of common sense, in the form of piqa and written for this.
SENSE = (
    ("dry wet shoes", "put them in a warm, airy place", "put them in a bucket of water"),
    ("open a jar with a tight lid", "hold the lid under hot water, then turn it",
     "hold the jar and look at it"),
    ("keep bread fresh", "keep it in a closed bag", "keep it in the rain"),
    ("find a lost key in the dark", "look for it with a lamp", "look for it with a spoon"),
    ("stop a door from squeaking", "put a drop of oil on the hinge",
     "put a drop of honey on the window"),
    ("warm up cold soup", "heat it in a pot on the stove", "heat it in the freezer"),
    ("cut a thick rope", "use a sharp knife", "use a soft pillow"),
    ("carry water up a hill", "pour it into a bucket", "pour it into a net"),
    ("make a room darker", "close the curtains", "switch on the lights"),
    ("reach a high shelf", "stand on a ladder", "lie down on the floor"),
    ("clean a dirty plate", "wash it with soap and water", "wash it with mud"),
    ("sleep well", "lie down in a quiet room", "drink strong coffee at midnight"),
    ("keep milk from turning sour", "put it in the fridge", "put it in the sun"),
    ("write on a blackboard", "use a piece of chalk", "use a piece of cheese"),
    ("catch a fish", "use a hook and a line", "use a hammer and a nail"),
    ("put out a candle", "blow on the flame", "pour oil on the flame"),
    ("stay dry in the rain", "open an umbrella", "open a book"),
    ("hang a picture on a wall", "hammer a nail into the wall", "hammer an egg into the wall"),
    ("cool a hot drink", "add some ice", "add some sand"),
    ("see far-away birds", "look through binoculars", "look through a blanket"),
    ("glue two pieces of wood", "press them together until the glue is dry",
     "keep them apart until the glue is dry"),
    ("boil an egg", "put it in boiling water for ten minutes", "put it in cold milk for ten seconds"),
    ("grow tomatoes", "water the plants and give them sun", "keep the plants in a dark cupboard"),
    ("sharpen a pencil", "turn it in a sharpener", "turn it in a glass of juice"),
    ("send a letter", "put a stamp on it and post it", "put a stone on it and forget it"),
    ("tie a shoe", "make a knot in the laces", "make a cut in the laces"),
    ("heat a cold house", "light a fire in the stove", "open all the windows in winter"),
    ("paint a fence", "use a brush and a can of paint", "use a fork and a can of beans"),
    ("measure a table", "use a tape measure", "use a thermometer"),
)  # fmt: skip
SHOTS = 5  # of them stand before each question, with what reaches the goal


def sense(model, tokenizer):
    """Right answers to short questions of common sense, with what stands before them cut and without any."""
    line = "Question: how do you {}?\nAnswer: {}\n\n".format
    before = "".join(line(goal, good) for goal, good, _ in SENSE[:SHOTS])
    asked, rows = SENSE[SHOTS:], []

    def likely(method: str, start: str, goal: str, said: str) -> float:
        """log p of an answer, a token of it; every token is fed through the cache."""
        head = tokenizer(start + line(goal, "").rstrip(), return_tensors="pt").input_ids
        answer = tokenizer(" " + said, return_tensors="pt").input_ids
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, method))
        stepper.feed(head[:, :-1])
        total, token = 0.0, head[:, -1:]
        for n in range(answer.shape[1]):
            logits = stepper.feed(token, last=True)
            token = answer[:, n : n + 1]
            total += logits.log_softmax(-1)[0, token].item()
        return total / answer.shape[1]

    for method in ("full", f"sinks:budget={BUDGET}", f"h2o:budget={BUDGET}", "nothing before the question"):
        start, cache = (before, method) if ":" in method or method == "full" else ("", "full")
        right = sum(
            likely(cache, start, goal, good) > likely(cache, start, goal, bad) for goal, good, bad in asked
        )
        rows.append([method, right])
    return (
        f"right answers of {len(asked)} to questions like those of piqa, {SHOTS} worked examples before each",
        ["method", "right"],
        rows,
    )


def needle(model, tokenizer):
    """Right answers about one sentence of a long story, the question known and unknown at compression."""
    chosen = ("sinks", "h2o", "snapkv", "topk", "infinigen")
    return _found(model, tokenizer, ("full", "int8", "int4", *(f"{m}:budget={BUDGET}" for m in chosen)))


def after(model, tokenizer):
    """As `needle`, for the methods of chapter 9."""
    chosen = ("snapkv", "random", "keydiff", "kvzip", "adakv:of=keydiff", "quest")
    budgeted = (f"{m}{',' if ':' in m else ':'}budget={BUDGET}" for m in chosen)
    return _found(model, tokenizer, ("full", "int4", "int4:rotate=true", *budgeted))


def _found(model, tokenizer, methods):
    right = lesson.answered(model, tokenizer, methods, _needles())
    return (
        f"right answers of {NEEDLES} about one sentence in about 800 tokens",
        ["method", "question known", "question unknown"],
        [[m, *counts] for m, counts in right.items()],
    )


def clause(model, tokenizer):
    """Right answers about clause 17 of the lease, for what chapters 8 and 9 decide between."""
    chosen = ("random", "sinks", "snapkv", "keydiff", "kvzip", "topk")
    methods = ("full", "fp8", "int4", "int4:rotate=true", *(f"{m}:budget={BUDGET}" for m in chosen))
    asked = lease.asked_of_smollm2()
    right = lesson.answered(model, tokenizer, methods, asked)
    tokens = tokenizer(asked[0][0], return_tensors="pt").input_ids.shape[1]
    return (
        f"right answers of {len(asked)} about clause 17 of a contract of {tokens:,} tokens",
        ["method", "question known", "question unknown"],
        [[m, *counts] for m, counts in right.items()],
    )


def _needles():
    rng = random.Random(17)
    names = [
        "Paris",
        "London",
        "Berlin",
        "Rome",
        "Madrid",
        "Vienna",
        "Tokyo",
        "Oslo",
        "Athens",
        "Dublin",
        "Cairo",
        "Lima",
    ]
    for n in range(NEEDLES):
        story = harness("tasks.corpus").prose(rng, 60)
        story.insert(rng.randrange(10, 50), f"The secret meeting of clause 17 takes place in {names[n]}.")
        yield (
            " ".join(story),
            QUESTION,
            names[n],
        )


def again(model, tokenizer, prompt: int = 256, new: int = 8):
    """What writing a few tokens costs with and without a cache: tokens fed and operations."""
    ids, rows = _text(model, prompt), []
    for method in ("recompute", "full"):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, method))
        token = stepper.feed(ids, last=True).argmax(-1)[None]

        def write(stepper=stepper, token=token):
            for _ in range(new - 1):
                token = stepper.feed(token, last=True).argmax(-1)[None]

        fed = prompt * new + new * (new - 1) // 2 if method == "recompute" else prompt + new - 1
        rows.append([method, fed, count_flops(write) / (new - 1) / 1e9])
    return (
        f"{new} tokens after a prompt of {prompt}",
        ["method", "tokens fed", "GFLOP per token after the first"],
        rows,
    )


def size(model, tokenizer, tokens: int = 512):
    """Bytes per token, by formula and held, and what they would be without shared KV heads."""
    cache, shape = kvlab.make_cache(model, "full"), ModelShape.of(model)
    kvlab.Stepper(model, cache).feed(_text(model, tokens))
    held = cache.stats().device_bytes / tokens
    return (
        f"{shape.layers} layers, {shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim},"
        " 32 bits",
        ["what", "bytes per token"],
        [
            ["by the formula", int(kv_bytes_per_token(shape, 32))],
            ["held by the cache", int(held)],
            ["if every query head had a KV head of its own", int(held * shape.heads / shape.kv_heads)],
        ],
    )  # fmt: skip


def reserved(model, tokenizer, tokens: int = 512):
    """What each buffer holds after the same text, and how much of it is in use."""
    ids, rows = _text(model, tokens), []
    used = kv_bytes_per_token(ModelShape.of(model), 32) * tokens
    longest = model.config.max_position_embeddings
    for method in ("full", f"static:length={longest}", "paged"):
        cache = kvlab.make_cache(model, method)
        kvlab.Stepper(model, cache).feed(ids)
        held = cache.stats().device_bytes
        rows.append([method, held / 1e6, 100 * used / held])
    return (f"after {tokens} tokens of {longest:,} that it can read", ["buffer", "MB held", "% in use"], rows)


def formats(model, tokenizer):
    """Perplexity of a text read through a cache of each format."""
    return _read(model, ("full", "int8", "fp8", "int4", "kivi2", "int2"))


def turned(model, tokenizer):
    """As `formats`, for the formats of chapter 9, and those that they should be compared with."""
    return _read(
        model, ("full", "int4", "int4:rotate=true", "nvfp4", "turboquant", "int5", "kvquant", "kivi2")
    )


def _read(model, methods, first: int = 384, then: int = 192):
    ids, rows = _text(model, first + then), []
    for method in methods:
        bits, perplexity = _perplexity(model, ids, method, first)
        rows.append([method, bits, perplexity])
    return (
        f"perplexity of {then} tokens after {first}, read one by one",
        ["format", "bits per number held", "perplexity"],
        rows,
    )


def sinks(model, tokenizer, first: int = 384, then: int = 192):
    """How much attention the first token draws, and what happens when it is thrown away."""
    ids = _text(model, first + then)
    shares = []
    for layer in attention.recorded(model, ids[:, :first]):
        weights = layer.received() / first  # [1, kv_heads, tokens]
        shares.append(weights[..., 0].mean() / weights.sum(-1).mean())
    share = 100 * torch.stack(shares).mean().item()
    rows = [["full", _perplexity(model, ids, "full", first)[1]]]
    for kept in (4, 1, 0):
        spec = f"sinks:budget=128,sinks={kept}"
        rows.append([spec, _perplexity(model, ids, spec, first)[1]])
    return (
        f"{share:.0f} % of the attention goes to the first of {first} tokens; perplexity of {then} more",
        ["method", "perplexity"],
        rows,
    )


def link(model, tokenizer):
    """Milliseconds to read a cache from the GPU's memory, and over the link."""
    from .teaching.contract import DEVICE

    machine, shape, rows = bill_data.machine(bill_data.device_named(DEVICE)[1]), ModelShape.of(model), []
    for tokens in (1024, 4096, 8192):
        held = kv_bytes_per_token(shape, 16) * tokens
        rows.append(
            [f"{tokens:,} tokens", held / 1e6, 1e3 * held / machine.memory, 1e3 * held / machine.link]
        )
    return (
        f"its cache at 16 bits on an {DEVICE}: each step at least",
        ["context", "MB", "ms from the GPU's memory", "ms over the link"],
        rows,
    )


def alike(model, tokenizer, tokens: int = 384):
    """How alike the inputs of successive blocks are, here and in the workshop model."""
    rows = []
    for name, one in (("workshop", kvlab.load()[0]), ("SmolLM2", model)):
        found = similarity(read(one, _text(one, tokens)))
        rows.append([name, *(values.mean().item() for values in found.values())])
    return (
        f"cosine between what a block receives and what its neighbour does, {tokens} tokens",
        ["model", *found],
        rows,
    )


def rehearsed(model, tokenizer):
    """What InfiniGen answers by alpha and ratio, here and on others' models: cells of docs/results, which
    `python -m eval reproduce --studies infinigen` makes, of models whose full cache answers at all."""
    tables, budget = harness("reproduce.tables"), 0.2
    stored = tables.study("infinigen")
    moved = {(row["model"], tables.label(row["method"])): row["moved_bytes"] for row in stored}

    def fetched(
        model: str, method: str
    ) -> float:  # of all layers, beside the fifth of each that topk fetches
        return budget * moved[model, method] / moved[model, "topk"]

    rows = []
    for row in stored:
        name, method = row["model"], tables.label(row["method"])
        part = fetched(name, method)
        if method.startswith("infinigen"):  # of a guessed layer: alpha=inf fetches a fifth of each of these
            part = 1 - (1 - part) * (1 - budget) / (1 - fetched(name, "infinigen:alpha=inf,ratio=1"))
        if row["compared"] and name != "workshop":
            rows.append([name.removesuffix("-q4_k_m.gguf"), method, 100 * row["value"], 100 * part])
    caption = "questions about facts in 96 documents, question inside, 20 % budget"
    return caption, ["model", "method", "% right", "% of a guessed layer fetched"], rows


STUDIES = {
    study.__name__: study
    for study in (
        needle, sense, clause, after, again, size, reserved, formats, turned, sinks, link, alike, rehearsed,
    )
}  # fmt: skip


def _text(model, tokens: int):
    """The first tokens `[1, tokens]` of the text that kvlab brings along."""
    return calibration_ids(model)[:, :tokens]


def _perplexity(model, ids, method: str, first: int) -> tuple[float, float]:
    """(Bits per number held, perplexity of what comes after the first tokens), one token a step."""
    cache = kvlab.make_cache(model, method)
    stepper, lost = kvlab.Stepper(model, cache), []
    logits = stepper.feed(ids[:, :first], last=True)
    for n in range(first, ids.shape[1]):
        lost.append(-logits.log_softmax(-1)[0, ids[0, n]])
        logits = stepper.feed(ids[:, n : n + 1], last=True)
    stats = cache.stats()
    numbers = kv_bytes_per_token(ModelShape.of(model), 8) * stats.tokens_held
    return 8 * stats.device_bytes / numbers, torch.stack(lost).mean().exp().item()


def measure(names: list[str]) -> None:
    """Measure studies by name (default: all); show each, and store it, as soon as it is there.

    ValueError for an unknown name.
    """
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise ValueError(f"no study is called {unknown[0]!r}; there are {', '.join(STUDIES)}")
    torch.set_num_threads(1)
    model, tokenizer = kvlab.load("smollm2")
    kept = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    package = f"{PACKAGES['smollm2'].name} {PACKAGES['smollm2'].version}"
    model_is = {
        "model": "SmolLM2-135M-Instruct",
        "package": package,
        "digest": harness("core.digests").model_digest("smollm2"),
    }
    same = all(kept.get(key) == value for key, value in model_is.items())
    studies = kept.get("studies", {}) if same else {}
    for name in names or STUDIES:
        torch.manual_seed(0)
        with torch.no_grad():
            caption, columns, rows = STUDIES[name](model, tokenizer)
        today = datetime.date.today().isoformat()
        studies[name] = {"caption": caption, "columns": columns, "rows": rows, "made": today}
        ordered = {study: studies[study] for study in STUDIES if study in studies}
        made = {**model_is, "studies": ordered}
        if kit_folder() is None:
            STORED.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {caption}\n{drawn(columns, rows)}", flush=True)

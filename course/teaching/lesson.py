"""What every chapter starts and ends with: the model, the six-token prompt, and the growing cost table."""

from __future__ import annotations

import platform
import random
import statistics

import torch

from kvlab.arithmetic import count_flops
from kvlab.decode import Stepper, decode
from kvlab.faster import engine_of
from kvlab.make import make_cache
from kvlab.measure.simulate import AHEAD, NEEDED, REHEARSED, Work, simulate
from kvlab.models import calibration_ids, load
from kvlab.place import ModelledLink

from ..harness import harness
from . import mine

corpus = harness("tasks.corpus")
PROMPT = "The brown dog slept by the"  # six tokens, the same in every chapter


def start(name: str | None = None):
    """The workshop model and its tokenizer, seeded, on one thread: a small model decodes fastest there."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return load(name)


def people_know(model, tokenizer):
    """SmolLM2 and its tokenizer, where it was fetched; else those that are given, and a line that says so."""
    try:
        return load("smollm2")
    except ValueError as error:
        print(f"({error}; the workshop model answers)")
        return model, tokenizer


def versions() -> None:
    """Print what this runs on. For a cell whose output is not compared."""
    import transformers

    parts = (f"Python {platform.python_version()}", f"torch {torch.__version__}")
    print(*parts, f"transformers {transformers.__version__}", platform.machine(), sep=" · ")


def document(seed: int = 11, facts: int = 8, filler: int = 12):
    """A `corpus.Document`: facts among sentences of prose, and a question about one of the facts."""
    rng = random.Random(seed)
    return corpus.recall(rng, facts=facts, filler=corpus.prose(rng, filler))


def begun(model, method):
    """What feeds a text through a method's cache, or through a cache of one's own (a `mine.Cache`)."""
    if isinstance(method, str):
        return Stepper(model, make_cache(model, method))
    return mine.Reader(model, method())


def ask(model, tokenizer, method, document, *, known: bool = True) -> str:
    """The model's next word after a document, decided by steps that see only what the cache offers.

    known: whether the question stands in the text that the method compresses. If not, the context alone is
    compressed and the question comes after it, token by token.
    """
    ids = tokenizer(document.text, return_tensors="pt").input_ids
    cut = -1 if known else len(tokenizer(document.context).input_ids)
    stepper = begun(model, method)
    stepper.feed(ids[:, :cut])  # read as it is, then compressed
    for token in ids[0, cut:]:
        logits = stepper.feed(token.view(1, 1), last=True)
    return tokenizer.decode(logits.argmax(-1))


@torch.inference_mode()
def answered(model, tokenizer, methods, asked) -> dict[str, tuple[int, int]]:
    """{method: (right answers with the question known when the cache is compressed, and unknown)}.

    asked: (context, question, answer) each. As `ask`, for many methods: all of them take one prefill.
    """
    shared = harness("accuracy.prefill").shared

    right = {method: [0, 0] for method in methods}
    for context, question, answer in asked:
        whole = tokenizer(context + question, return_tensors="pt").input_ids  # [1, tokens]
        last = whole.shape[1] - 1
        for protocol, cut in enumerate((last, min(last, len(tokenizer(context).input_ids)))):
            caches = {method: make_cache(model, method) for method in methods}
            for method, stepper, read in shared(model, caches, whole[:, :cut], None, last=True):
                if isinstance(read, Exception):
                    raise read
                for token in whole[0, cut:]:
                    logits = stepper.feed(token.view(1, 1), last=True)
                said = tokenizer.decode(logits.argmax(-1)).strip()
                right[method][protocol] += bool(said) and answer.startswith(said)
    return {method: (known, unknown) for method, (known, unknown) in right.items()}


def costs(model, tokenizer, methods, *, steps: int = 32, questions: int = 10) -> list[dict]:
    """One row of the cost table for each method, measured on the same text and the same questions. A method
    is a name, or a class of `mine.Cache`; one that is not finished gets a line in place of a row.

    A row: method, held (tokens), device, host and moved (bytes, moved by the last step), flops (of the last
    step), agree (of `steps` next tokens, how many are the full cache's), right (of `questions`), steps,
    questions.
    """
    ids = calibration_ids(model)[:, : 256 + steps]
    asked = [document(2_100_000 + i) for i in range(questions)]
    reference = _next_tokens(begun(model, "full"), ids, steps)[0]
    rows = []
    for method in methods:
        stepper = begun(model, method)
        try:
            chosen, flops = _next_tokens(stepper, ids, steps)
        except Exception as error:
            if isinstance(method, str):
                raise
            print(mine.not_yet(method, error))
            continue
        stats = stepper.cache.stats()
        rows.append({
            "method": method if isinstance(method, str) else method.__name__,
            "held": stats.tokens_held, "device": stats.device_bytes,
            "host": stats.host_bytes, "moved": stats.moved_bytes, "flops": flops,
            "agree": int((chosen == reference).sum()), "steps": steps,
            "right": sum(ask(model, tokenizer, method, d) == d.answer for d in asked),
            "questions": questions,
        })  # fmt: skip
    return rows


def _next_tokens(stepper, ids, steps: int):
    """Most likely next tokens `[steps]` while the text is fed one token at a time; FLOPs of the last."""
    stepper.feed(ids[:, :-steps])
    chosen = []
    for step in range(ids.shape[1] - steps, ids.shape[1] - 1):
        chosen.append(stepper.feed(ids[:, step : step + 1], last=True).argmax(-1))
    logits = []
    flops = count_flops(lambda: logits.append(stepper.feed(ids[:, -1:], last=True)))
    return torch.cat([*chosen, logits[0].argmax(-1)]), flops


def print_costs(rows: list[dict]) -> None:
    """The cost table: counts, the same on every machine."""
    wide = max(24, *(len(row["method"]) + 2 for row in rows))
    print(f"{'method':{wide}}{'held':>6}{'device kB':>11}{'host kB':>9}{'moved kB':>10}{'MFLOP':>9}"
          f"{'agree':>9}{'right':>8}")  # fmt: skip
    for row in rows:
        agree, right = f"{row['agree']}/{row['steps']}", f"{row['right']}/{row['questions']}"
        print(f"{row['method']:{wide}}{row['held']:6}{row['device'] / 1e3:11.0f}{row['host'] / 1e3:9.0f}"
              f"{row['moved'] / 1e3:10.0f}{row['flops'] / 1e6:9.1f}{agree:>9}{right:>8}")  # fmt: skip


def print_seconds(model, tokenizer, methods, *, tokens: int = 256, steps: int = 12) -> None:
    """Median milliseconds per token of each method after a prompt of `tokens`, with the engine's name. For a
    cell whose output is not compared: it is this machine's, and noisy."""
    ids = tokenizer(" ".join(corpus.prose(random.Random(7), 60)), return_tensors="pt").input_ids[:, :tokens]
    for method in methods:
        cache = make_cache(model, method)
        engine = "its static graph" if hasattr(cache, "forward") else f"{engine_of(model)} engine"
        ms = decode(model, ids, cache, steps).ms[1:]
        told = f"{engine}   ({min(ms):.2f} to {max(ms):.2f})"
        print(f"{method:24}{statistics.median(ms):8.2f} ms/token, {told}")


def played(
    way: str, compute: float, whole: float, part: float, choose: float, guess: float, layers: int = 40
) -> float:
    """Milliseconds of a decode step of layers that are alike, played event by event.

    way: wait for everything, choose late, or guess early (layers 0 and 1 then fetch everything). Of a layer:
    compute, and whole, the transfer of all its tokens; part is fetched when it was chosen among whole keys,
    or when it was guessed.
    """
    each = {"wait": (0, AHEAD, 1), "late": (choose, NEEDED, part), "early": (guess, REHEARSED, part)}
    ways = ["wait"] * 2 + ["early"] * (layers - 2) if way == "early" else [way] * layers
    parts = compute / 4e3, compute / 4e3, compute / 2e3  # seconds: to project, to attend, and after that
    step = [Work(*parts, pick / 1e3, ask, int(1e3 * whole * some)) for pick, ask, some in map(each.get, ways)]
    link = ModelledLink(1e6, latency=0)  # 1,000 bytes in a millisecond
    return 1e3 * simulate([step] * 3, link).steps(1).seconds

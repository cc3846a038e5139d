"""Ask: one question or many about a context that a cache holds, in one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from .bill.show import seconds, size
from .decode import Stepper, now
from .devices import entry_of
from .errors import first_line
from .parameters import check_bool, check_kind, check_one_of, check_text, check_tokenizer, check_whole, shown

PROTOCOLS = ("many-questions", "question-inside")


@dataclass(frozen=True)
class Answer:
    """The answer to one question, and its cost."""

    text: str  # without special tokens
    tokens: list[int] = field(repr=False)  # all generated ones, an end token included
    stats: object  # `cache.stats()` after the answer, of all rows where several were answered at once
    seconds: float  # of this question and its answer, or of all answered at once
    context_seconds: float = field(repr=False)  # of the context, which the first answer alone pays for
    at_once: int = field(default=1, repr=False)  # questions that were answered together

    @property
    def cost(self) -> str:
        """Bytes, tokens and time in a line."""
        said = self.stats
        host = f" and {size(said.host_bytes)} on the host" if said.host_bytes else ""
        held = f"{said.tokens_held:,} of {said.tokens_seen:,} tokens held, the answer's among them"
        once = f" after {seconds(self.context_seconds)} for the context" if self.context_seconds else ""
        rows = f"{self.at_once} questions at once: " if self.at_once > 1 else ""
        return f"{rows}{size(said.device_bytes)} on the device{host}, {held}, {seconds(self.seconds)}{once}"

    def __str__(self) -> str:
        return f"{self.text.strip()}\n[{self.cost}]"


def ask(
    model, tokenizer=None, context=None, questions=None, method="full", protocol="many-questions", chat=False,
    max_new_tokens=64, streamer=None, batch_size=1,
):  # fmt: skip
    """Ask a question, or a list of them, about a context; returns an `Answer`, or a list of them.

    model, tokenizer: the result of `kvlab.load`; or a name instead of the model, which is loaded. context: a
    text. A question follows it on a new line. method: as for `kvlab.make_cache`. protocol: "many-questions"
    compresses the context once, then each question continues with a copy of that cache; "question-inside"
    compresses context and question together, for each question (docs/protocols.md). chat: context and
    question are a user's turn in the tokenizer's chat template. streamer: one of transformers', fed each
    prompt and its answer as by `generate`; it takes one row. batch_size: questions answered at once, at
    most, as rows of one batch, with the same answers as alone.

    Answers are greedy: at most max_new_tokens, up to any end token of the model's generation_config, whose
    other settings are not applied. Raises ValueError or TypeError for an empty context or question, more
    tokens than the model's context, a method that the model refuses, and a tokenizer without a template.
    """
    check(context, questions, protocol, chat, max_new_tokens, streamer, batch_size)
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ValueError(
                f"model={shown(model)}: a name brings its own tokenizer; expected none beside it"
            )
        from .make import load

        model, tokenizer = load(model)
    first, prompts = ready(model, tokenizer, context, questions, method, chat, max_new_tokens)
    found = list(one_by_one(first, prompts, tokenizer, protocol, max_new_tokens, streamer, batch_size))
    return found[0] if isinstance(questions, str) else found


def one_by_one(first: Stepper, prompts, tokenizer, protocol, max_new_tokens, streamer=None, batch_size=1):
    """Yield each `Answer` as soon as it is there, from what `ready` returns."""
    device = entry_of(first.model)
    begun, spent = now(device), 0.0
    held = protocol == "many-questions" and not first.cache.recompute  # which holds nothing of a context
    if held:
        first.feed(torch.tensor([prompts[0][0]], device=device), last=True)
        first.cache.hold()
        spent = now(device) - begun
        if first.cache.gapless:
            batch_size = 1  # shorter questions would be padded
    for start in range(0, len(prompts), batch_size):
        rows, begun = prompts[start : start + batch_size], now(device)
        if streamer is not None:
            streamer.put(torch.tensor([rows[0][0] + rows[0][1]], device="cpu"))
        stepper, given = first.copied(), [head + tail for head, tail in rows]
        if held:
            given = [tail for _, tail in rows]
            if len(rows) > 1:
                stepper.fork(torch.zeros(len(rows), dtype=torch.long, device=device))
        answers = _answers(stepper, given, max_new_tokens, streamer)
        stats, taken = stepper.cache.stats(), now(device) - begun
        del stepper  # the cache is not held while the caller reads the answer
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        for text, tokens in zip(texts, answers, strict=True):
            yield Answer(text, tokens, stats, taken, spent, len(rows))
            spent = 0.0


def ready(model, tokenizer, context, questions, method, chat, max_new_tokens):
    """(A stepper with a fresh cache, the ids of each question's context and question); ValueError for what
    `ask` refuses once it has the model."""
    from .make import make_cache

    first = Stepper(model, make_cache(model, method))
    prompts = _prompts(tokenizer, context, [questions] if isinstance(questions, str) else questions, chat)
    for head, tail in prompts if first.context and not first.cache.renumbers else ():
        first.check_room(len(head) + len(tail) + max_new_tokens - 1)
    return first, prompts


def warm(first: Stepper, prompts) -> None:
    """Answer with two tokens after the last 64 of a prompt, so that no compiler's time is a method's cost."""
    _answers(first, [(prompts[0][0] + prompts[0][1])[-64:]], 2, None)


def _answers(stepper: Stepper, rows: list[list[int]], most: int, streamer) -> list[list[int]]:
    """Greedy tokens after those of each row. The last given token is a separate step, so that even an answer
    of one token comes from the cache."""
    ends, device = stepper.model.generation_config.eos_token_id, entry_of(stepper.model)
    ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    width = max(map(len, rows))
    chooses = any(layer.place.chooses for layer in stepper.cache.attending)
    if width == 2 and chooses and stepper.cache.fillable:  # padding would move other layers' states
        width = 3  # a token that is fed alone would be a step, and in a batch it is none
    ids = torch.tensor([[row[0]] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    if width > 1:
        stepper.feed(ids[:, :-1], mask[:, :-1], last=True)
    found, ids = [[] for _ in rows], ids[:, -1:]

    def ended(row: list[int]) -> bool:
        return len(row) == most or bool(ends.intersection(row[-1:]))

    while not all(map(ended, found)):
        ids = stepper.feed(ids, last=True).argmax(-1, keepdim=True)
        for row, token in zip(found, ids[:, 0].tolist(), strict=True):
            if not ended(row):
                row.append(token)
        if streamer is not None:
            streamer.put(ids[0].cpu())
    if streamer is not None:
        streamer.end()
    return found


def _prompts(tokenizer, context: str, questions: list[str], chat: bool) -> list[tuple[list[int], list[int]]]:
    """The ids of the context, the same for all questions, and those of each question."""
    check_tokenizer(tokenizer)
    if chat and not tokenizer.chat_template:
        raise ValueError("chat=True: this tokenizer has no chat template")
    line = "" if context.endswith("\n") else "\n"
    head, texts = context, [f"{context}{line}{question}" for question in questions]
    if chat:
        # A template may change the ends of its text, so a mark in the question's place shows where the
        # context ends.
        mark = next(one for one in map(chr, range(0xE000, 0xF8FF)) if one not in context)  # private use
        head, *rest = _turn(tokenizer, context + mark).split(mark)
        texts = [_turn(tokenizer, text) for text in texts]
        if len(rest) != 1 or not all(text.startswith(head) for text in texts):
            raise ValueError("chat=True: the chat template does not show the user's words as they are")

    def ids_of(text: str, special: bool = not chat) -> list[int]:
        return opened(tokenizer, text) if special else plain(tokenizer, text)

    start = ids_of(head)
    found = []
    for text in texts:
        ids = ids_of(text)
        if ids[: len(start)] == start:
            found.append((start, ids[len(start) :]))
        else:  # a token reaches across the end of the context
            found.append((start, ids_of(text[len(head) :], special=False)))
    for what, ids in (("the context", start), *(("a question", tail) for _, tail in found)):
        if not ids:
            raise ValueError(f"{what} is empty: the tokenizer makes no token of it")
    return found


def opened(tokenizer, text: str) -> list[int]:
    """The ids of a text that goes on: behind what the tokenizer puts before a text, without what it puts at
    the end."""
    inside, whole = plain(tokenizer, text), tokenizer(text, verbose=False).input_ids
    starts = range(len(whole) - len(inside) + 1)
    before = next((at for at in starts if whole[at : at + len(inside)] == inside), 0)
    return whole[: before + len(inside)] if inside else whole


def plain(tokenizer, text: str) -> list[int]:
    """The ids of a text, without any that the tokenizer adds."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _turn(tokenizer, said: str) -> str:
    """A user's turn in the chat template, up to where the answer begins."""
    try:
        turns = [{"role": "user", "content": said}]
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program
        raise ValueError(f"chat=True: the chat template cannot be used: {first_line(error)}") from error


def check(
    context, questions, protocol, chat, max_new_tokens, streamer=None, batch_size=1,
) -> None:  # fmt: skip
    """TypeError or ValueError for what `ask` does not take, before a model is loaded."""
    check_text("context", context)
    check_kind("questions", questions, str | list | tuple, "a text or a list of texts")
    if not questions:
        raise ValueError(f"questions={shown(questions)}: expected one at least")
    asked = [questions] if isinstance(questions, str) else questions
    for question in asked:
        check_text("a question", question)
        if not question.strip():
            raise ValueError(f"questions={shown(questions)}: one of them is empty")
    if not context.strip():
        raise ValueError(f"context={shown(context)}: it is empty")
    check_one_of("protocol", protocol, PROTOCOLS)
    check_bool("chat", chat)
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("batch_size", batch_size, 1)
    if streamer is not None and batch_size > 1:
        raise ValueError(f"batch_size={batch_size}: a streamer takes one row; expected 1 beside it")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"streamer is a {type(streamer).__name__}: expected put and end, as transformers' have"
        )

"""Cuts: where a prompt's context ends and its question begins, task by task.

Under every protocol but `question-inside` the context is compressed before the question is known, so a prompt
must say where one ends. The whole prompt is tokenized once and cut at the last token boundary at or before
the character that a rule finds. A task without a rule is refused, never guessed: its user names the cut, with
`--context-until TEXT` or in the task's own YAML:

    metadata:
      context_until: "\\nQuestion:"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from ..core.errors import Problem
from .protocols import FIRST, INSIDE

FIELD = "context_until"  # under `metadata:` of a task's YAML
SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)`]*\s+(?=\S)")  # between two sentences


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    find: (prompt, document) -> the character before which the prompt is cut, None where there is none. where:
    the same in a few words. shots: the context is the examples, so there must be some.
    """

    where: str
    find: Callable[[str, dict], int | None]
    shots: bool = False


def before(*patterns: str) -> Callable[[str, dict], int | None]:
    """Before the last match of any of these regular expressions."""

    def find(text: str, document: dict) -> int | None:
        return max((m.start() for pattern in patterns for m in re.finditer(pattern, text)), default=None)

    return find


def after(*fields: str, end: str = "") -> Callable[[str, dict], int | None]:
    """After the last occurrence of a field's text, and, with `end`, of what follows it up to this regular
    expression."""

    def find(text: str, document: dict) -> int | None:
        for value in (str(document[field]) for field in fields if document.get(field)):
            at = text.rfind(value) if value in text else text.rfind(value.strip())
            if at >= 0:
                at += len(value if value in text else value.strip())
                last = re.search(end, text[at:]) if end else None
                return at + last.start() if last else None if end else at
        return None

    return find


def item(*fields: str, lead: str = "", change: Callable[[str], str] = str.strip):
    """Before the tested item, which begins with `lead` and one of these fields."""

    def find(text: str, document: dict) -> int | None:
        for value in (change(str(document[field])) for field in fields if document.get(field)):
            if value and (at := text.rfind(lead + value)) >= 0:
                return at
        return None

    return find


def last_sentence(text: str, document: dict) -> int | None:
    """Before the last sentence of the prompt; 0 where it is the only one."""
    return max((m.end() for m in SENTENCE.finditer(text)), default=0)


def last_question(text: str, document: dict) -> int | None:
    """Before the last sentence of the document's question; where it is the only one, before the item, which
    the question or a word in front of it begins, and None where nothing is before that."""
    question = str(document.get("question", "")).strip()
    at = text.rfind(question) if question else -1
    inside = last_sentence(question, document)
    if at < 0 or inside:
        return None if at < 0 else at + inside
    lead = re.search(r"(?:Question|Problem|Q):\s*\Z", text[:at])
    return (lead.start() if lead else at) or None


def gap(text: str, document: dict) -> int | None:
    """Before the last sentence with a gap, of which the prompt has what is before it, or, where that is
    nothing, one of the words that may fill it: behind the last blank line."""
    stem = str(document.get("sentence", "")).partition("_")[0].strip()
    sign, behind = (stem, 0) if stem else ("\n\n", 2)
    return text.rfind(sign) + behind if sign in text else None


TESTED, SHOTS, PASSAGE = "before the tested item", "after the shots", "after the passage"
QUESTION = "before the question"
MAGIC = before(
    r"What (?:is|are all) the special magic", r"Question: Find all variables",
    r"Question: What are the 10 most common", r"Question: Do not provide",
)  # fmt: skip
LONG = after("context", end=r"(?:Question|Query|问题)[:：]|The following is an abstract|下面是一个摘要")
GIVEN = (  # begins every item of lm-eval's mmlu_llama and of its translations
    "Given the following question and four candidate answers (A, B, C and D), choose the best answer.\n"
    "Question: "
)
RULES = {  # a regular expression for the whole name of a task -> its cut; the first that fits counts
    # The facts are the context.
    r"(recall|needle|chain)(_em|_many)?|needles_\w+": Rule('before "\\nQuestion:"', before(r"\nQuestion:")),
    # The stem is the query: with hellaswag every ending depends on the last words, and winogrande's two
    # choices are two contexts with one continuation.
    r"piqa": Rule(TESTED, item("goal", lead="Question: "), shots=True),
    r"arc_(easy|challenge)": Rule(TESTED, item("question", lead="Question: "), shots=True),
    r"openbookqa": Rule(TESTED, item("question_stem"), shots=True),
    r"copa": Rule(TESTED, item("premise", change=lambda text: text.strip()[:-1]), shots=True),
    r"hellaswag": Rule(TESTED, item("query"), shots=True),
    r"winogrande": Rule(TESTED, gap, shots=True),
    # A premise, then a hypothesis.
    r"rte|sglue_rte": Rule("after the first sentence", before(r"\nQuestion:")),
    # A natural passage and question; earlier turns belong to the question.
    r"boolq|drop": Rule(PASSAGE, after("passage")),
    r"squadv2": Rule(PASSAGE, after("context")),
    r"race": Rule(PASSAGE, after("article")),
    r"coqa": Rule(PASSAGE, after("story")),
    # Guessable from the passage, not from the sentence.
    r"lambada(_openai|_standard)?(_mt_\w+)?": Rule("before the last sentence", last_sentence),
    # What begins the answer stays behind the cut.
    r"niah_(single|multikey)_\d|niah_multi(value|query)|ruler_(vt|cwe|fwe)": Rule(QUESTION, MAGIC),
    r"ruler_qa_.*": Rule(QUESTION, before(r"(?<=\n\n)Question: ")),
    # The fixed instruction belongs to the context; those after the text are a control: what is asked is
    # always the same; with the last ones the context is the examples.
    r"longbench_(narrativeqa|qasper|multifieldqa|hotpotqa|2wikimqa|musique|dureader|qmsum|passage_retrieval).*":
        Rule(QUESTION, LONG),
    r"longbench_(gov_report|multi_news|vcsum|passage_count).*": Rule("after the text", after("context")),
    r"longbench_(trec|triviaqa|samsum|lsht).*": Rule("after the examples", after("context")),
    # As KVzip does.
    r"gsm8k.*": Rule("before the problem's last sentence, else the shots", last_question),
    # All rows share the shots.
    r"mmlu_(\w\w_)?llama_.*": Rule(SHOTS, item("question", "input_question", lead=GIVEN), shots=True),
    r"mmlu_.*continuation": Rule(SHOTS, item("question", lead="Question: "), shots=True),
    r"mmlu(_(?!pro|cot|flan).*)?": Rule(SHOTS, item("question"), shots=True),
}  # fmt: skip
REFUSED = {  # the same -> why there is nothing to cut
    r"prose|wikitext.*|.*perplexity.*": "every token is scored, so nothing is a question",
    r"lambada\w*_cloze\w*": "behind the gap in its last sentence only an arrow follows",
    r"humaneval.*": "all of a signature and its docstring is the question",
    r"cloze": "the ending depends on the whole story",
    r"squad_completion": "the passage is the text to be completed",
    r"longbench_(lcc|repobench).*": "the code before the line is the question",
}


def text(task: str, until) -> str:
    """The text that a user cuts a task's prompts before. Raises Problem for what is none."""
    if not isinstance(until, str) or not until:
        got = "none" if until == "" else f"{until!r}"
        raise Problem(f"{FIELD} of task {task}: expected the text before which a prompt is cut, got {got}")
    return until


def rule_of(task: str, until: str | None = None) -> Rule:
    """A task's cut; `until`: the text that a user cuts before. Raises Problem where there is none."""
    if until is not None:
        found = before(re.escape(text(task, until)))
        shell = r" (with a backslash; a shell writes a line break as $'\n')" if r"\n" in until else ""
        return Rule(f"before {until!r}{shell}", found)
    for pattern, why in REFUSED.items():
        if re.fullmatch(pattern, task):
            raise Problem(f"task {task}: there is no context to compress before a question: {why}")
    for pattern, cut in RULES.items():
        if re.fullmatch(pattern, task):
            return cut
    raise Problem(
        f"task {task}: where its context ends is not known; name the text before which its prompts are cut "
        f"with --context-until TEXT (lm-eval's command: --model_args ...,{FIELD}=TEXT), or as {FIELD} under "
        "metadata: in its YAML"
    )


def known(task: str) -> bool:
    """Is it a task of the table?"""
    fits = lambda table: any(re.fullmatch(pattern, task) for pattern in table)
    return fits(RULES) and not fits(REFUSED)


def check_until(until, protocol: str, tasks: Iterable[str] = (), said: str = f"{FIELD}=") -> None:
    """Problem for a user's text to cut before that is none, under a protocol that cuts nothing, and for tasks
    whose cut is known; said: what it was named with."""
    if until is None:
        return
    if not isinstance(until, str) or not until:
        raise Problem(f"{said}{until!r}: expected the text before which prompts are cut")
    if protocol == INSIDE:
        raise Problem(f"{said}{until!r}: {INSIDE} cuts no prompt; expected protocol {FIRST}")
    if has := [task for task in tasks if known(task)]:
        raise Problem(f"{said}{until!r}: the cut of task {has[0]} is known; ask it by itself")


def character(
    cut: Rule, task: str, text: str, document: dict, head: str = "", shots: int | None = None
) -> int:
    """The character before which a prompt is cut; `head`: what a chat template puts before any prompt; shots:
    the number of examples in the prompt, None: unknown, so any text before the item counts as examples.
    Raises Problem if the rule finds none, or shots are missing."""
    at = cut.find(text, document)
    if at is None:
        raise Problem(
            f"task {task}: its cut is {cut.where}, which is not found in the prompt ...{text[-60:]!r}"
        )
    if cut.shots and (shots == 0 or not text[:at].removeprefix(head).strip()):
        raise Problem(
            f"task {task}: its context is the examples before the tested item, and there are none: give some "
            "with --num-fewshot"
        )
    return at


def boundary(tokenizer, text: str, ids: list[int], at: int) -> int:
    """How many of a prompt's tokens end at or before character `at` of its text: at least one stays on either
    side of the cut, and where there is only one, it is the question.

    A token that begins before the cut and ends behind it belongs to the question. The ids are those of the
    text, with what the tokenizer adds or without; blanks at the text's end may be missing. Raises Problem
    where a tokenizer does not say where its tokens end.
    """
    if len(ids) < 2:
        return 0
    ends = ends_of(tokenizer, text, ids)
    count = _decoded(tokenizer, text, ids, at) if ends is None else sum(end <= at for end in ends)
    return min(max(1, count), len(ids) - 1)


def ends_of(tokenizer, text: str, ids: list[int]) -> list[int] | None:
    """The character behind each token, ascending, by the tokenizer's own offsets; None where it has none.

    A token without a width, such as a BOS or the first bytes of a character, ends with the next one. Offsets
    leave out blanks that end a token; they are its own.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    for asked, added in product((text, text.rstrip()), (True, False)):
        made = tokenizer(asked, add_special_tokens=added, return_offsets_mapping=True)
        if list(made["input_ids"]) == list(ids):
            break
    else:
        return None
    ends, before = [], 0
    for (start, end), piece in zip(made["offset_mapping"], tokenizer.convert_ids_to_tokens(ids), strict=True):
        if start < end and text[end - 1] != " " and text[end : end + 1] == " ":
            end += len(piece) - len(piece.rstrip("Ġ"))
        ends.append(end if start < end or end > before else None)
        before = max(before, end)
    follow = len(text)
    for place in reversed(range(len(ends))):
        follow = ends[place] = min(follow, follow if ends[place] is None else ends[place])
    return ends


def _decoded(tokenizer, text: str, ids: list[int], at: int) -> int:
    """The same count from what the first tokens say, special tokens among it, less what the tokenizer put
    before the text. What ends inside a character says something else than the text there."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    said = lambda count: tokenizer.decode(ids[:count], spaces_between_special_tokens=False, **options)
    whole = said(len(ids))
    lead = next((len(whole) - len(one) for one in (text, text.rstrip()) if whole.endswith(one)), None)
    if lead is None:
        raise Problem(
            f"tokenizer {type(tokenizer).__name__}: it has no offsets and says ...{whole[-40:]!r} for the "
            f"prompt ...{text[-40:]!r}, so where its context ends is not known: expected a fast tokenizer, "
            "or protocol question-inside"
        )
    low, high = 0, len(ids)  # as many tokens agree with the text up to the cut at most; so many go further
    while high - low > 1:
        middle = (low + high) // 2
        one = said(middle)
        agree = next((i for i, pair in enumerate(zip(one, whole)) if pair[0] != pair[1]), len(one))
        low, high = (middle, high) if agree <= at + lead else (low, middle)
    while low and not whole.startswith(said(low)):
        low -= 1
    return low

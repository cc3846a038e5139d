"""The example prompts of docs/protocols.md, one for each row of its table, alone and in a chat template."""

import copy
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "protocols.md"
SHOT = "Question: how to dry a coat\nAnswer: hang it up\n\n"
STORY = "Ada has a red boat. She keeps it in the shed."
DOCUMENTS = {  # what a task's rule looks at
    "piqa": {"goal": "cool some tea"},
    "arc_easy": {"question": "What melts ice?"},
    "openbookqa": {"question_stem": "A seed grows in"},
    "copa": {"premise": "Tom fell.", "question": "cause"},
    "hellaswag": {"query": "Sewing: He takes a needle. He"},
    "winogrande": {"sentence": "The cup broke the shelf because the _ was heavy."},
    "rte": {"sentence1": "A dog sleeps."},
    "sglue_rte": {"premise": "A dog sleeps."},
    "boolq": {"passage": STORY},
    "lambada_openai": {"text": "The cat slept. Then it woke and drank its milk"},
    "squadv2": {"context": STORY},
    "drop": {"passage": STORY},
    "race": {"article": STORY},
    "coqa": {"story": STORY},
    "longbench_multifieldqa_en": {"context": STORY},
    "longbench_gov_report": {"context": STORY},
    "longbench_trec": {"context": STORY},
    "gsm8k": {"question": "Ada has 2 boats. She buys 3. How many has she?"},
    "gsm8k_cot": {"question": "What is 2 + 3?"},
    "mmlu_de_llama_anatomy": {"input_question": "Was wächst? "},
    "mmlu_anatomy_continuation": {"question": "Which one bends? "},
    "mmlu_anatomy": {"question": "Which one bends? "},
}


def stored(heading: str) -> list[tuple[str, str]]:
    """(task, its prompt with | where it is cut) of every line of the page's block behind this heading."""
    lines = PAGE.read_text(encoding="utf-8").partition(f"{heading}\n\n```text\n")[2].partition("\n```")[0]
    return [tuple(line.replace("\\n", "\n").split(": ", 1)) for line in lines.splitlines()]


CUT = dict(stored("(a test checks them):"))
EXAMPLES = {  # task -> (prompt as lm-eval builds it, document)
    task: (text.replace("|", ""), DOCUMENTS.get(task, {})) for task, text in CUT.items()
}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = {"role": "system", "content": "Answer with a name."}
SHOTS = [
    {"role": "user", "content": "Question: how to dry a coat\nAnswer:"},
    {"role": "assistant", "content": "hang it up"},
]
CHATS = [
    (task, []) for task in ("recall", "boolq", "lambada_openai")
]  # (task, the turns before its example's)
CHATS += [("recall", [SYSTEM]), ("piqa", SHOTS), ("piqa", [SYSTEM, *SHOTS]), ("gsm8k", [SYSTEM, *SHOTS])]


def chatting(tokenizer):
    """A copy of a tokenizer with a chat template, and with the two special tokens of that."""
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made


def chat(tokenizer, task: str, turns: list[dict]) -> tuple[str, dict]:
    """(the prompt as lm-eval builds it with a template, its document): an example, as the last turn."""
    asked, document = EXAMPLES[task]
    if turns and task not in ("recall", "boolq"):
        asked = asked.removeprefix(SHOT)  # it is turns then
    turns = [*turns, {"role": "user", "content": asked}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True), document

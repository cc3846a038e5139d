"""The example prompts of docs/protocols.md, one for each row of its table, and another question on each."""

from __future__ import annotations

import copy
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "protocols.md"
SHOT = "Question: how to dry a coat\nAnswer: hang it up\n\n"
STORY = "Ada has a red boat. She keeps it in the shed."
GIVEN = (
    "Given the following question and four candidate answers (A, B, C and D), choose the best answer.\n"
    "Question: "
)
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
OTHERS = {  # task -> (what else may follow the same context, its document)
    "recall": ("\nQuestion: who has the dog", {}),
    "needle_em": ("\nQuestion: the rain", {}),
    "chain": ("\nQuestion: the place where it sleeps", {}),
    "piqa": ("Question: warm a cup of milk\nAnswer:", {"goal": "warm a cup of milk"}),
    "arc_easy": ("Question: What is hot?\nAnswer:", {"question": "What is hot?"}),
    "openbookqa": ("Snow falls from the", {"question_stem": "Snow falls from the"}),
    "copa": ("The dog barked therefore", {"premise": "The dog barked.", "question": "effect"}),
    "hellaswag": ("Rowing: She sits in a boat. She", {"query": "Rowing: She sits in a boat. She"}),
    "winogrande": (  # its other choice
        "The cup broke the shelf because the shelf",
        {"sentence": "The cup broke the shelf because the _ was heavy."},
    ),
    "rte": ("\nQuestion: Dogs never sleep. True or False?\nAnswer:", {"sentence1": "A dog sleeps."}),
    "sglue_rte": ("\nQuestion: A dog is asleep. True or False?\nAnswer:", {"premise": "A dog sleeps."}),
    "boolq": ("\nQuestion: does ada keep it in the house?\nAnswer:", {"passage": STORY}),
    "lambada_openai": ("It ran home and found a", {"text": "It ran home and found a key"}),
    "squadv2": ("\n\nQuestion: What colour has the boat?\n\nAnswer:", {"context": STORY}),
    "drop": (" Where is the boat kept?", {"passage": STORY}),
    "race": ("\n\nQuestion: What is it?\nAnswer: a boat\nAda keeps it _", {"article": STORY}),
    "coqa": ("\n\nQ: What is red?\n\nA:", {"story": STORY}),
    "niah_single_1": ("What is the special magic number for a bee mentioned in the provided text?", {}),
    "niah_multivalue": ("What are all the special magic numbers for a bee mentioned in the text?", {}),
    "ruler_vt": ("Question: Find all variables that are assigned the value 12345.", {}),
    "ruler_cwe": ("Question: What are the 10 most common words in the above list? Answer: they are", {}),
    "ruler_fwe": ("Question: Do not provide any explanation. Which are the three most frequent words?", {}),
    "longbench_multifieldqa_en": ("Question: What is the colour of her boat?\nAnswer:", {"context": STORY}),
    "longbench_gov_report": ("\n\nNow, write a summary.\n\nSummary:", {"context": STORY}),
    "longbench_trec": ("\nQuestion: Where does she keep it?\nType:", {"context": STORY}),
    "gsm8k": (
        "How many did she have before?\nAnswer:",
        {"question": "Ada has 2 boats. She buys 3. How many did she have before?"},
    ),
    "gsm8k_cot": ("Q: How much is 7 times 8?\nA:", {"question": "How much is 7 times 8?"}),
    "ruler_qa_squad": ("Question: What colour has her boat?", {}),
    "mmlu_de_llama_anatomy": (f"{GIVEN}Was knickt?\nA. Knie\nB. Kinn", {"input_question": "Was knickt?"}),
    "mmlu_anatomy_continuation": (
        "Question: Which one grows?\nAnswer:",
        {"question": "Which one grows?"},
    ),
    "mmlu_anatomy": (
        "Which one grows?\nA. hair\nB. a tooth\nC. an eye\nD. the skull\nAnswer:",
        {"question": "Which one grows?"},
    ),
}
# Tasks whose answers are written, not chosen.
WRITTEN = r".*_em|squadv2|drop|coqa|niah_.*|ruler_.*|longbench_.*|gsm8k.*"

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

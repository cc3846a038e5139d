"""An example prompt for every row of the table of cuts, and another question on the same context."""

from __future__ import annotations

import copy

SHOT = "Question: how to dry a coat\nAnswer: hang it up\n\n"
STORY = "Ada has a red boat. She keeps it in the shed."
LONG = "Read the following text.\n\n{context}\n\nNow, answer this question.\n\nQuestion: {question}\nAnswer:"
GIVEN = (
    "Given the following question and four candidate answers (A, B, C and D), choose the best answer.\n"
    "Question: "
)
EXAMPLES = {  # task -> (prompt as lm-eval builds it, document)
    "recall": ("Otis owns the dog.\nQuestion: the dog", {}),
    "needle_em": ("It rained all day. Otis owns the dog.\nQuestion: the dog", {}),
    "chain": ("Otis owns the dog. The dog sleeps in the barn.\nQuestion: the barn", {}),
    "piqa": (f"{SHOT}Question: cool some tea\nAnswer:", {"goal": "cool some tea"}),
    "arc_easy": (f"{SHOT}Question: What melts ice?\nAnswer:", {"question": "What melts ice?"}),
    "openbookqa": ("Ice melts in the\nsun\n\nA seed grows in", {"question_stem": "A seed grows in"}),
    "copa": (
        "It rained therefore the grass was wet\n\nTom fell because",
        {"premise": "Tom fell.", "question": "cause"},
    ),
    "hellaswag": (
        "Cooking: She stirs the soup.\n\nSewing: He takes a needle. He",
        {"query": "Sewing: He takes a needle. He"},
    ),
    "winogrande": (
        "Ann thanked May because May had helped.\n\nThe cup broke the shelf because the cup",
        {"sentence": "The cup broke the shelf because the _ was heavy."},
    ),
    "rte": (
        "A dog sleeps.\nQuestion: An animal sleeps. True or False?\nAnswer:",
        {"sentence1": "A dog sleeps."},
    ),
    "sglue_rte": ("A dog sleeps.\nQuestion: It runs. True or False?\nAnswer:", {"premise": "A dog sleeps."}),
    "boolq": (f"{STORY}\nQuestion: is the boat red?\nAnswer:", {"passage": STORY}),
    "lambada_openai": (
        "The cat slept. Then it woke and drank its",
        {"text": "The cat slept. Then it woke and drank its milk"},
    ),
    "squadv2": (
        f"Title: Boats\n\nBackground: {STORY}\n\nQuestion: Who has it?\n\nAnswer:",
        {"context": STORY},
    ),
    "drop": (f"{STORY} How many boats are there?", {"passage": STORY}),
    "race": (f"Article: {STORY}\n\nQuestion: Whose is it?\nAnswer: Ada's\nThe boat is _", {"article": STORY}),
    "coqa": (f"{STORY}\n\nQ: Who has it?\n\nA: Ada\n\nQ: Where is it?\n\nA:", {"story": STORY}),
    "niah_single_1": (
        "A special magic number is hidden within the following text. The magic number for ant is: 7.\n"
        "What is the special magic number for ant mentioned in the provided text?",
        {},
    ),
    "niah_multivalue": (
        "Some special magic numbers are hidden within the following text. One for ant is: 7.\n"
        "What are all the special magic numbers for ant mentioned in the provided text?",
        {},
    ),
    "ruler_vt": ("VAR A = 5 VAR B = VAR A\nQuestion: Find all variables that are assigned the value 5.", {}),
    "ruler_cwe": ("1. ant 2. bee 3. ant\nQuestion: What are the 10 most common words in the above list?", {}),
    "ruler_fwe": ("abc ... abc ...\nQuestion: Do not provide any explanation. What are the words?", {}),
    "longbench_multifieldqa_en": (LONG.format(context=STORY, question="Who has it?"), {"context": STORY}),
    "longbench_gov_report": (
        f"Report:\n{STORY}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        {"context": STORY},
    ),
    "longbench_trec": (f"Here are some examples.\n\n{STORY}\nQuestion: Who?", {"context": STORY}),
    "gsm8k": (
        f"{SHOT}Question: Ada has 2 boats. She buys 3. How many has she?\nAnswer:",
        {"question": "Ada has 2 boats. She buys 3. How many has she?"},
    ),
    "gsm8k_cot": ("Q: What is 1 + 1?\nA: 2\n\nQ: What is 2 + 3?\nA:", {"question": "What is 2 + 3?"}),
    "ruler_qa_squad": (
        f"Answer the question.\n\nThe following are given documents.\n\nDocument 1:\n{STORY}\n\nAnswer the "
        "question.\n\nQuestion: Who has it?",
        {},
    ),
    "mmlu_de_llama_anatomy": (
        f"{GIVEN}Was schlägt?\nA. Herz\nB. Haar\nThe best answer is A.\n\n"
        f"{GIVEN}Was wächst?\nA. Haar\nB. Horn",
        {"input_question": "Was wächst? "},
    ),
    "mmlu_anatomy_continuation": (
        "About anatomy.\n\nQuestion: Which one beats?\nAnswer: heart\n\nQuestion: Which one bends?\nAnswer:",
        {"question": "Which one bends? "},
    ),
    "mmlu_anatomy": (
        "Questions (with answers) about anatomy.\n\n"
        "Which one beats?\nA. heart\nB. bone\nC. hair\nD. nail\nAnswer: A\n\n"
        "Which one bends?\nA. knee\nB. skull\nC. nail\nD. tooth\nAnswer:",
        {"question": "Which one bends? "},
    ),
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

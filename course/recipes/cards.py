"""The tables of a model's card: `python -m course.recipes.cards FOLDER --text stories.jsonl.xz > tables.md`.

Prints accuracy per task and length with the full cache, accuracy per method
at a budget of 20 % of the prompt, the same with one restricted layer, the cosine of successive block
inputs, bits per byte of texts kept out of training, and a sample.  Documents come from seeds that
training does not use.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F

from eval.tasks import corpus, words
from kvlab.decode import Stepper
from kvlab.make import make_cache
from kvlab.models import load
from kvlab.spec import name_of

HELD_OUT = 3  # texts at the end of every file that are never trained on
# What is measured: name -> (a document from rng).
TASKS: dict[str, Callable[[random.Random], corpus.Document]] = {
    "recall 4": lambda rng: corpus.recall(rng, 4),
    "recall 8": lambda rng: corpus.recall(rng, 8),
    "recall 20": lambda rng: corpus.recall(rng, 20),
    "recall 8, new names": lambda rng: corpus.recall(rng, 8, names=words.EVAL_NAMES),
    "recall 8, new wording": lambda rng: corpus.recall(rng, 8, "met"),
    "separated 4": lambda rng: corpus.recall(rng, 4, "in"),
    "separated 12": lambda rng: corpus.recall(rng, 12, "in"),
    "several 9": lambda rng: corpus.several(rng, 9),
    "update 9": lambda rng: corpus.update(rng, 9),
    "chain 4": lambda rng: corpus.chain(rng, 4),
    "chain 6": lambda rng: corpus.chain(rng, 6),
    "needle 250": lambda rng: corpus.needle(rng, 15),
    "needle 500": lambda rng: corpus.needle(rng, 30),
    "needle 1000": lambda rng: corpus.needle(rng, 63),
    "needle 1800": lambda rng: corpus.needle(rng, 115),
}
METHODS = ("full", "int8", "topk:budget=0.2", "infinigen:budget=0.2", "h2o:budget=0.2", "sinks:budget=0.2")
METHOD_TASKS = ("recall 20", "separated 12", "chain 6", "needle 500")
LAYER_TASKS = ("recall 20", "separated 12", "chain 6")


def documents(task: str, count: int) -> Iterable[corpus.Document]:
    """The first `count` validation documents of a task."""
    rng = random.Random(f"{corpus.VALID_SEED} {task}")
    return (TASKS[task](rng) for _ in range(count))


def split(tokenizer, document) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer."""
    return tuple(tokenizer([document.text, document.answer])["input_ids"])


@torch.no_grad()
def accuracy(model, tokenizer, task: str, count: int) -> tuple[float, float]:
    """Greedy accuracy on `count` documents in one pass each, and the mean length of a prompt."""
    right = tokens = 0
    for document in documents(task, count):
        prompt, answer = split(tokenizer, document)
        ids = torch.tensor([prompt + answer], device=model.device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        said = model.lm_head(hidden[0, len(prompt) - 1 : -1]).argmax(-1).tolist()
        right, tokens = right + (said == answer), tokens + len(prompt)
    return right / count, tokens / count


def accuracies(model, tokenizer, caches: dict, task: str, count: int) -> dict[str, float]:
    """Accuracy through each of the caches: the last token of the prompt, and all of the answer, are
    decoded from what the cache has kept of the rest."""
    right = dict.fromkeys(caches, 0)
    for document in documents(task, count):
        prompt, answer = (torch.tensor([ids], device=model.device) for ids in split(tokenizer, document))
        for name, cache in caches.items():
            cache.reset()
            stepper = Stepper(model, cache)
            stepper.feed(prompt[:, :-1], last=True)
            token, correct = prompt[:, -1:], True
            for expected in answer[0]:
                token = stepper.feed(token, last=True).argmax(-1, keepdim=True)
                correct = correct and token.item() == expected.item()
            right[name] += correct
    return {name: number / count for name, number in right.items()}


def restricted(model, method: str, layer: int):
    """A cache that keeps everything, but for one layer, which is as in `method`."""
    cache = make_cache(model, "full")
    cache.layers[layer] = make_cache(model, method).layers[layer]
    cache.bind()
    return cache


@torch.no_grad()
def alike(model, tokenizer, texts: Iterable[str]) -> list[float]:
    """Cosine of successive block inputs, mean over the tokens of the texts."""
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"][:512]], device=model.device)
        states = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        blocks = states[:-1]
        found.append([F.cosine_similarity(a, b, dim=-1).mean() for a, b in pairwise(blocks)])
    return torch.tensor(found).mean(0).tolist()


@torch.no_grad()
def bits_per_byte(model, tokenizer, texts: Iterable[str], tokens: int = 512) -> float:
    """Cross-entropy of each text's first `tokens` tokens after <|end|>, in bits per UTF-8 byte."""
    bits = size = 0.0
    for text in texts:
        ids = tokenizer(text)["input_ids"][:tokens]
        row = torch.tensor([[0, *ids]], device=model.device)
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        bits += F.cross_entropy(logits, row[0, 1:], reduction="sum").item() / math.log(2)
        size += len(tokenizer.decode(ids).encode())
    return bits / size


def passages(texts: list[str], most: int = 100, size: int = 2000) -> list[str]:
    """At most `most` passages of `size` characters, evenly spread over the texts."""
    parts = [text[at : at + size] for text in texts for at in range(0, len(text), size)]
    return parts[:: -(-len(parts) // most)]


@torch.no_grad()
def sample(model, tokenizer, prompt: str = "Once upon a time", tokens: int = 220, seed: int = 0) -> str:
    """A text at temperature 0.8, up to <|end|>."""
    torch.manual_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    how = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens}
    said = model.generate(ids, past_key_values=make_cache(model, "full"), **how)
    return tokenizer.decode(said[0], skip_special_tokens=True)


def markdown(head: list[str], rows: Iterable[list]) -> str:
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(given=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m course.recipes.cards", description=__doc__)
    parser.add_argument("model", help="workshop, workshop-opt or a folder")
    parser.add_argument("--text", nargs="*", default=[], help="the files of the training, or others")
    parser.add_argument("--count", type=int, default=500, help="documents per task")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(given)
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model, device="cpu")
    layers = range(model.config.num_hidden_layers)

    def show(*parts):
        print(*parts, flush=True)

    some = min(50, args.count)
    texts = {
        "facts": [document.text for document in documents("recall 20", some)],
        "needles": [document.text for document in documents("needle 250", some)],
        "plain sentences": [" ".join(corpus.prose(random.Random(i), 20)) for i in range(some)],
    }
    rows = []
    for kind, texts_of in texts.items():
        rows.append([kind, *(f"{value:.2f}".lstrip("0") for value in alike(model, tokenizer, texts_of))])
    show(markdown(["block inputs", *(f"{i}→{i + 1}" for i in layers[:-1])], rows))
    for path in args.text:
        kept_out = passages(list(corpus.stories([path]))[-HELD_OUT:])
        show(f"{path}, last {HELD_OUT}: {bits_per_byte(model, tokenizer, kept_out):.3f} bits per byte\n")
    show("> " + sample(model, tokenizer).replace("\n", "\n> ") + "\n")

    caches = {name: make_cache(model, name) for name in METHODS}
    rows = []
    for task in METHOD_TASKS:
        found = accuracies(model, tokenizer, caches, task, args.count)
        rows.append([task, *(f"{found[name]:.1%}" for name in METHODS)])
    show(markdown(["through the cache", *map(name_of, METHODS)], rows))

    rows = []
    for task in LAYER_TASKS:
        caches = {str(layer): restricted(model, "sinks:budget=0.2", layer) for layer in layers}
        found = accuracies(model, tokenizer, caches, task, args.count // 5)
        rows.append([task, *(f"{value:.0%}" for value in found.values())])
    show(markdown(["`sinks` in one layer", *map(str, layers)], rows))

    rows = []
    for task in TASKS:
        right, tokens = accuracy(model, tokenizer, task, args.count)
        rows.append([task, args.count, f"{tokens:.0f}", f"{right:.1%}"])
    show(markdown(["task", "examples", "tokens", "accuracy"], rows))


if __name__ == "__main__":
    main()

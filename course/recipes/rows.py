"""The rows that a workshop model trains on: which kinds, how long, with how many facts; and their tokenizer.

A row begins with one document of `corpus` and is filled with prose.  Rows are short with few facts at
first; they grow when the answers are right (`Rows.learn`), or when it is time (`Rows.by`).
"""

import random
from array import array

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.tasks import corpus, words

ANSWER, REST = 4.0, 0.3  # loss weights within a document with facts; a story token weighs 1
# length of a row in tokens, rows per step, most facts in a document
LEVELS = (
    (64, 16, 3),
    (96, 16, 5),
    (128, 16, 8),
    (192, 10, 12),
    (256, 8, 16),
    (384, 5, 20),
    (512, 4, 24),
    (1024, 2, 24),
    (2048, 1, 24),
)
LOOKUPS = ("adjacent", "separated", "chain", "several", "update")

VOCABULARY = 4096


def fit(texts: list[str], seed: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 4,096 entries in which every word of the lists is one token."""
    rng = random.Random(seed)
    made = [corpus.recall(rng, 8, w, questions=8).text for w in corpus.WORDINGS for _ in range(200)]
    made += [corpus.chain(rng, questions=3).text for _ in range(200)]
    made += [" " + " ".join(words.ALL)] * 3000
    made += [" ".join(corpus.prose(rng, 50)) for _ in range(40)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts + made, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|end|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=2048,
    )


class Rows:
    """Draws training rows: token ids and loss weights, each of exactly the level's length."""

    def __init__(self, tokenizer, sources: list[list[str]], shares: list[float], seed: int):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.level, self.losses = 0, {}
        self.shares, self.streams = shares, [array("H") for _ in sources]
        for stream, texts in zip(self.streams, sources):
            for text in texts:
                stream.extend([*tokenizer(text)["input_ids"], 0])
        self.one = {w: tokenizer(" " + w)["input_ids"][0] for w in words.ALL}
        self.stop = tokenizer(".")["input_ids"][0]

    def mix(self) -> dict[str, float]:
        """Share of each kind of row; harder kinds come in when the level has risen."""
        if self.level < 1:
            return {"story": 0.1, "repeat": 0.15, "pairs": 0.15, "adjacent": 0.3, "separated": 0.3}
        share = {"story": 0.3, "repeat": 0.07, "pairs": 0.08, "adjacent": 0.25, "separated": 0.3}
        if self.level >= 3:
            share |= {"story": 0.36, "repeat": 0.03, "pairs": 0.03, "adjacent": 0.14}
            share |= {"separated": 0.22, "chain": 0.14, "several": 0.04, "update": 0.04}
        return share

    def story(self, length: int) -> list[int]:
        stream = self.rng.choices(self.streams, self.shares)[0]
        start = self.rng.randrange(max(1, len(stream) - length))
        return stream[start : start + length].tolist()

    def filler(self, tokens: int) -> list[str]:
        """Sentences of about `tokens` tokens together: a story's or the grammar's."""
        if self.rng.random() < 0.4:
            return corpus.prose(self.rng, tokens // 13)
        text = self.tokenizer.decode(self.story(tokens)).replace("<|end|>", " ")
        return corpus.sentences(text.replace("\n", " "))

    def pairs(self, length: int) -> tuple[list[int], list[float]]:
        """`dog Otis. cat Mia.` again and again in changing order: the densest lookup there is."""
        count = self.rng.randint(2, max(3, min(length // 8 - 1, 24)))
        left = self.rng.sample(words.ANIMALS + words.THINGS, count)
        right = self.rng.sample(words.NAMES, count)
        ids, weights, order = [], [], list(range(count))
        while len(ids) < length:
            for i in order:
                weights += [0.0, ANSWER if len(ids) >= 3 * count else 0.0, 0.0]
                ids += [self.one[left[i]], self.one[right[i]], self.stop]
            self.rng.shuffle(order)
        return ids[:length], weights[:length]

    def lookup(self, kind: str, length: int, most: int) -> tuple[list[int], list[float]]:
        rng = self.rng
        while True:
            facts = rng.randint(2, most)
            asked = rng.randint(max(1, facts // 2), facts)
            room = length - 12 * facts - 9 * asked
            filler = self.filler(int(room * rng.random())) if room > 24 and rng.random() < 0.7 else []
            if kind == "chain":
                document = corpus.chain(rng, rng.randint(4, 12), questions=rng.randint(1, 5), filler=filler)
            elif kind in ("several", "update"):
                document = getattr(corpus, kind)(rng, facts, questions=asked, filler=filler)
            else:
                styles = ("named",) if kind == "adjacent" else ("called", "in", "put")
                document = corpus.recall(rng, facts, rng.choice(styles), questions=asked, filler=filler)
            parts = document.pieces()
            ids, weights = [], []
            for (_, answer), part in zip(parts, self.tokenizer([p for p, _ in parts])["input_ids"]):
                ids += part
                weights += [ANSWER if answer else REST] * len(part)
            rest = length - len(ids)
            if rest >= 0:
                tail = [0, *self.story(rest - 1)] if rest else []
                return ids + tail, weights + [REST] * rest

    def row(self, kind: str, length: int, facts: int) -> tuple[list[int], list[float]]:
        if kind == "story":
            return self.story(length), [1.0] * length
        if kind == "pairs":
            return self.pairs(length)
        if kind == "repeat":
            every = self.rng.random() < 0.3
            tokens = list(range(2, len(self.tokenizer))) if every else list(self.one.values())
            ids, period = corpus.repeat(self.rng, tokens, length)
            return ids, [0.0] * period + [1.0] * (length - period)
        return self.lookup(kind, length, facts)

    def batch(self):
        """(ids, weights [rows, length], kinds, level): the current level or, more often, a lower one."""
        level = self.level if self.rng.random() < 0.15 else self.rng.randint(0, self.level)
        length, rows, facts = LEVELS[level]
        share = self.mix()
        kinds = self.rng.choices(list(share), list(share.values()), k=rows)
        ids, weights = zip(*(self.row(kind, length, facts) for kind in kinds))
        return torch.tensor(ids), torch.tensor(weights), kinds, level

    def learn(self, kinds, level, losses, weights) -> None:
        """Keep a moving average of each kind's loss; rise a level when the answers are right."""
        for kind, loss, weight in zip(kinds, losses, weights):
            if kind in LOOKUPS and level != self.level:
                continue
            value = loss[weight == weight.max()].mean().item()
            self.losses[kind] = 0.97 * self.losses.get(kind, value) + 0.03 * value
        hard = self.level >= 3 and self.losses.get("separated", 9) > 1.2
        if self.losses.get("adjacent", 9) < 0.25 and not hard:
            self.rise()

    def rise(self) -> None:
        if self.level + 1 < len(LEVELS):
            self.level += 1
            self.losses |= {"adjacent": 1.0, "separated": 1.0}

    def by(self, time: float) -> None:
        """Rise when it is time, right or not: from 0, the shortest rows, to 1, the longest."""
        while self.level < min(len(LEVELS) - 1, int(time * (len(LEVELS) - 1))):
            self.rise()

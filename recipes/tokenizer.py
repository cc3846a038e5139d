"""The tokenizer: byte-level BPE in which every word of the lists is one token."""

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.tasks import corpus, words

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

"""The token boundary at a cut, for tokenizers of every kind, beside what is known of their tokens' bytes.

Where a token ends inside a character, that character is the last it has a part of; a token without any is
part of the next one.
"""

import pytest
from cut_examples import SHOTS, SYSTEM, chatting
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eval.accuracy.boundaries import boundary
from eval.core.errors import Problem

TEXTS = [
    "Otis — “owns” 😀é\n\n   Question:  the  dog \n  Answer: ",
    "He said <|im_end|>\n <|im_start|>, then <s>: left.\nQuestion: who? ",
]
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def fast(made: Tokenizer, added: str):
    ids = [(name, made.token_to_id(name)) for name in SPECIAL[:2]]
    theirs = [made.post_processor] if made.post_processor else []
    template = processors.TemplateProcessing(single=added, special_tokens=ids)
    made.post_processor = processors.Sequence([*theirs, template])
    return chatting(PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>"))


def byte_level(trim: bool, added: str = "$A"):
    """Tokens end in blanks and inside characters; `trim`: offsets leave blanks out."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": list(SPECIAL[:2]), "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator([TEXTS[0] * 4], trainers.BpeTrainer(vocab_size=290, **how))
    return fast(made, added)


def byte_fallback():
    """As Llama 2's: a BOS, a blank before the text and after special tokens, bytes for unknown characters."""
    single = sorted({one for text in TEXTS for one in text if one.isascii() and one not in " \n"})
    words = ["<unk>", *SPECIAL[:2], *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *single]
    places = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=places, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return fast(made, "<s> $A")


class Slow:
    """A tokenizer in Python, without offsets: bytes, special tokens, a BOS. strips: drops doubled blanks."""

    def __init__(self, strips: bool = False):
        self.strips = strips
        self.like = byte_level(False)

    def apply_chat_template(self, *arguments, **how):
        return self.like.apply_chat_template(*arguments, **how)

    def encode(self, text: str) -> list[int]:
        text = " ".join(text.split()) if self.strips else text
        found = [256]
        while text:
            special = next((one for one in SPECIAL if text.startswith(one)), None)
            found += [256 + SPECIAL.index(special)] if special else text[0].encode()
            text = text.removeprefix(special) if special else text[1:]
        return found

    def decode(self, ids, skip_special_tokens=True, **_) -> str:
        kept = [one for one in ids if one < 256 or not skip_special_tokens]
        parts = [bytes([one]) if one < 256 else SPECIAL[one - 256].encode() for one in kept]
        return b"".join(parts).decode(errors="replace")

    def convert_ids_to_tokens(self, ids) -> list[str]:
        return [f"<0x{one:02X}>" if one < 256 else SPECIAL[one - 256] for one in ids]


KINDS = {
    "byte-level": lambda: byte_level(False),
    "byte-level, blanks left out": lambda: byte_level(True),
    "byte-level, BOS and EOS": lambda: byte_level(True, "<s> $A </s>"),
    "byte fallback, BOS": byte_fallback,
    "slow, BOS": Slow,
}


def ends(tokenizer, text: str, ids: list[int]) -> list[int]:
    """The character behind each token, from the bytes that its name stands for."""
    left, done, found = text.encode(), 0, []
    for name in tokenizer.convert_ids_to_tokens(ids):
        if name.startswith("<0x"):
            said = bytes([int(name[3:5], 16)])
        elif name in SPECIAL:
            said = name.encode()
        else:
            said = b" " if name == "▁" else bytes(BYTES.get(one, ord(one) % 256) for one in name)
        there = left[done:].startswith(said)  # else the tokenizer has put it there
        done += len(said) if there else 0
        whole = left[:done].decode(errors="ignore")
        found.append(len(whole) + (len(whole.encode()) < done) if there else None)
    for place in reversed(range(len(found))):
        if found[place] is None:
            found[place] = found[place + 1] if place + 1 < len(found) else len(text)
    assert done == len(left)
    return found


@pytest.mark.parametrize("turns", [None, [], [SYSTEM, *SHOTS]], ids=["bare", "template", "system and turns"])
@pytest.mark.parametrize("text", TEXTS, ids=["blanks", "special"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_last_one_at_or_before_every_character(kind, text, turns):
    tokenizer = KINDS[kind]()
    if turns is not None:
        turns = [*turns, {"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    known = ends(tokenizer, text, ids)
    for at in range(len(text) + 1):
        count = min(max(1, sum(end <= at for end in known)), len(ids) - 1)
        assert boundary(tokenizer, text, ids, at) == count, (at, text[:at])
    assert boundary(tokenizer, text, ids[:1], 5) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_blanks_at_the_end_may_be_missing(kind):
    """lm-eval moves those of a prompt to its continuation."""
    tokenizer, text = KINDS[kind](), TEXTS[0]
    ids = tokenizer.encode(text.rstrip())
    at = text.index("\n  Answer")
    count = sum(end <= at for end in ends(tokenizer, text.rstrip(), ids))
    assert boundary(tokenizer, text, ids, at) == count


def test_blanks_that_a_tokenizer_drops():
    """With offsets they are known; without, nobody knows where its tokens end: one line."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "otis": 1, "owns": 2, "dog": 3}, unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer, text = PreTrainedTokenizerFast(tokenizer_object=made), "Otis  owns \n\n DOG dog"
    ids = tokenizer.encode(text)
    counts = [boundary(tokenizer, text, ids, at) for at in (4, 6, 9, 10, 11, 15, 16, 17)]
    assert counts == [1, 1, 1, 2, 2, 2, 2, 3]
    slow = Slow(strips=True)
    with pytest.raises(Problem, match="tokenizer Slow: it has no offsets") as error:
        boundary(slow, text, slow.encode(text), 6)
    assert "\n" not in str(error.value) and "question-inside" in str(error.value)

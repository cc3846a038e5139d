"""`kvlab.ask` is what is done by hand with a Stepper, or a refusal in one line."""

import copy
import sys

import pytest
import torch
from cut_examples import chatting
from tiny import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import kvlab
from kvlab import cli

CONTEXT = "The brown dog Otis slept by the river. The red cat Mia ran to the barn."
ASKED = ["Question: the brown dog", "Question: the red cat"]
METHODS = [
    "full", "recompute", "kivi2:group=4,recent=6", "h2o:budget=0.5", "kvzip:budget=0.4", "infinigen",
    "topk:budget=3", "quest:budget=4,page=1,full_layers=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    """A tiny model with the workshop's vocabulary, and the tokenizer of that."""
    return tiny("llama", vocab_size=4160), kvlab.load()[1]


def ids(tokenizer, text):
    return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])


@pytest.mark.parametrize("around", ["$A {end}", "{end} $A {end}", "{end} $A", "$A"])
def test_what_a_tokenizer_puts_at_the_end_of_a_text_is_not_between_context_and_question(loaded, around):
    """As in a GGUF file whose `add_eos_token` is true."""
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    end = tokenizer.eos_token
    said = TemplateProcessing(single=around.format(end=end), special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor, fed = said, []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: fed.extend(given["input_ids"][0].tolist()), with_kwargs=True
    )
    kvlab.ask(model, tokenizer, CONTEXT, ASKED[0], max_new_tokens=1, protocol="question-inside")
    hook.remove()
    begins = end if around.startswith("{end}") else ""
    assert tokenizer.decode(fed) == f"{begins}{CONTEXT}\n{ASKED[0]}"


def by_hand(model, method, context, question, count):
    """Tokens after a question, fed as docs/protocols.md says; without a question the prompt is compressed."""
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, method))
    if question is None:
        context, question = context[:, :-1], context[:, -1:]
        stepper.feed(context)
    else:
        stepper.feed(context)
        stepper.cache.hold()
        stepper.feed(question[:, :-1])
    made, fed = [], question[:, -1:]
    for _ in range(count):
        fed = stepper.feed(fed)[:, -1].argmax(-1, keepdim=True)
        made.append(int(fed))
    return made, stepper.cache.stats()


@pytest.mark.parametrize("method", METHODS)
def test_it_is_what_is_done_by_hand(loaded, method):
    model, tokenizer = loaded
    found = kvlab.ask(model, tokenizer, CONTEXT, ASKED, method, max_new_tokens=4)
    inside = kvlab.ask(model, tokenizer, CONTEXT, ASKED, method, "question-inside", max_new_tokens=4)
    for question, answer, seen in zip(ASKED, found, inside, strict=True):
        context, tail = ids(tokenizer, CONTEXT), ids(tokenizer, f"\n{question}")
        assert (answer.tokens, answer.stats) == by_hand(model, method, context, tail, 4)
        whole = torch.cat([context, tail], 1)
        assert (seen.tokens, seen.stats) == by_hand(model, method, whole, None, 4)
        assert answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
        assert answer.cost in str(answer) and answer.cost.endswith("context") == (
            answer is found[0] and method != "recompute"  # which holds nothing of the context
        )
        assert seen.context_seconds == 0 and not seen.cost.endswith("context")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("protocol", ["many-questions", "question-inside"])
def test_questions_answered_at_once_are_answered_as_alone(loaded, method, protocol):
    """Of any length, and to an end token that one row meets before another."""
    model, tokenizer = loaded
    asked = [*ASKED, "dog", "Question: the brown dog and the red cat and the brown dog ran to the"]
    how = {"method": method, "protocol": protocol, "max_new_tokens": 5}
    first = kvlab.ask(model, tokenizer, CONTEXT, asked, **how)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = first[0].tokens[1]
    try:
        alone = kvlab.ask(model, tokenizer, CONTEXT, asked, **how)
        found = kvlab.ask(model, tokenizer, CONTEXT, asked, **how, batch_size=3)
    finally:
        model.generation_config.eos_token_id = before
    assert [one.tokens for one in found] == [one.tokens for one in alone] != [one.tokens for one in first]
    assert all(("questions at once: " in one.cost) == (one.at_once > 1) for one in found + alone)


def test_recompute_answers_at_once_as_alone_where_windows_count():
    """Padding between a context and a question would be counted by transformers' windows."""
    model, tokenizer = tiny("mistral", vocab_size=4160, sliding_window=7), kvlab.load()[1]
    asked = ["Question: the brown dog", "a", "The red cat Mia ran to the barn and to the river"]
    how = {"method": "recompute", "max_new_tokens": 5}
    alone = kvlab.ask(model, tokenizer, CONTEXT, asked, **how)
    found = kvlab.ask(model, tokenizer, CONTEXT, asked, **how, batch_size=3)
    assert [one.tokens for one in found] == [one.tokens for one in alone]


@pytest.mark.parametrize(
    "context, asked, what", [("\u200b", "a", "the context"), ("a b", "\u200b", "a question")]
)
def test_a_text_without_tokens_is_one_line(context, asked, what):
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = BertNormalizer(), Whitespace()
    with pytest.raises(ValueError, match=f"{what} is empty: the tokenizer makes no token of it"):
        kvlab.ask(tiny("llama"), PreTrainedTokenizerFast(tokenizer_object=words), context, asked)


@pytest.mark.parametrize("context", [CONTEXT, f"  {CONTEXT} \n", f"{CONTEXT}\n\n", f"\ufffc {CONTEXT}"])
def test_the_cut_in_a_chat_template(loaded, context):
    model, tokenizer = loaded[0], chatting(loaded[1])
    trimming = copy.deepcopy(tokenizer)
    trimming.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    for one in (tokenizer, trimming):
        told = Told()
        found = kvlab.ask(
            model, one, context, ASKED[0], "h2o:budget=0.5", chat=True, max_new_tokens=3, streamer=told
        )
        line = "" if context.endswith("\n") else "\n"
        turns = [{"role": "user", "content": f"{context}{line}{ASKED[0]}"}]
        text = one.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert one.decode(told.put_in[0][0]) == text
        shown = context if one is tokenizer else context.lstrip()
        cut = text.index(shown) + len(shown)
        head, tail = ids(one, text[:cut]), ids(one, text[cut:])
        assert told.put_in[0].tolist() == torch.cat([head, tail], 1).tolist()
        assert (found.tokens, found.stats) == by_hand(model, "h2o:budget=0.5", head, tail, 3)


class Told:
    """A streamer that remembers what it is told."""

    def __init__(self):
        self.put_in, self.ended = [], 0

    def put(self, value):
        self.put_in.append(value)

    def end(self):
        self.ended += 1


def test_a_name_in_the_models_place():
    answer = kvlab.ask("workshop", context=CONTEXT, questions=ASKED, max_new_tokens=3)[1]
    assert answer.text.strip().startswith("Mia") and answer.stats.tokens_held == answer.stats.tokens_seen


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"context": " \n"}, r"^context=' \\n': it is empty$"),
        ({"questions": []}, r"^questions=\[\]: expected one"),
        ({"questions": ["a", " "]}, r"one of them is empty$"),
        ({"questions": 5}, r"^questions is a int"),
        ({"questions": ["a", "b\ud800"]}, r"^'b\\ud800': expected text in UTF-8$"),
        ({"context": "caf\udce9"}, r"^'caf\\udce9': expected text in UTF-8$"),  # as a command line gives it
        ({"context": "Otis " * 200}, r"are more than the model's context of 128$"),
        ({"max_new_tokens": 128}, r"are more than the model's context of 128$"),
        ({"method": "h3o"}, r"did you mean h2o"),
        ({"protocol": "reuse"}, r"^protocol='reuse': expected one of many"),
        ({"chat": True}, r"^chat=True: this tokenizer has no chat template$"),
        ({"tokenizer": len}, r"^tokenizer is"),
        ({"streamer": 3}, r"^streamer is a int"),
        ({"model": "workshop"}, r"^model='workshop': a name brings"),
    ],
)
def test_what_cannot_be_asked_is_one_line(loaded, wrong, says):
    given = {"model": loaded[0], "tokenizer": loaded[1], "context": CONTEXT, "questions": ASKED}
    with pytest.raises((ValueError, TypeError), match=says) as error:
        kvlab.ask(**given | wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template, says",
    [
        ("{{ raise_exception('no') }}", "cannot be used"),
        ("{{ nothing.at.all }}", "cannot be used"),
        ("{{ messages[0].content | upper }}{{ messages[0].content }}", "as they are$"),
        ("hello", "as they are$"),
    ],
)
def test_a_template_that_does_something_else_is_refused(loaded, template, says):
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"^chat=True: the chat template .*{says}") as error:
        kvlab.ask(loaded[0], tokenizer, CONTEXT, ASKED, chat=True)
    assert "\n" not in str(error.value)


@pytest.fixture
def lease(tmp_path):
    (tmp_path / "lease.txt").write_text(f"{CONTEXT}\n", encoding="utf-8")
    for name, content in (("empty.txt", b" \n"), ("binary.txt", b"\x00\x01"), ("latin.txt", b"caf\xe9")):
        (tmp_path / name).write_bytes(content)
    return tmp_path / "lease.txt"


@pytest.mark.parametrize(
    "words, says",
    [
        (["--context", "missing.txt"], "--context takes a file: missing.txt: No such file or directory"),
        (["--context", "The rent is 940 euros. " * 20], "--context takes a file: The rent"),
        (["--context", "empty.txt"], "empty.txt: the file is empty"),
        (["--context", "binary.txt"], "binary.txt: expected text in UTF-8"),
        (["--context", "latin.txt"], "latin.txt: expected text in UTF-8"),
        (["--context", "."], ".: Is a directory"),
        (["--chat"], "chat=True: this tokenizer has no chat template"),
        (["--method", "offload:link=1"], "would take"),
        (["--method", "paged:blocks=16777216"], "16777216 blocks of 16 tokens do not fit here"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(lease, capsys, monkeypatch, words, says):
    monkeypatch.chdir(lease.parent)
    given = [] if "--context" in words else ["--context", "lease.txt"]
    assert cli.main(["ask", "--question", "Who?", *given, *words]) == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith("kvlab: error: ") and says in line
    said = ["kvlab ask: loading the workshop model"]
    assert before == ([] if "--context" in words else said)


def test_the_command_prints_each_answer_when_it_is_there(lease, capsys, monkeypatch):
    """Question by question, the methods side by side; an answer does not wait for later methods."""
    module = sys.modules["kvlab.ask"]
    asking, printed = module.one_by_one, []

    def watched(*given):
        for answer in asking(*given):
            printed.append(capsys.readouterr().out)
            yield answer

    monkeypatch.setattr(module, "one_by_one", watched)
    words = ["--question", ASKED[0], "--question", ASKED[1], "--tokens", "2", "--method", "full,int8"]
    assert cli.main(["ask", "--context", str(lease), *words]) == 0
    printed.append(capsys.readouterr().out)
    begins = [f"\n{ASKED[0]}\n", "  full  Otis.", "  int8  Otis.", "  full  Mia.", "  int8  Mia."]
    assert [text.startswith(begin) for text, begin in zip(printed, begins, strict=True)] == [True] * 5
    assert printed[2].endswith(f"]\n\n{ASKED[1]}\n")
    assert all("tokens held" in text for text in printed[1:])


def test_it_stops_at_every_end_token(loaded):
    model, tokenizer = kvlab.prepare(copy.deepcopy(loaded[0])), loaded[1]
    whole = kvlab.ask(model, tokenizer, CONTEXT, ASKED[0], max_new_tokens=6).tokens
    for ends in (whole[4], [4159, whole[4]]):
        model.generation_config.eos_token_id = ends
        found = kvlab.ask(model, tokenizer, CONTEXT, ASKED[0], max_new_tokens=6).tokens
        assert found == whole[: whole.index(whole[4]) + 1]

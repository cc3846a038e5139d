"""The gate's verdicts: of formats by nats, of keeps by answers, and of keys that one scale cannot hold."""

import hashlib
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from families.models import family
from gating.planted import planted
from tiny import interrupt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import kvlab
from kvlab import cli
from kvlab.gating import gate
from kvlab.gating.formats import Cost
from kvlab.gating.gate import Line, _worse
from kvlab.gating.keeps import _first, beats_guessing, difference, told_apart
from kvlab.gating.keys import keys_of, noise
from kvlab.gating.reading import Reading
from kvlab.gating.rules import BREAKS, POINTS, SAFE, SAME, by_answers, verdict_of
from kvlab.gating.show import OVER
from kvlab.gating.texts import KINDS, NAMES, Document, document, rows, text
from kvlab.models import blocks_of, prepare


class AddsBos:
    """A tokenizer that begins a text with a token of its own."""

    bos_token_id = 3

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens=True, **how):
        found = self.tokenizer(text, add_special_tokens=False, **how)
        if add_special_tokens:
            found["input_ids"] = [self.bos_token_id, *found["input_ids"]]
        return found


@pytest.fixture(scope="module")
def workshop():
    return kvlab.load()


@pytest.fixture
def short(monkeypatch):
    """Texts of a few tokens, where no verdict depends on them."""
    for size in ("PROMPT", "DECODED"):
        monkeypatch.setattr(sys.modules["kvlab.gating.gate"], size, 8)


def test_a_model_is_judged_by_its_own_full_cache(workshop, monkeypatch):
    monkeypatch.setattr(sys.modules["kvlab.gating.gate"], "DOCUMENTS", 12)
    found = gate(*workshop, ["static", "int8", "sinks:budget=0.2"])
    by = {line.method: line for line in found.lines}
    assert by["static"].cost.nats < 1e-9 and by["static"].cost.agrees == 1 and by["static"].verdict == "safe"
    assert by["static"].noise == 0 and 0 < by["int8"].cost.nats < SAFE
    assert found.model == "workshop" and found.tokens == 528 and found.safe[0].bytes <= found.safe[-1].bytes
    assert by["sinks:budget=0.2"].verdict == "breaks" and min(found.full.values()) > 0.5
    blind = kvlab.prepare(family("Llama", vocab_size=4160, max_position_embeddings=2048))
    (line,) = gate(blind, workshop[1], ["sinks:budget=0.2"]).lines
    assert line.verdict == "no verdict" and "full cache does not beat guessing" in line.why


@pytest.mark.parametrize("times", [1.0, 60.0])
def test_channels_that_are_too_large_for_a_shared_scale_are_seen_and_told(workshop, times):
    model = planted(workshop[0], times)
    found = gate(model, workshop[1], ["int4", "kivi4"], minutes=5)
    int4, kivi4 = found["int4"], found["kivi4"]
    assert kivi4.verdict == "safe", "a scale of its own for every channel does not mind"
    if times > 1:
        assert all(layer.outlier > 20 and layer.channel % 16 == 5 for layer in found.layers)
        assert int4.verdict in ("costs", "breaks") and int4.noise > 5 * kivi4.noise
    else:
        assert int4.cost.nats < 2 * SAFE


def test_the_noise_is_that_of_scores_beside_each_other(workshop):
    """By definition, for one layer: q · (what is held - what was given), less its mean over tokens."""
    model, tokenizer = workshop
    reading = Reading.of(model, rows(tokenizer, 70, 1)[:2])
    stepper = reading.taken("int4")
    found, given = noise(reading, stepper.cache), reading.layers[1]
    held = stepper.cache.layers[1].store.read("cpu")[0]
    moved = []
    for row in range(2):
        for head in range(given.query.shape[1]):
            mine = head // (given.query.shape[1] // given.keys.shape[1])
            off = held[row, mine] - given.keys[row, mine]
            for query in given.query[row, head, -32:]:
                score = off @ query * given.scaling
                moved.append(score - score.mean())
    assert found[1] == pytest.approx(float(torch.stack(moved).square().mean().sqrt()), rel=1e-4)
    assert noise(reading, reading.taken("h2o:budget=0.5").cache) == []
    sink = keys_of(reading)[1].sink
    assert 0 <= sink <= 1


def test_a_prompt_that_is_taken_is_a_prompt_that_was_fed(workshop):
    model, tokenizer = workshop
    ids = rows(tokenizer, 60, 1)
    reading = Reading.of(model, ids)
    for method in ("full", "kivi2", "h2o:budget=0.3", "kvzip:budget=0.5", "recompute"):
        taken, fed = reading.taken(method), kvlab.Stepper(model, kvlab.make_cache(model, method))
        fed.feed(ids, last=True)
        for step in range(3):
            one = torch.full((len(ids), 1), 7 + step)
            near = taken.feed(one, last=True) - fed.feed(one, last=True)
            assert near.abs().max() < 1e-4, method


@pytest.mark.parametrize("needle", [False, True])
def test_a_document_answers_its_questions(needle):
    for seed in range(20):
        made = document(seed, needle, 3)
        assert len({begun for begun, _, _ in made.questions}) == 3
        for begun, names, label in made.questions:
            assert len(set(names)) == 4 and all(f" {name} sleeps" in made.context for name in names)
            asked = begun.removeprefix("\nQuestion: the ")
            assert f"The {asked} {names[label]} sleeps" in made.context and made.context.count(asked) == 1


KEYS = {  # what W_k is part of -> its own part of the bias
    "k_proj": lambda bias: bias,
    "c_attn": lambda bias: bias.chunk(3)[1],
    "query_key_value": lambda bias: bias.view(9, 3, -1)[:, 1],
}


@pytest.mark.parametrize("name", ["Llama", "Phi", "gpt-oss", "OPT", "GPT-2", "GPT-NeoX", "Qwen3", "Gemma 3"])
def test_the_bias_of_keys_is_told_whatever_it_is_fused_with(name):
    model = prepare(family(name))
    drawn = torch.Generator().manual_seed(len(name))
    expected = []
    for layer, block in enumerate(blocks_of(model)):
        parts = {part.rpartition(".")[2]: one for part, one in block.named_modules()}
        known, keys = next((parts[one], keys) for one, keys in KEYS.items() if one in parts)
        if known.bias is None:
            expected.append(None)
            continue
        known.bias.data = 40 * torch.rand(known.bias.shape, generator=drawn) + 30 * layer
        expected.append(float(keys(known.bias.detach()).max()))
    layers = keys_of(Reading.of(model, torch.randint(2, 90, (2, 12), generator=drawn)))
    assert [layer.bias for layer in layers] == [pytest.approx(one) if one else None for one in expected]


def test_what_is_behind_the_bias_of_keys_is_not_told_as_it():
    """YaRN has a factor for keys, at the first token, too."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    yarn |= {"original_max_position_embeddings": 32}
    model = prepare(family("GPT-NeoX", rope_parameters=yarn))
    for name, one in model.named_parameters():
        if name.endswith("query_key_value.bias"):
            one.data = 40 * torch.rand(one.shape, generator=torch.Generator().manual_seed(1))
    layers = keys_of(Reading.of(model, torch.arange(2, 14)[None]))
    assert [layer.bias for layer in layers] == [None, None]


def test_rules():
    cost = lambda low, high: Cost((low + high) / 2, low, high, 1.0, 0.0)
    assert verdict_of(cost(0, SAFE)) == "safe" and verdict_of(cost(BREAKS, 2)) == "breaks"
    assert verdict_of(cost(SAFE + 0.01, BREAKS - 0.01)) == "costs"
    assert verdict_of(cost(0, BREAKS)) == verdict_of(cost(SAFE / 2, 2 * SAFE)) == "undecided"
    assert by_answers(-0.5, -POINTS - 0.01) == "breaks" and by_answers(-0.5, -0.01) == "costs"
    assert by_answers(-POINTS + 0.01, 0.1) == "safe" and by_answers(-0.2, 0.1) == "undecided"
    assert verdict_of(Cost(0.01, 0, SAFE, SAME - 0.01, 0.0)) == "undecided", "few nats, and another text"
    right, wrong = [True] * 60, [False] * 60
    assert (
        by_answers(*difference(right, right)) == "safe" and by_answers(*difference(wrong, right)) == "breaks"
    )
    assert difference(wrong, right) == pytest.approx([-x for x in difference(right, wrong)[::-1]])
    assert by_answers(*difference(right[:6], right[:6])) == "undecided", "six answers say little"
    assert beats_guessing([True] * 12 + [False] * 12) and not beats_guessing([True] * 3 + [False] * 9)


def test_a_method_that_chooses_and_rounds_is_judged_both_ways(workshop, monkeypatch):
    monkeypatch.setattr(sys.modules["kvlab.gating.gate"], "DOCUMENTS", 4)
    found = gate(
        planted(workshop[0], 60.0), workshop[1], ["int4", "infinigen+int4:alpha=inf,ratio=1"], minutes=5
    )
    alone, both = found.lines
    assert both.cost.nats == pytest.approx(alone.cost.nats) and alone.verdict in ("costs", "breaks")
    assert both.verdict in ("breaks", alone.verdict) and "its store alone: " in both.why
    assert both.accuracy is not None and "undecided" != both.verdict


def test_what_a_method_or_a_model_refuses_is_a_line(workshop, short):
    found = gate(*workshop, ["int8:group=7", "int4", "sinks:budget=0.5"], minutes=1e-9)
    assert [line.why for line in found.lines[1:]] == ["the time was over"] * 2
    assert "group=7" in found.lines[0].why, "a refusal needs no time"
    assert found["int4"].noise > 0 and f"{found['int4'].noise:.2g}" in str(found), (
        "it is foretold all the same"
    )
    assert str(found).endswith("The time was over before 2 methods: give more minutes")
    (line,) = gate(*workshop, ["int8:group=7"]).lines
    assert line.verdict == "no verdict" and "group=7" in line.why and "\n" not in line.why


def test_a_method_named_twice_is_asked_once(workshop, short):
    found = gate(*workshop, ["int8", "h2o:budget=0.5", "int8", "h2o:budget=0.5"], minutes=0.02)
    assert [line.method for line in found.lines] == ["int8", "h2o:budget=0.5"]


def test_what_is_safe_and_does_not_fit_is_not_called_unsafe(workshop, short):
    found = gate(*workshop, ["int8"], memory="6MB", context="2k", users=4)
    found.lines = [replace(found.lines[0], verdict="safe")]
    said = str(found)
    assert "Safe, and too much for 6.00 MB: int8" in said and "full in 16 bits: 67.1 MB, too much" in said
    assert "int8_per_token_head" in said and "q8_0" not in said and "keep the full cache" not in said
    found.lines = [replace(found.lines[0], verdict="breaks")]
    assert str(found).endswith("Nothing was found to be safe, and the full cache does not fit")
    found.lines = [replace(found.lines[0], verdict="no verdict")]
    assert str(found).endswith("Nothing could be judged")


def test_every_method_gets_a_line(workshop, short):
    """Those without a cache of layers, and a link by its number."""
    methods = ["recompute", "padded:length=700,chunk=1", "offload:link=1e9", "topk:budget=0.5,link=1e9",
               f"infinigen:full_layers={len(workshop[0].model.layers)}"]  # fmt: skip
    lines = gate(*workshop, methods, minutes=0.02).lines
    assert [line.method for line in lines] == methods and all(line.verdict for line in lines)
    assert "nats" in gate(*workshop, ["offload:link=1e9"]).lines[0].why
    (line,) = gate(*workshop, ["offload:link=-3"]).lines
    assert line.verdict == "no verdict" and "link" in line.why


def test_a_model_that_forgets_its_text_gets_a_reason(workshop, short):
    """`full` is refused at the first question already."""
    model = kvlab.prepare(family("Jamba", vocab_size=4160, max_position_embeddings=2048))
    found = gate(model, workshop[1], ["int8", "h2o:budget=0.5"])
    assert [line.method for line in found.lines] == ["int8", "h2o:budget=0.5"]
    assert found.lines[1].verdict == "no verdict" and found.lines[1].why and "\n" not in found.lines[1].why


def test_a_tokenizer_that_knows_few_words_of_a_text_is_refused():
    """Of a text that is the same token again and again any verdict could be had."""
    few = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "is": 2}, unk_token="<unk>"))
    few.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=few, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"^text: most of its words are unknown to this tokenizer"):
        rows(tokenizer, 40, 2)
    assert rows(tokenizer, 40, 1, "the cat is " * 99).shape == (3, 40)


def test_names_are_told_apart_by_their_tokens_after_the_sentence():
    """In Llama 2's tokenizer the blank before a name alone is a token of its own."""
    blank = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    blank.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    words = [word for kind in ("prose", "facts") for word in text(kind).split()]
    blank.train_from_iterator(words, trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=blank, unk_token="<unk>")
    assert len({tokenizer(f" {name}", add_special_tokens=False).input_ids[0] for name in NAMES}) == 1
    names = told_apart(tokenizer)
    assert len(names) >= 4
    for needle in (False, True):
        for _, some, _ in document(3, needle, 3, names).questions:
            assert len({_first(tokenizer, "The cat", name) for name in some}) == 4


@pytest.mark.parametrize(
    "words",
    [
        "minutes -1",
        "memory 24XB",
        "context 0",
        f"context {'9' * 5000}",
        "users 0",
        "methods h3o",
        "threads 99999",
    ],
)
def test_what_no_model_allows_is_refused_before_one_is_loaded(words, capsys):
    option, value = words.split()
    assert cli.main(["gate", "--model", "no/such-model", f"--{option}", value]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and option.removesuffix("s") in said and value[:20] in said


def test_a_context_beyond_the_models_is_refused_before_it_is_loaded(capsys):
    assert cli.main(["gate", "--context", "900k"]) == 2
    said = capsys.readouterr().err
    assert "the model was trained for" in said and "loading" not in said


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_text("The lamp was lit, and the boats came home one after another. " * 200)
    files = [str(tmp_path / name) for name in ("gate.json", "gate.html")]
    words = ["--methods", "int8", "--text", str(text), "--memory", "1GB", "--users", "90", "--context", "2k"]
    assert cli.main(["gate", *words, "--json", files[0], "--html", files[1], "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| `int8` | safe |" in printed and "90 users of 2,048 tokens" in printed
    stored = json.loads((tmp_path / "gate.json").read_text())
    assert stored["lines"][0]["fits"] is True and math.isfinite(stored["lines"][0]["cost"]["nats"])
    page = (tmp_path / "gate.html").read_text()
    assert page.count("<svg") == 1 and "int8" in page and len(KINDS) == 3
    assert page.count("<li value=") == len(stored["layers"]) > 2


def test_a_refusal_leaves_no_file(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("The lamp was lit.")
    words = ["--text", str(tmp_path / "short.txt"), "--json", str(tmp_path / "gate.json")]
    assert cli.main(["gate", "--methods", "int8", *words]) == 2
    assert "tokens" in capsys.readouterr().err and not (tmp_path / "gate.json").exists()


@pytest.mark.parametrize(
    "words", ["--json {0} --html {0}", "--text {0} --json {0}", "--model {0} --html {0}"]
)
def test_a_file_that_another_option_names_is_not_written_over(tmp_path, capsys, words):
    file = tmp_path / "mine"
    file.write_text("The lamp was lit, and the boats came home one after another. " * 200)
    before = file.read_bytes()
    assert cli.main(["gate", "--methods", "int8", *words.format(file).split()]) == 2
    assert "another option names this file as well" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_every_piece_begins_as_a_text_does(workshop):
    plain = rows(workshop[1], 40, 2)
    bos = AddsBos(workshop[1])
    begun = rows(bos, 40, 2)
    assert plain.shape == begun.shape == (6, 40) and set(begun[:, 0].tolist()) == {bos.bos_token_id}
    assert torch.equal(begun[0, 1:], plain[0, :39]) and not torch.equal(begun[1, 1:], plain[1, :39])


def test_a_document_beyond_the_context_costs_no_other_verdict(workshop, monkeypatch):
    monkeypatch.setattr(
        sys.modules["kvlab.gating.keeps"], "document", lambda *_: Document("word " * 3000, [])
    )
    found = gate(*workshop, ["int8", "sinks:budget=0.5"])
    assert [line.verdict for line in found.lines] == ["safe", "no verdict"]
    assert "are more than the model's context of 2048" in found["sinks:budget=0.5"].why and str(found)


def test_ctrl_c_prints_what_was_done_and_ends_with_130(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["kvlab.gating.gate"], "_formats", interrupt)
    assert cli.main(["gate", "--methods", "int8"]) == 130
    said = capsys.readouterr()
    assert "interrupted: the methods below" in said.out and said.err.endswith("kvlab: interrupted\n")


@pytest.mark.parametrize(
    "asked, store, verdict",
    [("safe", "safe", "safe"), ("costs", "breaks", "breaks"), ("undecided", "safe", "undecided"),
     ("no verdict", "safe", "no verdict"), ("safe", "no verdict", "no verdict"),
     ("no verdict", "breaks", "breaks")],
)  # fmt: skip
def test_the_worse_of_two_verdicts_counts(asked, store, verdict):
    found = _worse(Line("x", asked, "a"), Line("x", store, OVER))
    assert (found.verdict, found.why) == (verdict, f"a; its store alone: {OVER}")


def test_what_was_not_asked_is_not_called_safe(workshop, short, monkeypatch):
    """An interruption at the first question; and a method that the questions refuse."""
    ours = sys.modules["kvlab.gating.gate"]
    monkeypatch.setattr(ours, "ask", interrupt)
    found = gate(*workshop, ["infinigen+int4", "int8"])
    assert [line.method for line in found.lines] == ["int8"] and found.stopped
    monkeypatch.setattr(ours, "ask", lambda *given: {"full": "no"})
    (line,) = gate(*workshop, ["infinigen+int4"]).lines
    assert (line.verdict, line.why) == ("no verdict", "no")


def test_the_texts_are_those_of_the_stored_tables():
    """Nats change with the text: `kivi4` on SmolLM2 cost 0.0034, and 0.0037 once a docstring in the code that
    was read here had changed."""
    found = [hashlib.sha256(text(kind).encode()).hexdigest()[:12] for kind in KINDS]
    assert found == ["443eeef81785", "49b22c4e0c31", "d24d7cf3e1c4"]

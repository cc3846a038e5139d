"""Families and methods: equal to the model's own cache, or refused in one line."""

import copy
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tiny import begun, prompt
from transformers import AutoConfig, DynamicCache

import kvlab
from families.models import FAMILIES, HIDDEN, REFUSED, family, refused
from families.table import (
    FAULT,
    FILE,
    METHODS,
    PROMPT,
    STEPS,
    TOLERANCE,
    difference,
    find,
    heads,
    lines,
    logits,
    own_logits,
    refusals,
    texts,
)  # fmt: skip
from kvlab.models import blocks_of, query_of
from kvlab.models.shrunk import twin_of
from kvlab.place import InfiniGen

LATENT = ("DeepSeek-V2", "DeepSeek-V3")
PAGE = FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_method_is_equal_or_refused(name):
    row = find(name)
    allowed = {"=", "b", "g", "h", "i", "j"} if name in LATENT else {"=", "a", "g", "h"}
    assert set(row.cells.values()) <= allowed and list(row.cells) == list(METHODS)
    kinds = {method.rstrip("0123456789") for method, cell in row.cells.items() if cell not in "=bghij"}
    assert kinds <= {"kivi"}
    compares = {"keydiff", "keynorm", "lagkv", "curdkv", "rkv"}
    undoing = {"expected", "shadowkv", "kvquant", "kvzap"}
    for letter, only in (("g", {"kvzip"}), ("h", undoing), ("i", {"d2o", *compares}), ("j", {"duo"})):
        assert {method for method, cell in row.cells.items() if cell == letter} <= only
    assert row.fault[1] > FAULT
    assert row.pieces == ("f" if name == "Jamba" else "=")  # transformers' own cache is off, too
    assert all(line in PAGE for line in lines(name, row)), "make it again: python -m tests.families"


def test_others_are_refused_in_one_line():
    for name, (error, letter) in refusals().items():
        assert REFUSED[name][2] in error and error.startswith("method 'full': ") and "\n" not in error
        assert letter in "cde"


def test_the_page_has_a_line_for_each_and_no_other():
    found = re.findall(r"(?<=^\| )[^|]+?(?= \|)", PAGE, flags=re.M)
    assert found == 2 * ["family", *FAMILIES] and all(head in PAGE for head in heads())
    listed = "".join(f"- {name}: {letter}\n" for name, (_, letter) in refusals().items())
    assert PAGE.partition("that holds something:\n\n")[2].startswith(f"{listed}\n")
    said = f"{PROMPT} tokens and {STEPS} decode steps", f"more than {TOLERANCE:.0e}", f"at least {FAULT:.0e}"
    assert all(one in PAGE for one in said)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_budget_above_the_window_gives_nothing_up(name):
    own, (ids, mask) = family(name, **HIDDEN[name]), texts()
    expected = own_logits(own, ids, mask)
    ours = kvlab.prepare(copy.deepcopy(own))
    specs = ["sinks", "h2o", "tova", "topk", "snapkv:window=4", "pyramidkv:window=4"]
    specs += ["rkv:window=2,every=2", "offload+h2o"]
    for spec in specs:
        spec += f"{',' if ':' in spec else ':'}budget=8"
        cache = kvlab.make_cache(ours, spec)
        if not spec.startswith("pyramidkv"):  # whose higher layers hold less than the mean
            assert difference(logits(ours, cache, ids, mask), expected) < TOLERANCE, spec
        assert cache.stats().tokens_held <= 7


def test_a_fraction_is_of_the_window():
    ours = kvlab.prepare(family("Mistral"))
    ids, _ = texts()
    cache = kvlab.make_cache(ours, "h2o:budget=0.6")
    kvlab.decode(ours, ids, cache, 5)
    assert cache.stats().tokens_held == 4  # of 7, where the prompt has 60


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LATENT])
def test_a_rehearsed_query_is_the_layers_own(name):
    """Given a layer's true input, its own forward says what the layer asks, whatever the family."""
    ours, (ids, _), inputs, asked = kvlab.prepare(family(name)), texts(), {}, {}
    cache = kvlab.make_cache(ours, "full")
    blocks = blocks_of(ours)

    def note(index, block, args, kwargs):
        inputs[index] = args[0] if args else kwargs["hidden_states"], kwargs.get("position_embeddings")

    def on_read(layer, held, slots, query):
        asked[layer.index] = query

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(note, index), with_kwargs=True)
    for layer in cache.attending:
        layer.on_read = on_read
    stepper = kvlab.Stepper(ours, cache)
    stepper.feed(ids[:, :20])
    stepper.feed(ids[:, 20:21])
    assert asked
    for index, query in asked.items():
        with torch.no_grad():
            hidden, rotary = inputs[index]
            assert difference(query_of(ours, index, hidden, rotary), query) < 1e-5


@pytest.mark.parametrize(
    "kind, refused", [("zaya", True), ("zamba", True), ("olmo", False), ("helium", False)]
)
def test_an_unlisted_family_whose_queries_cannot_be_told_is_refused(kind, refused):
    """A state inside the attention, or a layer that is called with more than its input."""
    model = twin_of(AutoConfig.for_model(kind)).eval()
    kvlab.make_cache(model, "topk:budget=3")
    told = pytest.raises(ValueError, match="cannot be told before its turn") if refused else nullcontext()
    for method in ("infinigen:budget=3", InfiniGen(3)):
        with told:
            kvlab.decode(model, prompt(15), kvlab.make_cache(model, method), 3)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Cohere 2", "GLM-4", "gpt-oss", "Jamba"])
def test_rehearsal_happens(name):
    """Fetched ahead of time, where an earlier block can lend the layer its position embeddings."""
    changes = {"num_hidden_layers": 4, "no_rope_layers": [1, 0] * 2}
    if getattr(family(name).config, "layer_types", None) and name != "Jamba":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    ours, (ids, _) = kvlab.prepare(family(name, **changes)), texts()
    cache = kvlab.make_cache(ours, "infinigen:budget=3,full_layers=1,alpha=inf")
    fetched = {}
    for layer in cache.attending:
        layer.on_read = lambda layer, held, slots, query: fetched.update({layer.index: slots})
    kvlab.decode(ours, ids, cache, 3)
    chosen = [index for index, slots in fetched.items() if slots is not None]
    assert chosen == {"Gemma 3": [2, 3], "Jamba": [1, 3]}.get(name, [1, 2, 3])


@pytest.mark.parametrize("name", LATENT)
def test_the_latent_is_what_is_held(name):
    """Its bytes: rank and rotary part of every token, once for all heads."""
    ours, (ids, _) = kvlab.prepare(family(name)), texts()
    tokens = ids.shape[1]
    sizes = {"full": 4 * (12 + 4), f"static:length={tokens}": 4 * (12 + 4), "int8": 12 + 2 + 4 + 2}
    for spec, size in sizes.items():
        cache = begun(ours, spec, ids).cache
        assert cache.stats().device_bytes == 2 * 2 * tokens * size, spec
    with pytest.raises(ValueError, match="made of a latent after the cache: a host has nothing to fetch by"):
        kvlab.make_cache(ours, "topk")


@pytest.mark.parametrize("name", ["Qwen3-Next", "LFM2", "Granite 4", "Jamba", "Falcon-H1"])
def test_hybrids_count_fork_and_refuse_to_go_back(name):
    ours, (ids, _) = kvlab.prepare(family(name)), texts()
    theirs = DynamicCache(config=ours.config)
    cache = kvlab.make_cache(ours, "full")
    with torch.no_grad():
        for held in (cache, theirs):
            ours(ids[:, :20], past_key_values=held)
    states = 0
    for layer in theirs.layers:
        kept = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        kept += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        states += sum(x.numel() * x.element_size() for x in kept if x is not None)
    assert cache.stats().device_bytes == states
    with pytest.raises(ValueError, match=r"crop: the state of a \w+ cannot go back"):
        cache.crop(-2)
    with torch.no_grad():
        expected = ours(ids[:1, 20:21], past_key_values=theirs_row(ours, ids)).logits
        cache.reorder_cache(torch.tensor([0, 0, 0]))
        three = ours(ids[:1, 20:21].expand(3, -1), past_key_values=cache).logits
    assert difference(three, expected.expand(3, -1, -1)) < TOLERANCE
    cache.reset()
    with torch.no_grad():  # another batch
        ours(ids[:1, :20], past_key_values=cache)
        again = ours(ids[:1, 20:21], past_key_values=cache).logits
    assert difference(again, expected) < TOLERANCE


def theirs_row(model, ids):
    cache = DynamicCache(config=model.config)
    model(ids[:1, :20], past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", ["Doge", "DiffLlama", "Gemma 3n"])
def test_a_refused_model_attends_as_before(name):
    own, (ids, _) = refused(name).eval(), texts()
    ids, said = ids[:1, :PROMPT], {"max_new_tokens": 5, "do_sample": False}
    expected = own.generate(ids, **said)
    with pytest.raises(ValueError, match=REFUSED[name][2]):
        kvlab.make_cache(own, "full")
    assert torch.equal(own.generate(ids, **said), expected)
    found = kvlab.decode(own, ids, kvlab.make_cache(own, "recompute"), 5).tokens
    assert torch.equal(found, expected[:, PROMPT:])
    assert torch.equal(own.generate(ids, **said), expected)


def test_a_forgetful_prompt_in_chunks_is_refused_before_it_begins():
    ours, (ids, _) = kvlab.prepare(family("Jamba")), texts()
    stepper = kvlab.Stepper(ours, kvlab.make_cache(ours, "full"))
    with pytest.raises(ValueError, match="forgets its text at a later pass of several tokens"):
        stepper.feed(ids, chunk=10)
    with pytest.raises(ValueError, match="forgets its text"), stepper.cache.prefill():
        stepper.feed(ids[:, :10])
        stepper.feed(ids[:, 10:20])
    assert stepper.cache.get_seq_length() == 10 and not stepper.cache.broken


def test_the_doctor_says_what_serves_a_model(tmp_path, capsys):
    from kvlab import doctor

    for name in ("Gemma 3", "Mistral"):
        family(name).config.save_pretrained(tmp_path / name)
    assert doctor.model(str(tmp_path / "Gemma 3")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[ok]") and "(gemma3_text): equal with full, static, paged, int8" in lines[0]
    assert any(line.startswith("[!!] kivi2: method 'kivi2:recent=80': kivi: keys are") for line in lines)
    refused("Doge").config.save_pretrained(tmp_path / "Doge")
    assert doctor.model(str(tmp_path / "Doge")) == 1
    assert "(doge): DogeForCausalLM: it does something of its own" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no configuration could be loaded from"):
        doctor.model(str(tmp_path / "nothing"))

"""The bill against what transformers and kvlab really allocate, and against the source texts."""

import re

import pytest
import torch
from billed import MODELS, held, shaped
from families.models import FAMILIES, LATENT, build, family, refused
from families.profiles import RECENT, THRESHOLD, profiled, write
from tiny import EACH, LOSSY, prompt, tiny
from transformers import DynamicCache

import kvlab
from kvlab.arithmetic import (
    SHAPES,
    kv_bytes,
    kv_bytes_per_token,
)
from kvlab.bill.account import bytes_per_token, prefill_operations, weights
from kvlab.bill.describe import describe
from kvlab.hybrid import states_of
from kvlab.methods import HOST
from kvlab.spec import parse

INDEXED = ("deepseek_v32", LATENT | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2})


@pytest.mark.parametrize("name", [*FAMILIES, "Gemma 3n", "DeepSeek-V3.2"])
def test_bytes_that_transformers_allocates(name):
    """Full, grouped, sliding, chunked, latent, hybrid, shared, indexed layers; before and beyond a window."""
    if name in FAMILIES:
        model = family(name)
    else:
        model = refused(name) if name == "Gemma 3n" else build(*INDEXED)
    model = model.to(torch.bfloat16)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # grouped ones want rows of 16 bytes
    found = describe(model.config)
    for tokens in (3, 20):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(tokens, rows=2), past_key_values=cache, use_cache=True)
        assert 2 * held("full", found, tokens).device == allocated(cache), found
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(row[1] for row in found["weights"]) == parameters


def filled(model, spec, *passes):
    """A cache of the model into which so many tokens went in each pass."""
    cache = kvlab.make_cache(model, spec)
    with torch.no_grad():
        for tokens in passes:
            model(prompt(tokens, seed=tokens), past_key_values=cache)
    return cache


def allocated(cache) -> int:
    """Bytes of the tensors that a cache of transformers holds."""
    total = 0
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        tensors += list(states_of(layer))
        total += sum(x.numel() * x.element_size() for x in tensors if x is not None)
    return total


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("spec", [spec for spec in EACH if spec != "recompute"] + ["duo:heads=0.6", "duo"])
def test_bytes_that_kvlab_allocates(spec, window):
    """K and V with their scales, on the side where they are; what keeps and tables remember left out."""
    spec = "static:length=40" if spec == "static" else re.sub("[:,]link=.*", "", spec)
    model = tiny("mistral", dtype=torch.bfloat16, sliding_window=window)
    if window and "kivi" in spec:
        with pytest.raises(ValueError, match="written in blocks"):
            held(spec, describe(model.config), 30)
        return
    spec = profiled(spec, model)
    cache = filled(model, spec, 30)
    row = held(spec, describe(model.config), 30)
    tensors = [x for layer in cache.layers for x in layer.store.tensors()]
    found = sum(x.numel() * x.element_size() for x in tensors if x.dtype != torch.int64)  # lengths of heads
    if spec.startswith("paged"):  # the layers share a pool
        pool = cache.layers[0].store.pool
        found = pool.used * pool.block_bytes
    if not cache.layers[0].place.policy.on_host:
        assert (found, 0) == (pytest.approx(row.device, rel=1e-9), row.host)
        return
    assert found == pytest.approx(row.host, rel=1e-9)
    assert row.device == pytest.approx(index_bytes(cache) + fetched(model, cache), rel=1e-9)


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 8, 12, 13, 14, 30])
def test_bytes_of_heads_that_stream(tokens):
    """About where the first tokens leave the window's sight, and where the newest ones fill a head."""
    model = tiny("mistral", dtype=torch.bfloat16, sliding_window=12)
    spec = profiled("duo:heads=0.4", model)
    cache = filled(model, spec, tokens)
    found = sum(int((layer.positions >= 0).sum()) for layer in cache.layers)
    assert held(spec, describe(model.config), tokens).device == pytest.approx(found * 2 * 8 * 2)


def test_bytes_of_a_threshold(tmp_path):
    """As many as its calibration counted; of another threshold, and of another model, nobody knows."""
    model = tiny("mistral", dtype=torch.bfloat16)
    shape = describe(model.config)
    spec = "kvzap:profile=" + write(tmp_path / "profile", "kvzap", model, share=0.25)
    full = held("full", shape, 40).device
    assert held(spec, shape, 40).device == full / 4
    assert held(f"{spec},recent={RECENT},threshold={THRESHOLD}", shape, 40).device == full / 4  # its own
    assert held(spec, shape, 4).device == held("full", shape, 4).device  # the newest ones are not judged
    (line,) = kvlab.bill("SmolLM2-135M", "L4", 4096, methods=[spec]).lines
    assert "weight has shape (3, 2, 32), expected (30, 3, 384)" in line.refused
    for wrong in (f"{spec},threshold=0.5", profiled("kvzap", model)):
        with pytest.raises(ValueError, match="the text decides how many tokens stay, except"):
            held(wrong, shape, 40)


def index_bytes(cache) -> int:
    """Bytes in 16 bits of what stays on the device beside a host: what tokens are chosen by, what keys are
    made of. No numbers of columns or slots, no spare room."""
    states = [
        getattr(layer.place, "fetch", layer.place) for layer in cache.layers if layer.place.policy.on_host
    ]
    held = [[s.partial_keys] if hasattr(s, "partial") else s.tensors() for s in states]
    return 2 * sum(x.numel() for tensors in held for x in tensors if x.is_floating_point())


def fetched(model, cache) -> int:
    """Bytes that the largest layer fetches in the coming step."""
    with torch.no_grad():
        model(prompt(1), past_key_values=cache)
    return max(layer.place.fetched_bytes for layer in cache.layers)


# Where all of the budget is fetched: nothing is far below the best score.
MOVING = [
    "offload", "offload+int4", "offload+h2o:budget=0.4", "uvm",
    "topk:budget=9", "topk:budget=9,full_layers=3",
    "infinigen:budget=9,alpha=inf", "infinigen:budget=0.5,alpha=inf,full_layers=1",
    "infinigen+int4:budget=9,alpha=inf,full_layers=0", "quest:budget=1",
]  # fmt: skip


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("spec", MOVING)
def test_bytes_that_kvlab_moves(spec, window):
    model = tiny("mistral", dtype=torch.bfloat16, sliding_window=window)
    cache = filled(model, spec, 30, 1)
    assert cache.stats().moved_bytes == pytest.approx(held(spec, describe(model.config), 30).moved, rel=1e-9)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("spec", [spec for spec in LOSSY if parse(spec).method.family == HOST])
def test_nothing_moves_less_than_its_bill_but_what_says_so(spec, window):
    """At every length, whatever the text: a lower bound, or, where a line is `at_most`, the upper one."""
    spec = re.sub("[:,]link=[^,]*", "", spec)
    model = tiny("mistral", dtype=torch.bfloat16, sliding_window=window)
    shape = describe(model.config)
    for tokens in range(2, 60, 7):
        cache = filled(model, spec, tokens, 1)
        row, moved = held(spec, shape, tokens), cache.stats().moved_bytes
        if row.most:
            least, most = row.moved / 9, held(spec, shape, tokens + 1).moved
        else:
            place = cache.layers[0].place.policy
            pages = getattr(getattr(place, "fetch", None), "page", None) or getattr(place, "chunk", 0)
            slots = sum(layer.kv_heads * layer.store.bytes_per_slot for layer in cache.layers)
            least, most = row.moved, row.moved + (1 + 2 * pages) * slots
        assert least * (1 - 1e-9) <= moved <= most * (1 + 1e-9), tokens


# Against the source texts.


def test_figures_of_the_source_texts():
    full = lambda name, tokens: held("full", shaped(name), tokens).device
    assert held("padded:length=2048", shaped("Llama-7B"), 2048).device == 2_146_435_072  # QC AI Research
    assert held("padded:length=2048,policy=compromise", shaped("Llama-7B"), 2048).device == 1_609_826_304
    for name, shape in SHAPES.items():
        assert full(name, 7) == kv_bytes(shape, 7)


def test_released_models_of_the_source_texts():
    for name, shape in {"meta-llama/Llama-2-7b-hf": "Llama-2-7B", "facebook/opt-13b": "OPT-13B"}.items():
        assert bytes_per_token(MODELS[name], 1) == kv_bytes_per_token(SHAPES[shape])
    assert weights(MODELS["meta-llama/Llama-2-7b-hf"]) == pytest.approx(14e9, rel=0.04)  # "7B"


def test_operations_of_a_prefill():
    """*KV Cache* (n.d.): l(24bsh^2 + 4bs^2h) + 2bshV, with half of the pairs and one token's head."""
    model, shape, s = shaped("Llama-7B"), SHAPES["Llama-7B"], 100
    h, layers = shape.hidden, shape.layers
    expected = layers * (24 * s * h**2 + 4 * h * s * (s + 1) / 2) + 2 * h * shape.vocabulary
    assert prefill_operations(model, s) == expected

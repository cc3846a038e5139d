"""The bill against what transformers and kvlab really allocate, and against formulas written out here."""

import itertools
import json
import math
import re
from dataclasses import asdict

import pytest
import torch
from families.models import FAMILIES, build
from tiny import EACH, prompt, tiny
from transformers import DynamicCache

import kvlab
from kvlab.arithmetic import (
    SHAPES,
    causal_pairs,
    cost_per_million,
    experts_read,
    kv_bytes,
    kv_bytes_per_token,
)
from kvlab.bill import data
from kvlab.bill.account import account, bytes_per_token, policies, prefill_operations, seen, weights
from kvlab.bill.describe import describe
from kvlab.cli import main
from kvlab.layer import states_of
from kvlab.methods import METHODS, parse
from kvlab.static_graph.kv_manager import spare_part

MODELS, DEVICES = data.table("models")["models"], data.table("devices")["devices"]


def held(spec: str, model: dict, tokens: int):
    spec = parse(spec)
    return account(spec, policies(spec), model, tokens)


def shaped(name: str) -> dict:
    """A model of the source texts, as `describe` would have it."""
    shape = SHAPES[name]
    kind = {
        "heads": shape.kv_heads, "key": shape.head_dim, "value": shape.head_dim, "latent": False,
        "window": None, "reads": None, "index": 0, "state": 0, "scores": 2 * shape.hidden,
        "index_scores": 0, "shares": None,
    }  # fmt: skip
    blocks = 12 * shape.layers * shape.hidden**2
    rows = [["head", shape.vocabulary * shape.hidden, 16, "head"], ["blocks", blocks, 16, "step"]]
    return {
        "context": None,
        "layers": "A" * shape.layers,
        "kinds": {"A": kind},
        "weights": rows,
        "experts": None,
    }


# Against what is really allocated.


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2", "gemma3n", "deepseek_v32"])
def test_bytes_that_transformers_allocates(family):
    """Full, grouped, sliding, chunked, latent, hybrid, shared, indexed layers; before and beyond a window."""
    if family in FAMILIES and FAMILIES[family][1] is not None:
        model = build(*FAMILIES[family][:2])
    else:
        model = special({"deepseek_v2": "DeepSeek-V2"}.get(family, family))
    model = model.to(torch.bfloat16)
    found = describe(model.config)
    for tokens in (3, 20):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(tokens, rows=2), past_key_values=cache, use_cache=True)
        assert 2 * held("full", found, tokens).device == allocated(cache), found
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(row[1] for row in found["weights"]) == parameters


def special(family: str):
    """Families that tests/families makes elsewhere, or not at all."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32,
        "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    latent = {
        "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    }  # fmt: skip
    own = {
        "DeepSeek-V2": ("deepseek_v2", latent),
        "DeepSeek-V3": ("deepseek_v3", latent),
        "deepseek_v32": (
            "deepseek_v32", latent | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
        ),
        "gemma3n": ("gemma3n_text", {
            "num_kv_shared_layers": 2, "head_dim": 8, "num_key_value_heads": 2, "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8, "sliding_window": 7,
            "vocab_size_per_layer_input": 96, "layer_types": ["sliding_attention", "full_attention"] * 2,
        }),
    }  # fmt: skip
    kind, changes = own[family]
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **common | changes), attn_implementation="eager"
    ).eval()


def allocated(cache) -> int:
    """Bytes of the tensors that a cache of transformers holds."""
    total = 0
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        tensors += list(states_of(layer))
        total += sum(x.numel() * x.element_size() for x in tensors if x is not None)
    return total


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("spec", [spec for spec in EACH if spec != "recompute"])
def test_bytes_that_kvlab_allocates(spec, window):
    """K and V with their scales, on the side where they are; what keeps and tables remember left out."""
    spec = "static:length=40" if spec == "static" else re.sub("[:,]link=.*", "", spec)
    model = tiny("mistral", dtype=torch.bfloat16, sliding_window=window)
    if window and "kivi" in spec:
        with pytest.raises(ValueError, match="blocks of keys"):
            held(spec, describe(model.config), 30)
        return
    cache = kvlab.make_cache(model, spec)
    with torch.no_grad():
        model(prompt(30), past_key_values=cache)
    row = held(spec, describe(model.config), 30)
    tensors = [x for layer in cache.layers for x in layer.store.tensors()]
    found = sum(x.numel() * x.element_size() for x in tensors if x.dtype != torch.int64)  # lengths of heads
    if spec.startswith("paged"):  # the layers share a pool
        pool = cache.layers[0].store.pool
        found = pool.used * pool.block_bytes
    assert found == pytest.approx(row.host or row.device, rel=1e-9)


@pytest.mark.parametrize("spec", ["offload", "offload+int4", "topk:budget=9", "offload+h2o:budget=0.4"])
def test_bytes_that_kvlab_moves(spec):
    model = tiny("llama", dtype=torch.bfloat16)
    cache = kvlab.make_cache(model, spec)
    with torch.no_grad():
        model(prompt(30), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
    assert cache.stats().moved_bytes == pytest.approx(held(spec, describe(model.config), 30).moved, rel=1e-9)


# Against the source texts.


def test_figures_of_the_source_texts():
    full = lambda name, tokens: held("full", shaped(name), tokens).device
    assert full("OPT-30B", 1) == 1_376_256  # Gong, Yi and Zhang 2024
    for thousands, printed in {1: 0.50, 2: 0.99, 4: 1.97, 8: 3.92, 16: 7.83, 32: 15.64}.items():
        assert round(full("Longchat-7B", 1000 * thousands + 31) / 2**30, 2) == printed
    assert round(full("GPT-3", 100) / 1e6) == 472  # allenlu2009 2023
    assert round(64 * full("GPT-3", 544) / 1e9) == 164
    assert round(full("GPT-3", 2048) / 1e9, 1) == 9.7
    assert full("Llama-2-7B", 2048) == 2**30 and round(full("Llama-2-7B", 4096) / 1e9, 1) == 2.1
    assert full("Llama-70B-MHA", 1) == 2_621_440  # 8-bit KV Cache 2024
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


# Formulas.


@pytest.mark.parametrize("tokens, window", [(1, None), (9, None), (9, 4), (3, 4), (4, 4), (9, 1)])
def test_causal_pairs_are_counted(tokens, window):
    pairs = [(q, k) for q in range(tokens) for k in range(q + 1) if window is None or q - k < window]
    assert causal_pairs(tokens, window) == len(pairs)


def test_experts_that_a_step_reads():
    """The mean over all ways in which two tokens each take 2 of 4 experts."""
    ways = list(itertools.product(itertools.combinations(range(4), 2), repeat=2))
    assert experts_read(4, 2, 2) == pytest.approx(sum(len({*a, *b}) for a, b in ways) / len(ways))
    assert experts_read(4, 2, 1) == 2 and experts_read(8, 2, 10_000) == pytest.approx(8)


def test_a_bill_by_hand():
    bill = kvlab.bill(
        "Llama-3.1-8B", "H100 80GB", 8192, users=4, price=2.0, methods=["full", "int4", "offload"]
    )
    token = 2 * 32 * 8 * 128 * 2
    read = 2 * (6_979_588_096 + 525_336_576)
    full = bill["full"]
    assert bill.weights_bytes == 2 * 8_030_261_248 and full.device_bytes == 4 * 8192 * token
    assert full.step == pytest.approx((read + 4 * 8192 * token) / 3350e9) and full.first == "bandwidth"
    assert full.users == int((80e9 - bill.weights_bytes) // (8192 * token))
    assert full.cost == pytest.approx(2.0 * full.step / 3600 * 1e6 / 4)
    assert bill["int4"].device_bytes == 4 * 8192 * token * (4 + 16 / 128) / 16
    offload = bill["offload"]
    assert offload.host_bytes == full.device_bytes and offload.device_bytes == full.device_bytes / 32
    assert offload.step == pytest.approx(4 * (8192 + 1) * token / 64e9) and offload.first == "link"
    operations = 2 * (8192 * 6_979_588_096 + 525_336_576 + 32 * 2 * 4096 * 8192 * 8193 / 2)
    assert bill.prefill == pytest.approx(operations / 989.4e12)
    assert bill.prefill_cost == pytest.approx(cost_per_million(2.0, bill.prefill, 8192))


def test_experts_are_read_where_a_token_takes_them():
    one, many = (
        kvlab.bill("Mixtral-8x7B-v0.1", "B200", 1, users=n, methods=["full"])["full"] for n in (1, 400)
    )
    dense, experts = 2 * (1_343_492_096 + 131_072_000), 2 * 45_097_156_608
    assert one.floors["bandwidth"] * 8e12 == pytest.approx(dense + experts / 4 + 131_072)
    assert many.floors["bandwidth"] * 8e12 == pytest.approx(dense + experts + 400 * 131_072, rel=1e-6)


def test_what_runs_out_first():
    small = {"model": "Llama-3.1-8B", "device": "RTX 4090", "context": 8000}
    lines = {line.method: line for line in kvlab.bill(**small, users=8).lines}
    assert lines["full"].first == "memory" and lines["full"].users == 7
    assert lines["int4"].first == "bandwidth" and lines["recompute"].first == "FLOP/s"
    assert lines["topk"].first == "link"
    # Unified memory stays on the device as long as it fits there, and crosses the link from then on.
    fits, spills = (kvlab.bill(**small, users=n, methods=["uvm"])["uvm"] for n in (7, 8))
    assert fits.moved_bytes == 0 and fits.first == "bandwidth"
    assert spills.moved_bytes > spills.host_bytes and spills.first == "link"


def test_a_model_whose_attention_picks_reads_less_than_it_holds():
    """DeepSeek-V3.2: 2,048 latents of those held, and every index key."""
    model = MODELS["deepseek-ai/DeepSeek-V3.2-Exp"]
    row = held("full", model, 100_000)
    assert row.device == 61 * 100_000 * 2 * (576 + 128)
    assert row.read == 61 * 2 * (2048 * 576 + 100_000 * 128)


def test_shared_layers_hold_nothing_and_read_what_others_hold():
    row = held("full", MODELS["google/gemma-3n-E4B"], 10_000)
    local, whole = 511 * 2048, 10_000 * 2048
    assert row.device == 16 * local + 4 * whole
    assert row.read == 28 * local + 7 * whole


def test_spare_rows_are_those_of_the_engine():
    given = [("double", None), ("shift", None), ("ring", None), ("compromise", None), ("compromise", 0.25)]
    for policy, extra in given:
        spec = f"padded:length=11,policy={policy}" + ("" if extra is None else f",extra={extra}")
        row = held(spec, shaped("Llama-7B"), 5)
        assert row.device == pytest.approx(row.read * (1 + spare_part(policy, extra)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "gemma-3-27b-it", "DeepSeek-V2-Lite", "Jamba-v0.1"])
def test_what_fits_is_what_just_fits(method, model):
    _, entry = data.model_named(model)
    bill = kvlab.bill(model, "B200", 4096, users=3, methods=[method])
    line, left = bill.lines[0], 179e9 - weights(entry)
    if line.refused or method == "recompute":
        return
    spec = parse(method)
    made = policies(spec)
    needs = lambda users, tokens: users * account(spec, made, entry, tokens).device
    assert needs(line.users, 4096) <= left < needs(line.users + 1, 4096)
    if line.tokens:
        assert needs(3, line.tokens) <= left
    if line.tokens < entry["context"]:
        assert needs(3, line.tokens + 1) > left


# Data.


def test_there_are_twenty_models_and_ten_devices():
    assert len(MODELS) == 20 and len(DEVICES) == 10


@pytest.mark.parametrize("name", MODELS)
def test_figures_of_a_model_follow_from_its_configuration(name):
    from kvlab.bill.__main__ import described

    assert json.loads(json.dumps(described(MODELS[name]))) == MODELS[name]


# 2 * layers * KV heads * head dimension * 2 bytes, written out: first token, and one beyond every window.
PER_TOKEN = {
    "facebook/opt-13b": (2 * 40 * 40 * 128 * 2,) * 2,
    "meta-llama/Llama-2-7b-hf": (2 * 32 * 32 * 128 * 2,) * 2,
    "meta-llama/Llama-3.1-8B": (2 * 32 * 8 * 128 * 2,) * 2,
    "meta-llama/Llama-3.1-70B": (2 * 80 * 8 * 128 * 2,) * 2,
    "meta-llama/Llama-3.2-1B": (2 * 16 * 8 * 64 * 2,) * 2,
    "HuggingFaceTB/SmolLM2-135M": (2 * 30 * 3 * 64 * 2,) * 2,
    "mistralai/Mistral-7B-v0.1": (2 * 32 * 8 * 128 * 2, 0),  # a window of 4,096 in every layer
    "mistralai/Mixtral-8x7B-v0.1": (2 * 32 * 8 * 128 * 2,) * 2,
    "Qwen/Qwen2.5-7B": (2 * 28 * 4 * 128 * 2,) * 2,
    "Qwen/Qwen3-8B": (2 * 36 * 8 * 128 * 2,) * 2,
    "Qwen/Qwen3-30B-A3B": (2 * 48 * 4 * 128 * 2,) * 2,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (2 * 12 * 2 * 256 * 2,) * 2,  # one layer in four
    "google/gemma-3-27b-it": (2 * 62 * 16 * 128 * 2, 2 * 10 * 16 * 128 * 2),  # every sixth sees all
    "google/gemma-3n-E4B": (2 * 20 * 2 * 256 * 2, 2 * 4 * 2 * 256 * 2),  # 15 of 35 share
    "openai/gpt-oss-20b": (2 * 24 * 8 * 64 * 2, 2 * 12 * 8 * 64 * 2),  # every other sees all
    "meta-llama/Llama-4-Scout-17B-16E": (2 * 48 * 8 * 128 * 2, 2 * 12 * 8 * 128 * 2),  # chunks of 8,192
    "deepseek-ai/DeepSeek-V2-Lite": (27 * (512 + 64) * 2,) * 2,  # a latent and a rotary part
    "deepseek-ai/DeepSeek-V3.2-Exp": (61 * (512 + 64 + 128) * 2,) * 2,  # and an index key
    "ai21labs/Jamba-v0.1": (2 * 4 * 8 * 128 * 2,) * 2,  # one layer in eight
    "tiiuae/falcon-7b": (2 * 32 * 1 * 64 * 2,) * 2,
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token(name):
    model = MODELS[name]
    assert (bytes_per_token(model, 1), bytes_per_token(model, model["context"])) == PER_TOKEN[name]


def dated(text: str) -> bool:
    year, month, day = map(int, text.split("-"))
    return (year, month, day) >= (2026, 11, 1) and 1 <= month <= 12 and 1 <= day <= 31


def test_every_figure_has_a_source_and_a_date():
    for name in ("models", "devices", "flags"):
        assert dated(data.table(name)["read"])
    for name, model in MODELS.items():
        assert model["sources"] and all(len(source) > 10 for source in model["sources"]), name
        assert set(model["unverified"]) <= {*model["config"], "bits"}, name
    figures = {"memory", "bandwidth", "flops", "link"}
    for name, device in DEVICES.items():
        assert set(device) == {*figures, "sources", "unverified"}, name
        assert all(device[figure] > 1e9 for figure in figures), name
        told = {part.strip() for key in device["sources"] for part in key.split(",")}
        told = figures if told == {"all"} else told
        assert told | set(device["unverified"]) == figures and not told & set(device["unverified"]), name


def test_form_of_the_flags():
    known = data.table("flags")
    assert list(known["engines"]) == ["vLLM", "SGLang", "llama.cpp", "transformers"]
    assert all(engine["version"] and engine["source"] for engine in known["engines"].values())
    named = set()
    for technique in known["techniques"]:
        assert set(technique) == {"name", "methods", "options"}
        assert list(technique["options"]) == list(known["engines"])
        named.update(technique["methods"])
        for option in technique["options"].values():
            assert option is None or (set(option) == {"option", "note"} and option["option"])
    assert named == set(METHODS)
    assert len({technique["name"] for technique in known["techniques"]}) == len(known["techniques"])


def test_transformers_takes_its_flags():
    from transformers import GenerationConfig

    for technique in data.table("flags")["techniques"]:
        option = technique["options"]["transformers"]
        if option and option["option"].startswith("cache_implementation"):
            given = eval(f"dict({option['option']})")  # ours, from the file
            GenerationConfig(**given).validate()


# As a reader meets it.


@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_device(model):
    """Every combination is a table that fits 80 columns, or one line."""
    context, size = min(4096, MODELS[model]["context"]), weights(MODELS[model])
    for device, figures in DEVICES.items():
        if size > figures["memory"]:
            with pytest.raises(ValueError, match=r"its weights take .* GB and .* has .* GB"):
                kvlab.bill(model, device)
            continue
        bill = kvlab.bill(model, device, context, users=2, price=1.5)
        assert [line.method for line in bill.lines] == list(METHODS)
        assert max(map(len, str(bill).splitlines())) <= 80
        assert json.loads(json.dumps(asdict(bill)))["lines"][0]["method"] == "full"
        for line in bill.lines:
            assert line.refused or line.first in ("memory", "bandwidth", "link", "FLOP/s")
            assert (line.step is None) == (line.users == 0 or bool(line.refused))


def test_a_bill_in_a_notebook_has_a_row_for_every_method():
    bill = kvlab.bill("gemma-3-27b-it", "H200", 4096)
    page = bill._repr_html_()
    assert page.count("<tr>") == 1 + len(METHODS) and "not on this model" in page
    assert "cost" not in page and "bytes moved / link" in page and repr(bill) == str(bill)


def test_a_folder_or_a_config_is_a_model(tmp_path):
    tiny("llama").config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        bill = kvlab.bill(str(path), "L4", methods=["full", "h2o:budget=0.5"])
        assert bill.context == 128 and bill["full"].device_bytes == 128 * 2 * 4 * 2 * 8 * 2
        assert bill["h2o:budget=0.5"].device_bytes == bill["full"].device_bytes / 2


def test_what_a_config_leaves_out_is_told(tmp_path):
    """Weights that are quantized and parts that are no text stand in the name; code of a model is not run."""
    values = tiny("llama").config.to_dict()
    for more, told in {
        "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "though they are quantized"),
        "text": ({"model_type": "llava", "text_config": values}, "its text part"),
    }.values():
        (tmp_path / "config.json").write_text(json.dumps(values | more))
        assert told in kvlab.bill(str(tmp_path), "L4", 100, methods="full").model
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    with pytest.raises(ValueError, match="not a configuration that transformers reads"):
        kvlab.bill(str(tmp_path), "L4")


def test_names_are_read_kindly():
    bill = kvlab.bill("llama-3.1-8b", "rtx 4090", 100, methods=["full"])
    assert (bill.model, bill.device) == ("meta-llama/Llama-3.1-8B", "RTX 4090")
    assert seen({"window": 8}, 20) == 7


GIVEN = {"model": "Llama-3.1-8B", "device": "H200"}
BAD = {
    "did you mean meta-llama/Llama-3.1-8B": {"model": "Lama-3.1-8B"},
    "did you mean RTX 4090": {"device": "4090"},
    "known: facebook/opt-13b, ": {"model": "zzzzzzzz"},
    "context=0: expected": {"context": 0},
    "context=1.5: expected": {"context": 1.5},
    "was trained for 131,072 tokens": {"context": 131_073},
    "users=1.5: expected": {"users": 1.5},
    "users=0: expected": {"users": 0},
    "users=True: expected": {"users": True},
    "price=-1: expected": {"price": -1},
    "price=nan: expected": {"price": math.nan},
    "price=inf: expected": {"price": math.inf},
    "budget=1.5: expected": {"methods": ["h2o:budget=1.5"]},
    "unknown method 'h3o', did you mean h2o": {"methods": ["h3o"]},
    "leave link= out": {"methods": ["offload:link=1e9"]},
    "its weights take 141.1 GB and L4 has 24 GB": {"model": "Llama-3.1-70B", "device": "L4"},
    "max_length=1: expected": {"methods": ["padded:length=1"]},
}


@pytest.mark.parametrize("expected", BAD)
def test_bad_input_is_one_line(expected):
    with pytest.raises(ValueError) as raised:
        kvlab.bill(**GIVEN | BAD[expected])
    assert expected in str(raised.value) and "\n" not in str(raised.value)


def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        kvlab.bill(str(tmp_path), "H200")
    for text in ("{", "[]", '{"model_type": "nobody"}', '{"model_type": "t5"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError) as raised:
            kvlab.bill(str(tmp_path), "H200")
        assert "\n" not in str(raised.value)


def test_the_command_prints_the_bill_and_the_flags(capsys):
    methods = ["--methods", "full,h2o:budget=0.1,recent=0.3", "int4"]
    assert main(["bill", "--model", "Llama-3.1-8B", "--device", "H200", "--users", "2", *methods]) == 0
    printed = capsys.readouterr().out
    assert "h2o:budget=0.1,recent=0.3" in printed and "-ctk q4_0 -ctv q4_0" in printed
    assert "In none of the four: eviction by attention" in printed and "fp8" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert main(["bill", "--model", "Lama-3.1-8B", "--device", "H200"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvlab: error: model='Lama-3.1-8B'") and told.count("\n") == 1

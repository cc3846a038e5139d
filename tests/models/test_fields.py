"""What a GGUF file says of its model is in the model's configuration, or the file is refused."""

import random

import pytest
import torch
from models import made
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    NemotronConfig,
    Phi3Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)  # fmt: skip

import kvlab
from kvlab.models import fields

package = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'kvlab[gguf]')")

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=2, max_position_embeddings=128, vocab_size=len(made.TOKENS), initializer_range=0.2,
    pad_token_id=None, tie_word_embeddings=True,
)  # fmt: skip
TYPES = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
KINDS = {one: package.GGUFValueType[name] for one, name in TYPES.items()}
RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))


def turning(base: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": base} | more


def starcoder2(dice, base, eps, window):
    return (
        Starcoder2Config,
        dict(norm_epsilon=eps, sliding_window=None, rope_parameters=turning(base)),
        {NORM: eps},
    )


def stablelm(dice, base, eps, window):
    parallel, parts = dice.random() < 0.5, turning(base, partial_rotary_factor=0.25)
    options = dict(layer_norm_eps=eps, rope_parameters=parts, use_parallel_residual=parallel)
    return StableLmConfig, options, {NORM: eps, "rope.dimension_count": 4, "use_parallel_residual": parallel}


def nemotron(dice, base, eps, window):
    parts = turning(base, partial_rotary_factor=0.5)
    return NemotronConfig, dict(norm_eps=eps, rope_parameters=parts), {NORM: eps, "rope.dimension_count": 8}


def phi3(dice, base, eps, window):
    window = dice.choice([window, None])  # Phi-4's files say 0
    options = dict(rms_norm_eps=eps, sliding_window=window, rope_parameters=turning(base))
    return Phi3Config, options, {RMS: eps, "attention.sliding_window": window or 0}


def gemma2(dice, base, eps, window):
    caps = {"attn_logit_softcapping": dice.uniform(1, 9), "final_logit_softcapping": dice.choice([None, 4.0])}
    options = dict(
        head_dim=32, query_pre_attn_scalar=32, sliding_window=window, rope_parameters=turning(base)
    )
    windows = {"attention.sliding_window": window, "attention.key_length": 32}
    said = {name: value or 0.0 for name, value in caps.items()}
    return Gemma2Config, options | caps | {"rms_norm_eps": eps}, said | windows | {RMS: eps}


def gemma3(dice, base, eps, window):
    nearby, drawn = dice.uniform(100, 900), [dice.random() < 0.5 for _ in range(4)]
    pattern = dice.choice([2, drawn])
    local = [at % 2 == 0 for at in range(4)] if pattern == 2 else drawn
    options = dict(
        head_dim=16, query_pre_attn_scalar=16, rms_norm_eps=eps, sliding_window=window, num_hidden_layers=4,
        layer_types=["sliding_attention" if one else "full_attention" for one in local],
        rope_parameters={"sliding_attention": turning(nearby), "full_attention": turning(base)},
    )  # fmt: skip
    windows = {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}
    return (
        Gemma3TextConfig,
        options,
        windows | {RMS: eps, "rope.freq_base_swa": nearby, "attention.key_length": 16},
    )


def qwen3(dice, base, eps, window):
    options = dict(rms_norm_eps=eps, rope_parameters=turning(base), head_dim=dice.choice([16, 32, 80]))
    return Qwen3Config, options, {RMS: eps, "attention.key_length": options["head_dim"]}


def gpt2(dice, base, eps, window):
    positions = dice.choice([64, 128, 1024])
    options = dict(layer_norm_epsilon=eps, max_position_embeddings=positions, n_inner=96, bos_token_id=1)
    return GPT2Config, options, {NORM: eps, "context_length": positions, "attention.head_count_kv": 4}


def write(file, architecture: str, model, said: dict) -> None:
    """A model of another architecture as a GGUF file, its fields as llama.cpp names them."""
    config = model.config
    out = package.GGUFWriter(file, architecture)
    out.add_name("x")
    about = {
        "block_count": config.num_hidden_layers, "context_length": 128, "embedding_length": 64,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    for field, value in (about | said).items():
        out.add_key_value(f"{architecture}.{field}", value, KINDS[type(value)])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(made.TOKENS)
    out.add_token_types([3 if token in made.CONTROL else 1 for token in made.TOKENS])
    out.add_token_merges(made.MERGES)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    kind = next(one for one, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    names = package.get_tensor_name_map(kind, config.num_hidden_layers)
    more = architecture in ("gemma2", "gemma3", "nemotron")  # whose norms multiply by one more
    for name, weight in model.state_dict().items():
        part, _, end = name.removeprefix("transformer.").rpartition(".")
        if part != "lm_head":
            if architecture == "gpt2" and part.startswith("h."):  # its matrices are [in, out]
                weight = weight.t().contiguous()
            weight = weight + 1 if more and name.endswith("norm.weight") else weight
            out.add_tensor(f"{names.get_name(part)}.{end}", weight.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", [starcoder2, stablelm, nemotron, phi3, gemma2, gemma3, qwen3, gpt2])
def test_a_model_has_the_numbers_that_its_file_says(family, seed, tmp_path):
    dice = random.Random(seed)
    base, eps, window = dice.uniform(500, 1e6), dice.choice([1e-5, 1e-3, 0.02]), dice.randrange(6, 40)
    kind, options, said = family(dice, base, eps, window)
    torch.manual_seed(seed)
    expected = AutoModelForCausalLM.from_config(kind(**SIZES | options)).eval()
    turns = {} if family is gpt2 else {"rope.freq_base": base}
    write(tmp_path / "x.gguf", family.__name__, expected, said | turns)
    model, _ = kvlab.load(tmp_path / "x.gguf", device="cpu")
    ids = torch.randint(4, len(made.TOKENS), (1, 60))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-3, rtol=1e-4)


STRANGE = {
    "attention.scale": 0.2, "attention.clamp_kqv": 8.0, "attention.causal": False,
    "attention.max_alibi_bias": 8.0,
    "attention.sliding_window": 32, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0,
    "logit_scale": 8.0, "embedding_scale": 12.0, "residual_scale": 0.2, "attention.temperature_scale": 0.1,
    "attention.temperature_length": 64, "rope.scaling.attn_factor": 1.2, "never.heard_of": 1,
    "rope.freq_base_swa": 77.0,
}  # fmt: skip
WRONG = {
    "attention.sliding_window_pattern": [-1, [True], "often"], "attention.sliding_window": [-1],
    "attn_logit_softcapping": [[1.0, 2.0]],
}  # fmt: skip
NOTHING = {
    "attention.scale": 0.0, "attention.causal": True, "attention.max_alibi_bias": 0.0, "logit_scale": 1.0,
    "residual_scale": 1.0, "attention.key_length": 16, "tensor_data_layout": "Meta AI original pth",
    "rope.scaling.attn_factor": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("field, value", [(field, value) for field in WRONG for value in WRONG[field]])
def test_a_value_that_no_model_has_is_refused(field, value):
    config = Gemma3TextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match=rf"it says {field} = "):
        fields.settle(config, {field: value})


@pytest.mark.parametrize("field", STRANGE)
def test_a_number_that_a_model_has_no_place_for_is_refused(field, tmp_path):
    file = tmp_path / "x.gguf"
    more = [("add_key_value", f"llama.{field}", STRANGE[field], KINDS[type(STRANGE[field])])]
    made.write(file, more=more)
    with pytest.raises(ValueError, match=rf"x\.gguf cannot be converted: it says {field} = ") as error:
        kvlab.load(file, device="cpu")
    assert "\n" not in str(error.value)


def test_numbers_that_change_nothing_are_no_obstacle(tmp_path):
    file = tmp_path / "x.gguf"
    more = [
        ("add_key_value", f"llama.{field}", value, KINDS[type(value)]) for field, value in NOTHING.items()
    ]
    expected, _ = made.write(file, more=more)
    assert kvlab.load(file, device="cpu")[0].config.head_dim == expected.config.head_dim


@pytest.mark.parametrize("config", [GPT2Config(), BloomConfig()])
def test_a_model_without_rotary_embedding_needs_no_base_of_one(config):
    said = {"context_length": 1024, "embedding_length": 768, "feed_forward_length": 3072, "block_count": 12}
    fields.settle(config, said | {"attention.head_count": 12, "attention.head_count_kv": 12, NORM: 1e-4})
    assert config.layer_norm_epsilon == 1e-4


@pytest.mark.parametrize("blocks, scalar", [(62, 168), (48, 128)])
def test_queries_of_gemmas_27b(blocks, scalar):
    """llama.cpp's rule: the hidden width over the heads, where there are 62 blocks; else a head's width."""
    config = Gemma3TextConfig(
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        num_hidden_layers=blocks,
    )
    fields.settle(config, {})
    assert config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    "family, said, window", [(gemma2, None, 4096), (gemma3, None, 0), (gemma2, 0, 0), (gemma3, 0, 0)]
)
def test_layers_of_a_file_without_a_window_have_none_or_llama_cpps(family, said, window, tmp_path):
    kind, options, about = family(random.Random(5), 10_000.0, 1e-5, 12)
    windows = {} if said is None else {"attention.sliding_window": said}
    about = {name: value for name, value in about.items() if name != "attention.sliding_window"} | windows
    made_model = AutoModelForCausalLM.from_config(kind(**SIZES | options))
    write(tmp_path / "x.gguf", family.__name__, made_model, about | {"rope.freq_base": 10_000.0})
    model, _ = kvlab.load(tmp_path / "x.gguf", device="cpu")
    local = "sliding_attention" in model.config.layer_types
    assert (model.config.sliding_window if local else 0) == window
    kvlab.make_cache(model, "full")
    model(torch.tensor([[5, 6, 7]]))


def test_a_width_that_follows_from_others_is_passed_over():
    fields.settle(FalconConfig(), {"attention.key_length": 64})

"""The twin: whatever the sizes of a configuration, a tiny model of its class tells what serves it."""

import pytest
from transformers import AutoConfig

from families.models import family
from kvlab import make_cache
from kvlab.doctor import tried
from kvlab.models import LISTED
from kvlab.random_model import differs

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LAYERS = (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 4
REAL = {  # as published, where the defaults of the configuration are no such model
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "num_hidden_layers": 27},
    "deepseek_v3": {"rope_parameters": YARN},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 4096,
             "max_position_embeddings": 131072},
    "granitemoehybrid": {"num_hidden_layers": 40, "layer_types": LAYERS, "num_local_experts": 72,
                         "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(LISTED))
def test_a_listed_type_of_real_size_is_served(kind):
    assert differs(AutoConfig.for_model(kind, **REAL.get(kind, {}))) is None


EXPERTS = {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}


@pytest.mark.parametrize("kind", [
    "youtu", "modernbert-decoder", "laguna", "kimi_linear", "nemotron", "fuyu", "zamba", "zamba2", "zaya",
    "longcat_flash", "dots1",
])  # fmt: skip
def test_types_that_nobody_listed_are_served(kind):
    assert differs(AutoConfig.for_model(kind, **(EXPERTS if kind == "dots1" else {}))) is None


REASONS = {
    "dots3_note": "it caches in a DynamicIndexedLayer, which kvlab does not know",
    "gemma4_text": "it has heads of its own, in number or size, in some layers",
    "gemma4": "it shares keys and values between layers in a way of its own",
    "mimo_v2_flash": "it does something of its own with K and V (ValueError: layer 1: K has 6 heads",
    "blt": "transformers makes no cache from its configuration alone (AttributeError: 'BltConfig'",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_refusal_says_what_the_model_does(kind):
    changes = {"num_kv_shared_layers": 0} if kind == "gemma4_text" else {}
    config = AutoConfig.for_model(kind, **changes)
    if kind == "gemma4":
        config.text_config.num_kv_shared_layers = 10
    assert differs(config).startswith(REASONS[kind])
    with pytest.raises(ValueError) as refused:
        tried(config)
    assert REASONS[kind] in str(refused.value) and "\n" not in str(refused.value)


def test_what_cannot_be_made_small_is_not_blamed_on_the_model():
    """Such a model is refused, too: nobody has seen that it is right."""
    untried = differs(AutoConfig.for_model("phi4_multimodal"))
    assert untried.startswith("it could not be tried: no tiny model of its class runs (ValueError: shrunk")


def test_a_mask_of_its_own_is_refused_when_the_cache_is_made():
    model = family("Gemma 3", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="'full': Gemma3ForCausalLM: it attends by a mask of its own"):
        make_cache(model, "full")
    assert model.config._attn_implementation == "eager"

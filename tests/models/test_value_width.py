"""A model whose V is of another width than its K: served from the first token to a saved cache, or refused
before it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MiMoV2FlashConfig

import kvlab
from kvlab.finding import METHODS

SPECS = [
    name + (":budget=0.5" if "budget" in one.parameters else "")
    for name, one in METHODS.items()
    if name != "padded"  # torch exports no such model
]
WIDTHS = [(24, 16), (16, 9), (96, 20)]


def model_of(key: int, value: int):
    torch.manual_seed(3)
    config = MiMoV2FlashConfig(
        vocab_size=96, hidden_size=64, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=key, v_head_dim=value, layer_types=["full_attention"] * 2,
        mlp_layer_types=["dense"] * 2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        max_position_embeddings=128, pad_token_id=None, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_method_serves_it_and_its_saved_cache_is_read_again_or_it_is_refused(widths, tmp_path):
    model, served = model_of(*widths), []
    ids = torch.randint(2, 96, (2, 41), generator=torch.Generator().manual_seed(5))
    for spec in [*SPECS, "int4:group=12", "kivi4:group=3"]:
        try:
            cache = kvlab.make_cache(model, spec)
        except ValueError as error:
            assert "\n" not in str(error), spec
            continue
        stepper = kvlab.Stepper(model, cache)
        stepper.feed(ids[:, :40])
        expected = stepper.feed(ids[:, 40:])
        if spec == "full":
            torch.testing.assert_close(expected, model(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)
        served.append(spec)
        if not cache.recompute:
            cache.save(tmp_path / "x")
            assert kvlab.load_cache(tmp_path / "x", model).stats().device_bytes == cache.stats().device_bytes
    assert len(served) > 15

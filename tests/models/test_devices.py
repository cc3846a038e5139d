"""A model over several devices: every method as on one, and a layer of a cache lives where its block runs."""

import copy
import random

import pytest
import torch
from every import decoded
from tiny import EACH, prompt, tiny
from transformers import AutoModelForCausalLM

import kvlab
from kvlab.calibrate.fold import fold
from kvlab.calibrate.smoothing import fold_smoothing
from kvlab.models import prepare

BLOCKS = 3
MIXED = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(BLOCKS)} | {
    name: "cpu" for name in ("model.norm", "model.rotary_emb", "lm_head")
}
MIXED["model.embed_tokens"] = "disk"  # so the model itself says that it is on no device


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny model of three blocks."""
    folder = tmp_path_factory.mktemp("model")
    tiny("llama", "sdpa").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def spread(saved, tmp_path_factory):
    """The same over CPU and disk."""
    offload = tmp_path_factory.mktemp("offload")
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=MIXED, offload_folder=str(offload))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    return prepare(model.eval())


@pytest.mark.parametrize("spec", EACH)
def test_every_method_decodes_and_forks_as_on_one_device(spread, spec):
    expected, _ = decoded(tiny("llama"), spec)
    found, cache = decoded(spread, spec)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5), spec
    for layer in cache.layers:
        for _, tensor in layer.tensors():
            assert tensor.device.type == "cpu"  # where the block runs, not where its weights rest
        assert spec.startswith("shadowkv") or layer.keys.isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no second device beside the CPU")
@pytest.mark.parametrize("spec", EACH)
def test_a_layer_lives_where_its_block_does(saved, spec):
    where = {f"model.layers.{i}": "cpu" if i % 2 else 0 for i in range(BLOCKS)} | {
        name: 0 for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    }
    model = prepare(AutoModelForCausalLM.from_pretrained(saved, device_map=where).eval())
    found, cache = decoded(model, spec)
    expected, _ = decoded(tiny("llama"), spec)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.cpu(), theirs, atol=1e-4)
    for index, layer in enumerate(cache.layers):
        for on_host, tensor in layer.tensors():
            assert on_host or tensor.device.type == (
                "cpu" if where[f"model.layers.{index}"] == "cpu" else "cuda"
            )


@pytest.mark.parametrize("change", [fold, fold_smoothing])
def test_weights_that_are_not_there_are_not_changed(tmp_path, change):
    tiny("opt", "sdpa").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    with pytest.raises(ValueError, match="offloads some"):
        change(prepare(model.eval()))


@pytest.mark.parametrize("seed", range(6))
def test_a_model_without_weights_is_one_line_everywhere(seed):
    draw = random.Random(seed)
    model = copy.deepcopy(tiny(draw.choice(("llama", "opt", "gpt2"))))
    cache = kvlab.make_cache(model, "full")
    stepper = kvlab.Stepper(model, cache)
    module = draw.choice([x for x in model.modules() if [*x.parameters()]]) if seed else model
    model = model.to("meta") if module is model else model
    module.to("meta")
    for call in (
        lambda: kvlab.prepare(model), lambda: kvlab.KVCache(model), lambda: kvlab.load_cache("none", model),
        lambda: kvlab.make_cache(model, draw.choice(EACH)), lambda: kvlab.Stepper(model, cache),
        lambda: kvlab.decode(model, prompt(9), cache, 2), lambda: kvlab.gate(model, None, minutes=0.1),
        lambda: kvlab.ask(model, None, "It rains.", "What?"), lambda: kvlab.load(device="meta"),
        *([lambda: stepper.feed(prompt(9)), lambda: model.generate(prompt(9), past_key_values=cache)]
          if module is model else ()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^model: [\w.]+ is on torch's meta device, [^\n]*$"):
            call()

"""Models inside a wrapper, or with layers taken out, and what people know of transformers' caches."""

import copy
import functools
import gc
import random
from functools import partial

import pytest
import torch
from families.models import family
from tiny import EACH, begun, prompt, tiny
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

import kvlab


class Outer(nn.Module):
    """As PEFT's."""

    def __init__(self, model):
        super().__init__()
        self.base = model
        self.config = model.config

    def get_base_model(self):
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


WRAPPERS = {
    "PEFT": (Outer, r"model\.get_base_model\(\)$"),
    "torch.compile": (lambda model: torch.compile(model, backend="eager"), r"model\._orig_mod$"),
    "DataParallel": (nn.DataParallel, r"model\.module$"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_names_the_model_inside_which_serves_it(name):
    wrap, way = WRAPPERS[name]
    model = copy.deepcopy(tiny("llama"))
    outer, ids = wrap(model), prompt(20)
    for call in (
        lambda: kvlab.make_cache(outer, "full"), lambda: kvlab.KVCache(outer), lambda: kvlab.prepare(outer),
        lambda: kvlab.Stepper(outer, kvlab.make_cache(model, "full")),
        lambda: kvlab.make_cache(outer, "recompute"),
        lambda: kvlab.decode(outer, ids, kvlab.make_cache(model, "full"), 2),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=way):
            call()
    for spec in ("full", "h2o:budget=8", "int4") if name != "torch.compile" else ():  # which takes a minute
        right = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 5)
        cache, found = kvlab.make_cache(model, spec), [ids]
        with torch.no_grad():
            for _ in range(5):
                found.append(outer(found[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
        assert torch.equal(torch.cat(found[1:], 1), right.tokens)


def compiled(part) -> None:
    part.compile(backend="eager")


INSIDE = {
    "layers": lambda model: [compiled(layer) for layer in model.model.layers],
    "attention": lambda model: [compiled(layer.self_attn) for layer in model.model.layers],
    "body": lambda model: compiled(model.model),
    "model": compiled,
    "forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "another body": lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_part_that_attends_is_refused_in_one_line(name):
    model = copy.deepcopy(tiny("llama"))
    INSIDE[name](model)
    torch._dynamo.reset()
    with pytest.raises(
        ValueError, match=r"^a part .* is compiled|interface as a decoder, or is compiled, so"
    ):
        model(prompt(20), past_key_values=kvlab.make_cache(model, "full"))


def test_a_compiled_part_that_does_not_attend_serves_as_before():
    model, ids = copy.deepcopy(tiny("llama")), prompt(20)
    right = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        compiled(layer.mlp)
    assert torch.allclose(
        model(ids, past_key_values=kvlab.make_cache(model, "full")).logits, right, atol=1e-5
    )


USES = {
    "scaled": lambda k, mask: k * 2.0,
    "divided": lambda k, mask: torch.ones(1) / k,
    "as floats": lambda k, mask: k.float(),
    "repeated": lambda k, mask: torch.repeat_interleave(k, 2, dim=1),
    "cut": lambda k, mask: k[:, :, -4:],
    "sdpa": lambda k, mask: nn.functional.scaled_dot_product_attention(torch.ones(1, 1, 1, 8), k, k),
    "the mask": lambda k, mask: mask[:, :, :, :4],
    "the mask added": lambda k, mask: torch.zeros(1) + mask,
    "the mask moved": lambda k, mask: mask.to(torch.float64),
}


@pytest.mark.parametrize("name", USES)
def test_a_layer_that_attends_by_itself_hears_that_it_is_handed_no_tensors(name):
    class Own(LlamaAttention):
        def forward(self, hidden_states, attention_mask=None, past_key_values=None, **_):
            keys, _ = past_key_values.update(*[torch.zeros(1, 2, 5, 8)] * 2, self.layer_idx)
            return USES[name](keys, attention_mask)

    model = copy.deepcopy(tiny("llama"))
    cache = kvlab.make_cache(model, "full")
    model.model.layers[1].self_attn.__class__ = Own
    with pytest.raises((ValueError, AttributeError), match="computes attention by itself"):
        model(prompt(5), past_key_values=cache)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, type("Sub", (LlamaForCausalLM,), {})])
def test_an_eager_function_that_is_exchanged_is_not_replaced(kind, monkeypatch):
    model = kvlab.prepare(kind(tiny("llama").config).eval())
    model.set_attn_implementation("eager")
    wrapped = functools.wraps(sdpa_attention_forward)(
        lambda *given, **how: sdpa_attention_forward(*given, **how)
    )
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", wrapped)
    with pytest.raises(ValueError, match=r"a function of .*test_wrapped, in the place of 'eager'"):
        model(prompt(5), past_key_values=kvlab.make_cache(model, "full"))


def test_transformers_function_in_a_wrapper_of_torchs_is_served(monkeypatch):
    model = kvlab.prepare(copy.deepcopy(tiny("llama")))
    wrapped = torch.no_grad()(sdpa_attention_forward)
    known = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", known | {"sdpa": wrapped})
    assert model(prompt(5), past_key_values=kvlab.make_cache(model, "full")).logits.isfinite().all()


class Attends:
    def __call__(self, *given, **how):
        return sdpa_attention_forward(*given, **how)


OWN = {
    "a function": lambda *given, **how: sdpa_attention_forward(*given, **how),
    "an object": Attends(),
    "a partial one": functools.partial(Attends(), scaling=0.1),
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize("name", ["mine", "sdpa", "eager"])
def test_an_attention_function_of_a_users_own_is_not_replaced(name, own, monkeypatch):
    """kvlab's would take its place, whatever it computes."""
    model = kvlab.prepare(copy.deepcopy(tiny("llama")))
    caches = [kvlab.make_cache(model, "full") for _ in range(2)]
    for interface, function in ((AttentionInterface, own), (AttentionMaskInterface, sdpa_mask)):
        known = dict(interface._global_mapping)
        monkeypatch.setattr(interface, "_global_mapping", known | {name: function})
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=f"a function of .*test_wrapped, registered as '{name}'"):
        model(prompt(5), past_key_values=caches[0])
    monkeypatch.undo()
    model.set_attn_implementation("sdpa")
    for cache in caches:
        assert model(prompt(5), past_key_values=cache).logits.isfinite().all()


def save_of_packed_weights():
    model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(tiny("llama")), {nn.Linear}, torch.qint8)
    begun(model, "h2o:budget=8", prompt(20)).cache.save("nowhere")


LLAMA = tiny("llama")
REFUSED = [
    ("the method decides where tokens are", lambda: begun(LLAMA, "full", prompt(5)).cache.offload(0)),
    ("the method decides where tokens are", lambda: begun(LLAMA, "full", prompt(5)).cache.prefetch(0)),
    ("the cache of this layer is gone", lambda: begun(LLAMA, "full", prompt(5)).cache.layers[0].keys),
    ("caches latents", lambda: begun(kvlab.prepare(family("DeepSeek-V3")), "full").cache.layers[0].keys),
    ("prefix", lambda: begun(LLAMA, "full").cache.max_cache_len),
    ("^a model whose weights are packed, .* has no digest", save_of_packed_weights),
    (
        "^use_cache=False beside a cache that holds tokens",
        lambda: LLAMA.generate(prompt(9), past_key_values=begun(LLAMA, "full").cache, use_cache=False),
    ),
]


@pytest.mark.parametrize("says, ask", REFUSED, ids=[says for says, _ in REFUSED])
def test_what_a_cache_cannot_do_is_said(says, ask):
    with pytest.raises((ValueError, AttributeError, RuntimeError), match=says):
        ask()


def test_a_cache_whose_model_is_gone_says_so(tmp_path):
    model = copy.deepcopy(tiny("llama"))
    cache = begun(model, "h2o:budget=8", prompt(20)).cache
    del model
    gc.collect()
    for call in (
        lambda: cache.save(tmp_path / "cache.safetensors"), lambda: cache.layers[0].keys,
        lambda: kvlab.Stepper(tiny("llama"), cache),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^this cache was made for another model that is gone"):
            call()


def test_a_cache_inside_transformers_pair_for_encoders_is_refused_and_stays_whole():
    model, ids = tiny("llama"), prompt(20)
    for spec in ("full", "h2o:budget=8", "kvzip:budget=8", "int4"):
        cache = kvlab.make_cache(model, spec)
        for pair in ((cache, DynamicCache()), (DynamicCache(), cache)):
            for call in (model, partial(model.generate, max_new_tokens=2)):
                with pytest.raises(ValueError, match="inside an EncoderDecoderCache: pass the cache itself"):
                    call(ids, past_key_values=EncoderDecoderCache(*pair))
        right = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 5)
        assert torch.equal(kvlab.decode(model, ids, cache, 5).tokens, right.tokens)


@pytest.mark.parametrize("seed", range(6))
def test_layers_taken_out_or_used_twice_are_refused_until_the_configuration_says_so(seed):
    draw = random.Random(seed)
    model = copy.deepcopy(tiny("llama", num_hidden_layers=5))
    left = draw.choice([draw.sample(range(5), 3), sorted(draw.sample(range(5), 4)), [0, 1, 1, 2, 3, 4]])
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layers[k] for k in left)
    for spec in (
        "full", "h2o:budget=8", "offload:link=1e9", "kvzip:budget=9",
        "expected", "kvquant", "shadowkv", "sinks:budget=8,renumber=true",  # which undo rotations
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"set config\.num_hidden_layers and each attention's layer_idx"):
            begun(model, spec, prompt(20))
    if len(set(left)) < len(left):
        return
    model.config.num_hidden_layers = len(left)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    with torch.no_grad():
        right = tiny("llama", "sdpa", num_hidden_layers=5)
        right = copy.deepcopy(right)
        right.config.num_hidden_layers = len(left)
        right.model.layers = nn.ModuleList(right.model.layers[k] for k in left)
        want = right(prompt(20), use_cache=False).logits
    for spec in ("full", "offload:link=1e9"):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        found = torch.cat(
            [stepper.feed(prompt(20)[:, :15]), *(stepper.feed(prompt(20)[:, [at]]) for at in range(15, 20))],
            1,
        )
        assert (found - want).abs().max() < 1e-3


@pytest.mark.parametrize("spec", EACH)
def test_a_layer_shows_its_keys_and_values_as_transformers_does(spec):
    model = tiny("llama")
    cache = kvlab.make_cache(model, spec)
    if not cache.layers or not hasattr(cache.layers[0], "slot_positions"):
        return
    assert cache.layers[0].keys is None and cache.layers[0].values is None
    stepper = kvlab.Stepper(model, cache)
    for tokens in (20, 1, 1):
        stepper.feed(prompt(tokens, 2))
        for layer in cache.layers:
            shape = (*layer.slot_positions.shape, layer.shape.head_dim)
            if spec.startswith("shadowkv"):
                with pytest.raises(AttributeError, match="ShadowKV holds keys in parts of its own"):
                    _ = layer.keys
                continue
            assert layer.keys.shape == layer.values.shape == shape and layer.keys.isfinite().all()
            layer.keys.zero_()  # what is written to it is lost
            assert layer.keys.any()
    cache.stats()


class Sees(type(tiny("llama"))):
    """A model that takes pictures."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, pixel_values=None, **kwargs):
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **kwargs)


def test_a_prompt_with_pictures_is_not_read_again():
    model = Sees(tiny("llama").config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    pictures, cache = {"pixel_values": torch.zeros(1, 3, 4, 4)}, kvlab.make_cache(model, "kvzip")
    for more in (
        pictures,
        {"token_type_ids": torch.zeros(1, 20)},
        pictures | {"attention_mask": None},
    ):
        name = next(iter(more))
        with pytest.raises(ValueError, match=f"KVzip reads the prompt again, .* it cannot read {name}$"):
            model(prompt(20), past_key_values=cache, **more)
        cache.reset()
    model(prompt(20), past_key_values=kvlab.make_cache(model, "h2o"), **pictures)
    model(prompt(20), attention_mask=torch.ones(1, 20), past_key_values=cache, pixel_values=None)
    cache.reset()
    assert kvlab.decode(model, prompt(20), cache, 3)

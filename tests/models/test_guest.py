"""A model that kvlab has touched computes what it did before, in every pass that carries no kvlab cache."""

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from families.models import family
from tiny import interrupt
from transformers import DynamicCache, QuantizedCache, StaticCache

import kvlab
from kvlab.attention import recorded

NAMES = ("Llama", "OPT", "GPT-2", "GPT-NeoX", "Gemma 3", "Mistral", "Qwen3-MoE", "Phi-3")
IDS = torch.randint(2, 96, (2, 24), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :5] = 0
SAID = {
    "attention_mask": MASK, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0,
    "disable_compile": True,
}  # fmt: skip


def refused(model) -> None:
    with pytest.raises(ValueError, match="group"):
        kvlab.make_cache(model, "int8:group=7")


def used(model) -> None:
    model.generate(IDS, past_key_values=kvlab.make_cache(model, "h2o:budget=8"), **SAID)


def broken(model) -> None:
    """A pass is left half-way, as Ctrl-C leaves it: no hook hears of it."""
    last = list(model.modules())[-1]
    with last.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        model(IDS, past_key_values=kvlab.make_cache(model, "full"))


def looked_at(model) -> None:
    recorded(kvlab.prepare(model), IDS)


TOUCHES = {
    "prepared": kvlab.prepare, "made": lambda model: kvlab.make_cache(model, "full"), "refused": refused,
    "used": used, "broken": broken, "looked at": looked_at,
}  # fmt: skip
PAIRS = [  # every way with the first two, the others in turn
    (name, way) for i, name in enumerate(NAMES) for j, way in enumerate(TOUCHES) if i < 2 or (i + j) % 6 < 2
]


def seeded(run, model):
    torch.manual_seed(11)
    return run(model)


@torch.no_grad()
def passes(model) -> dict:
    """Everything that people do with a model and no kvlab cache, as tensors."""
    config, found = model.config, {}
    found["no cache"] = model(IDS, attention_mask=MASK, use_cache=False).logits
    for name, make in {
        "dynamic": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=40),
        "quantized": lambda: QuantizedCache("fp8", config),
    }.items():
        try:
            cache = make()
            parts = IDS.split([15, 1, 8], 1)
            found[name] = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
        except Exception as error:  # transformers' own, for the untouched model as well
            found[name] = str(error)
    found["generated"] = model.generate(IDS, **SAID)
    found["static generated"] = model.generate(IDS, cache_implementation="static", **SAID)
    found["beams"] = model.generate(IDS, num_beams=3, **SAID)
    return found


def attentions(model):
    return torch.cat([each.flatten() for each in model(IDS, output_attentions=True).attentions])


def trained(model):
    model.train()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.eval().zero_grad()
    return torch.cat([loss.detach()[None], found])


def equal(found, expected) -> bool:
    return found == expected if isinstance(expected, str) else torch.equal(found, expected)


@pytest.mark.parametrize("name, way", PAIRS)
def test_a_touched_model_computes_what_it_did(name, way):
    touch, plain = TOUCHES[way], family(name, attention_dropout=0.5)
    for attention in ("sdpa", "eager"):
        plain.set_attn_implementation(attention)
        ours = copy.deepcopy(plain)
        touch(ours)
        assert ours.config._attn_implementation == attention
        found = passes(ours)
        assert all(equal(found[what], expected) for what, expected in passes(plain).items())
        assert torch.equal(seeded(trained, ours), seeded(trained, plain))
        touch(ours)
    assert torch.equal(attentions(ours), attentions(plain))
    for each in (ours, plain):
        each.set_attn_implementation("sdpa")
    assert torch.equal(passes(ours)["no cache"], passes(plain)["no cache"])
    used(ours)


def test_touching_leaves_the_random_numbers_and_the_mode_alone():
    model = family("GPT-2", attn_pdrop=0.5).train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    kvlab.make_cache(model, "h2o")
    assert torch.equal(torch.rand(3), expected) and model.training


def test_copies_and_files_of_a_touched_model_are_those_of_any_model(tmp_path):
    plain = family("Gemma 3")
    ours = kvlab.prepare(copy.deepcopy(plain))
    assert isinstance(ours.config, type(plain.config)) and ours.config == plain.config
    assert type(copy.deepcopy(ours).config) is type(plain.config)
    assert type(pickle.loads(pickle.dumps(ours.config))) is type(plain.config)
    assert ours.config.to_dict() == plain.config.to_dict()
    ours.save_pretrained(tmp_path / "ours"), plain.save_pretrained(tmp_path / "plain")
    files = [(tmp_path / which / "config.json").read_text() for which in ("ours", "plain")]
    assert files[0] == files[1]
    other = type(plain).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert torch.equal(other(IDS).logits, plain(IDS).logits)


def test_models_that_share_a_configuration_attend_each_in_its_own_way():
    one = family("Llama")
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())
    expected = other(IDS, output_attentions=True)
    cache = kvlab.make_cache(one, "full")

    def beside(module, args, kwargs):
        """Another model works while a pass with a cache runs, and so does the same one without."""
        hook.remove()
        found.extend((other(IDS, output_attentions=True), one(IDS, output_attentions=True)))

    found, hook = [], one.lm_head.register_forward_pre_hook(beside, with_kwargs=True)
    kvlab.prepare(other)
    one(IDS[:, :20], past_key_values=cache)
    last = one(IDS[:, 20:], past_key_values=cache).logits
    assert (last - expected.logits[:, 20:]).abs().max() < 1e-5
    for each in found:
        assert torch.equal(each.logits, expected.logits) and torch.equal(
            each.attentions[0], expected.attentions[0]
        )


def first_blocks_of(model, count: int):
    """A model of the first blocks of another one, which both use: a draft, or an early exit."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    made = type(model)(config).eval()
    made.load_state_dict(model.state_dict(), strict=False)
    made.model.layers = torch.nn.ModuleList(model.model.layers[:count])
    return made


@pytest.mark.parametrize("spec", ["full", "h2o:budget=8", "infinigen:budget=8", "kvquant", "padded"])
def test_models_that_share_blocks_attend_each_in_its_own_way(spec):
    whole, apart = family("Llama"), family("Llama")
    models, alone = (whole, first_blocks_of(whole, 2)), (apart, first_blocks_of(copy.deepcopy(apart), 2))
    written = [kvlab.decode(one, IDS[:1], kvlab.make_cache(one, spec), 4).logprobs for one in alone]
    caches = [kvlab.make_cache(one, spec) for one in models]
    for one, cache, expected in zip(models, caches, written, strict=True):
        assert torch.equal(kvlab.decode(one, IDS[:1], cache, 4).logprobs, expected)


def test_other_threads_do_not_notice():
    model = family("Llama")
    expected, wrong = model.generate(IDS, **SAID), []

    def work() -> None:
        for _ in range(12):
            if not torch.equal(model.generate(IDS, **SAID), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for method in ("full", "h2o:budget=1", "infinigen", "infinigen:variant=official-speed") * 3:
        said = model.generate(IDS, past_key_values=kvlab.make_cache(model, method), **SAID)
        assert torch.equal(said, expected) or "infinigen" in method
    for each in threads:
        each.join()
    assert not wrong


def test_a_touched_model_still_compiles_as_one_graph():
    plain = family("Llama")
    ours = copy.deepcopy(plain)
    used(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = StaticCache(config=ours.config, max_cache_len=32)
        assert torch.equal(
            compiled(IDS, past_key_values=cache).logits,
            ours(IDS, past_key_values=StaticCache(config=ours.config, max_cache_len=32)).logits,
        )


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "DeepSeek-V3"])
def test_what_a_cache_cannot_give_is_refused_in_one_line(name):
    model = family(name, attention_dropout=0.5)
    if name == "GPT-2":
        model = family(name, attn_pdrop=0.5)
    cache = kvlab.make_cache(model, "full")
    with pytest.raises(ValueError, match=r"^output_attentions: a kvlab cache returns no attention weights"):
        model(IDS, past_key_values=cache, output_attentions=True)
    with pytest.raises(ValueError, match=r"^attention dropout of 0\.5: .* call model.eval"):
        model.train()(IDS, past_key_values=cache)
    if name != "DeepSeek-V3":
        model.activation_checkpointing_enable()
        with pytest.raises(ValueError, match=r"^gradient checkpointing takes a cache away"):
            model(IDS, past_key_values=cache)
    model.eval()
    cache.reset()
    blocks = [part for part in model.modules() if getattr(part, "is_causal", False)]
    blocks[0].is_causal = False
    with pytest.raises(ValueError, match=r"\.is_causal is False: a kvlab cache is for attention to earlier"):
        model(IDS, past_key_values=cache)
    blocks[0].is_causal = True
    cache.reset()
    last = model(IDS[:, :8], past_key_values=cache, logits_to_keep=torch.tensor([0, 7])).logits
    assert (last - model(IDS[:, :8], use_cache=False).logits[:, [0, 7]]).abs().max() < 1e-4
    asked = model.get_input_embeddings()(IDS[:, 8:]).detach().requires_grad_()
    out = model(inputs_embeds=asked, past_key_values=cache).logits
    assert (out - model(IDS, use_cache=False).logits[:, 8:]).abs().max() < 1e-4
    with pytest.raises(RuntimeError, match=r"^a kvlab cache keeps numbers and no graph"):
        out.sum().backward()


def test_a_copied_layer_attends_as_the_others_do():
    """It has a configuration of its own, before the model is prepared or since."""
    model = family("Llama")
    for _ in range(2):
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
        model.config.num_hidden_layers = len(model.model.layers)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = index
        expected = model(IDS, use_cache=False).logits
        found = model(IDS, past_key_values=kvlab.make_cache(model, "full")).logits
        assert (found - expected).abs().max() < 1e-5
        assert torch.equal(model(IDS, use_cache=False).logits, expected)


def test_looks_leave_a_rotary_embedding_that_follows_the_length_as_it_was():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain = family("Llama", max_position_embeddings=32, rope_parameters=rope)
    long = torch.randint(2, 96, (1, 60), generator=torch.Generator().manual_seed(4))
    for method in ("full", "sinks:budget=16,renumber=true", "shadowkv"):
        ours, other = copy.deepcopy(plain), copy.deepcopy(plain)
        for ids in (IDS, long[:, :40], long):
            assert torch.equal(ours(ids).logits, other(ids).logits)
            with contextlib.suppress(ValueError):
                kvlab.make_cache(ours, method)
            looked_at(ours)
            assert torch.equal(ours(IDS).logits, other(IDS).logits)

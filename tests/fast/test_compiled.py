"""The compiled engine says what the eager one says, with every method; or that it cannot, and is eager."""

import copy
import inspect
import pickle
import random
import warnings

import pytest
import torch
from fast.stepped import arrays, decoded, read_in_place
from tiny import EACH, SAME, begun, interrupt, prompt, tiny
from transformers import Ministral3Config, Ministral3ForCausalLM

import kvlab
from kvlab.fast.compiled import compiled, engine_of
from kvlab.measure.timeline import record

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def pair(family="llama", **changes):
    """A model, and a copy of it that decodes by the compiled engine."""
    eager = tiny(family, **changes)
    return eager, compiled(copy.deepcopy(eager))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_eagers(family, steps):
    eager, fast = pair(family)
    assert (engine_of(eager), engine_of(fast)) == ("eager", "compiled")
    most = fast.forward.body.rows
    more = f"compiled, eager above {most} rows"
    assert [engine_of(one, most + 1) for one in (eager, fast)] == ["eager", more]
    assert most == 8 and engine_of(fast, most) == "compiled"
    for prompts in ([prompt(12)], [prompt(12), prompt(12, seed=3)]):
        found, expected = (decoded(model, "full", prompts) for model in (fast, eager))
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(steps) == 2 * (6 + 2)


@pytest.mark.usefixtures("one_thread")
def test_a_layer_with_a_window_does_not_see_beyond_it():
    """The prompt is longer than the window; a model of Llama's shape that has one decodes eagerly."""
    with pytest.warns(UserWarning, match="eager engine: its layers see by a rule of their own"):
        eager, fast = pair("mistral", sliding_window=8)
    assert engine_of(fast) == "eager"
    open_to_all = pair("mistral", sliding_window=64)[1]
    for spec in ("full", "int8", "h2o:budget=6", "topk:budget=3"):
        found, expected, seen = (decoded(one, spec, [prompt(21)]) for one in (fast, eager, open_to_all))
        assert (found - expected).norm() <= (1e-4 if spec == "full" else 0.02) * expected.norm(), spec
        assert (found - seen).norm() > 0.05 * seen.norm(), "the window counts"


@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_neox"])
def test_a_model_of_another_shape_decodes_eagerly_and_one_line_says_so(family):
    model = copy.deepcopy(tiny(family))
    with pytest.warns(UserWarning, match="eager engine: it is no Llama-shaped model") as said:
        assert compiled(model) is model
    assert engine_of(model) == "eager" and len(said) == 1 and "\n" not in str(said[0].message)


@pytest.mark.parametrize("spec", EACH)
def test_every_method_works_through_it_also_in_a_padded_batch(spec, steps):
    """Codes and choices are made of numbers that differ in their last digit, so of what gives something up a
    code may be another one."""
    eager, fast = pair()
    prompts = [prompt(23, seed=1), prompt(14, seed=2)]
    found, expected = (decoded(model, spec, prompts) for model in (fast, eager))
    limit = 1e-4 if spec in SAME.values() else 0.02
    assert (found - expected).norm() <= limit * expected.norm()
    speculates = spec.startswith("infinigen")
    assert len(steps) == (0 if speculates or spec == "recompute" else 8)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_says_the_same(beams, steps):
    eager, fast = pair()
    how = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    said = [
        model.generate(prompt(9), past_key_values=kvlab.make_cache(model, "full"), **how)
        for model in (eager, fast)
    ]
    assert torch.equal(*said) and len(steps) == 11
    assert inspect.signature(eager.forward) == inspect.signature(fast.forward)


def test_a_model_that_scales_queries_by_their_position_is_not_taken_for_a_llama():
    """Ministral 3 looks like one, and is one up to the length that it was first trained on."""
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
    rope |= {"llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "head_dim": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = Ministral3Config(**sizes, initializer_range=0.2, eos_token_id=None, rope_parameters=rope)
    eager = kvlab.prepare(Ministral3ForCausalLM(config).eval())
    with pytest.warns(UserWarning, match="eager engine"):
        fast = compiled(copy.deepcopy(eager))
    assert engine_of(fast) == "eager"
    for tokens in (5, 30, 60):
        found, expected = (decoded(model, "full", [prompt(tokens)]) for model in (fast, eager))
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@torch.no_grad()
def test_positions_of_any_size(steps):
    """Where a table of rotations ends, before the first one, rows far apart."""
    eager, fast = pair(max_position_embeddings=4096)
    found = []
    for model in (eager, fast):
        cache = begun(model, "full", prompt(9, 2)).cache
        for positions in ([9, 9], [-1, -2], [1023, 1024], [5, 3000], [1024, 1500], [2047, 2047]):
            at = torch.tensor(positions)[:, None]
            found.append(model(prompt(1, 2), past_key_values=cache, position_ids=at).logits)
    assert len(steps) == 6
    for one, other in zip(found[:6], found[6:], strict=True):
        assert (one - other).abs().max() <= 1e-4 * one.abs().max()


def test_weights_are_held_once_and_read_where_they_are(steps):
    eager, fast = pair()
    body, layer = fast.forward.body, fast.model.layers[1]
    assert len(arrays(body)) > 9 * len(fast.model.layers) and read_in_place(fast)
    with torch.no_grad():  # in place, and by another tensor
        for model in (eager := copy.deepcopy(eager), fast):
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
            model.model.layers[2].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight * 0.5
    found, expected = (decoded(model, "full", [prompt(12)]) for model in (fast, eager))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(steps) == 8 and fast.forward.body is not body and layer is fast.model.layers[1]
    fast.double()
    with pytest.warns(UserWarning, match="decodes with the eager engine: it compiles models in fp32"):
        decoded(fast, "full", [prompt(12)])
    assert len(steps) == 8, "fp64 is not compiled"


def test_two_models_in_one_process_and_a_copy_of_one(steps):
    _, first = pair()
    _, second = pair("llama", num_hidden_layers=2)
    twin = copy.deepcopy(first)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.mul_(3)
    for model in (first, second, twin, first):
        found = decoded(model, "full", [prompt(12)])
        plain = copy.deepcopy(model)
        del plain.forward
        assert (found - decoded(plain, "full", [prompt(12)])).abs().max() <= 1e-4 * found.abs().max()
    assert len(steps) == 4 * 8
    with pytest.raises(TypeError, match="save_pretrained"):
        pickle.dumps(first)


@pytest.mark.parametrize("family, weights", [("llama", "fp32"), ("qwen2", "int8")])
def test_a_plain_call_is_a_compiled_step(family, weights, steps):
    """Without no_grad around it; qwen2's biases are fp32 among narrow weights."""
    fast = compiled(copy.deepcopy(tiny(family)), weights)
    cache = kvlab.make_cache(fast, "full")
    fast(prompt(5), past_key_values=cache)
    assert not fast(prompt(1), past_key_values=cache).logits.requires_grad and len(steps) == 1


@pytest.mark.parametrize("part", ["", "lm_head"])
def test_gradients_that_are_asked_for_are_the_eager_ones(part, steps):
    """Of a head alone; through what a cache gave there are none, and the whole model is told so."""
    found = []
    for model in map(copy.deepcopy, pair()):
        model.requires_grad_(False).get_submodule(part).requires_grad_()
        cache = kvlab.make_cache(model, "full")
        model(prompt(5), past_key_values=cache)
        logits = model(prompt(1), past_key_values=cache).logits
        if not part:
            with pytest.raises(RuntimeError, match="no gradient goes through it"):
                logits[0, -1, 3].backward()
            continue
        logits[0, -1, 3].backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert not steps and len(found) == (2 if part else 0)
    for eager, fast in [found] if part else []:
        assert eager.keys() == fast.keys() == {"lm_head.weight"}
        difference = (fast["lm_head.weight"] - eager["lm_head.weight"]).abs().max()
        assert difference <= 1e-4 * eager["lm_head.weight"].abs().max()


def test_what_is_no_step_of_its_own_goes_through_the_models_modules(steps):
    fast = pair()[1].requires_grad_()
    stepper = kvlab.Stepper(fast, cache := kvlab.make_cache(fast, "full"))
    stepper.feed(prompt(5))
    stepper.feed(prompt(2))
    fast(prompt(5))  # no cache
    fast(prompt(1), past_key_values=cache)  # a graph is wanted
    with torch.no_grad():
        fast(prompt(1), past_key_values=cache, output_hidden_states=True)
        fast(inputs_embeds=torch.randn(1, 1, 32), past_key_values=cache)
        hook = fast.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="eager engine: a hook is on a module of it"):
            fast(prompt(1), past_key_values=cache)
        hook.remove()
    decoded(fast, "full", [prompt(6, seed=seed) for seed in range(9)], count=0)  # then two rows: two steps
    assert len(steps) == 2
    with torch.no_grad():
        fast(prompt(1), past_key_values=cache)
    assert any(given is cache for given in steps.pop().values())
    with record(fast, timed := kvlab.make_cache(fast, "full")):
        kvlab.decode(fast, prompt(5), timed, 3)
    assert len(steps) == 2


def test_nan_does_not_vanish():
    _, fast = pair()
    with torch.no_grad():
        fast.model.layers[2].mlp.gate_proj.weight[3, 5] = torch.nan
    stepper = kvlab.Stepper(fast, kvlab.make_cache(fast, "full"))
    with pytest.raises(ValueError, match=r"gate_proj.weight' holds NaN"):
        stepper.feed(prompt(5))
    with torch.no_grad():
        fast.model.layers[2].mlp.gate_proj.weight[3, 5] = 0
        stepper.cache.reset()
        (stepper := kvlab.Stepper(fast, stepper.cache)).feed(prompt(5))
        fast.model.layers[2].mlp.gate_proj.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"gate_proj.weight' holds NaN"):
        stepper.feed(prompt(1))


def test_a_pass_that_breaks_off_leaves_a_broken_cache(monkeypatch):
    _, fast = pair()
    stepper = kvlab.Stepper(fast, cache := kvlab.make_cache(fast, "full"))
    stepper.feed(prompt(5))
    monkeypatch.setattr(cache.layers[2], "attend", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stepper.feed(prompt(1))
    assert cache.broken
    with pytest.raises(ValueError, match="made for another model"), torch.no_grad():
        pair("qwen2")[1](prompt(1), past_key_values=kvlab.make_cache(fast, "full"))


def test_load_takes_an_engine():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine_of(kvlab.load(engine="compiled")[0]) == "compiled"
        assert engine_of(kvlab.load()[0]) == "eager"
    with pytest.raises(ValueError, match="engine='fast': expected one of eager, compiled, graph"):
        kvlab.load(engine="fast")


@pytest.mark.parametrize("spec", EACH)
def test_turns_and_steps_in_any_mode(spec, steps):
    """Buffers that grow in a compiled step are written to by a later turn, which is none."""
    modes = (torch.no_grad, torch.inference_mode, torch.inference_mode, torch.enable_grad)
    model, dice = pair(head_dim=32, max_position_embeddings=512)[1].requires_grad_(False), random.Random(spec)
    drawn, found = [dice.choice(modes) for _ in range(12)], []
    for each in ([torch.no_grad] * 12, drawn, [torch.inference_mode] * 12):
        told = []
        with each[0]():
            stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        for at, mode in enumerate(each):
            with mode():
                try:
                    told.append(stepper.feed(prompt({0: 40, 6: 4}.get(at, 1), 1, at), last=True).clone())
                except ValueError as error:  # a turn that the method refuses
                    told.append(str(error))
        found.append(told)
    for one in found[1:]:
        for a, b in zip(one, found[0], strict=True):
            assert a == b if isinstance(a, str) else torch.equal(a, b), drawn

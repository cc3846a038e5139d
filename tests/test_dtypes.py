"""Dtypes: every method in each of them, under autocast that comes and goes, and a cache is of one."""

import copy
import random

import pytest
import torch
from every import LINKED
from families.models import family
from families.profiles import profiled
from tiny import EACH, SAME, begun, prompt, rounds, tiny

import kvlab
from kvlab.faster import compiled, lodger

MORE = [
    "int4:sinks=3", "int8:smooth=0.5,sinks=2", "int8:sinks=80", "mixed:k=full,v=int4",
    "quest:digest=centre,budget=4,page=2",
]  # fmt: skip


@pytest.mark.parametrize("spec", [*EACH, *MORE])
def test_under_autocast_every_method_is_what_it_is_within_bf16(spec):
    """Also where it comes and goes between passes."""
    model, found = tiny("llama", num_hidden_layers=4), []
    for on in ((False,) * 4, (True,) * 4, (False, True, False, True), (True, False, True, False)):
        stepper, logits = kvlab.Stepper(model, kvlab.make_cache(model, spec)), []
        for step, enabled in enumerate(on):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits.append(stepper.feed(prompt(1 if step else 20, 2, step), last=True))
        stepper.cache.stats()
        found.append(torch.stack(logits))
    for cast in found[1:]:
        assert cast.isfinite().all()
        # what is chosen, and which code is nearest, may fall otherwise in bf16
        assert float((found[0] - cast).norm() / found[0].norm()) < 0.5


@pytest.mark.parametrize(
    "spec", ["full", "int8", "h2o:budget=8", "snapkv:budget=8", "topk:budget=0.5", "kivi2"]
)
def test_q_k_and_v_of_several_dtypes_are_one_line(spec):
    for at in range(2):  # in the prompt, or in a later step
        model = copy.deepcopy(tiny("llama"))
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        with pytest.raises(ValueError, match=r"^layer 1: q, k and v are of torch.bfloat16, torch.float32: "):
            for step in range(3):
                if step == at:
                    given = model.model.layers[1].self_attn.v_proj
                    given.register_forward_hook(lambda module, args, out: out.bfloat16())
                stepper.feed(prompt(20 if step == 0 else 1, 2, step))


@pytest.mark.parametrize("spec", [*EACH, *LINKED])
def test_every_method_steps_in_bf16_and_fp16_where_kernels_read(spec):
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny("llama", dtype=dtype, head_dim=32)
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        found = [stepper.feed(prompt(20, 2), last=True)]
        found += [stepper.feed(prompt(1, 2, step), last=True) for step in range(4)]
        assert torch.stack(found).isfinite().all()


@pytest.mark.parametrize("spec", [spec for spec in EACH if not rounds(spec)])
def test_large_keys_in_fp64_cost_no_digits(spec):
    """A score of 10**5 in fp32 is off by .004, and so is what is made of it."""
    draw = random.Random(spec)
    model = copy.deepcopy(tiny(draw.choice(("llama", "mistral", "qwen3")), "sdpa")).double()
    for layer in model.model.layers:
        getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj).weight.data *= draw.choice((100, 3e4))
    ids = prompt(24, 2, seed=draw.randrange(99))
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
    pieces = [ids[:, :20], *ids[:, 20:].split(1, 1)] if spec in SAME.values() else [ids]
    found = torch.cat([stepper.feed(piece) for piece in pieces], 1)
    assert (found - right).abs().max() < 1e-5


@pytest.mark.parametrize("spec", [spec for spec in (*EACH, *LINKED) if spec != "recompute"])
def test_a_cache_is_of_one_dtype(spec):
    """Else some methods would go on with rounded keys, and others end with torch's own error."""
    draw = random.Random(spec)
    first, later = draw.sample((torch.float32, torch.bfloat16, torch.float64), 2)
    model = copy.deepcopy(tiny("llama")).to(first)
    stepper = begun(model, spec, prompt(20, 2), prompt(1, 2))
    model.to(later)
    with pytest.raises(ValueError, match=r"layer 0: K is torch\.\w+, but the cache was filled in torch\.\w+"):
        stepper.feed(prompt(draw.choice((1, 3)), 2))


@pytest.mark.parametrize("name", ["Llama", "DeepSeek-V3"])
@pytest.mark.parametrize("spec", ["full", "int8", "h2o:budget=5", "kivi2:group=4,recent=4"])
@pytest.mark.parametrize("by_autocast", [True, False], ids=["autocast", "the model"])
def test_a_dtype_that_changes_between_pieces_is_right_or_one_line(name, spec, by_autocast):
    wide, narrow = torch.float32, torch.bfloat16
    for first, later in ((wide, narrow), (narrow, wide)):
        model = kvlab.prepare(copy.deepcopy(family(name)))
        model.set_experts_implementation("eager")  # transformers' own knows one dtype
        cache = kvlab.make_cache(model, spec)
        try:
            for dtype, fed in ((first, prompt(20, 2)), (later, prompt(9, 2, seed=1)), (later, prompt(1, 2))):
                model.to(wide if by_autocast else dtype)
                with torch.autocast("cpu", narrow, enabled=by_autocast and dtype == narrow):
                    assert model(fed, past_key_values=cache).logits.isfinite().all()
        except ValueError as error:
            assert "was filled in torch." in str(error) and not by_autocast
        else:
            assert by_autocast


@pytest.mark.parametrize("spec", EACH)
def test_torchs_default_dtype_and_device_change_nothing(spec):
    model, ids = tiny("llama"), prompt(30)
    for one in (model, *([compiled(copy.deepcopy(model))] if lodger() else [])):
        right = kvlab.decode(one, ids, kvlab.make_cache(one, profiled(spec, one)), 4)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")  # a tensor made there without a word has no numbers
        try:
            found = kvlab.decode(one, ids, kvlab.make_cache(one, profiled(spec, one)), 4)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        assert torch.equal(found.logprobs, right.logprobs)

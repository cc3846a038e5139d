"""Every method at the setting where it must equal the full cache, on every family."""

import functools

import pytest
import torch
from families import profiles
from families.profiles import profiled
from tiny import EACH, FAMILIES, LOSSY, NEUTRAL, falcon, left_padded, prompt, refused, rounds, tiny
from transformers import DynamicCache

import kvlab

pytestmark = pytest.mark.uncounted

STEPS = 8


def in_turn(specs, families: int) -> list[tuple[str, str]]:
    """Every setting with so many families, all of them in turn; every method meets every family in
    tests/families, padded as well."""
    names = list(FAMILIES)
    return [(spec, names[(3 * i + j) % len(names)]) for i, spec in enumerate(specs) for j in range(families)]


@functools.cache
def reference(family: str):
    """Greedy tokens of a prompt and their log-probabilities, from transformers and its own attention."""
    model, ids = tiny(family, "sdpa"), prompt(21, rows=2)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        do_sample=False,
        past_key_values=DynamicCache(),
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(out.logits, 1).float().log_softmax(-1)
    return tokens, logprobs.gather(2, tokens[..., None])[..., 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", NEUTRAL + profiles.NEUTRAL)
def test_equals_transformers(family, spec):
    model, ids = tiny(family), prompt(21, rows=2)
    if refused(model, spec):
        return
    spec = profiled(spec, model)
    trace = kvlab.decode(model, ids, kvlab.make_cache(model, spec), STEPS)
    tokens, logprobs = reference(family)
    assert torch.equal(trace.tokens, tokens)
    assert torch.allclose(trace.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("spec, family", in_turn(NEUTRAL + LOSSY + profiles.NEUTRAL + profiles.LOSSY, 2))
def test_padded_batch_equals_each_row_alone(spec, family):
    # Coarse formats turn a difference in the last digit of fp32 into a whole step of theirs, so those are
    # compared where the last digit is far away.
    model = tiny(family, dtype=torch.float64 if rounds(spec) else torch.float32)
    if refused(model, spec):
        return
    spec = profiled(spec, model)
    prompts = [prompt(tokens, seed=tokens) for tokens in (17, 5, 30)]
    ids, mask = left_padded(prompts)
    together = kvlab.decode(model, ids, kvlab.make_cache(model, spec), STEPS, attention_mask=mask)
    for row, one in enumerate(prompts):
        alone = kvlab.decode(model, one, kvlab.make_cache(model, spec), STEPS)
        assert torch.equal(together.tokens[row], alone.tokens[0])
        assert torch.allclose(together.logprobs[row], alone.logprobs[0], atol=1e-4)


@pytest.mark.parametrize("spec, family", in_turn(sorted({*EACH, *LOSSY, *profiles.LOSSY} - {"recompute"}), 2))
def test_generate_takes_the_cache(spec, family):
    model = tiny(family)
    if refused(model, spec):
        return
    spec = profiled(spec, model)
    ids, mask = left_padded([prompt(14), prompt(9, seed=3)])
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=kvlab.make_cache(model, spec),
        max_new_tokens=STEPS,
        do_sample=False,
    )
    trace = kvlab.decode(model, ids, kvlab.make_cache(model, spec), STEPS, attention_mask=mask)
    assert torch.equal(out[:, ids.shape[1] :], trace.tokens)


def test_lossy_settings_do_change_something():
    """Otherwise the tests above would pass for a method that does nothing."""
    model, ids = tiny("llama"), prompt(40, rows=2)
    full = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), STEPS).logprobs
    for spec in LOSSY + profiles.LOSSY:
        cache = kvlab.make_cache(model, profiled(spec, model))
        logprobs = kvlab.decode(model, ids, cache, STEPS).logprobs
        assert torch.allclose(logprobs[:, 0], full[:, 0], atol=1e-5)  # the prompt attends to itself as it is
        assert not torch.allclose(logprobs[:, 1:], full[:, 1:], atol=1e-6), spec


@pytest.mark.parametrize("chunks", [(40,), (1, 39), (13, 20, 7)])
def test_feeding_in_chunks_equals_one_pass(chunks):
    model, ids = tiny("llama"), prompt(40, rows=2)
    whole = kvlab.Stepper(model, kvlab.make_cache(model, "recompute")).feed(ids)
    for spec in ("full", "static", "topk:budget=1", "h2o:budget=1"):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        parts = [stepper.feed(part) for part in ids.split(chunks, dim=1)]
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)


def test_sliding_window_is_honoured():
    changes = {"sliding_window": 6}
    ids = prompt(25, rows=2)
    ours = kvlab.decode(
        tiny("mistral", **changes), ids, kvlab.make_cache(tiny("mistral", **changes), "full"), STEPS
    )
    model = tiny("mistral", "sdpa", **changes)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(ours.tokens, theirs[:, 25:])


def test_right_padding_inside_the_cache_is_invisible():
    """A row that ends early in one pass goes on in the next as if the padding were not there."""
    model = tiny("llama")
    short, long, more = prompt(6), prompt(11, seed=1), prompt(4, rows=2, seed=2)
    ids = torch.cat([torch.cat([short, torch.ones(1, 5, dtype=torch.long)], 1), long])
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    for spec in ("full", "int8", "topk:budget=1"):
        both = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        both.feed(ids, mask)
        together = both.feed(more)
        for row, one in enumerate((short, long)):
            alone = kvlab.Stepper(model, kvlab.make_cache(model, spec))
            alone.feed(one)
            assert torch.allclose(together[row], alone.feed(more[row : row + 1])[0], atol=1e-4)


def test_a_family_without_the_attention_interface_is_refused():
    with pytest.raises(ValueError, match="FalconForCausalLM does not use transformers' attention interface"):
        kvlab.make_cache(falcon(), "full")


def test_low_precision_models_run():
    model = tiny("llama", dtype=torch.bfloat16)
    for spec in kvlab.FIRST_WAVE:
        trace = kvlab.decode(model, prompt(20), kvlab.make_cache(model, spec), 4)
        assert torch.isfinite(trace.logprobs).all()

"""Decoding: the trace, recompute, and every bad input in one clear line."""

import copy
import random

import pytest
import torch
from families.models import family
from tiny import begun, prompt, tiny

import kvlab
from kvlab.attention import recorded


def test_trace():
    model = tiny("llama")
    trace = kvlab.decode(model, prompt(10, rows=3), kvlab.make_cache(model, "full"), 5)
    assert trace.tokens.shape == trace.logprobs.shape == (3, 5)
    for name in ("ms", "device_bytes", "host_bytes", "moved_bytes", "tokens_held"):
        assert len(getattr(trace, name)) == 5
    assert trace.tokens_held == [10, 11, 12, 13, 14]
    growth = {b - a for a, b in zip(trace.device_bytes, trace.device_bytes[1:], strict=False)}
    assert growth == {2 * 3 * 2 * 8 * 4 * 3}  # one token: K and V, layers, heads, head dimension, fp32, rows


def test_recompute_feeds_everything_again():
    model, fed = tiny("llama"), []
    with model.model.embed_tokens.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1])):
        kvlab.decode(model, prompt(10), kvlab.make_cache(model, "recompute"), 4)
        assert fed == [10, 11, 12, 13]
        fed.clear()
        kvlab.decode(model, prompt(10), kvlab.make_cache(model, "full"), 4)
        assert fed == [10, 1, 1, 1]


def test_prompts_that_cannot_be():
    model = tiny("llama")

    def decode(ids, new=2, mask=None, spec="full"):
        return kvlab.decode(model, ids, kvlab.make_cache(model, spec), new, attention_mask=mask)

    for spec in ("full", "recompute", "h2o"):
        with pytest.raises(ValueError, match="context of 128"):
            decode(prompt(129), spec=spec)
        with pytest.raises(ValueError, match="129 tokens are more than the model's context of 128"):
            decode(prompt(120), new=10, spec=spec)
    assert decode(prompt(120), new=9).tokens.shape == (1, 9)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        decode(prompt(4), new=0)
    with pytest.raises(ValueError, match="no token at all"):
        decode(prompt(4, rows=2), mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    with pytest.raises(ValueError, match="static: 10 tokens do not fit into a buffer of length=8"):
        decode(prompt(10), spec="static:length=8")


@pytest.mark.parametrize("spec", ["full", "h2o:budget=6", "int4", "paged", "offload:link=1e9", "recompute"])
def test_what_is_refused_is_not_fed(spec):
    """Ids out of range, of another shape or kind, and masks that do not fit leave everything as it was."""
    model, ids = tiny("llama"), prompt(10, rows=2)
    stepper, right = (kvlab.Stepper(model, kvlab.make_cache(model, spec)) for _ in range(2))
    bad = [
        (torch.full((2, 1), 96), None, "96 is none of the model's 96 token ids"),
        (torch.full((2, 1), -1), None, "-1 is none of the model's 96 token ids"),
        (torch.zeros(2, 1), None, "expected whole numbers"),
        (torch.zeros(2, 0, dtype=torch.long), None, "not empty"),
        (torch.zeros(2, dtype=torch.long), None, "not empty"),
        (torch.zeros(2, 119, dtype=torch.long), None, "model's context of 128"),
        (torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 1), "attention_mask has shape"),
        (torch.zeros(2, 1, dtype=torch.long), torch.tensor([[1], [2]]), "expected 1 for real tokens and 0"),
    ]
    late = [(torch.zeros(3, 1, dtype=torch.long), None, "batch of 3 rows, but 2 were fed before")]
    for wrong, mask, says in bad[:5] + bad[-1:]:
        with pytest.raises(ValueError, match=says):
            stepper.feed(wrong, mask)
    with pytest.raises(ValueError, match="fork: no tokens were fed here"):
        stepper.fork(torch.tensor([0, 1, 1]))
    assert stepper.ids is None and stepper.cache.get_seq_length() == 0
    assert torch.equal(stepper.feed(ids), right.feed(ids))
    for wrong, mask, says in bad + late:
        with pytest.raises(ValueError, match=says):
            stepper.feed(wrong, mask)
        assert torch.equal(stepper.ids, ids) and not stepper.padded
    token = prompt(1, rows=2, seed=5)
    assert torch.equal(stepper.feed(token), right.feed(token))
    for used in (stepper.cache, copy.deepcopy(stepper.cache)):
        with pytest.raises(ValueError, match="fork: no tokens were fed here"):
            kvlab.Stepper(model, used).fork(torch.tensor([0, 1, 1]))
        assert len(used.lengths) == (0 if spec == "recompute" else 2)
    if spec in ("full", "int4"):
        stepper.cache.crop(-1)
        with pytest.raises(RuntimeError, match="has seen 10 tokens, but 11 were fed here"):
            stepper.fork(torch.tensor([0, 1, 1]))
        assert len(stepper.cache.lengths) == len(stepper.ids) == 2


def test_not_a_number_in_the_weights_is_named():
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(tiny("llama").config).eval()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"'model.layers.2.mlp.up_proj.weight' holds NaN"):
        kvlab.decode(model, prompt(5), kvlab.make_cache(model, "full"), 2)


@pytest.mark.parametrize("seed", range(12))
def test_ids_and_masks_of_any_kind_are_read_or_refused_in_one_line(seed):
    """Whatever their dtype, layout and device: what is read is read as int64 would be, and nothing else."""
    dice, model = random.Random(seed), tiny("llama")
    whole = torch.int64, torch.int32
    kinds = [*whole, torch.int8, torch.uint8, torch.int16, torch.bool, torch.float32, torch.complex64]
    ways = {
        "as it is": lambda x: x, "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
        "sparse": lambda x: x.to_sparse(), "meta": lambda x: x.to("meta"),
        "nested": lambda x: torch.nested.nested_tensor([*x]),
    }  # fmt: skip
    fed = lambda: kvlab.Stepper(model, kvlab.make_cache(model, dice.choice(["full", "int4", "recompute"])))
    for _ in range(8):
        ids, mask = prompt(9, rows=2), torch.ones(2, 9).long()
        mask[0, : dice.randrange(4)] = 0
        kind, way, other, how = (dice.choice([*what]) for what in (kinds, ways, kinds, ways))
        good = way in [*ways][:2] and how in [*ways][:2]
        given = ways[way](ids.to(kind)), ways[how](mask.to(other))
        if good and kind in whole:
            state, stepper = dice.getstate(), fed()
            dice.setstate(state)
            assert torch.equal(stepper.feed(*given), fed().feed(ids, mask))
            continue
        for ask in (fed().feed, lambda *x: kvlab.decode(model, x[0], fed().cache, 2, x[1])):
            with pytest.raises(ValueError, match=r"^(input_ids|attention_mask) [^\n]*$"):
                ask(*given)
    with pytest.raises(ValueError, match="expected 1 for real tokens"):
        fed().feed(prompt(9), torch.full((1, 9), 0.9))


@pytest.mark.parametrize("method", ["full", "int8", "offload", "h2o:budget=1", "padded"])
def test_a_stepper_goes_on_with_a_cache_that_was_filled_by_hand(method):
    """Also after a reset; with the keys and values of a prompt, so that its continuation is known."""
    model, ids = tiny("llama"), prompt(24, rows=2)
    expected = begun(model, method, ids[:, :20])
    cache = expected.cache
    expected = [expected.feed(ids[:, at : at + 1]) for at in range(20, 24)]
    cache.reset()
    for layer, given in zip(cache.layers, recorded(model, ids[:, :20]), strict=True):
        layer.fill(given, given.received() if layer.observes else None)
    stepper = kvlab.Stepper(model, cache)
    for at, logits in zip(range(20, 24), expected, strict=True):
        assert torch.allclose(stepper.feed(ids[:, at : at + 1]), logits, atol=1e-5)
    assert stepper.ids.tolist() == ids[:, 20:].tolist() and cache.lengths == [24, 24]


@pytest.mark.parametrize("method", ["full", "h2o:budget=8", "padded"])
def test_what_a_pass_elsewhere_fed_is_refused_until_a_reset(method):
    """By another Stepper, before or after this one was made; in a copy of the cache, too."""
    model, ids = tiny("llama"), prompt(12)
    cache = kvlab.make_cache(model, method)
    early = kvlab.Stepper(model, cache)
    kvlab.Stepper(model, cache).feed(ids)
    for stepper in (early, kvlab.Stepper(model, cache), kvlab.Stepper(model, copy.deepcopy(cache))):
        with pytest.raises(RuntimeError, match="has seen 12 tokens, but 0 were fed here: the last pass"):
            stepper.feed(ids[:, :1])
    cache.reset()
    assert kvlab.Stepper(model, cache).feed(ids).shape == (1, 12, 96)


def test_decode_goes_on_past_the_context_where_tokens_are_renumbered():
    model, ids, spec = tiny("llama", max_position_embeddings=40), prompt(30), "sinks:budget=9,renumber=true"
    found = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 30).tokens
    how = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(ids, past_key_values=kvlab.make_cache(model, spec), **how)[:, 30:], found
    )
    with pytest.raises(ValueError, match="more than the model's context of 40"):
        kvlab.decode(model, ids, kvlab.make_cache(model, "sinks:budget=9"), 30)


def test_a_model_without_a_head_is_one_line():
    body = tiny("llama").model
    with pytest.raises(
        ValueError, match=r"^model is a LlamaModel, which gives no logits: expected one with a head$"
    ):
        kvlab.Stepper(body, kvlab.make_cache(body, "full"))


def test_a_padded_batch_may_be_longer_than_the_context_if_its_rows_are_not():
    model = tiny("llama")
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    ids, mask = prompt(140, rows=2), torch.ones(2, 140, dtype=torch.long)
    mask[:, :20] = 0
    assert torch.isfinite(stepper.feed(ids, mask, last=True)).all()


def test_a_copied_model_rehearses_with_its_own_weights():
    """The hooks that a copy takes along belong to the model it was copied from: they fall silent."""
    model = tiny("llama", num_hidden_layers=3)
    kvlab.decode(model, prompt(20), kvlab.make_cache(model, "infinigen:budget=5"), 3)
    own = kvlab.prepare(copy.deepcopy(model))
    with torch.no_grad():
        own.model.layers[1].self_attn.q_proj.weight.mul_(-1)
        own.model.layers[2].self_attn.q_proj.weight.mul_(-1)
    fresh = type(own)(own.config).eval()
    fresh.load_state_dict(own.state_dict())
    spec = "infinigen:budget=5,full_layers=1,alpha=inf"
    found = [kvlab.decode(m, prompt(20), kvlab.make_cache(m, spec), 6) for m in (own, kvlab.prepare(fresh))]
    assert torch.equal(found[0].logprobs, found[1].logprobs)


@pytest.mark.parametrize("name", ["Mistral", "LFM2"])
def test_recompute_feeds_no_padding_between_a_row_s_tokens(name):
    """A window, or a state, would take it for tokens."""
    model, ids, mask = kvlab.prepare(copy.deepcopy(family(name))), prompt(24, 2), torch.ones(2, 6).long()
    mask[1, :2] = 0
    found = begun(model, "recompute", ids[:, :18]).feed(ids[:, 18:], mask)
    for row, own in enumerate((ids[:1], torch.cat([ids[1:, :18], ids[1:, 20:]], 1))):
        alone = begun(model, "recompute").feed(own)
        torch.testing.assert_close(found[row, 2:], alone[0, -4:], atol=1e-4, rtol=0)

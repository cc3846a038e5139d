"""Steps as graphs: what replaying a captured step gives is what the eager engine gives, and what cannot be
replayed is refused before it is captured. Without a GPU a step's operators are recorded and run again."""

import copy
import random
import warnings

import pytest
import torch
from families.models import FAMILIES, family
from fast import replayed
from fast.replayed import replaying
from tiny import begun, interrupt, tiny

import kvlab
from kvlab.decode import Stepper
from kvlab.fast import graph
from kvlab.fast.recorder import check_repeats
from kvlab.fast.suited import Unsuited
from kvlab.methods import HOST, METHODS

STEPS, PROMPT, BLOCKS = 16, 30, "kivi2:group=4,recent=6"
EAGER = {  # methods that no graph serves, and why
    "paged": "a store of kind Paged is written by the host",
    "kvquant": "a store of kind PreRope is written by the host",
    "d2o": "H2O lets go of other tokens than one of every head",
    "kvzip": "a store of kind Ragged is written by the host",
    "adakv": "a store of kind Ragged is written by the host",
    "rkv": "RKV lets go of other tokens than one of every head",
}
NONE = {"recompute", "padded", "infinigen", "infinigen+int4"}  # no KVCache, or one that listens to the model
HOSTS = [name for name, one in METHODS.items() if one.family == HOST and name not in NONE]
EAGER |= dict.fromkeys(HOSTS, "K and V are on a host")


def spec_of(name: str) -> str:
    """The method at a setting at which it gives something up."""
    return METHODS[name].spec(METHODS[name].less) if METHODS[name].less else name


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(graph, "captured", replayed.captured)


def decoded(model, spec, *, rows=2, padded=0, steps=STEPS, after=None):
    """(Logits of a prompt and some steps, the cache); after: step -> what happens to the cache before it."""
    cache, generator = kvlab.make_cache(model, spec), torch.Generator().manual_seed(1)
    ids = torch.randint(2, 90, (rows, PROMPT), generator=generator).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    stepper = Stepper(model, cache)
    found = [stepper.feed(ids, mask if padded else None, last=True)]
    for step in range(steps):
        if after and step in after:
            stepper = after[step](stepper) or stepper
        ids = torch.randint(2, 90, (len(cache.lengths), 1), generator=generator).to(model.device)
        found.append(stepper.feed(ids, last=True))
    return found, stepper.cache


def same(model, spec, tolerance=1e-3, **how):
    other = replaying(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*eager engine")
        found, cache = decoded(other, spec, **how)
    assert other.forward.replays(cache)
    expected, its = decoded(model, spec, **how)
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right, atol=tolerance, rtol=0)
    cache._in_order()
    for layer, right in zip(cache.attending, its.attending, strict=True):
        assert (layer.lengths, layer.seen) == (right.lengths, right.seen)
        if layer.local is None:  # what has left a window goes with the next eager step
            assert torch.equal(layer.slot_positions, right.slot_positions)
            assert layer.rows_held == right.rows_held
    return cache, its


REPLAYED = [name for name in METHODS if name not in {*EAGER, *NONE}]


@pytest.mark.parametrize("name, padded", [(name, 7 * (i % 2)) for i, name in enumerate(REPLAYED)])
def test_a_method_s_replayed_steps_are_its_steps(name, padded):
    """Of a padded batch, every other one: blocks of kivi that hold padding are eager."""
    padded = 0 if name.startswith("kivi") else padded
    same(tiny("llama", dtype=torch.float64), spec_of(name), padded=padded, tolerance=1e-4)


@pytest.mark.parametrize("name", EAGER)
def test_a_method_that_decides_on_the_host_says_so_and_stays_eager(name):
    model = replaying(tiny("llama"))
    with pytest.warns(UserWarning, match=EAGER[name]):
        found, cache = decoded(model, spec_of(name), steps=5)
    assert not model.forward.replays(cache)
    expected, _ = decoded(tiny("llama"), spec_of(name), steps=5)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family(name):
    """With windows, soft caps, sinks beside the tokens, odd sizes; chunks, and what holds more than K and V,
    are eager."""
    model = family(name)
    more = not kvlab.make_cache(model, "full").fillable
    if not (more or name.startswith("Llama 4")):
        same(model, "full", padded=5, steps=8)
        return
    with pytest.warns(UserWarning, match="holds more than K and V" if more else "see by a rule of their own"):
        decoded(replaying(model), "full", steps=4)


@pytest.mark.parametrize(
    "spec", ["full", "h2o:budget=9", "sinks:budget=9", "kivi2:group=4,recent=6", "tova:budget=9"]
)
def test_forks_copies_and_saves_in_between(spec, tmp_path):
    """What is done to a cache between replayed steps finds its slots in the order of positions."""

    def fork(stepper):
        stepper.fork(torch.tensor([1, 0, 1]))

    def saved(stepper):
        stepper.cache.save(tmp_path / "cache.safetensors")
        cache = kvlab.load_cache(tmp_path / "cache.safetensors", stepper.model)
        return Stepper(stepper.model, cache)

    def copied(stepper):
        stepper.cache = copy.deepcopy(stepper.cache)

    def several(stepper):
        stepper.feed(torch.arange(2, 8).expand(len(stepper.ids), -1))

    same(tiny("llama"), spec, after={4: fork, 8: saved, 11: several, 13: copied, 15: fork})


@pytest.mark.parametrize("padded", [0, 7])
@pytest.mark.parametrize(
    "spec", ["full", "int4", "int8:axis=channel", "snapkv:budget=0.4,window=4", "h2o:budget=0.4"]
)
def test_padding_in_a_later_pass_is_seen_by_no_step(spec, padded):
    def turn(stepper):
        ids, mask = torch.randint(2, 90, (2, 5), generator=torch.Generator().manual_seed(3)), torch.ones(2, 5)
        mask[1, :3] = 0
        stepper.feed(ids, mask.long())

    def crop(stepper):  # four steps, and all of the turn but its first column
        stepper.cache.crop(-8)
        stepper.ids, stepper.mask = stepper.ids[:, :-8], stepper.mask[:, :-8]

    after = {6: turn} if "budget" in spec else {6: turn, 10: crop}
    same(tiny("llama", dtype=torch.float64), spec, padded=padded, after=after, tolerance=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_turn_may_be_longer_than_the_room_behind_a_step(name, monkeypatch):
    monkeypatch.setattr("kvlab.fast.moves.LEAST_ROOM", 8)

    def turn(stepper):
        stepper.feed(torch.arange(2, 22).expand(2, -1))

    same(family(name).double(), "full", padded=3, after={6: turn}, tolerance=1e-4)


@pytest.mark.parametrize("spec", ["full", "int8", "h2o:budget=0.4", BLOCKS])
def test_a_prompt_that_was_read_under_autocast(spec):
    ids, found = torch.randint(2, 90, (2, PROMPT + 6), generator=torch.Generator().manual_seed(2)), []
    for model in (tiny("llama"), replaying(tiny("llama"))):
        stepper = Stepper(model, kvlab.make_cache(model, spec))
        with torch.autocast(model.device.type, torch.bfloat16):
            stepper.feed(ids[:, :PROMPT])
        found.append([stepper.feed(one, last=True) for one in ids[:, PROMPT:].split(1, 1)])
    assert model.forward.replays(stepper.cache)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0)


def test_a_mask_that_hides_an_earlier_token_is_refused():
    model, cache, _ = replayed_for_a_while("full")
    mask = torch.ones(1, cache.get_seq_length() + 1, dtype=torch.long)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="a cache hides no token later"), torch.no_grad():
        model(torch.full((1, 1), 3), attention_mask=mask, past_key_values=cache)


def test_a_copy_counts_what_is_out_of_range_by_itself():
    _, cache, stepper = replayed_for_a_while("int8:axis=channel")
    twin = copy.deepcopy(cache)
    before = twin.stats().clipped
    for token in range(3, 9):
        stepper.feed(torch.full((1, 1), token))
    assert twin.stats().clipped == before < cache.stats().clipped


def test_a_configuration_that_asks_for_hidden_states_is_answered():
    model, cache, _ = replayed_for_a_while("full")
    model.config.output_hidden_states = True
    with pytest.warns(UserWarning, match="asks for more than logits"), torch.no_grad():
        for _ in range(4):
            assert model(torch.full((1, 1), 3), past_key_values=cache).hidden_states is not None


def test_a_prompt_shorter_than_kivis_window():
    same(tiny("llama"), "kivi4:group=4,recent=33", steps=40)


@pytest.mark.parametrize("spec", ["h2o:budget=0.4", "tova:budget=0.4", "sinks:budget=0.4", "int8"])
def test_what_is_held_from_a_step_on_stays(spec):
    cache, _ = same(tiny("llama"), spec, after={6: lambda stepper: stepper.cache.hold()})
    assert cache.stats().tokens_held >= 12 + STEPS - 6


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "h2o", "random"])
def test_who_renumbers_decodes_eagerly(name):
    with pytest.warns(UserWarning, match=r"decodes with the eager engine"):
        found, _ = decoded(replaying(tiny("llama")), f"{name}:budget=0.4,renumber=true")
    expected, _ = decoded(tiny("llama"), f"{name}:budget=0.4,renumber=true")
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("steps", range(3, 9))
def test_a_crop_behind_a_block_writes_it_once(steps):
    def crop(stepper):
        stepper.cache.crop(-1)
        stepper.ids, stepper.mask = stepper.ids[:, :-1], stepper.mask[:, :-1]

    same(tiny("llama"), BLOCKS, after={steps: crop})


@pytest.mark.parametrize("spec", ["full", "int8", "h2o:budget=20", BLOCKS])
def test_a_graph_made_in_one_of_torchs_modes_serves_all(spec):
    seed = random.randrange(10**6)
    draw, ids = random.Random(seed), torch.randint(2, 90, (2, PROMPT + STEPS))
    drawn = [draw.choice((torch.no_grad, torch.inference_mode, torch.enable_grad)) for _ in range(STEPS)]
    found = []
    for model, modes in ((tiny("llama"), [torch.no_grad] * STEPS), (replaying(tiny("llama")), drawn)):
        stepper = begun(model, spec, ids[:, :PROMPT])
        for step, mode in enumerate(modes, PROMPT):
            with mode():
                found.append(stepper.feed(ids[:, step : step + 1], last=True))
    assert model.forward.replays(stepper.cache)
    for one, other in zip(found[:STEPS], found[STEPS:], strict=True):
        assert torch.allclose(one, other, atol=1e-3), seed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "spec", ["full", "int8", "h2o:budget=20", "kivi2:group=32,recent=16", "tova:budget=20"]
)
@pytest.mark.parametrize("padded", [0, 7])
def test_on_a_gpu_600_tokens_are_the_eager_engine_s(spec, padded):
    """Through kernels, across captures and flushes."""
    if padded and spec.startswith("kivi"):
        pytest.skip("blocks that hold padding are eager")
    model = tiny("llama", head_dim=64, max_position_embeddings=800)
    same(copy.deepcopy(model).to("cuda"), spec, padded=padded, steps=600)


def test_a_buffer_that_is_full_is_lengthened_and_captured_again():
    model = replaying(tiny("llama", max_position_embeddings=700))
    stepper = begun(model, "full", torch.randint(2, 90, (1, 8)))
    cache = stepper.cache
    made = set()
    for _ in range(300):
        stepper.feed(torch.full((1, 1), 3))
        made.add(id(model.forward.served.get(cache)))
    assert cache.attending[0].store.copies < 600 and len(made) <= 5


def replayed_for_a_while(spec):
    """A model, a cache and its stepper, after steps of which the last were replayed."""
    model = replaying(tiny("llama"))
    stepper = begun(model, spec, torch.randint(2, 90, (1, 8)))
    for _ in range(6):
        stepper.feed(torch.full((1, 1), 3))
    return model, stepper.cache, stepper


def test_a_model_that_has_left_the_gpu_is_eager(monkeypatch):
    """A graph of what a CPU does would hold nothing, and replay nothing."""
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="not on a GPU any more"):
        model, cache, _ = replayed_for_a_while("full")
    assert not model.forward.replays(cache)


def test_a_number_that_cannot_be_stored_is_refused_one_step_later():
    model, _, stepper = replayed_for_a_while("int8")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"layer 2: .*NaN, infinity|not finite"):
        for _ in range(3):
            stepper.feed(torch.full((1, 1), 3))


@pytest.mark.parametrize("spec", ["full", "h2o:budget=6", BLOCKS])
def test_an_interrupted_step_that_the_host_has_not_counted_leaves_a_broken_cache(spec, monkeypatch):
    model, cache, stepper = replayed_for_a_while(spec)
    monkeypatch.setattr(model.forward.served[cache].late, "ask", interrupt)  # behind the replay
    with pytest.raises(KeyboardInterrupt):
        stepper.feed(torch.full((1, 1), 3))
    assert cache.broken


def test_other_weights_and_a_hook_of_someone_else_s_let_the_graph_go():
    model, cache, stepper = replayed_for_a_while("full")
    assert model.forward.replays(cache)
    seen = []
    hook = model.model.layers[1].register_forward_hook(lambda *given: seen.append(1))
    with pytest.warns(UserWarning, match="a hook is on a module of it"):
        for _ in range(4):
            stepper.feed(torch.full((1, 1), 3))
    assert len(seen) == 4 and not model.forward.replays(cache)
    hook.remove()
    for _ in range(4):
        stepper.feed(torch.full((1, 1), 3))
    assert model.forward.replays(cache)


def test_a_step_that_asks_the_device_is_refused():
    x = torch.ones(3)
    with pytest.raises(Unsuited, match="asks the device for a number"):
        check_repeats(lambda: x.sum().item(), lambda: None)
    lengths = iter(range(5))
    with pytest.raises(Unsuited, match="given something else"):
        check_repeats(lambda: x + next(lengths), lambda: None)
    with pytest.raises(Unsuited, match="given something else"):
        check_repeats(lambda: x * torch.tensor([1.0, 2.0, 3.0]), lambda: None)
    check_repeats(lambda: (x * 2).cumsum(0), lambda: None)


def test_a_model_that_is_not_on_a_gpu_has_no_graphs():
    with pytest.raises(ValueError, match="engine='graph': the model is not on a GPU"):
        kvlab.load(device="cpu", engine="graph")

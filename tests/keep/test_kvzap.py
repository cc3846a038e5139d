"""KVzap beside its definition: odd sizes, padding, groups, windows, and profiles."""

import copy

import pytest
import torch
from families.models import family
from families.profiles import RECENT, write
from reference.definitions import keep
from reference.driven import Driven, check
from tiny import fed, prompt, tiny

import kvlab
from kvlab.calibrate import profile
from kvlab.keep import KVzap
from kvlab.models import rotations_of


@pytest.fixture()
def made(tmp_path):
    """made(model) -> the file of a profile whose linear models were drawn at random: about half of the tokens
    are guessed to score less than its threshold."""
    return lambda model, **about: write(tmp_path / profile.model_digest(model), "kvzap", model, **about)


@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("sizes, head_dim, group", [((33, 7), 20, 3), ((40,), 14, 1), ((3, 4, 9), 20, 3)])
def test_definition(sizes, head_dim, group, every, made):
    """Held tokens and outputs after every pass, in grouped queries of odd sizes, padded."""
    passes = (1,) * 9 + (4,) + (1,) * 8
    given = {"sizes": sizes, "passes": passes, "head_dim": head_dim, "group": group}
    model = Driven(**given).model
    policy = KVzap(made(model), every=every)
    (rotation,), told = rotations_of(model), policy.profile.arrays
    weight, bias = told["weight"][0], told["bias"][0]
    frequencies = rotation.frequencies.double().tolist()

    def start(row):
        judged = 0

        def guess(head):
            return lambda p: keep.surrogate(
                row.keys[:, p].double(), row.values[:, p].double(), p, frequencies,
                torch.from_numpy(weight[head]).double(), float(bias[head]),
            )  # fmt: skip

        def held_after(new, present, attended):
            nonlocal judged
            due = new[-1] + 1 - RECENT - judged
            if due < (1 if new[0] == 0 else every or 1):
                return present
            before, judged = judged, judged + due
            rule = before, policy.threshold, RECENT
            return [keep.kvzap(mine, guess(head), *rule) for head, mine in enumerate(present)]

        return held_after

    run = Driven({"keep": policy}, **given).run()
    check(run, start)
    kept = [len(head) for row in run.seen[-1][0].kept for head in row]
    assert RECENT < min(kept) and max(kept) < max(sizes) + sum(passes) and len({*kept}) > 1


def test_bad_input(made, tmp_path):
    model = tiny("llama")
    file = made(model)
    for threshold in (-0.1, 1.5, "much"):
        with pytest.raises(ValueError, match=r"threshold=.*: expected a weight between 0 and 1"):
            KVzap(file, threshold)
    with pytest.raises(ValueError, match="recent=0: expected a whole number of at least 1"):
        KVzap(file, recent=0)
    with pytest.raises(ValueError, match=r"profile=None: .*python -m course\.recipes\.kvzap makes one$"):
        kvlab.make_cache(model, "kvzap")
    weight, bias, about = torch.ones(3, 2, 32), torch.ones(3, 2), {"threshold": 0.1, "recent": RECENT}
    both = {"weight": weight, "bias": bias}
    for tensors, numbers, said in (
        ({"weight": weight}, about, "expected bias, finite float32 of 2 dimensions"),
        (both | {"weight": weight[0]}, about, "expected weight, finite float32 of 3 dimensions"),
        (both, {"recent": 1}, "threshold=None: expected a weight between 0 and 1"),
        (both, about | {"recent": 0}, "recent=0: expected a whole number of .*"),
        (both, about | {"share": 9}, "share=9: expected a share of 1"),
        (both | {"weight": weight[1:]}, about, r"weight has shape \(2, 2, 32\), expected \(3, 2, 32\)"),
        (both | {"bias": bias.T}, about, r"bias has shape \(2, 3\), expected \(3, 2\)"),
    ):
        profile.write(tmp_path / "wrong", "kvzap", model, tensors, **numbers)
        with pytest.raises(ValueError, match=rf"^profile={tmp_path}/wrong: {said}$"):
            kvlab.KVCache(model, keep=KVzap(str(tmp_path / "wrong")))
    with pytest.raises(ValueError, match=r"has no rotary embedding \(RoPE\)$"):
        kvlab.KVCache(tiny("gpt2"), keep=KVzap(made(tiny("gpt2"))))
    with pytest.raises(ValueError, match=r"^DeepseekV3ForCausalLM caches latents"):
        latent = kvlab.prepare(copy.deepcopy(family("DeepSeek-V3")))
        kvlab.KVCache(latent, keep=KVzap(made(latent)))
    for wrong in ({"place": kvlab.place.Host()}, {"store": kvlab.store.Static()}):
        with pytest.raises(ValueError, match="heads"):
            kvlab.KVCache(model, keep=KVzap(file), **wrong)


def test_window(made):
    """In a layer with a sliding window, what it still sees is judged."""
    model = tiny("mistral", sliding_window=12)
    cache, _ = fed(model, {"keep": KVzap(made(model))}, prompt(40), steps=3)
    held = [head[head >= 0].tolist() for layer in cache.layers for head in layer.positions[0]]
    assert all(mine[-RECENT:] == [38, 39, 40, 41, 42] and mine[0] >= 32 for mine in held)
    assert len({len(mine) for mine in held}) > 1


def test_over_what_is_rounded_the_rounded_numbers_are_judged(made):
    """Each head holds what the definition says of the decoded keys and values."""
    model = tiny("llama", num_hidden_layers=1)
    (rotation,), ids = rotations_of(model), prompt(30)
    all_of_it, policy = (KVzap(made(model), threshold) for threshold in (0, None))
    rounded = kvlab.store.Ragged(kvlab.store.Int(4))
    whole, _ = fed(model, {"keep": all_of_it, "store": rounded}, ids, steps=0)
    keys, values = (x[0].double() for x in whole.layers[0].store.read("cpu"))
    weight, frequencies = (
        torch.from_numpy(policy.profile.arrays["weight"][0]).double(),
        rotation.frequencies.tolist(),
    )
    cache, _ = fed(model, {"keep": policy, "store": rounded}, ids, steps=0)
    for head, held in enumerate(cache.layers[0].positions[0]):
        about = frequencies, weight[head], float(policy.profile.arrays["bias"][0][head])
        guess = lambda p, about=about: keep.surrogate(keys[:, p], values[:, p], p, *about)
        wanted = keep.kvzap([*range(30)], guess, 0, policy.threshold, RECENT)
        assert held[held >= 0].tolist() == wanted and len(wanted) < 30

"""DuoAttention beside its definition: odd sizes, padding, groups, windows, and profiles."""

import copy

import pytest
import torch
from families.models import family
from families.profiles import RECENT, SINKS, write
from reference.definitions import keep
from reference.driven import Driven, check
from tiny import fed, prompt, tiny

import kvlab
from kvlab.calibrate import profile
from kvlab.keep import Duo


@pytest.fixture()
def made(tmp_path):
    """made(model) -> the file of a profile whose gates were drawn at random."""
    return lambda model, **about: write(tmp_path / profile.model_digest(model), "duo", model, **about)


@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("sizes", [(33, 7), (40,), (3, 4, 9)])
@pytest.mark.parametrize("heads", [0, 0.5])
def test_definition(sizes, heads, every, made):
    """Held tokens and outputs after every pass, in grouped queries of odd sizes, padded."""
    passes = (1,) * 9 + (4,) + (1,) * 8
    model = Driven(sizes=sizes, passes=passes).model
    policy = Duo(made(model), heads, every)

    def start(row):
        def held_after(new, present, attended):
            pairs = zip(present, policy.retrieves[0].tolist(), strict=True)
            kept = [keep.duo(mine, all_of_it, SINKS, RECENT) for mine, all_of_it in pairs]
            over = max(len(mine) - len(stay) for mine, stay in zip(present, kept, strict=True))
            return present if over < (every or 1) and not (new[0] == 0 and over) else kept

        return held_after

    check(Driven({"keep": policy}, sizes, passes).run(), start)


def test_which_heads_retrieve(made):
    model = tiny("llama")
    file = made(model)
    gates = torch.from_numpy(profile.read(file, "duo", gates=2).arrays["gates"])
    for heads in (0, 0.25, 0.5, 1):
        found = Duo(file, heads).retrieves
        assert found.sum() == round(heads * 6)
        assert not found.any() or found.all() or gates[found].min() >= gates[~found].max()


def test_equal_gates_go_to_lower_layers_and_heads_first(tmp_path):
    """Trained gates end at exactly 0 and 1."""
    model, file = tiny("llama"), str(tmp_path / "profile")
    gates = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    profile.write(file, "duo", model, {"gates": gates}, sinks=SINKS, recent=RECENT)
    assert Duo(file, 0.25).retrieves.flatten().nonzero()[:, 0].tolist() == [1, 2]
    assert Duo(file, 0.625).retrieves.flatten().nonzero()[:, 0].tolist() == [0, 1, 2, 3, 6]


def test_a_hybrid_counts_the_heads_of_layers_that_attend(tmp_path):
    """LFM2: the first layer does not."""
    model, file = kvlab.prepare(copy.deepcopy(family("LFM2"))), str(tmp_path / "profile")
    about = {"sinks": SINKS, "recent": RECENT}
    profile.write(file, "duo", model, {"gates": torch.tensor([[1.0, 0.0, 1.0]])}, **about)
    cache, _ = fed(model, {"keep": Duo(file, heads=0.67)}, prompt(20), steps=3)
    assert (cache.layers[1].positions[0] >= 0).sum(-1).tolist() == [23, SINKS + RECENT, 23]
    profile.write(file, "duo", model, {"gates": torch.ones(2, 3)}, **about)
    with pytest.raises(ValueError, match=r"^profile=.*: gates has shape \(2, 3\), expected \(1, 3\)$"):
        kvlab.KVCache(model, keep=Duo(file))


def test_window(made):
    """In a layer with a sliding window a retrieval head holds the window, a streaming head less."""
    model = tiny("mistral", sliding_window=12)
    cache, _ = fed(model, {"keep": Duo(made(model), 0.5)}, prompt(40), steps=3)
    counts = {int(n) for layer in cache.layers for n in (layer.positions[0] >= 0).sum(-1)}
    assert counts == {11, RECENT}  # what the next query will see; the first tokens are out of sight

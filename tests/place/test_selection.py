"""TopK and InfiniGen in whole models against the selections of their definitions."""

import copy
import math

import pytest
import torch
from families.models import family
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, left_padded, prompt, tiny

import kvlab
from kvlab.attention import group_importance, recorded
from kvlab.calibrate.fold import fold, is_folded
from kvlab.calibrate.skew import skew, skewing_matrices
from kvlab.models import blocks_of, query_of
from kvlab.place import Host, InfiniGen, TopK
from kvlab.place.infinigen import VARIANTS
from kvlab.place.topk import most_important
from kvlab.reference.place import columns, fetched, guess, how_many, topk


def recorded_steps(cache) -> dict[int, dict]:
    """What the last step read, {layer: slots, query, all keys, scaling}, kept up to date."""
    seen = {}

    def note(layer, held, slots, query):
        full, _ = layer.store.read(query.device)
        seen[layer.index] = {"slots": slots, "query": query, "keys": full, "scaling": layer.scaling}

    for layer in cache.layers:
        layer.on_read = note
    return seen


def chosen(seen, row, head):
    """Past slots that a head fetched, newest left out."""
    return {slot for slot in seen["slots"][row, head, :-1].tolist() if slot >= 0}


def truly_best(seen, row, head, count, pad):
    """The `count` past tokens with the largest attention weight (mean over the group), by definition."""
    query, keys = seen["query"][row, :, 0], seen["keys"][row, head, pad:-1]
    group = query.shape[0] // seen["keys"].shape[1]
    best = topk(query[head * group : (head + 1) * group], keys, seen["scaling"], count)
    return {slot + pad for slot in best}


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=3), heads=st.integers(1, 3),
    slots=st.integers(1, 9), kinds=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_most_important_slots_of_every_row_and_head(counts, heads, slots, kinds, seed):
    """Of equal ones, any."""
    generator = torch.Generator().manual_seed(seed)
    importance = torch.randint(kinds, (len(counts), heads, slots), generator=generator).float().log()
    found = most_important(importance, counts)
    assert found.shape == (len(counts), heads, min(max(counts), slots))
    for row, count in enumerate(counts):
        for head in range(heads):
            chosen = [slot for slot in found[row, head].tolist() if slot >= 0]
            assert len(set(chosen)) == len(chosen) == min(count, slots)
            best = sorted(importance[row, head].tolist(), reverse=True)[: len(chosen)]
            assert sorted(importance[row, head, chosen].tolist(), reverse=True) == best


@pytest.mark.parametrize("family", FAMILIES)
def test_topk_fetches_the_largest_weights(family):
    model = tiny(family)
    ids, mask = left_padded([prompt(30), prompt(11, seed=1)])
    cache = kvlab.KVCache(model, place=Host(TopK(0.2)))
    steps = recorded_steps(cache)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids, mask)
    for step in range(3):
        stepper.feed(prompt(1, rows=2, seed=step))
        for layer in cache.layers:
            seen = steps[layer.index]
            for row, (tokens, pad) in enumerate([(30, 0), (11, 19)]):
                count = int(0.2 * (tokens + step + 1))
                for head in range(layer.kv_heads):
                    assert chosen(seen, row, head) == truly_best(seen, row, head, count, pad)
                    assert seen["slots"][row, head, -1] == 30 + step  # the newest, always


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rehearsed_query_is_the_layers_own_when_given_its_true_input(family):
    """For every layer: LN, W_q, norms, rotary and scale all rebuilt exactly."""
    model, inputs, rotary = tiny(family), {}, {}
    blocks = blocks_of(model)

    def note(index):
        def hook(block, args, kwargs):
            inputs[index] = args[0] if args else kwargs["hidden_states"]
            rotary[index] = kwargs.get("position_embeddings")

        return hook

    hooks = [b.register_forward_pre_hook(note(i), with_kwargs=True) for i, b in enumerate(blocks)]
    try:
        cache = kvlab.KVCache(model)
        steps = recorded_steps(cache)
        stepper = kvlab.Stepper(model, cache)
        stepper.feed(prompt(12, rows=2))
        stepper.feed(prompt(1, rows=2, seed=1))
    finally:
        for hook in hooks:
            hook.remove()
    for index in range(len(cache.layers)):
        with torch.no_grad():
            guess = query_of(model, index, inputs[index], rotary[index])
        assert torch.allclose(guess, steps[index]["query"], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_rehearsal_with_the_true_query_selects_what_the_oracle_selects(family, monkeypatch):
    """With ratio 1 and the layer's own query, guessed and true scores are the same numbers."""
    model = tiny(family)
    cache = kvlab.KVCache(model, place=Host(InfiniGen(0.3, alpha=math.inf, ratio=1.0, full_layers=0)))
    steps, original_select = recorded_steps(cache), InfiniGen.select

    def rehearse_late(self, layer, query):
        # the layer's own query, on the past tokens only, as `speculate` would see them
        table, partial = cache.layers[layer.index].table, layer.state.partial
        held, seen = table.rows_held, table.lengths
        table.rows_held, table.lengths = [n - 1 for n in held], [n - 1 for n in seen]
        partial.filled -= 1
        self.speculate(layer, lambda: query)
        table.rows_held, table.lengths = held, seen
        partial.filled += 1
        return original_select(self, layer, query)

    monkeypatch.setattr(InfiniGen, "select", rehearse_late)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(30, rows=2))
    for step in range(3):
        stepper.feed(prompt(1, rows=2, seed=step))
        for layer in cache.layers:
            for row in range(2):
                for head in range(layer.kv_heads):
                    best = truly_best(steps[layer.index], row, head, int(0.3 * (31 + step)), 0)
                    assert chosen(steps[layer.index], row, head) == best


def test_what_infinigen_fetches_is_what_its_definition_says():
    """Skew, columns, partial keys, alpha rule and cap recomputed from the raw tensors, one row at a time."""
    model = tiny("llama")
    alpha, ratio, budget = 0.5, 0.5, 12
    ids, mask = left_padded([prompt(30), prompt(17, seed=1)])
    cache = kvlab.KVCache(model, place=Host(InfiniGen(budget, alpha=alpha, ratio=ratio, full_layers=2)))
    steps = recorded_steps(cache)
    prompts, guesses = {}, {}
    original_prefill, original_speculate = InfiniGen.prefill, InfiniGen.speculate

    def prefill(self, layer, query, keys):
        prompts[layer.index] = query, keys
        original_prefill(self, layer, query, keys)

    def speculate(self, layer, query):
        guesses[layer.index] = query()
        return original_speculate(self, layer, query)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InfiniGen, "prefill", prefill)
        patch.setattr(InfiniGen, "speculate", speculate)
        stepper = kvlab.Stepper(model, cache)
        stepper.feed(ids, mask)
        stepper.feed(prompt(1, rows=2, seed=2))
        stepper.feed(prompt(1, rows=2, seed=3))
    matrices = skew(model)
    counts = set()
    for index in (2, 3):
        seen = steps[index]
        query, keys = prompts[index]
        for row, pad in enumerate((0, 13)):
            scores = []
            for head, matrix in enumerate(matrices[index]):
                q, k = query[row, 2 * head : 2 * head + 2, pad:], keys[row, head, pad:]
                chosen_columns = columns(q @ matrix, k @ matrix, 4)
                past, asked = seen["keys"][row, head, pad:-1], guesses[index][row, 2 * head : 2 * head + 2, 0]
                scores.append([guess(q, past, matrix, chosen_columns, seen["scaling"]) for q in asked])
            count = how_many([member for group in scores for member in group], alpha, budget)
            counts.add(count)
            for head, group in enumerate(scores):
                expected = {slot + pad for slot in fetched(torch.stack(group), count)}
                assert chosen(seen, row, head) == expected
    assert steps[0]["slots"] is None and steps[1]["slots"] is None
    assert len(counts) > 1  # the rule, not the cap, decided somewhere


def test_skewing_keeps_scores_and_gathers_them():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(2, 16, 16, generator=generator) * torch.logspace(0, -2, 16)[:, None]
    queries = torch.randn(2, 50, 16, generator=generator) @ mix
    keys = torch.randn(2, 50, 16, generator=generator)
    a = skewing_matrices(queries)
    assert torch.allclose(a @ a.transpose(1, 2), torch.eye(16).expand(2, 16, 16), atol=1e-5)
    skewed, before = (queries @ a) @ (keys @ a).transpose(1, 2), queries @ keys.transpose(1, 2)
    assert torch.allclose(skewed, before, atol=1e-4)
    energy = (queries @ a).square().sum(1)
    assert (energy[:, :4].sum(1) > 0.9 * energy.sum(1)).all()  # few columns carry it
    assert (queries.square().sum(1).topk(4).values.sum(1) < 0.6 * energy.sum(1)).all()  # not before
    assert skewing_matrices(queries[:, :3]).shape == (2, 16, 16)  # fewer tokens than dimensions


def test_skewing_is_computed_once_per_model_and_text(monkeypatch):
    model = tiny("llama", num_hidden_layers=2)
    first = skew(model)
    assert skew(model) is first
    assert skew(model, prompt(40).tolist()) is not first


def test_skewing_from_a_file_lies_where_the_model_does(tmp_path):
    """Once, when it is read: InfiniGen would copy it to the device in every layer of every step."""
    import copy
    from importlib import import_module

    module, model = import_module("kvlab.calibrate.skew"), copy.deepcopy(tiny("llama"))
    file = tmp_path / "skew.pt"
    module._write(file, module._calibrate(model, prompt(40)))
    assert {matrix.device.type for matrix in module._read(file, model)} == {"cpu"}
    assert {matrix.device.type for matrix in module._read(file, model.to("meta"))} == {"meta"}


def test_the_skewing_of_a_larger_model_is_found_again(monkeypatch, tmp_path):
    monkeypatch.setattr("kvlab.calibrate.skew.SMALL", 0)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    make = lambda: kvlab.prepare(copy.deepcopy(tiny("llama", num_hidden_layers=2)))
    first = skew(make())
    (file,) = (tmp_path / "skew").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("kvlab.calibrate.skew._calibrate", lambda *_: pytest.fail("calibrated again"))
        again = skew(make())  # another object with the same weights
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = make()
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight[0] += 1
    skew(other)
    skew(make(), prompt(40).tolist())
    assert len(list((tmp_path / "skew").iterdir())) == 3  # other weights, another text
    file.write_bytes(b"damaged")
    assert torch.equal(skew(make())[0], first[0])
    assert file.stat().st_size > 100  # mended


def test_the_skewing_of_a_larger_hybrid_is_found_again(monkeypatch, tmp_path):
    """As many matrices as layers that attend."""
    monkeypatch.setattr("kvlab.calibrate.skew.SMALL", 0)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    model = kvlab.prepare(family("LFM2"))
    first = skew(copy.deepcopy(model))
    monkeypatch.setattr("kvlab.calibrate.skew._calibrate", lambda *_: pytest.fail("calibrated again"))
    assert len(first) == 1 and torch.equal(skew(kvlab.prepare(copy.deepcopy(model)))[0], first[0])


def test_a_calibration_that_failed_is_tried_again(monkeypatch):
    model = tiny("llama", num_hidden_layers=2)
    with monkeypatch.context() as patch:
        patch.setattr("kvlab.calibrate.skew._calibrate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            skew(model, prompt(41).tolist())
    assert len(skew(model, prompt(41).tolist())) == 2


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_folding_changes_no_logit_and_saves_the_rotation(family, tmp_path):
    unfolded = tiny(family, num_hidden_layers=3, initializer_range=0.3)
    folded = fold(kvlab.prepare(copy.deepcopy(unfolded)))
    ids = prompt(25, rows=2)
    with torch.no_grad():
        assert torch.allclose(folded(ids).logits, unfolded(ids).logits, atol=1e-4)
    spec = "infinigen:budget=0.4,alpha=1.0,full_layers=1"
    rotated = kvlab.decode(unfolded, ids, kvlab.make_cache(unfolded, spec), 8)
    ready = kvlab.decode(folded, ids, kvlab.make_cache(folded, spec), 8)
    assert torch.equal(rotated.tokens, ready.tokens)  # the same selections
    assert torch.allclose(rotated.logprobs, ready.logprobs, atol=1e-4)
    folded.save_pretrained(tmp_path)
    loaded = kvlab.prepare(type(unfolded).from_pretrained(tmp_path).eval())
    assert is_folded(loaded) and not is_folded(unfolded)
    again = kvlab.decode(loaded, ids, kvlab.make_cache(loaded, spec), 8)
    assert torch.equal(again.logprobs, ready.logprobs)
    assert kvlab.make_cache(loaded, spec).layers[2].place.fetch.skew is None  # nothing to rotate
    gathered = [sum(strongest_quarter(model, ids)) for model in (unfolded, folded)]
    assert gathered[1] > gathered[0]
    with pytest.raises(ValueError, match="folded already"):
        fold(loaded)


def strongest_quarter(model, ids):
    """Part of each layer's query energy in its strongest quarter of columns."""
    for layer in recorded(kvlab.prepare(model), ids[:1]):
        queries = layer.query[0].unflatten(0, (layer.keys.shape[1], -1)).flatten(1, 2)
        energy = queries.square().sum(1)
        yield float(energy.topk(2).values.sum() / energy.sum())


def test_only_models_without_rotation_are_folded():
    with pytest.raises(ValueError, match="'llama' cannot be folded, only opt and gpt2"):
        fold(tiny("llama"))


def test_the_variants_choose_columns_and_counts_as_they_say():
    queried, keyed = torch.tensor([[[5.5, 4, 0, 0, 1, 3]]]), torch.tensor([[[0.0, 0, 6, 1, 0, 2]]])
    column_sets = [set(rule.columns(queried, keyed, 2)[0, 0].tolist()) for rule in VARIANTS.values()]
    assert column_sets == [{0, 2}, {0, 1}, {0, 1, 2, 5}, {0, 1, 2, 5}]
    two = torch.cat([queried, torch.tensor([[[1.0, 2, 0, 0, 0, 0]]])])
    same = torch.cat([keyed, torch.tensor([[[1.0, 2, 0, 0, 0, 0]]])])
    assert (VARIANTS["official-accuracy"].columns(two, same, 2)[1, 0] < 0).sum() == 2  # a smaller union
    scores = torch.tensor([[[0.0, -1, -9, -9]], [[0.0, -1, -1, -1]]])
    assert InfiniGen(alpha=2.0).how_many(scores, [4, 4]) == [2, 4]
    assert VARIANTS["official-speed"].columns(two, same, 2)[1, 0].tolist() == [0, 1]  # the first row's
    assert InfiniGen(alpha=2.0, variant="official-speed").how_many(scores, [4, 4]) == [3, 3]
    scores[1] -= 0.5  # the first row's best is 0: of the second, one is within 1 of it
    counts = {v: InfiniGen(alpha=1.0, variant=v).how_many(scores, [4, 4]) for v in VARIANTS}
    assert counts == {
        "paper": [1, 1], "official-speed": [1, 1],
        "official-accuracy": [3, 3], "official-accuracy-llama": [1, 1],
    }  # fmt: skip
    model, seen = tiny("opt"), {}

    def query(norm=None):
        seen["norm"] = norm
        return torch.zeros(1, 4, 1, 8)

    for variant, norm in [("paper", None), ("official-speed", 2), ("official-accuracy-llama", 2)]:
        cache = kvlab.KVCache(model, place=Host(InfiniGen(5, variant=variant)))
        kvlab.decode(model, prompt(20), cache, 4)
        cache.layers[3].place.speculate(cache.layers[3], query)
        assert seen["norm"] == norm
    with pytest.raises(ValueError, match="variant='fast': expected one of paper, official-speed"):
        InfiniGen(variant="fast")


def test_group_importance():
    scores = torch.tensor([[[0.0, 2.0, -math.inf], [1.0, 0.0, -math.inf]]])
    assert torch.equal(group_importance(scores, 2), scores)
    mean = scores.softmax(-1).mean(1, keepdim=True)
    assert torch.allclose(group_importance(scores, 1), mean)


def test_bad_parameters_and_models():
    for parameter, value in [("alpha", 0), ("alpha", "x"), ("ratio", 0), ("ratio", 1.2), ("budget", 0)]:
        with pytest.raises(ValueError, match=f"{parameter}="):
            InfiniGen(**{parameter: value})
    from transformers import StableLmConfig, StableLmForCausalLM

    other = StableLmForCausalLM(
        StableLmConfig(vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                       num_key_value_heads=2, intermediate_size=16, max_position_embeddings=32)
    )  # fmt: skip
    kvlab.decode(other.eval(), prompt(5) % 32, kvlab.make_cache(other, "h2o"), 3)  # others work
    kvlab.decode(other, prompt(5) % 32, kvlab.make_cache(other, "infinigen"), 3)

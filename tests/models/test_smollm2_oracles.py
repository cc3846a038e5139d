"""The oracles on a real model: `pytest -m real tests/models` (minutes; SmolLM2 is fetched at the first time).

transformers' own generate, and the definitions of tests/reference on queries, keys and values recorded in one
of its layers. lm-eval's HF model on rows of public data sets: test_smollm2_parity.py.
"""

import pytest
import torch
from reference import driven
from reference.definitions import store
from reference.driven import Driven, check, keep_all
from reference.keeps import by_h2o, by_sinks, by_snapkv, by_topk
from reference.test_place import by_infinigen, skewing
from reference.test_store import check_format
from transformers import AutoModelForCausalLM

import kvlab
from eval.tasks.rows import prose
from kvlab.attention import recorded
from kvlab.models import query_of, source_of

pytestmark = pytest.mark.real
TOKENS, SIZES, STEPS = 200, (40, 17), 24
LAYER = 11  # of 30; a fetch guesses its query from the input of block 10


@pytest.fixture(scope="module")
def theirs(smollm2):
    """The same weights as transformers alone loads them."""
    return AutoModelForCausalLM.from_pretrained(source_of("smollm2"), dtype=torch.float32).eval()


def test_full_is_transformers_generate(smollm2, theirs):
    model, tokenizer = smollm2
    ids = tokenizer("Once upon a time there was a small boat", return_tensors="pt").input_ids
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = theirs.generate(ids, **options)
    found = model.generate(ids, past_key_values=kvlab.make_cache(model, "full"), **options)
    assert found.sequences.shape == (1, ids.shape[1] + TOKENS)
    assert torch.equal(found.sequences, expected.sequences)
    mine, other = (torch.stack(out.logits, 1).log_softmax(-1) for out in (found, expected))
    assert torch.allclose(mine, other, atol=2e-4)


@pytest.fixture(scope="module")
def of_one_layer(smollm2):
    """makes a `Driven` of two rows whose last layer is given what LAYER of SmolLM2 was, before it the layers
    before."""
    model, tokenizer = smollm2
    texts = [row["text"] for row in prose()["test"].select(range(2))]
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in texts]

    def make(spec: str, layers: int = 1) -> Driven:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driven, "KV_HEADS", 3)
            run = Driven(spec, SIZES, (1,) * STEPS, head_dim=64, layers=layers, group=3)
            for row, (size, ids) in enumerate(zip(SIZES, rows, strict=True)):
                ids = ids[:, : size + STEPS]
                with torch.no_grad():
                    seen = recorded(model, ids)[LAYER - layers + 1 : LAYER + 1]
                    inputs = model(ids, output_hidden_states=True, use_cache=False).hidden_states
                    rotary = model.model.rotary_emb(inputs[0], torch.arange(ids.shape[1])[None])
                    asked = query_of(model, LAYER, inputs[LAYER - 1], rotary)
                real = slice(max(SIZES) - size, None)
                for i, layer in enumerate(seen):
                    run.query[i][row, :, real] = layer.query[0]
                    run.keys[i][row, :, real] = layer.keys[0]
                    run.values[i][row, :, real] = layer.values[0]
                run.asked[-1][row, :, real] = asked[0]
            return run.run()

    return make


KEPT = {
    "full": keep_all,
    "sinks:budget=12,sinks=4": by_sinks(12, 4),
    "h2o:budget=0.4,recent=0.5": by_h2o(0.4, 0.5),
    "snapkv:budget=12,window=5,kernel=3": by_snapkv(12, 5, 3),
}


@pytest.mark.parametrize("spec", KEPT)
def test_kept_sets(of_one_layer, spec):
    check(of_one_layer(spec), KEPT[spec])


@pytest.mark.parametrize("bits", [8, 4])
def test_formats(of_one_layer, bits):
    group = 32
    run = of_one_layer(f"int{bits}:group={group}")
    check_format(run, lambda x, prompt: store.integers(x, prompt, bits, group=group), bits)


def test_topk(of_one_layer):
    check(of_one_layer("topk:budget=7,full_layers=0"), keep_all, by_topk(7))


def test_infinigen(of_one_layer):
    run = of_one_layer("infinigen:budget=0.4,alpha=4,ratio=0.3", layers=3)
    check(run, keep_all, by_infinigen(skewing(run.model)[2], 0.4, 4, 0.3), layer=2)
    counts = {len(head) for seen in run.seen[1:] for row in seen[2].attended for head in row}
    assert len(counts) > 3  # neither the cap nor everything

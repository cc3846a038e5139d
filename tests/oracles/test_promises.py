"""What a batch may change, method by method: the promises of docs/promises.md.

A batched matrix product may differ from that of a row alone in its last bit. What holds numbers as they are
makes nothing of that. Elsewhere a code may become its neighbour where a value lies at a border, and a token
may take another's place where both are equally good; never otherwise.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families.profiles import profiled
from hypothesis import given
from hypothesis import strategies as st
from tiny import left_padded

import kvlab
from eval.tasks.rows import prose, recall
from kvlab.finding import METHODS, PROFILED
from kvlab.keep import Keep
from kvlab.place.topk import most_important
from kvlab.store import Float8, Int
from kvlab.store.planes import unpack

HALF = 2.0**-10  # one step of fp16, relative


def pairs(seed: int, part: float, tokens: int = 40, width: int = 16):
    """x `[1, 2, tokens, width]`, and x with noise of at most `part` of its largest value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, tokens, width, generator=generator) * 3
    noise = (torch.rand(x.shape, generator=generator) * 2 - 1) * x.abs().max() * part
    return x, x + noise, noise.abs()


def numbers(form, parts, like):
    """(codes, step of every value, zero of every value) of what an Int wrote."""
    scale = form.scales.spread(parts[1].float().clamp(min=form.scales.smallest), like)
    zero = torch.zeros(1) if form.symmetric else form.scales.spread(parts[2].float(), like)
    codes = unpack(parts[0], form.bits).float() + (0 if form.symmetric else 2 ** (form.bits - 1))
    return codes, scale, zero


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis, group", [("group", None), ("group", 4), ("channel", None), ("tensor", None)])
@pytest.mark.parametrize("symmetric", [True, False])
@given(seed=st.integers(0, 10**6))
def test_integers_differ_by_one_code_and_only_at_a_border(bits, axis, group, symmetric, seed):
    form = Int(bits, group, axis, symmetric)
    x, other, noise = pairs(seed, 1e-6)
    codes, step, zero = numbers(form, form.write(x), x)
    codes_too, step_too, zero_too = numbers(form, form.write(other), x)
    assert (codes - codes_too).abs().max() <= 1
    steps = (x - zero) / step  # where the value lies between the levels, and how far a scale can shift it
    moved = noise / step + steps.abs() * (step_too / step - 1).abs() + ((zero - zero_too) / step).abs()
    shifted = HALF * step + (zero - zero_too).abs() / (2**bits - 1)  # the scale, by one fp16 number
    assert ((step_too - step).abs() <= shifted * 1.01 + 1e-6).all()
    border = (steps - steps.floor() - 0.5).abs()
    assert (border[codes != codes_too] <= (moved + 1e-5 * (1 + steps.abs()))[codes != codes_too]).all()


@pytest.mark.parametrize("form", [Float8("e4m3"), Float8("e5m2"), Float8("e4m3", "token")])
@given(seed=st.integers(0, 10**6))
def test_floats_differ_by_one_code(form, seed):
    x, other, _ = pairs(seed, 1e-7)
    bits, bits_too = form.write(x)[0].short(), form.write(other)[0].short()
    signed = (bits != bits_too) & (x.sign() == other.sign())
    assert (bits - bits_too)[signed].abs().sum() == int(signed.sum())


@pytest.mark.parametrize("form", [Int(8), Int(4, 4), Int(2, symmetric=False), Int(4, axis="channel")])
@given(seed=st.integers(0, 10**6), part=st.sampled_from([1e-6, 1e-3, 0.05, 0.3]))
def test_a_store_adds_one_step_to_a_difference_at_most(form, seed, part):
    """However far apart the two are."""
    x, other, noise = pairs(seed, part)
    parts, parts_too = form.write(x), form.write(other)
    step = torch.maximum(numbers(form, parts, x)[1], numbers(form, parts_too, x)[1])
    decoded, too = form.decode(parts, torch.float32), form.decode(parts_too, torch.float32)
    assert ((decoded - too).abs() <= noise + step * 1.0001).all()


class Given(Keep):
    """Keeps by scores that are handed to it."""

    def score(self, layer):
        return layer.scores


def kept(scores, budget: int) -> list[set[int]]:
    policy, slots = Given(budget), scores.shape[-1]
    layer = SimpleNamespace(
        state=policy.start(None), scores=scores, lengths=[slots], rows_held=[slots],
        slot_positions=torch.arange(slots).expand(scores.shape), local=None,
        in_prompt=True,
    )  # fmt: skip
    return [set(head) for head in policy.choose(layer)[0].tolist()]


@given(
    slots=st.integers(3, 40), part=st.floats(0.05, 0.95), ties=st.sampled_from([3, 50, 10**6]),
    eps=st.sampled_from([1e-6, 1e-2]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_sets_differ_only_among_equals(slots, part, ties, eps, seed):
    """What is kept, and what is fetched, is the same but for tokens within 2 eps of the last that stays."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(ties, (1, 2, slots), generator=generator) / ties
    other = scores + (torch.rand(scores.shape, generator=generator) * 2 - 1) * eps
    count = max(2, min(slots - 1, int(part * slots)))
    fetched = [[set(head) for head in most_important(s, [count])[0].tolist()] for s in (scores, other)]
    for one, two in ((kept(scores, count), kept(other, count)), fetched):
        for head, (mine, theirs) in enumerate(zip(one, two, strict=True)):
            assert len(mine) == len(theirs) == count
            last = float(scores[0, head].topk(count).values[-1])
            assert all(abs(float(scores[0, head, token]) - last) <= 2 * eps + 1e-6 for token in mine ^ theirs)


# Whole models.

TABLE = Path(__file__).resolve().parents[2] / "docs" / "promises.md"
ROW = re.compile(r"^\| (`.+`) \| (\S+) \| (\S+) \|", re.MULTILINE)
PROMISED = [
    (method, float(fp32), float(bf16))
    for methods, fp32, bf16 in ROW.findall(TABLE.read_text(encoding="utf-8"))
    for method in re.findall(r"`([^`]+)`", methods)
]
STEPS = 2


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def texts(request):
    """(model, prompts `[1, tokens]`, what follows `[rows, STEPS]`)."""
    model, tokenizer = kvlab.load("workshop", dtype=request.param)
    stories = [row["text"] for row in prose()["test"]]

    def read(text: str):
        return tokenizer(text, return_tensors="pt").input_ids

    later = torch.cat([read(stories[20 + row])[:, :STEPS] for row in range(2)])
    return model, [read(recall()["test"][0]["context"]), read(stories[7][:120])], later


def fed(model, method, ids, mask=None):
    """(stepper that has read the prompt, its last logits)."""
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, profiled(method, model)))
    return stepper, stepper.feed(ids, mask, last=True)


def logprobs(model, method, ids, mask, later):
    stepper, logits = fed(model, method, ids, mask)
    found = [logits, *(stepper.feed(token, last=True) for token in later.split(1, dim=1))]
    return torch.stack(found, 1).log_softmax(-1)


@pytest.mark.parametrize("method, fp32, bf16", PROMISED)
def test_a_row_in_a_batch_is_the_row_alone(texts, method, fp32, bf16):
    model, prompts, later = texts
    promised = fp32 if model.dtype == torch.float32 else bf16
    together = logprobs(model, method, *left_padded(prompts), later)
    for row, ids in enumerate(prompts):
        alone = logprobs(model, method, ids, None, later[row : row + 1])[0]
        assert (together[row] - alone).abs().max() <= promised


def test_every_method_has_a_promise():
    promised = {method.partition(":")[0] for method, *_ in PROMISED}
    assert promised | {"padded"} == set(METHODS | PROFILED)  # it runs rows one after the other

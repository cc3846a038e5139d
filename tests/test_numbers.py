"""Numbers outside of what a format holds: right within the format's error, or one line, in every dtype."""

import copy
import random

import pytest
import torch
from drawn import FORMS
from every import LINKED
from families.models import family
from families.profiles import profiled
from tiny import EACH, SAME, begun, prompt, refusing, tiny

import kvlab
from kvlab.store import Exact, Float4, Float8, Growing, Int, Kivi, NonUniform, Rotated, Smoothed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1e-42, 1e-9, 1.0, 300.0, 3e3, 1e4, 6.5e4, 1e6, 1e37)


def drawn(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys with a bias in some channels, single outliers, and numbers near zero, `[2, 2, 12, 32]`."""
    draw = random.Random(seed)
    x = torch.randn(2, 2, 12, 32, generator=torch.Generator().manual_seed(seed))
    x = x * draw.choice((1e-42, 1e-9, 1e-3, 1.0, 30.0))
    bias = draw.choice(SIZES)
    for channel in draw.sample(range(32), draw.randint(0, 3)):
        x[:, :, :, channel] += bias * draw.choice((-1, 1))
    if draw.random() < 0.5:
        x[draw.randrange(2), draw.randrange(2), draw.randrange(12), draw.randrange(32)] = draw.choice(SIZES)
    return x.to(dtype)


def bound(form: Exact, x: torch.Tensor) -> torch.Tensor:
    """The most that a format of a few bits may be off, by what shares its scale: generously."""
    form = getattr(form, "format", form) if isinstance(form, Rotated) else form
    most = x.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    if isinstance(form, NonUniform) or getattr(getattr(form, "scales", None), "fixed", False):
        return 2.1 * x.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return most * (2.1 if not isinstance(form, Int) or form.bits < 4 else 0.6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_read_is_near_what_was_written_or_it_is_refused(form, dtype):
    for seed in range(6):
        x = drawn(seed, dtype)
        plain = x if x.isfinite().all() else None
        try:
            form.check(32)
            read = form.decode(form.encode(x), dtype)
        except ValueError as error:
            assert "KV head" in str(error) and "\n" not in str(error)
            large = plain is None or x.abs().max() > (440 if isinstance(form, Float8) else 2600)
            assert large, f"refused without a reason: {error}"
            continue
        assert plain is not None or isinstance(form, Exact)
        if type(form) is Exact:
            assert torch.equal(read, x) or plain is None
            continue
        assert read.dtype == dtype and read.isfinite().all()
        assert ((read.double() - x.double()).abs() <= bound(form, x.double())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", ["token", "channel", "tensor"])
def test_the_largest_numbers_of_a_dtype_are_read_as_numbers_or_refused(axis, dtype):
    """With scales of fp32, too, whose rounding may take what is read beyond the largest number."""
    draw = random.Random(axis + str(dtype))
    for scale in ("fp16", "fp32"):
        more = {"axis": axis, "scale": scale}
        forms = [Int(bits, symmetric=even, **more) for bits in (2, 4, 8) for even in (True, False)]
        for form in (*forms, Int(7, **more), Float8(**more), Float8("e5m2", **more)):
            for part in (1.0, 0.999, 0.49, draw.random()):
                x = torch.randn(2, 2, 12, 32, generator=torch.Generator().manual_seed(draw.randrange(99)))
                x = (x / x.abs().max() * torch.finfo(dtype).max * part).to(dtype)
                try:
                    read = form.decode(form.encode(x), dtype)
                except ValueError as error:
                    assert ("KV head" in str(error) and part > 0.49) or scale == "fp16"
                    continue
                assert read.isfinite().all(), (form, part)


@pytest.mark.parametrize("seed", range(8))
def test_scales_of_fp32_are_read_as_such(seed):
    """Of numbers for which fp16 has few bits or none: in fp16 they are what they are in fp32, rounded."""
    draw = random.Random(seed)
    how = {"axis": draw.choice(("group", "token", "channel", "tensor")), "scale": "fp32"}
    forms = [Int(draw.randint(2, 8), symmetric=even, **how) for even in (True, False)]
    for form in (*forms, Float8(**how), Float8("e5m2", **how)):
        size = 10 ** draw.uniform(-6, 3)
        x = (torch.randn(2, 2, 9, 32, generator=torch.Generator().manual_seed(seed)) * size).half()
        wide, read = (form.decode(form.encode(x), dtype).float() for dtype in (torch.float32, torch.float16))
        assert ((read - wide).abs() <= wide.abs() * 2**-10 + 2**-24).all(), form


@pytest.mark.parametrize("seed", range(4))
def test_what_smoothed_keys_lose_is_counted_or_refused(seed):
    """A number beyond the format behind the division, in the first tokens and in later ones; and no other."""
    draw = random.Random(seed)
    for clip in (True, False):
        form = Smoothed(Int(draw.choice((2, 3)), nonfinite="clip" if clip else "refuse"), 0.1)
        other = Growing(Smoothed(Rotated(form.format), 0.5))
        usual = other.start(kvlab.make_cache(tiny("llama"), "full").layers[0])
        usual.append(torch.randn(2, 2, 9, 8).double(), torch.randn(2, 2, 9, 8).double())
        assert usual.clipped == 0
        store = Growing(form).start(kvlab.make_cache(tiny("llama"), "full").layers[0])
        x, fine = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 3, 8)
        many = draw.randint(1, 5)
        x[0, 1, draw.sample(range(12), many), draw.randrange(8)] = draw.choice((-1, 1)) * 1e7
        fine[0, 0, 1, 3] = 1e9
        if clip:
            store.append(x, torch.zeros_like(x))
            assert store.clipped == many
            store.append(fine, torch.zeros_like(fine))
            assert store.clipped == many + 1
        else:
            with pytest.raises(ValueError, match="KV head 1 holds a value above"):
                store.append(x, torch.zeros_like(x))


@pytest.mark.parametrize("form, most", [(Float8(), 448.0), (Float8("e5m2"), 57344.0), (Float4(), 2688.0)])
def test_a_format_without_a_scale_refuses_or_counts_what_it_cannot_hold(form, most):
    """By itself, and where a compiled kernel writes the token; `stats` counts what was clipped."""
    model = tiny("llama", head_dim=32, hidden_size=64)
    for size in (most, -most, most * 1.01, -3 * most):
        for clip in (False, True):
            kind = type(form)(form.format, nonfinite="clip" if clip else "refuse")
            cache = kvlab.KVCache(model, store=kind)
            stepper = kvlab.Stepper(model, cache)
            stepper.feed(prompt(9))
            stepper.feed(prompt(1))
            with model.model.layers[0].self_attn.v_proj.register_forward_hook(
                lambda module, args, out, size=size: out.index_fill(-1, torch.tensor([33]), size)
            ):
                if abs(size) <= most or clip:
                    stepper.feed(prompt(1))
                    held = cache.layers[0].values[0, 1, -1, 1]
                    assert abs(held) <= most and abs(held - max(-most, min(most, size))) < 0.2 * most
                    assert cache.stats().clipped == (abs(size) > most)
                else:
                    with pytest.raises(
                        ValueError, match=rf"^layer 0: values: .*KV head 1 holds .* above {most:g} "
                    ):
                        stepper.feed(prompt(1))
                    assert cache.stats().clipped == 0


FIXED = [
    Int(8, axis="channel"), Int(4, axis="tensor", symmetric=False), Int(5, axis="tensor"),
    Float8(axis="channel"), Smoothed(Int(8, axis="channel")), NonUniform(3, "channel", 0),
]  # fmt: skip


@pytest.mark.parametrize("form", FIXED, ids=str)
def test_what_lies_beyond_the_prompts_scale_is_counted(form):
    draw = random.Random(str(form))
    store = Growing(form).start(kvlab.make_cache(tiny("llama"), "full").layers[0])
    x = torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(1))
    store.append(x, x)
    assert store.clipped == 0
    beyond = draw.randint(1, 8)
    new = torch.zeros(2, 2, 1, 8)
    new.view(-1)[draw.sample(range(32), beyond)] = 100.0
    store.append(new, torch.zeros(2, 2, 1, 8), torch.ones(2, 1, dtype=torch.bool))
    assert store.clipped == beyond
    padding = torch.zeros(2, 1, dtype=torch.bool)
    store.append(new, new, padding)
    assert store.clipped == beyond


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_keys_are_read_as_numbers(dtype):
    for seed in range(12):
        store = Kivi(random.Random(seed).choice((2, 4)), group=4, recent=3).start(
            kvlab.make_cache(tiny("llama"), "full").layers[0]
        )
        x = drawn(seed, dtype)[..., :8]
        try:
            store.append(x, x)
        except ValueError as error:
            assert "KV head" in str(error) and "\n" not in str(error)
            continue
        for read in store.read(x.device):
            assert read.dtype == dtype and read.isfinite().all()


@pytest.mark.parametrize("spec", ["full", "recompute", "h2o:budget=8", "int8", "offload:link=1e9", "static"])
def test_logits_that_are_not_finite_are_refused_after_every_pass(spec):
    draw = random.Random(spec)
    for seed in range(6):
        model = copy.deepcopy(tiny("llama"))
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        when, value = draw.randrange(3), draw.choice((float("nan"), float("inf")))
        weights = [
            w for name, w in model.named_parameters() if draw.choice(("mlp", "norm", "lm_head")) in name
        ]
        with pytest.raises(ValueError, match=r"not finite|NaN"):
            for step in range(5):
                if step == when:
                    draw.choice(weights).data.view(-1)[0] = value
                stepper.feed(
                    prompt(12 if step == 0 else draw.randint(1, 3), 2, seed), last=draw.random() < 0.5
                )


def test_logits_that_are_not_finite_where_weights_are_elsewhere():
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(tiny("llama"))
    model.lm_head.weight.data[3, 0] = float("nan")
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="not finite"):
        kvlab.decode(model, prompt(9), kvlab.make_cache(model, "full"), 3)


def test_padding_may_be_anything():
    """A row's padding has no say, whatever logits it gets."""
    model = tiny("llama")
    mask = torch.ones(2, 8).long()
    mask[1, 5:] = 0
    place = torch.tensor([1]), torch.tensor([7])
    spoilt = lambda module, args, out: out.index_put(place, torch.tensor(float("nan")))
    with model.lm_head.register_forward_hook(spoilt):
        begun(model, "full", (prompt(8, 2), mask))
        with pytest.raises(ValueError, match="not finite"):
            begun(model, "full", prompt(8, 2))


@pytest.mark.parametrize("spec", [spec for spec in (*EACH, *LINKED) if spec != "recompute"])
def test_a_prompt_of_padding_alone(spec):
    """Numbers, or the method refuses so short a prompt."""
    model, mask = tiny("llama"), torch.zeros(1, 9).long()
    cache = kvlab.make_cache(model, spec)
    with torch.no_grad(), refusing("a prompt of 0 tokens"):
        model(prompt(9), attention_mask=mask, past_key_values=cache)
        for step in range(4):
            mask = torch.cat([mask, torch.ones(1, 1).long()], 1)
            found = model(prompt(1, seed=step), attention_mask=mask, past_key_values=cache).logits
            assert found.isfinite().all()


@pytest.mark.parametrize("spec", EACH)
def test_a_bias_in_w_k_is_borne_or_refused(spec):
    """Biases of 1 to 10,000 in a few channels: in fp32 equal to the model's own cache where the method gives
    nothing up; else, and in every dtype, numbers or one line."""
    draw, same = random.Random(spec), spec in SAME.values()
    for dtype in DTYPES:
        model = copy.deepcopy(family("Qwen2")).to(dtype)
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.data
            for channel in draw.sample(range(len(bias)), 3):
                bias[channel] = draw.choice((1, 30, 700, 10_000)) * draw.choice((-1, 1))
        ids, step = prompt(14, 2, seed=1), prompt(1, 2, seed=2)
        with torch.no_grad():
            plain = model(ids, use_cache=True)
            after = model(step, past_key_values=plain.past_key_values).logits[:, -1]
        if not after.isfinite().all():
            continue  # the model alone has no answer
        try:
            stepper = kvlab.Stepper(kvlab.prepare(model), kvlab.make_cache(model, spec))
            stepper.feed(ids)
            found = stepper.feed(step, last=True)
            stepper.cache.stats() if stepper.cache is not None else None
        except ValueError as refused:
            assert "\n" not in str(refused)
            continue
        assert found.isfinite().all()
        if same and dtype == torch.float32:  # bf16 rounds a score of 10,000 by 30, in either order of sums
            off = (found.double() - after.double()).abs().max() / after.double().abs().max()
            assert off < 1e-3


@pytest.mark.parametrize("spec", EACH)
def test_scores_beyond_fp16_are_scores(spec):
    """A bias in W_q and W_k, as Qwen 2.5 has: q times k overflows fp16 before it is scaled, in torch's own
    attention too, which computes it in fp32."""
    draw = random.Random(spec)
    wide = copy.deepcopy(tiny("llama", head_dim=64))
    for layer in wide.model.layers:
        for name in ("q_proj", "k_proj"):
            old = getattr(layer.self_attn, name)
            new = torch.nn.Linear(old.in_features, old.out_features)
            bias = torch.zeros(old.out_features).view(-1, 64)
            bias[:, 24:32] = draw.choice((80.0, 150.0))
            new.load_state_dict({"weight": old.weight, "bias": bias.flatten()})
            setattr(layer.self_attn, name, new)
    for dtype in (torch.float16, torch.bfloat16):
        model, ids = copy.deepcopy(wide).to(dtype), prompt(30, 2)
        with torch.no_grad():
            right, theirs = (
                one(ids, use_cache=False).logits[:, -1].float().log_softmax(-1) for one in (wide, model)
            )
        try:
            found = kvlab.Stepper(model, kvlab.make_cache(model, spec)).feed(ids, last=True)
        except ValueError as refused:
            assert spec.startswith(("fp8", "int8:smooth")) or "fp16" in str(refused), refused
            continue
        assert (found.float().log_softmax(-1) - right).norm() < 1.5 * (theirs - right).norm() + 0.1


@pytest.mark.parametrize("spec", [*EACH, "fp8:nonfinite=clip", "int4:sinks=2", "kvquant"])
@pytest.mark.parametrize("value", [900.0, 1e30])
def test_numbers_of_padding_are_nobodys(spec, value):
    """A shorter row of a batch is neither refused nor counted for them."""
    if spec.startswith(("padded", "recompute")):  # which hold no padding
        return
    model = copy.deepcopy(tiny("llama"))
    ids = prompt(20, 2)
    mask = torch.ones(2, 20).long()
    mask[1, :7] = 0
    spec = profiled(spec, model)

    large = lambda module, args, out: (
        out if out.shape[1] == 1 else out.masked_fill(mask[..., None] == 0, value)
    )
    loud = ("k_proj", "v_proj") if value < 1e3 else ("v_proj",)
    found = []
    for parts in ((), loud):
        for layer in model.model.layers:
            for name in parts:
                getattr(layer.self_attn, name).register_forward_hook(large)
        stepper = begun(model, spec, (ids, mask))
        found.append((stepper.feed(prompt(1, 2), last=True), stepper.cache.stats()))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4) and found[0][1] == found[1][1]

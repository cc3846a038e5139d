"""Every number format against its definition: codes bit by bit, numbers, and steps of attention."""

import itertools
import math

import pytest
import torch
from reference.definitions import store
from reference.driven import Driven

from kvlab.models import rotations_of
from kvlab.store import BlockPool, Float8, Int, Paged
from kvlab.store.codebook import levels

CPU = torch.device("cpu")
SIZES, LATER = (13, 6), (1,) * 17


def stored(run: Driven, layer: int = 0):
    """(codes of K, of V, numbers of K, of V), `[batch, kv_heads, tokens, ...]`, as the store holds them."""
    run.cache.stats()  # a link's last token lands
    held = run.cache.layers[layer].store
    (keys, *_), (values, *_) = held.parts()
    return keys, values, *held.read(CPU)


def check_codes(run: Driven, quantize, bits: int | None = None) -> None:
    """quantize(x `[kv_heads, tokens, head_dim]`, tokens of the prompt) -> codes and numbers; bits: how they
    are packed."""
    found = stored(run)
    for index, row in enumerate(run.rows()):
        pad = run.longest - row.prompt
        for side, x in enumerate((row.keys, row.values)):
            codes, numbers = quantize(x, row.prompt)
            if bits not in (None, 8):
                pack = store.planes if 8 % bits else store.pack
                codes = torch.tensor([[pack(t.int().tolist(), bits) for t in head] for head in codes])
            assert torch.equal(found[side][index, :, pad:].int(), codes.int())
            assert torch.equal(found[2 + side][index, :, pad:], numbers)


def check_outputs(run: Driven, hold) -> None:
    """hold(x `[kv_heads, tokens, head_dim]`, prompt, side) -> the numbers that a row holds of them; what is
    written is not written again. Decode steps attend to these, the prompt to itself as it is."""
    for index, row in enumerate(run.rows()):
        for step, new in run.positions_of(index):
            over = [list(range(new[-1] + 1))] * len(row.keys)
            keys, values = row.keys, row.values
            if step:
                end = new[-1] + 1
                keys, values = (hold(x[:, :end], row.prompt, side) for side, x in enumerate((keys, values)))
            expected = row.out(new, over, keys, values)
            found = run.seen[step][0].out[index, :, -len(new) :]
            assert torch.allclose(found, expected, atol=1e-5), f"pass {step}, row {index}"


# Kernels read multiples of 32, of which few are here: tests/fast holds each of them against the eager code.
INTEGERS = [  # spec, what the definition is asked; at head dimensions that its group divides
    (80, "int8", {"bits": 8}),
    (96, "int2", {"bits": 2}),
    (72, "int8:group=24", {"bits": 8, "group": 24}),
    (20, "int2:group=5", {"bits": 2, "group": 5}),
    (80, "int8:axis=token,scale=fp32", {"bits": 8, "axis": "token", "rounded": float}),
    (20, "int8:axis=channel", {"bits": 8, "axis": "channel"}),
    (80, "int4:axis=channel,symmetric=false", {"bits": 4, "axis": "channel", "symmetric": False}),
    (20, "int8:axis=tensor,symmetric=false", {"bits": 8, "axis": "tensor", "symmetric": False}),
    (20, "int2:symmetric=false,group=4", {"bits": 2, "symmetric": False, "group": 4}),
    (20, "int4:symmetric=false,scale=fp32", {"bits": 4, "symmetric": False, "rounded": float}),
    (20, "offload+int4:group=5,link=1e12", {"bits": 4, "group": 5}),
    (96, "int5:group=32", {"bits": 5, "group": 32}),
    (160, "int5:symmetric=false", {"bits": 5, "symmetric": False}),
    (20, "int5:axis=channel", {"bits": 5, "axis": "channel"}),
]


def check_format(run: Driven, quantize, bits: int | None = None) -> None:
    """quantize(x, tokens of the prompt) -> codes and numbers: codes, numbers, and attention to these."""
    made = {}

    def whole(x, prompt):
        key = prompt, x.shape, float(x.sum())
        if key not in made:
            made[key] = quantize(x, prompt)
        return made[key]

    check_codes(run, whole, bits)
    sides = {row.prompt: (row.keys, row.values) for row in run.rows()}
    check_outputs(run, lambda x, prompt, side: whole(sides[prompt][side], prompt)[1][:, : x.shape[1]])


@pytest.mark.parametrize("head_dim, spec, how", INTEGERS, ids=[spec for _, spec, _ in INTEGERS])
def test_integers(head_dim, spec, how):
    run = Driven(spec, SIZES, LATER, head_dim=head_dim).run()
    check_format(run, lambda x, prompt: store.integers(x, prompt, **how), how["bits"])


ROTATED = [
    (80, "int4:rotate=true", {"bits": 4}, False),
    (72, "int8:rotate=signs,group=24", {"bits": 8, "group": 24}, True),
    (144, "int4:rotate=signs", {"bits": 4}, True),
    (80, "int4:rotate=true,group=40", {"bits": 4, "group": 40}, False),
    (20, "int2:rotate=signs,symmetric=false", {"bits": 2, "symmetric": False}, True),
    (20, "int4:rotate=true,axis=channel", {"bits": 4, "axis": "channel"}, False),
    (20, "offload+int4:rotate=true,group=5,link=1e12", {"bits": 4, "group": 5}, False),
]


@pytest.mark.parametrize("head_dim, spec, how, signed", ROTATED, ids=[spec for _, spec, _, _ in ROTATED])
def test_rotated_integers(head_dim, spec, how, signed):
    signs = store.signs(head_dim) if signed else None
    integers = lambda x, first: store.integers(x, first, **how)
    run = Driven(spec, SIZES, (1,) * 9, head_dim=head_dim).run()
    check_format(run, lambda x, first: store.rotated(x, first, integers, signs), how["bits"])


FOURS = [
    (80, "nvfp4", {"form": "nvfp4"}),
    (20, "nvfp4:largest=4over6", {"form": "nvfp4", "four_or_six": True}),
    (160, "nvfp4:largest=4over6", {"form": "nvfp4", "four_or_six": True}),
    (80, "mxfp4", {"form": "mxfp4"}),
    (96, "mxfp4", {"form": "mxfp4"}),
]


@pytest.mark.parametrize("head_dim, spec, how", FOURS, ids=[f"{spec}-{width}" for width, spec, _ in FOURS])
def test_floats_of_four_bits(head_dim, spec, how):
    def quantize(x, prompt):
        codes, numbers = store.float4(x, prompt, **how)
        return codes - 8, numbers

    check_format(Driven(spec, SIZES, (1,) * 9, head_dim=head_dim).run(), quantize, 4)


@pytest.mark.parametrize("head_dim, bits", [(80, 4), (96, 3), (160, 2), (20, 3)])
def test_turboquant(head_dim, bits):
    def quantize(x, prompt):
        codes, numbers = store.codebook(x, prompt, levels(head_dim, bits))
        return codes - 2 ** (bits - 1), numbers

    signs = store.signs(head_dim)
    run = Driven(f"turboquant:bits={bits}", SIZES, (1,) * 9, head_dim=head_dim).run()
    check_format(run, lambda x, first: store.rotated(x, first, quantize, signs), bits)


@pytest.mark.parametrize("head_dim, bits", [(8, 2), (20, 3), (64, 3), (128, 4)])
def test_levels_are_those_of_lloyd_and_max(head_dim, bits):
    found = levels(head_dim, bits)
    assert torch.allclose(found, torch.tensor(store.nearest_means(found.tolist(), head_dim)), atol=3e-4)


@pytest.mark.parametrize("head_dim, bits, part", [(80, 3, 0.01), (96, 4, 0.05), (160, 2, 0.0), (20, 2, 0.1)])
def test_kvquant(head_dim, bits, part):
    """Keys are compared before RoPE, and as they are read."""
    spec = f"kvquant:bits={bits},outliers={part},sinks=0"
    run = Driven(spec, SIZES, (1,) * 9, head_dim=head_dim).run()
    layer = run.cache.layers[0]
    rotation, held = rotations_of(layer.model)[0], layer.store.read(CPU)
    for index, row in enumerate(run.rows()):
        pad, at = run.longest - row.prompt, torch.arange(row.keys.shape[1]).expand(row.keys.shape[:2])
        codes, keys = store.nonuniform(rotation.undo(row.keys, at), row.prompt, bits, "channel", part)
        read = rotation.move(keys, torch.zeros_like(at), at)
        codes_v, values = store.nonuniform(row.values, row.prompt, bits, "token", part)
        for side, (its, numbers) in enumerate(((codes, read), (codes_v, values))):
            packed = [
                [store.planes([int(c) - 2 ** (bits - 1) for c in vector], bits) for vector in head]
                for head in its.tolist()
            ]
            ours = layer.store.parts()[side][0][index, :, pad:]
            assert torch.equal(ours, torch.tensor(packed, dtype=torch.uint8))
            assert torch.equal(held[side][index, :, pad:], numbers)


FLOATS = [
    (20, "fp8", {"form": "e4m3"}),
    (80, "fp8:format=e5m2", {"form": "e5m2"}),
    (20, "fp8:axis=token", {"form": "e4m3", "axis": "token"}),
    (20, "fp8:group=5,format=e5m2", {"form": "e5m2", "axis": "group", "group": 5}),
    (20, "fp8:axis=channel,scale=fp32", {"form": "e4m3", "axis": "channel", "rounded": float}),
    (20, "fp8:axis=tensor", {"form": "e4m3", "axis": "tensor"}),
]


@pytest.mark.parametrize("head_dim, spec, how", FLOATS, ids=[spec for _, spec, _ in FLOATS])
def test_floats(head_dim, spec, how):
    run = Driven(spec, SIZES, (1,) * 9, head_dim=head_dim).run()
    check_format(run, lambda x, prompt: store.floats(x, prompt, **how))


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_every_byte_and_every_halfway_point(form):
    """All bytes decode to what their bits mean; a number between two goes to the nearer, or the even one."""
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    finite = [b for b in range(256) if abs(store.float8_value(b, form)) <= store.FLOATS[form][2]]
    numbers = Float8(form).decode((every,), torch.float32).flatten().tolist()
    assert [numbers[b] for b in finite] == [store.float8_value(b, form) for b in finite]
    values = sorted({store.float8_value(b, form) for b in finite})
    between = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    close = [math.nextafter(x, side) for x in between for side in (-math.inf, math.inf)]
    asked = torch.tensor([*values, *between, *close, -0.0, 1e9, -1e9]).view(1, 1, 1, -1)
    expected = [store.float8_byte(x, form) for x in asked.flatten().tolist()]
    assert Float8(form, nonfinite="clip").encode(asked)[0].flatten().tolist() == expected


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_halfway_points_go_to_the_even_level(bits, symmetric):
    """Values half-way between levels that lie 1 apart, and scales that fp16 cannot hold."""
    levels = 2 ** (bits - 1) - 1
    low, high = (-levels, levels) if symmetric else (0, 2**bits - 1)
    halves = [low + 0.5 + i for i in range(high - low)]
    exact = torch.tensor([low, high, *halves, *halves])[: len(halves) // 4 * 4 + 4].view(1, 1, -1)
    generator = torch.Generator().manual_seed(bits)
    others = [torch.randn(3, 5, 20, generator=generator) * size for size in (1e-9, 1e-5, 0.1, 700.0)]
    constant = torch.full((1, 2, 8), -2.1875)
    for x in (exact, *others, constant, constant * 0):
        form = Int(bits, symmetric=symmetric)
        parts = form.encode(x[None])
        codes, numbers = store.integers(x, x.shape[1], bits, symmetric=symmetric)
        if bits < 8:
            codes = torch.tensor([[store.pack(t.int().tolist(), bits) for t in head] for head in codes])
        assert torch.equal(parts[0][0].int(), codes.int())
        assert torch.equal(form.decode(parts, torch.float32)[0], numbers)


@pytest.mark.parametrize("head_dim, spec, group, recent", [
    (20, "kivi2:group=15,recent=5", 15, 5),
    (80, "kivi4:group=20,recent=3", 20, 3),
    (96, "kivi2:group=36,recent=0", 36, 0),
    (20, "kivi2", 32, 32),
])  # fmt: skip
def test_kivi(head_dim, spec, group, recent):
    bits, channels, made = int(spec[4]), math.gcd(group, head_dim), {}

    def hold(x, prompt, side):
        """What is written stays what it is, so it is worked out again only when there is more of it."""
        written, share = store.kivi_written(x.shape[1], prompt, group, recent), channels if side else None
        if (prompt, side, written) not in made:
            found = [store.kivi(head, prompt, bits, group, recent, share) for head in x]
            made[prompt, side, written] = torch.stack(found)[:, :written]
        return torch.cat([made[prompt, side, written], x[:, written:]], 1)

    def after(step, layer):
        found = layer.store.read(CPU)
        for index, row in enumerate(run.rows()):
            pad, end = run.longest - row.prompt, row.prompt + step
            for side, x in enumerate((row.keys, row.values)):
                assert torch.equal(found[side][index, :, pad:], hold(x[:, :end], row.prompt, side))

    run = Driven(spec, (23, 6), (1,) * 40, head_dim=head_dim)
    check_outputs(run.run(after), hold)


@pytest.mark.parametrize("spec, bits, strength, sinks", [
    ("int4:smooth=0.5", 4, 0.5, 0),
    ("int8:smooth=1.0,sinks=3", 8, 1.0, 3),
    ("int2:group=5,sinks=9,symmetric=false", 2, None, 9),
])  # fmt: skip
def test_smoothed_keys_and_exact_sinks(spec, bits, strength, sinks):
    how = {"group": 5, "symmetric": False} if bits == 2 else {}
    run = Driven(spec, SIZES, LATER, head_dim=20)
    for keys in run.keys:
        keys[..., 3] *= 20
    run.run()
    found = stored(run)[2:]
    for index, row in enumerate(run.rows()):
        pad = run.longest - row.prompt
        for side, x in enumerate((row.keys, row.values)):
            factor = torch.ones(len(x), 1, x.shape[2])
            if strength is not None and side == 0:
                factor = torch.stack([store.smoothing(head[: row.prompt], strength) for head in x])[:, None]
            numbers = store.integers(x / factor, row.prompt, bits, **how)[1] * factor
            numbers[:, :sinks] = x[:, :sinks]
            assert torch.allclose(found[side][index, :, pad:], numbers, rtol=1e-5, atol=0)


@pytest.mark.parametrize("spec, quantize", [
    ("int8:axis=channel", lambda x, prompt: store.integers(x, prompt, 8, "channel")),
    ("int4:axis=channel,symmetric=false", lambda x, prompt: store.integers(x, prompt, 4, "channel", None, 0)),
    ("fp8:axis=channel", lambda x, prompt: store.floats(x, prompt, "e4m3", "channel")),
], ids=["int8", "int4", "fp8"])  # fmt: skip
def test_a_channel_that_was_silent_in_the_prompt(spec, quantize):
    """Its scale is 0, and so it stays."""
    run = Driven(spec, (7, 4), (1,) * 5)
    for x in (*run.keys, *run.values):
        x[..., :7, 5] = 0.0
    found = stored(run.run())[2:]
    for index, row in enumerate(run.rows()):
        for side, x in enumerate((row.keys, row.values)):
            numbers = quantize(x, row.prompt)[1]
            assert torch.equal(found[side][index, :, run.longest - row.prompt :], numbers)
            assert not numbers[..., 5].any()


def test_paged_holds_the_blocks_of_its_definition():
    """Equal rows share the full blocks of their prompt; what is written later has a block of its own."""
    pool, block, prompt = BlockPool(block=7), 7, 17
    run = Driven({"store": Paged(pool=pool)}, (prompt,) * 3, (1,) * 9, head_dim=20)
    for x in (*run.keys, *run.values):
        x[2] = x[0]
    used = []
    run.run(lambda step, layer: used.append(pool.used))
    shared = prompt // block  # of row 2 with row 0
    assert used == [3 * math.ceil((prompt + step) / block) - shared for step in range(10)]

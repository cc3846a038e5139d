"""Stage attention: decode attention over packed K and V beside flash attention over bf16, in one run.

All contestants of a unit hold K and V of the same sizes and take turns. Where a GPU is, a CUDA graph holds
one call for each of several copies of K and V, together many times the device's cache, and its replay is
timed, several of them in a row: `ms` is a call's share, without gaps between launches. `eager_ms` is one call
as Python makes it, after the cache was flushed. `speedup` is over the fastest bf16 flash form of the same
unit, `of_torch` over the fastest of all that torch has in it, `fraction` the stored bytes over the time, over
the bandwidth that a copy on the device reaches in the same process.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvlab.store import Float8, Int

from .bench import out_of_memory, spread
from .right import triton_there
from .unit import FIRST, LAST, NEXT, Unit

SHAPES = {  # heads, KV heads, head dimension
    "Llama-3-8B": (32, 8, 128),
    "Llama-2-13B": (40, 40, 128),
    "small": (4, 2, 64),
}
FORMS = {
    "int8": lambda: Int(8),
    "int8:group=32": lambda: Int(8, 32),
    "int4": lambda: Int(4),
    "int4:group=32": lambda: Int(4, 32),
    "fp8:e4m3": lambda: Float8("e4m3"),
}
FLASH = ("bf16 flash", "bf16 flash, group as queries")  # K and V read once by either
COPIES, TIMES_CACHE = 64, 8  # copies of K and V at most; bytes of all of int4's over the device's cache
REPEATS = 15
CHOSEN = {  # (batch, tokens) that nine minutes have room for, besides those that goals hang on
    "Llama-3-8B": ((1, 4096), (1, 16384), (1, 131072), (8, 65536), (64, 4096), (64, 16384)),
    "Llama-2-13B": ((1, 4096), (1, 65536), (8, 16384)),
}
TOTAL_BITS = 16 + 8.125 + 8.5 + 4.125 + 4.5 + 8  # of all contestants, for each number held


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {
            "shape": "small",
            "tokens": 160,
            "batch": 2,
            "flex": False,
            "forms": ["int8", "int4:group=32"],
        }
        return [Unit("attention", "small, 160 tokens, batch 2", FIRST, 5, given)]
    found = []
    for shape in ("Llama-3-8B", "Llama-2-13B"):
        for batch in (1, 8, 64):
            for tokens in (65536, 131072, 16384, 4096):
                at = batch, tokens
                goal = at == (1, 65536) and shape == "Llama-3-8B"
                rank = NEXT if at in CHOSEN[shape] else LAST
                if shape == "Llama-3-8B" and at in ((1, 65536), (8, 16384)):
                    rank = FIRST
                name = f"{shape}, {tokens} tokens, batch {batch}"
                given = {"shape": shape, "tokens": tokens, "batch": batch, "flex": goal, "forms": list(FORMS)}
                found.append(Unit("attention", name, rank, 18 if goal else 4, given))
    return found


def measure(bench, shape: str, tokens: int, batch: int, flex: bool, forms: list[str]) -> dict:
    bench.clear()
    heads, kv_heads, dim = SHAPES[shape]
    one = (
        kv_heads * dim * tokens * TOTAL_BITS / 8 * 2 * 1.15
    )  # K and V of one row, and what making them needs
    spare = kv_heads * dim * tokens * 4 * 6  # one row's K while it is quantized
    rows_that_fit = [batch >> step for step in range(batch.bit_length())]
    held = bench.shrunk(rows_that_fit, lambda rows: rows * one + spare, f"{shape}, {tokens} tokens: batch")
    copies = copies_of(bench, held * one, held * kv_heads * dim * tokens)
    calls = contestants(bench, (heads, kv_heads, dim), tokens, held, copies, flex, forms)
    about = {"shape": shape, "tokens": tokens, "batch": held}
    rows = timed(bench, calls, copies, about, profiled=flex)
    if not any(name.startswith("kvlab") for name in calls):
        rows += [
            {"kernel": f"kvlab {name}", **about, "left_out": "triton is not installed"} for name in forms
        ]
    return {"rows": rows, "line": line(rows)}


def line(rows: list[dict]) -> str:
    """The fastest kernel of every width beside flash."""
    ours = [row for row in rows if row["kernel"].startswith("kvlab") and row.get("speedup")]
    return ", ".join(f"{row['kernel'][6:]} {row['speedup']:.2f}x ({row['fraction']:.0%})" for row in ours)


def copies_of(bench, size: float, smallest: float) -> int:
    """Copies of everything, so that those of the smallest contestant are many times the device's cache, as
    far as memory goes. smallest: bytes of the 4-bit one."""
    if bench.dry:
        return 2
    wanted = int(TIMES_CACHE * bench.cache_bytes // smallest) + 1
    return max(1, min(COPIES, wanted, int(0.8 * bench.free_bytes() // size)))


def contestants(bench, sizes, tokens: int, batch: int, copies: int, flex: bool, forms: list[str]) -> dict:
    """{name: (calls, one for each copy; bytes of K and V as stored)}."""
    heads, kv_heads, dim = sizes
    torch.manual_seed(tokens)
    dtype, scale = torch.bfloat16, dim**-0.5
    query = torch.randn(batch, heads, 1, dim, device=bench.device).to(dtype)
    row = [torch.randn(1, kv_heads, tokens, dim, device=bench.device).to(dtype) for _ in "kv"]
    plain = [[x.repeat(batch, 1, 1, 1) for x in row] for _ in range(copies)]
    grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
    share = heads != kv_heads

    def flash(keys, values):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=share)

    def flash_grouped(keys, values):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(grouped, keys, values, scale=scale).view_as(query)

    def chosen(keys, values):
        return scaled_dot_product_attention(grouped, keys, values, scale=scale).view_as(query)

    made = {"bf16 flash": flash, "bf16 as torch chooses": chosen}
    if share:
        made["bf16 flash, group as queries"] = flash_grouped
    if flex:
        made["bf16 FlexAttention"] = flexible(query, scale, share)
    size = 2 * plain[0][0].nbytes
    found = {name: ([bound(call, *kv) for kv in plain], size) for name, call in made.items()}
    if triton_there(bench):
        from kvlab.kernels import gpu

        for name in forms:
            form = FORMS[name]()
            if not gpu.compiles(form, bench.capability):
                bench.say(f"kvlab {name}: left out: capability {bench.capability} does not know it")
                continue
            coded = [form.encode(x) for x in row]
            parts = [
                [tuple(part.repeat(batch, 1, 1, 1) for part in one) for one in coded] for _ in range(copies)
            ]
            size = sum(part.nbytes for one in parts[0] for part in one)
            calls = [
                lambda keys=keys, values=values, form=form: gpu.attend(query, keys, values, form, scale)
                for keys, values in parts
            ]
            found[f"kvlab {name}"] = calls, size
    return found


def bound(call, keys, values):
    return lambda: call(keys, values)


def flexible(query, scale: float, share: bool):
    """torch's FlexAttention, compiled for these sizes."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda keys, values: compiled(query, keys, values, scale=scale, enable_gqa=share)


def timed(bench, contestants: dict, copies: int, about: dict, profiled: bool = False) -> list[dict]:
    """The rows of one unit. Who fails is left out with the reason; the others go on. profiled: whether the
    kernels that torch's forms run are named."""
    rows, bodies, eager = {}, {}, {}
    truth = None
    for name, (calls, size) in contestants.items():
        row = rows[name] = {"kernel": name, **about, "bytes": size, "copies": copies}
        try:
            out = calls[0]().float()
            if truth is None:
                truth = out  # bf16 flash
            row["from_flash"] = float((out - truth).norm() / truth.norm())

            def body(calls=calls):
                for call in calls:
                    call()

            bodies[name] = bench.captured(body) or body
            eager[name] = calls[0]
            row["graph"] = bench.on_gpu
        except Exception as error:
            if "CUDA error" in str(error) and not out_of_memory(error):
                raise
            rows[name] = row | {"left_out": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            bodies.pop(name, None)
            bench.say(f"{name}: left out: {rows[name]['left_out'][:120]}")
    repeats = REPEATS if bench.on_gpu else 3
    for name, times in bench.interleaved(bodies, repeats, bench.replayed).items():
        rows[name] |= spread([ms / copies for ms in times])
    flushed = bench.interleaved(eager, repeats, lambda call: bench.once(call, flush=True))
    for name, times in flushed.items():
        rows[name] |= {f"eager_{key}": value for key, value in spread(times).items() if key != "repeats"}
    flash = [rows[name]["ms"] for name in FLASH if "ms" in rows.get(name, {})]
    torchs = [row["ms"] for name, row in rows.items() if name.startswith("bf16") and "ms" in row]
    for row in rows.values():
        if "ms" in row:
            row["gbps"] = row["bytes"] / row["ms"] / 1e6
            row["fraction"] = row["bytes"] / row["ms"] * 1e3 / bench.bandwidth
            row["speedup"] = min(flash) / row["ms"] if flash else None
            row["of_torch"] = min(torchs) / row["ms"] if torchs else None
    if bench.on_gpu and profiled:  # afterwards: a profiler and graphs are not always friends
        for name in bodies:
            if name.startswith("bf16"):
                rows[name]["runs"] = kernels_of(eager[name])
    return list(rows.values())


def kernels_of(call) -> list[str] | None:
    """Names of the kernels that a call runs on the device, by torch's profiler; None where it does not
    work."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        names = [event.key for event in seen.key_averages() if event.device_type.name == "CUDA"]
    except Exception:  # a driver without a profiler: the row says less
        return None
    return [name[:120] for name in names if "Memcpy" not in name and "Memset" not in name]

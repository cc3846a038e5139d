"""Stage attention: decode attention over packed K and V beside flash attention over bf16, in one run.

All contestants of a unit hold K and V of the same sizes and take turns. Where a GPU is, a CUDA graph holds
one call for each of several copies of K and V, together many times the device's cache, and its replay is
timed, several of them in a row: `ms` is a call's share, without gaps between launches. `speedup` is over the
fastest bf16 flash form of the same unit, `of_torch` over the fastest of all that torch has in it, `fraction`
the stored bytes over the time, over the bandwidth that a copy on the device reaches in the same process.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .bench import spread
from .right import FORMS, triton_there
from .unit import FIRST, LAST, NEXT, Unit

SHAPES = {  # heads, KV heads, head dimension
    "Llama-3-8B": (32, 8, 128),
    "Llama-2-13B": (40, 40, 128),
    "small": (4, 2, 64),
}
NAMES = ("exact", "int8", "int8:group=32", "int4", "int4:group=32", "fp8:e4m3")  # of FORMS
FLASH = ("bf16 flash", "bf16 flash, group as queries")  # K and V read once by either
COPIES, TIMES_CACHE = 64, 8  # copies of K and V at most; bytes of all of int4's over the device's cache
REPEATS, SEVERAL = 15, 10  # times that are counted, and replays of a graph in each
SIZES = (  # shape, batch, tokens, when: first the most telling, then as many as nine minutes allow
    ("Llama-3-8B", 1, 65536, FIRST), ("Llama-3-8B", 8, 16384, FIRST), ("Llama-3-8B", 1, 131072, NEXT),
    ("Llama-3-8B", 1, 16384, NEXT), ("Llama-3-8B", 1, 4096, NEXT), ("Llama-3-8B", 64, 16384, NEXT),
    ("Llama-2-13B", 1, 65536, NEXT), ("Llama-2-13B", 8, 16384, NEXT), ("Llama-3-8B", 64, 4096, LAST),
)  # fmt: skip
TOTAL_BITS = 2 * 16 + 8.125 + 8.5 + 4.125 + 4.5 + 8  # of all contestants, for each number held


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {"shape": "small", "tokens": 160, "batch": 2, "forms": ["int8", "int4:group=32"]}
        return [Unit("attention", "small, 160 tokens, batch 2", FIRST, 5, given)]
    return [
        Unit("attention", f"{shape}, {tokens} tokens, batch {batch}", rank, 5,
             {"shape": shape, "tokens": tokens, "batch": batch, "forms": list(NAMES)})
        for shape, batch, tokens, rank in SIZES
    ]  # fmt: skip


def measure(bench, shape: str, tokens: int, batch: int, forms: list[str]) -> dict:
    bench.clear()
    heads, kv_heads, dim = SHAPES[shape]
    numbers = kv_heads * dim * tokens  # of one row's K
    one = numbers * TOTAL_BITS / 8 * 2 * 1.15  # K and V of a row in all forms, and what making them needs
    copies = 2
    if bench.on_gpu:  # those of int4, the smallest, shall be many times the device's cache
        wanted = int(TIMES_CACHE * bench.cache_bytes // (batch * numbers)) + 1
        copies = max(1, min(COPIES, wanted, int(0.8 * bench.free_bytes() // (batch * one))))
    calls = contestants(bench, (heads, kv_heads, dim), tokens, batch, copies, forms)
    rows = timed(bench, calls, copies, {"shape": shape, "tokens": tokens, "batch": batch})
    return {"rows": rows, "line": line(rows)}


def line(rows: list[dict]) -> str:
    """The fastest kernel of every width beside flash."""
    ours = [row for row in rows if row["kernel"].startswith("kvlab") and row.get("speedup")]
    return ", ".join(f"{row['kernel'][6:]} {row['speedup']:.2f}x ({row['fraction']:.0%})" for row in ours)


def contestants(bench, sizes, tokens: int, batch: int, copies: int, forms: list[str]) -> dict:
    """{name: (calls, one for each copy; bytes of K and V as stored)}."""
    heads, kv_heads, dim = sizes
    torch.manual_seed(tokens)
    dtype, scale = torch.bfloat16, dim**-0.5
    query = torch.randn(batch, heads, 1, dim, device=bench.device).to(dtype)
    row = [torch.randn(1, kv_heads, tokens, dim, device=bench.device).to(dtype) for _ in "kv"]
    plain = [[x.repeat(batch, 1, 1, 1) for x in row] for _ in range(copies)]
    grouped = query.view(batch, kv_heads, heads // kv_heads, dim)

    def torchs(query, **more):
        return lambda keys, values: scaled_dot_product_attention(query, keys, values, scale=scale, **more)

    def flash(call):
        def within(keys, values):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return call(keys, values)

        return within

    made = {
        "bf16 flash": flash(torchs(query, enable_gqa=heads != kv_heads)),
        "bf16 flash, group as queries": flash(torchs(grouped)),
        "bf16 as torch chooses": torchs(grouped),
    }
    size = 2 * plain[0][0].nbytes
    found = {name: ([partial(call, *kv) for kv in plain], size) for name, call in made.items()}
    for name in forms if triton_there(bench) else ():
        from kvlab.fast import gpu

        form = FORMS[name]()
        if not gpu.compiles(bench.capability):
            bench.say(f"kvlab {name}: left out: capability {bench.capability} does not know it")
            continue
        coded = [form.encode(x) for x in row]
        parts = [[tuple(p.repeat(batch, 1, 1, 1) for p in one) for one in coded] for _ in range(copies)]
        size = sum(part.nbytes for one in parts[0] for part in one)
        found[f"kvlab {name}"] = [partial(gpu.attend, query, *kv, form, scale) for kv in parts], size
    return found


def timed(bench, contestants: dict, copies: int, about: dict) -> list[dict]:
    """The rows of one unit. Who fails is left out with the reason; the others go on."""
    rows, bodies, truth = {}, {}, None
    for name, (calls, size) in contestants.items():
        row = rows[name] = {"kernel": name, **about, "bytes": size, "copies": copies}
        try:
            out = calls[0]().float().flatten()
            truth = out if truth is None else truth  # bf16 flash
            row["from_flash"] = float((out - truth).norm() / truth.norm())

            def body(calls=calls):
                for call in calls:
                    call()

            bodies[name] = bench.captured(body) or body
            row["graph"] = bench.on_gpu
        except Exception as error:
            row["left_out"] = bench.left_out(name, error)
    times = bench.interleaved(bodies, REPEATS if bench.on_gpu else 3, lambda call: bench.once(call, SEVERAL))
    for name, taken in times.items():
        rows[name] |= spread([ms / copies for ms in taken])
    flash = [rows[name]["ms"] for name in FLASH if "ms" in rows.get(name, {})]
    torchs = [row["ms"] for name, row in rows.items() if name.startswith("bf16") and "ms" in row]
    for row in rows.values():
        if "ms" in row:
            row["gbps"] = row["bytes"] / row["ms"] / 1e6
            row["fraction"] = row["gbps"] * 1e9 / bench.bandwidth
            row["speedup"] = min(flash) / row["ms"] if flash else None
            row["of_torch"] = min(torchs) / row["ms"] if torchs else None
    return list(rows.values())

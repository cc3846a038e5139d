"""Stage right: the kernels against their definition, every method against its CPU self, and links."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

import kvlab
from kvlab.attention import attend
from kvlab.spec import parse
from kvlab.store import Exact, Float8, Int, Kivi
from kvlab.store.kivi import KiviState
from kvlab.store.static import Static, StaticState

from . import models
from .led import Led
from .unit import FIRST, NEXT, Unit, groups

FORMS = {
    "exact": Exact, "int8": lambda: Int(8), "int8:group=32": lambda: Int(8, 32), "int4": lambda: Int(4),
    "int4:group=32": lambda: Int(4, 32), "int2:group=16": lambda: Int(2, 16),
    "fp8:e4m3": lambda: Float8("e4m3"), "fp8:e5m2": lambda: Float8("e5m2"),
    "fp8:e4m3,group=32": lambda: Float8("e4m3", group=32),
}  # fmt: skip
KIVIS = {"kivi2": lambda: Kivi(2), "kivi4": lambda: Kivi(4), "kivi2:group=64": lambda: Kivi(2, 64)}
PRESETS = ("int8", "int4", "int4:group=32", "fp8:e4m3", "kivi2")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BOUNDS = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}  # relative, of the norm: what rounding costs
METHODS = (  # every method that decodes on the device or over a link
    "full", "static:length=512", "paged", "int8", "int4", "int2:group=32", "fp8", "kivi2", "kivi4", "sinks",
    "h2o", "snapkv", "tova", "pyramidkv", "offload", "offload+int4", "offload+h2o", "uvm", "uvm+h2o", "topk",
    "infinigen",
)  # fmt: skip
LINKED = ("offload", "offload+int4", "offload+h2o", "uvm", "topk", "infinigen")
STEPS = 8  # tokens decoded beside the CPU
FP32, BF16 = 1e-4, 1e-3  # how far a method may be from its CPU self: see `methods`


def units(size: str) -> list[Unit]:
    dry = size == "dry"
    small = {"small": True} if dry else {}
    dtypes = {"fp32": (7, FIRST)} if dry else {"bf16": (5, FIRST), "fp32": (4, NEXT), "fp16": (2, NEXT)}
    found = [
        Unit("right", f"kernels {number}, {dtype}", rank, seconds,
             {"what": "kernels", "dtype": dtype, "forms": forms} | small)
        for dtype, (seconds, rank) in dtypes.items()
        for number, forms in enumerate(groups(PRESETS if dtype == "fp16" else [*FORMS, *KIVIS]), 1)
    ]  # fmt: skip
    named = {"links": LINKED[:: 2 if dry else 1], "methods": METHODS[:: 3 if dry else 1]}
    return found + [
        Unit("right", f"{what} {number}", FIRST, 8, {"what": what, "methods": methods} | small)
        for what, names in named.items()
        for number, methods in enumerate(groups(names), 1)
    ]


def measure(bench, what: str, **given) -> dict:
    comparisons = {"kernels": kernels, "methods": methods, "links": links}
    rows = comparisons[what](bench, **given)
    wrong = [row for row in rows if row.get("right") is False]
    for row in wrong:
        bench.say(f"NOT RIGHT: {row}")
    judged = [row for row in rows if row.get("right") is not None]
    return {"rows": rows, "line": f"{len(judged) - len(wrong)} of {len(judged)} are right"}


# Kernels.


def triton_there(bench) -> bool:
    """Whether Triton is; says so where it is not."""
    try:
        import triton  # noqa: F401
    except ImportError:
        bench.say("left out: triton is not installed")
        return False
    return True


def cases(name: str, dtype: str, small: bool = False) -> list[dict]:
    """What a form is tried with: head dimension, query heads of a group, tokens, rows, a mask, a buffer that
    is read in place. Each new dimension, group or dtype is another kernel, which takes seconds to compile;
    so the formats that presets use are tried in bf16 with all, others and in other dtypes with some."""
    plain = {"head_dim": 128, "share": 4, "tokens": 2049, "batch": 2, "mask": False, "static": False}
    if small:
        changes = [
            {"tokens": 77, "head_dim": 64, "mask": mask, "static": mask and name not in KIVIS}
            for mask in (False, True)
        ]
        return [plain | change | {"batch": 1} for change in changes]
    changes = [
        {}, {"tokens": 1}, {"tokens": 63, "share": 1}, {"tokens": 5000, "mask": True}, {"static": True},
        {"tokens": 40000, "batch": 1}, {"share": 5}, {"head_dim": 64, "share": 7},
        {"head_dim": 256, "share": 2}, {"head_dim": 80}, {"head_dim": 96}, {"head_dim": 160},
    ]  # fmt: skip
    if dtype != "bf16" or name not in PRESETS:
        changes = [one for one in changes if one.get("head_dim", 64) == 64 and "share" not in one]
        changes.append({"head_dim": 64, "tokens": 777})
    if name in KIVIS:  # what it holds is no buffer with room
        changes = [one for one in changes if "static" not in one]
    return [plain | change for change in changes]


def kernels(bench, dtype: str, forms: list[str], small: bool = False) -> list[dict]:
    """Kernels of forms, KIVI's among them, beside decode-then-attend in fp64 over the same codes: the error's
    norm over the result's. Memory is poisoned with NaN before each."""
    if not triton_there(bench):
        return []
    from kvlab.fast import gpu, gpu_kivi

    rows = []
    for name in forms:
        form = (FORMS | KIVIS)[name]()
        for number, case in enumerate(cases(name, dtype, small)):
            row = {"kernel": name, "dtype": dtype} | case
            rows.append(row)
            if not (name in KIVIS or gpu.supports(form, case["head_dim"])):
                row["left_out"] = "no kernel: decoded first"
                continue
            if not gpu.compiles(bench.capability):
                row["left_out"] = f"capability {bench.capability[0]}.{bench.capability[1]}"
                continue
            try:
                row |= compared(bench, gpu_kivi if name in KIVIS else gpu, form, row, number)
            except Exception as error:
                row |= {"right": False, "error": bench.left_out(name, error)}
    return rows


def compared(bench, kernel, form, case: dict, seed: int) -> dict:
    """One case of one kernel, a module with `attend`: how far its output is from the truth, in fp64."""
    dim, dtype = case["head_dim"], case["dtype"]
    query, keys, values, allowed = drawn(bench, case, DTYPES[dtype], seed)
    if isinstance(form, Kivi):
        store = holding(form, keys, values)
        if not kernel.supports(store, dim):
            return {"left_out": "no kernel: decoded first"}
        store.dtype = torch.float64  # in which the reference reads its codes
        plain, stored = store.read(bench.device), (store,)
    else:
        stored = form.encode(keys), form.encode(values)
        if case["static"]:
            store = StaticState(Static(case["tokens"] + 37, form), case["tokens"] + 37)
            store.append(keys, values)
            stored = store.parts()
        plain, stored = [form.decode(part, torch.float32) for part in stored], (*stored, form)
    right = attend(query.double(), *(part.double() for part in plain), dim**-0.5, allowed)[0]
    poison(bench)
    out = kernel.attend(query, *stored, dim**-0.5, allowed)
    error = float((out.double() - right).norm() / right.norm())
    return {"error": error, "bound": BOUNDS[dtype], "right": error <= BOUNDS[dtype]}  # NaN is not right


def holding(form: Kivi, keys, values) -> KiviState:
    """What KIVI holds after such a prompt."""
    store = KiviState(form, replace(form.values, group=math.gcd(form.group, values.shape[3])))
    store.append(keys, values)
    return store


def drawn(bench, case: dict, dtype: torch.dtype, seed: int):
    """A case's query, K, V and what of them may be seen (None: everything)."""
    generator = torch.Generator(bench.device).manual_seed(seed)
    kv_heads, batch, dim, tokens = 3, case["batch"], case["head_dim"], case["tokens"]
    like = {"device": bench.device, "generator": generator}

    def numbers(heads: int, length: int):
        return torch.randn(batch, heads, length, dim, **like).to(dtype)

    query, keys, values = numbers(kv_heads * case["share"], 1), *(numbers(kv_heads, tokens) for _ in "kv")
    allowed = None
    if case["mask"]:
        allowed = torch.rand(batch, kv_heads, 1, tokens, **like) < 0.5
        allowed[..., -1] = True
    return query, keys, values, allowed


def poison(bench) -> None:
    """Fill memory that is about to be handed out with NaN."""
    waste = [torch.full((2**20,), torch.nan, device=bench.device) for _ in range(8 if bench.on_gpu else 1)]
    del waste


# Methods.


def small_model(device: torch.device, dtype: torch.dtype):
    """A small Llama, random weights that spread attention unevenly, the same on every device."""
    torch.manual_seed(1)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(models.published("small-llama").config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.06)
    return kvlab.prepare(model.to(device, dtype).eval())


@torch.no_grad()
def logits_of(model, method, ids: torch.Tensor, prompt: int, masked: int, led=None) -> torch.Tensor:
    """Log-probabilities `[steps, rows, vocabulary]` of the given tokens, fed one by one after the prompt,
    whose second row begins with `masked` tokens of padding. led: watches the cache (`Led`)."""
    cache = kvlab.make_cache(model, method)
    if led is not None:
        led.watch(cache)
    stepper = kvlab.Stepper(model, cache)
    ids = ids.to(model.device)
    mask = torch.ones_like(ids[:, :prompt])
    mask[1, :masked] = 0
    found = [stepper.feed(ids[:, :prompt], mask, last=True)]
    found += [stepper.feed(ids[:, at : at + 1], last=True) for at in range(prompt, prompt + STEPS)]
    return torch.stack(found).log_softmax(-1).float().cpu()


def methods(bench, methods: list[str], small: bool = False) -> list[dict]:
    """Methods on the device beside their CPU selves, which take over what codes the device has stored and
    what it has fetched (`Led`). In fp32 a code that differs is a tie, everything fetched and held is the
    same, and the largest difference of a log-probability is at most 1e-4. In bf16 the distance from the CPU's
    fp32 is at most 1e-3 more than that of the CPU's own bf16 (root mean square)."""
    host, here, prompt = torch.device("cpu"), bench.device.type, 48 if small else 200
    ids = torch.randint(0, 512, (2, prompt + STEPS), generator=torch.Generator().manual_seed(2))
    rows = []
    made = {
        (where.type, name): small_model(where, dtype)
        for where in {host, bench.device}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    for method in methods:
        row: dict = {"method": method}
        try:
            away, led = {}, None
            for where, dtype in ((here, "fp32"), (here, "bf16"), ("cpu", "bf16")):
                leader = Led()
                found = logits_of(made[where, dtype], method, ids, prompt, masked=7, led=leader)
                if led is None or leader.leads:
                    led = Led(leader)
                    truth = logits_of(made["cpu", "fp32"], method, ids, prompt, masked=7, led=led)
                away[where, dtype] = found - truth
                if dtype == "fp32":
                    row |= {"codes": led.numbers, "differ": led.differ, "no_tie": led.apart, "sets": led.sets}
                    row["sets"] += leader.held != led.held
            row["fp32"] = float(away[here, "fp32"].abs().max())
            for name, where in (("bf16", here), ("bf16_cpu", "cpu")):
                row[name] = float(away[where, "bf16"].square().mean().sqrt())
            same = row["no_tie"] == row["sets"] == 0
            row["right"] = same and row["fp32"] <= FP32 and row["bf16"] - row["bf16_cpu"] <= BF16
        except Exception as error:
            row |= {"right": False, "error": bench.left_out(method, error)}
        rows.append(row)
    return rows


# Links.


def links(bench, methods: list[str], small: bool = False) -> list[dict]:
    """Over a link of threads and streams, every offloading method says what it says without one, several
    times over; the zero-copy gather brings the rows that indexing does."""
    from kvlab.place import CudaLink, Link

    model = small_model(bench.device, torch.float32)
    prompt = 48 if small else 400
    ids = torch.randint(0, 512, (2, prompt + STEPS), generator=torch.Generator().manual_seed(3))
    rows = []
    for method in methods:
        spec = parse(method)
        without = logits_of(model, spec, ids, prompt, masked=5)
        link = CudaLink(bench.device) if bench.on_gpu else Link()
        linked = type(spec)(spec.text, spec.method, spec.parameters | {"link": link})
        difference = max(
            float((logits_of(model, linked, ids, prompt, masked=5) - without).abs().max())
            for _ in range(1 if small else 3)
        )
        row = {"method": method, "link": type(link).__name__, "difference": difference, "bound": FP32}
        rows.append(row | {"right": difference <= FP32})
    return rows + (gathered(bench) if triton_there(bench) else [])


def gathered(bench) -> list[dict]:
    """The zero-copy gather of views of pinned buffers, rows of several widths."""
    from kvlab.fast.zero_copy import gather

    rows = []
    for width, dtype in ((128, torch.bfloat16), (64, torch.uint8), (3, torch.uint8), (1, torch.float16)):
        stored, count, batch, heads = 300, 40, 2, 3
        part = (torch.rand(batch, heads, stored + 20, width) * 99).to(dtype)
        part = (part.pin_memory() if bench.on_gpu else part)[:, :, :stored]
        slots = torch.randint(0, stored, (batch, heads, count))
        found = gather((part,), slots.to(bench.device), bench.device)[0]
        wanted = part.gather(2, slots[..., None].expand(-1, -1, -1, width))
        same = torch.equal(found[:, :, :-1].cpu(), wanted)
        rows.append({"gather": f"{dtype}, rows of {width}".removeprefix("torch."), "right": same})
    return rows

"""Stage right: the kernels against their definition, every method against its CPU self, links, host syncs."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

import kvlab
from kvlab import late
from kvlab.attention import attend
from kvlab.store import Float8, Int, Kivi
from kvlab.store.kivi import KiviState
from kvlab.store.static import Static, StaticState

from . import models
from .unit import FIRST, LAST, NEXT, Unit

FORMS = {
    "int8": lambda: Int(8), "int8:group=32": lambda: Int(8, 32), "int4": lambda: Int(4),
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
COARSE = (
    "int8",
    "int4",
    "int2",
    "fp8",
    "kivi2",
    "kivi4",
)  # where the last digit may turn a code into the next
COARSE_FP32 = 2e-3
WAITS = (  # what makes the host wait for a GPU, where the tensor is on one
    "item", "tolist", "nonzero", "equal", "allclose", "masked_select", "unique",
    "__bool__", "__int__", "__float__", "__index__", "argwhere",
)  # fmt: skip
WHEN_DRY = {"methods": METHODS[::3] + ("infinigen",), "waits": METHODS}


def units(size: str) -> list[Unit]:
    if size == "real":
        parts = [("methods", 30, FIRST), ("links", 12, FIRST), ("waits", 6, FIRST), ("sanitizer", 90, LAST)]
        kernels = [("bf16", 15, FIRST), ("fp32", 10, NEXT), ("fp16", 6, NEXT)]
        small = {}
    else:
        parts = [(what, 20, FIRST) for what in ("methods", "links", "waits")]
        kernels, small = [("fp32", 20, FIRST)], {"small": True}
    return [
        Unit("right", f"kernels, {dtype}", rank, seconds, {"what": "kernels", "dtype": dtype} | small)
        for dtype, seconds, rank in kernels
    ] + [Unit("right", what, rank, seconds, {"what": what} | small) for what, seconds, rank in parts]


def measure(bench, what: str, **given) -> dict:
    rows = {"kernels": kernels, "methods": methods, "links": links, "waits": waits, "sanitizer": sanitizer}[
        what
    ](bench, **given)
    wrong = [row for row in rows if row.get("right") is False]
    for row in wrong:
        bench.say(f"NOT RIGHT: {row}")
    asked = [row for row in rows if row.get("right") is not None]
    return {"rows": rows, "line": f"{len(asked) - len(wrong)} of {len(asked)} are right"}


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


def kernels(bench, dtype: str, small: bool = False) -> list[dict]:
    """Every form's kernel, and KIVI's, beside decode-then-attend in fp64 over the same codes: the error's
    norm over the result's. Memory is poisoned with NaN before each."""
    if not triton_there(bench):
        return []
    from kvlab.kernels import gpu, gpu_kivi

    rows, torch_dtype = [], DTYPES[dtype]
    for name, form in (FORMS | KIVIS).items():
        form = form()
        if dtype == "fp16" and name not in PRESETS:
            continue
        for number, case in enumerate(cases(name, dtype, small)):
            row = {"kernel": name, "dtype": dtype} | case
            if not (name in KIVIS or gpu.supports(form, case["head_dim"])):
                rows.append(row | {"left_out": "no kernel: decoded first"})
                continue
            if not gpu.compiles(form, bench.capability):
                rows.append(row | {"left_out": f"capability {bench.capability[0]}.{bench.capability[1]}"})
                continue
            try:
                compare, with_ = (compared_kivi, gpu_kivi) if name in KIVIS else (compared, gpu)
                rows.append(row | compare(bench, with_, form, case, torch_dtype, BOUNDS[dtype], number))
            except Exception as error:
                if "CUDA error" in str(error):
                    raise
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                rows.append(row | {"right": False, "error": said})
    return rows


def compared(bench, gpu, form, case: dict, dtype: torch.dtype, bound: float, seed: int) -> dict:
    """One case of one kernel."""
    query, keys, values, allowed = drawn(bench, case, dtype, seed)
    if case["static"]:
        store = StaticState(Static(case["tokens"] + 37, form), case["tokens"] + 37)
        store.append(keys, values)
        parts = store.parts()
    else:
        parts = form.encode(keys), form.encode(values)
    plain = [form.decode(part, torch.float32).double() for part in parts]
    right = attend(query.double(), *plain, case["head_dim"] ** -0.5, allowed)[0]
    poison(bench)
    return judged(gpu.attend(query, *parts, form, case["head_dim"] ** -0.5, allowed), right, bound)


def compared_kivi(bench, gpu_kivi, policy, case: dict, dtype: torch.dtype, bound: float, seed: int) -> dict:
    """One case of KIVI's kernels."""
    query, keys, values, allowed = drawn(bench, case, dtype, seed)
    store = kivi_state(policy, case["head_dim"])
    store.append(keys, values)
    if not gpu_kivi.supports(store, case["head_dim"]):
        return {"left_out": "no kernel: decoded first"}
    store.dtype = torch.float64  # in which the reference reads its codes
    plain = [part.double() for part in store.read(bench.device)]
    right = attend(query.double(), *plain, case["head_dim"] ** -0.5, allowed)[0]
    poison(bench)
    return judged(gpu_kivi.attend(query, store, case["head_dim"] ** -0.5, allowed), right, bound)


def kivi_state(policy: Kivi, head_dim: int) -> KiviState:
    """An empty state for heads of this dimension, as `Kivi.start` makes one for a layer."""
    return KiviState(policy, replace(policy.values, group=math.gcd(policy.group, head_dim)))


def drawn(bench, case: dict, dtype: torch.dtype, seed: int):
    """A case's query, K, V and what of them may be seen (None: everything)."""
    generator = torch.Generator(bench.device).manual_seed(seed)
    kv_heads, batch, dim = 3, case["batch"], case["head_dim"]

    def numbers(*shape: int):
        return torch.randn(*shape, device=bench.device, generator=generator).to(dtype)

    query = numbers(batch, kv_heads * case["share"], 1, dim)
    keys, values = (
        numbers(batch, kv_heads, case["tokens"], dim),
        numbers(batch, kv_heads, case["tokens"], dim),
    )
    allowed = None
    if case["mask"]:
        allowed = (
            torch.rand(batch, kv_heads, 1, case["tokens"], device=bench.device, generator=generator) < 0.5
        )
        allowed[..., -1] = True
    return query, keys, values, allowed


def judged(out: torch.Tensor, right: torch.Tensor, bound: float) -> dict:
    """How far a kernel's output is from the truth, in fp64."""
    error = float((out.double() - right).norm() / right.norm())
    return {"error": error, "bound": bound, "right": error <= bound}  # NaN is not right


def poison(bench) -> None:
    """Fill memory that is about to be handed out with NaN."""
    waste = [torch.full((2**20,), torch.nan, device=bench.device) for _ in range(8 if bench.on_gpu else 1)]
    del waste


# Methods.


def small_model(device: torch.device, dtype: torch.dtype):
    """A small Llama, random weights that spread attention unevenly, the same on every device."""
    torch.manual_seed(1)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(models.config("small-llama"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.06)
    return kvlab.prepare(model.to(device, dtype).eval())


@torch.no_grad()
def logits_of(model, method, ids: torch.Tensor, prompt: int, masked: int) -> torch.Tensor:
    """Log-probabilities `[steps, rows, vocabulary]` of the given tokens, fed one by one after the prompt,
    whose second row begins with `masked` tokens of padding."""
    cache = kvlab.make_cache(model, method)
    stepper = kvlab.Stepper(model, cache)
    ids = ids.to(model.device)
    mask = torch.ones_like(ids[:, :prompt])
    mask[1, :masked] = 0
    found = [stepper.feed(ids[:, :prompt], mask, last=True)]
    found += [stepper.feed(ids[:, at : at + 1], last=True) for at in range(prompt, prompt + STEPS)]
    return torch.stack(found).log_softmax(-1).float().cpu()


def methods(bench, small: bool = False) -> list[dict]:
    """Every method on the device beside its CPU self: in fp32 the largest difference of a log-probability is
    at most 1e-4 (2e-3 where codes are coarse: rounding may turn one into the next); in bf16 the distance
    from the CPU's fp32 is at most 1e-3 more than that of the CPU's own bf16 (root mean square). A method
    that chooses may choose differently where two tokens are as good, which fp32 shows too."""
    host, prompt = torch.device("cpu"), 48 if small else 200
    ids = torch.randint(0, 512, (2, prompt + STEPS), generator=torch.Generator().manual_seed(2))
    rows = []
    made = {
        (where.type, name): small_model(where, dtype)
        for where in {host, bench.device}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    for method in WHEN_DRY["methods"] if small else METHODS:
        row: dict = {"method": method}
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = {
                    key: logits_of(model, method, ids, prompt, masked=7)
                    for key, model in made.items()
                    if key[0] == bench.device.type or not bench.dry
                }
            truth, here = found["cpu", "fp32"], bench.device.type
            row["fp32"] = float((found[here, "fp32"] - truth).abs().max())
            away = {where: rms(found[where, "bf16"] - truth) for where in {"cpu", here}}
            row["bf16"], row["bf16_cpu"] = away[here], away["cpu"]
            bound = COARSE_FP32 if any(name in method for name in COARSE) else FP32
            row["right"] = row["fp32"] <= bound and away[here] - away["cpu"] <= BF16
            row["warnings"] = sorted({str(w.message)[:200] for w in said if "kvlab" in str(w.message)})
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            row |= {"right": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        rows.append(row)
    return rows


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


# Links.


def links(bench, small: bool = False) -> list[dict]:
    """Over a link of threads and streams, every offloading method says what it says without one, several
    times over; the zero-copy gather brings the rows that indexing does."""
    from kvlab.place import CudaLink, Link
    from kvlab.spec import parse

    model = small_model(bench.device, torch.float32)
    prompt = 48 if small else 400
    ids = torch.randint(0, 512, (2, prompt + STEPS), generator=torch.Generator().manual_seed(3))
    rows = []
    for method in LINKED[:: 2 if small else 1]:
        spec = parse(method)
        alone = logits_of(model, spec, ids, prompt, masked=5)
        link = CudaLink(bench.device) if bench.on_gpu else Link()
        linked = type(spec)(spec.text, spec.method, spec.parameters | {"link": link})
        differences = [
            float((logits_of(model, linked, ids, prompt, masked=5) - alone).abs().max())
            for _ in range(1 if small else 3)
        ]
        trial = getattr(link, "trial", None)
        row = {"method": method, "link": type(link).__name__, "difference": max(differences), "bound": FP32}
        rows.append(row | {"right": max(differences) <= FP32, "gathered_by": trial and trial.best})
    return rows + (gathered(bench) if triton_there(bench) else [])


def gathered(bench) -> list[dict]:
    """The zero-copy gather of views of pinned buffers, rows of several widths."""
    from kvlab.link.zero_copy import gather

    rows = []
    for width, dtype in ((128, torch.bfloat16), (64, torch.uint8), (3, torch.uint8), (1, torch.float16)):
        held, count, batch, heads = 300, 40, 2, 3
        part = (torch.rand(batch, heads, held + 20, width) * 99).to(dtype)
        part = (part.pin_memory() if bench.on_gpu else part)[:, :, :held]
        slots = torch.randint(0, held, (batch, heads, count))
        found = gather((part,), slots.to(bench.device), bench.device)[0]
        wanted = part.gather(2, slots[..., None].expand(-1, -1, -1, width))
        same = torch.equal(found[:, :, :-1].cpu(), wanted)
        rows.append({"gather": f"{dtype}, rows of {width}".removeprefix("torch."), "right": same})
    return rows


# Waits.


class Waits(TorchFunctionMode):
    """Counts calls for which the host waits where the tensor is on a GPU, by name; a mask as an index
    counts."""

    def __init__(self, on_gpu: bool):
        super().__init__()
        self.found: Counter = Counter()
        self.leaves = ("cpu", "numpy") if on_gpu else ()  # on a CPU nothing is left by these

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        leaves = name == "to" and any(str(argument) == "cpu" for argument in args[1:])
        if name in WAITS or name in self.leaves or (leaves and self.leaves):
            self.found[name.strip("_")] += 1
        elif name == "tensor" and (kwargs or {}).get("device") is not None:
            self.found["tensor of a list"] += 1
        elif name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool:
            self.found["index by a mask"] += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing_late():
    """Values that cannot be stored are refused as they are on a GPU, where asking at once would wait."""
    before, late.far = late.far, lambda x: True
    try:
        yield
    finally:
        late.far = before


def waits(bench, small: bool = False) -> list[dict]:
    """Calls in one decode step for which the host waits, by torch's own warnings on a GPU, and by the names
    of functions anywhere; a method that offloads waits by what it is."""
    rows = []
    for method in WHEN_DRY["waits"] if small else METHODS:
        model = small_model(bench.device, torch.float32 if bench.dry else torch.bfloat16)
        cache = kvlab.make_cache(model, method)
        models.fill(bench, model, cache, 100, 2)
        ids = models.next_ids(bench, 2)
        with torch.no_grad():
            for _ in range(2):
                model(ids, past_key_values=cache)
            for layer in cache.attending:
                layer.fused = None  # a step in one call is the CPU's
            with Waits(bench.on_gpu) as named, refusing_late():
                model(ids, past_key_values=cache)
            row = {"method": method, "layers": len(cache.attending), "by_name": dict(named.found)}
            if bench.on_gpu:
                bench.sync()
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    with warnings.catch_warnings(record=True) as said:
                        warnings.simplefilter("always")
                        model(ids, past_key_values=cache)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                row["waits"] = sum("synchroniz" in str(warning.message) for warning in said)
        offloads = cache.attending[0].place.on_host
        count = row.get("waits", sum(named.found.values()))
        rows.append(row | {"offloads": offloads, "right": None if offloads else count == 0})
    return rows


# compute-sanitizer.


def sanitizer(bench) -> list[dict]:
    """The kernels and a link under compute-sanitizer's memcheck, in a process of its own."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return [{"tool": "memcheck", "left_out": "compute-sanitizer is not on the PATH"}]
    bench.models.clear()
    bench.tidy()
    script = "from eval.gpu.right import under_sanitizer; under_sanitizer()"
    command = [
        program,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "3",
        "--target-processes",
        "application-only",
    ]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # so that every tensor has its own bounds
    done = subprocess.run(
        [*command, sys.executable, "-c", script],
        capture_output=True, text=True, timeout=300, env=environment, cwd=Path.cwd(),
    )  # fmt: skip
    said = [line for line in (done.stdout + done.stderr).splitlines() if "=====" in line or "checked" in line]
    return [
        {"tool": "memcheck", "exit_code": done.returncode, "said": said[-3:], "right": done.returncode == 0}
    ]


def under_sanitizer(dry: bool = False) -> None:
    """A few kernels, a gather, and offloading methods over a link with its streams, small, on the GPU."""
    from kvlab.kernels import gpu, gpu_kivi

    from .bench import Bench

    bench = Bench(dry)
    case = {"head_dim": 128, "share": 4, "tokens": 77, "batch": 1, "mask": True, "static": True}
    if not compared_kivi(bench, gpu_kivi, Kivi(2), case, torch.bfloat16, BOUNDS["bf16"], 0)["right"]:
        raise SystemExit("kivi2 is not right")
    for name in ("int8", "int4:group=32", "fp8:e4m3"):
        if not compared(bench, gpu, FORMS[name](), case, torch.bfloat16, BOUNDS["bf16"], 0)["right"]:
            raise SystemExit(f"{name} is not right")
    for row in links(bench, small=True):
        if not row["right"]:
            raise SystemExit(f"a link is not right: {row}")
    print("checked")

"""`kvlab doctor`: is this machine ready? One line per check, with the remedy if it fails.

Every check is a function without required arguments that returns `(ok, text)`. A check that raises counts as
failed and shows the first line of its error. ok is None for a working check with a remark.
`course/kit/ready.py` has the additional checks for a classroom.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from . import extras, scratch
from .errors import first_line
from .measure.host import cores, cpu_model

Result = tuple[bool | None, str]
Check = tuple[str, Callable[[], Result]]

PACKAGES = ("transformers", "lm-eval", "datasets", "numpy")
CPU_BUILD = "--index-url https://download.pytorch.org/whl/cpu"
REPAIR = "run `rm -rf .venv && make venv` (in a workshop's kit: delete .venv and start again)"
SLOW_MEMORY = 1e9  # bytes/s; the slowest laptop of the last ten years reads faster
# GiB for the workshop model, lm-eval and two worker processes, and the message if there are fewer.
FOR_A_RUN = 2, "`make demo` needs about 2 GiB, close other programs"
PROMPT = "Once upon a time"


def ranges() -> dict[str, Requirement]:
    """kvlab's requirements, those of its extras among them, from its installed metadata (pyproject), by
    canonical name."""
    lines = metadata.requires("kvlab") if extras.version("kvlab") else None
    return {canonicalize_name(r.name): r for r in map(Requirement, lines or ())}


def check_kvlab() -> Result:
    """kvlab itself is installed, so that the ranges are known."""
    if here := extras.version("kvlab"):
        return True, f"kvlab {here}"
    return False, f"kvlab is not installed in this environment: {REPAIR}"


def check_package(name: str) -> Result:
    """The package is there, in a version that pyproject admits."""
    wanted = ranges().get(canonicalize_name(name))
    allowed = str(wanted.specifier) if wanted else ""
    if (version := extras.version(name)) is None:
        if line := extras.line(name.replace("-", "_")):
            return None, line
        return False, f"{name} is not installed: {REPAIR}"
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return False, f"{name} {version} is outside {allowed}: {REPAIR}"
    return True, f"{name} {version}" + (f" (allowed: {allowed})" if allowed else "")


def check_kernels() -> Result:
    """Whether packed caches are attended to by compiled kernels, or in plain torch."""
    if here := extras.version("numba"):
        return True, f"kernels: numba {here} compiles them"
    text = "kernels: none, for numba is not installed; packed caches are decoded in plain torch, slower"
    if extras.kit_folder():
        return True, f"{text} (a workshop's kit leaves it out)"
    return False, f"{text}: {REPAIR}"


def check_torch() -> Result:
    """torch is there, in a version that pyproject admits, without unusable CUDA packages."""
    ok, text = check_package("torch")
    if not ok and sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        text = text.partition(":")[0] + ": on Linux pip brings gigabytes of CUDA, so run "
        return False, f"{text}`pip install torch {CPU_BUILD}`"
    if not ok:
        return ok, text
    import torch

    if torch.version.cuda and not torch.cuda.is_available():
        text += f": the CUDA build ({cuda_bytes() / 1e9:.1f} GB of libraries) on a machine without a CUDA GPU"
        return None, f"{text}; smaller: `pip install --force-reinstall torch {CPU_BUILD}`"
    return True, text


def cuda_bytes() -> int:
    """Bytes on disk of the installed packages that only CUDA needs."""
    size = 0
    for package in metadata.distributions():
        if (package.metadata["Name"] or "").lower().startswith(("nvidia-", "triton", "cuda-")):
            size += sum(file.size or 0 for file in package.files or [])
    return size


def check_threads() -> Result:
    """torch does not start more threads than there are cores."""
    import torch

    threads, available = torch.get_num_threads(), cores()
    text = f"threads: torch uses {threads}, {available} cores available"
    if threads > available:
        return False, f"{text}: set OMP_NUM_THREADS={available}, more only slow each other down"
    return True, text


def check_device() -> Result:
    """The device of the measurements."""
    import torch

    text = f"device: {cpu_model()}"
    if torch.cuda.is_available():
        text += f", {torch.cuda.get_device_name(0)} (use it with --device cuda)"
    return True, text


def check_bandwidth() -> Result:
    """Memory read bandwidth, measured within a second."""
    from kvlab.arithmetic import read_bandwidth

    rate = read_bandwidth(seconds=0.5)
    text = f"memory bandwidth: reads {rate / 1e9:.1f} GB/s"
    if not rate >= SLOW_MEMORY:
        return False, f"{text}: far too slow, close what else is running before you time anything"
    return True, text


def check_memory(needed: float, short: str) -> Result:
    """At least this many GiB of memory are free; short: the message if not."""
    free = psutil.virtual_memory().available / 2**30
    text = f"free memory: {free:.1f} GiB"
    return (False, f"{text}: {short}") if free < needed else (True, text)


def check_model() -> Result:
    """The workshop model loads and decodes one token greedily."""
    import torch

    import kvlab

    start = time.perf_counter()
    model, tokenizer = kvlab.load()
    loaded = time.perf_counter() - start
    size = sum(p.numel() for p in model.parameters()) / 1e6
    text = f"workshop model: {size:.1f} M parameters, loaded in {loaded:.1f} s"

    ids = tokenizer(PROMPT, return_tensors="pt").input_ids.to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    if not math.isfinite(logits.sum().item()):
        return False, (
            f"{text}, but its weights give NaN: the checkpoint is damaged, clone again "
            "(in a workshop's kit: start again, which mends it)"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="kvlab decodes quantized caches without")  # `check_kernels`
        trace = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), max_new_tokens=1)
    token = int(trace.tokens[0, 0])
    greedy = int(logits[0, -1].argmax())
    if token != greedy:
        return False, f"{text}, but decodes token {token} instead of {greedy}: {REPAIR}"
    return True, f"{text}, {PROMPT!r} goes on with {tokenizer.decode([token])!r}"


def check_results(folder: str | os.PathLike = "results") -> Result:
    """The folder for results can be written, or made."""
    if reason := scratch.why_not(Path(folder)):
        return False, (
            f"results folder {folder} cannot be written ({reason}): "
            "choose another with --out, or run from a folder of your own"
        )
    return True, f"results folder: {folder} can be written"


def first_checks(names: Iterable[str]) -> list[Check]:
    """The first checks of every machine, and those of these packages."""
    return [
        ("Python", lambda: (True, f"Python {platform.python_version()}")),  # pip refuses one that is too old
        ("kvlab", check_kvlab),
        ("torch", check_torch),
        *((name, lambda name=name: check_package(name)) for name in names),
        ("kernels", check_kernels),
        ("threads", check_threads),
        ("device", check_device),
    ]


def checks(results: str | os.PathLike = "results") -> list[Check]:
    """All checks in the order they are printed, as (label, function)."""
    return [
        *first_checks(PACKAGES),
        ("memory bandwidth", check_bandwidth),
        ("free memory", lambda: check_memory(*FOR_A_RUN)),
        ("workshop model", check_model),
        ("results folder", lambda: check_results(results)),
    ]


def run(which: Iterable[Check] | None = None, *, results: str | os.PathLike = "results") -> int:
    """Print one line per check; return 0 if all are well, else 1."""
    failed = 0
    for label, check in checks(results) if which is None else which:
        try:
            ok, text = check()
        except Exception as error:  # a broken environment can raise anything
            ok, text = False, f"{label}: {type(error).__name__}: {first_line(error)} ({REPAIR})"
        print(f"[{'ok' if ok else '!!' if ok is False else '??'}] {text}", flush=True)
        failed += ok is False
    return 1 if failed else 0


def tried(config) -> dict[str, str]:
    """{method: "equal", or why not}, each tried on a tiny random model of this configuration's class, at its
    lossless setting. ValueError, one line, for a model that no method can serve."""
    from kvlab.make import make_cache
    from kvlab.methods import METHODS
    from kvlab.models import prepare, refusal, refused_layers
    from kvlab.models.shrunk import twin_of
    from kvlab.random_model import differs

    if why := refused_layers(config):
        raise ValueError(why)
    twin = prepare(twin_of(config))
    if why := refusal(twin) or differs(config):
        raise ValueError(f"{type(twin).__name__}: {why}")
    specs = {one.name: one.spec(one.same) for one in METHODS.values() if one.same is not None}
    del specs["recompute"]  # it holds nothing
    make = lambda spec: lambda model: make_cache(model, spec)
    return {name: differs(config, make(spec)) or "equal" for name, spec in specs.items()}


def model(name: str) -> int:
    """Print which methods are right on a model, tried on a tiny random one of its configuration class; return
    0, or 1 if no method can serve it. ValueError for an unreadable configuration."""
    from kvlab.models import configuration

    config = configuration(name)
    try:
        found = tried(config)
    except Exception as error:
        print(f"[!!] {name} ({config.model_type}): {first_line(error)}")
        return 1
    equal = [method for method, why in found.items() if why == "equal"]
    print(f"[ok] {name} ({config.model_type}): equal with {', '.join(equal)}")
    for method, why in found.items():
        if why != "equal":
            print(f"[!!] {method}: {why}")
    return 0

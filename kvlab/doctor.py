"""`kvlab doctor`: is this machine ready? One line per check, and what to do where it is not.

Every check is a function without required arguments that returns `(ok, text)`. A check
that raises counts as failed and shows the first line of its error.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Result = tuple[bool, str]
Check = tuple[str, Callable[[], Result]]

PACKAGES = ("torch", "transformers", "lm-eval", "datasets", "numpy")
REPAIR = "run `rm -rf .venv && make venv`"
SLOW_MEMORY = 1e9  # bytes/s; the slowest laptop of the last ten years reads faster
NEEDED_MEMORY = 2 * 2**30  # bytes; the workshop model, lm-eval and two worker processes
PROMPT = "Once upon a time"


def ranges() -> dict[str, Requirement]:
    """kvlab's own requirements from its installed metadata (pyproject), by canonical name."""
    try:
        lines = metadata.requires("kvlab") or []
    except metadata.PackageNotFoundError:
        return {}
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in parsed if r.marker is None}


def check_python(version: tuple[int, ...] | None = None) -> Result:
    """Python is 3.11 or later."""
    version = tuple(sys.version_info[:3]) if version is None else version
    text = "Python " + ".".join(map(str, version))
    if version < (3, 11):
        return False, f"{text}: 3.11 or later is needed; install it and {REPAIR}"
    return True, text


def check_kvlab() -> Result:
    """kvlab itself is installed, so that the ranges are known."""
    try:
        return True, f"kvlab {metadata.version('kvlab')}"
    except metadata.PackageNotFoundError:
        return False, f"kvlab is not installed in this environment: {REPAIR}"


def check_package(name: str) -> Result:
    """The package is there, in a version that pyproject admits."""
    wanted = ranges().get(canonicalize_name(name))
    allowed = str(wanted.specifier) if wanted else ""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False, f"{name} is not installed: {REPAIR}"
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return False, f"{name} {version} is outside {allowed}: {REPAIR}"
    return True, f"{name} {version}" + (f" (allowed: {allowed})" if allowed else "")


def cores() -> int:
    """Number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads() -> Result:
    """torch does not start more threads than there are cores."""
    import torch

    threads, available = torch.get_num_threads(), cores()
    text = f"threads: torch uses {threads}, {available} cores available"
    if threads > available:
        return False, f"{text}: set OMP_NUM_THREADS={available}, more only slow each other down"
    return True, text


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="ignore").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def check_device() -> Result:
    """What the numbers will be measured on."""
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


def check_memory() -> Result:
    """There is memory left for a run."""
    free = psutil.virtual_memory().available
    text = f"free memory: {free / 2**30:.1f} GiB"
    if free < NEEDED_MEMORY:
        needed = NEEDED_MEMORY / 2**30
        return False, f"{text}: `make demo` needs about {needed:.0f} GiB, close other programs"
    return True, text


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
        return False, f"{text}, but its weights give NaN: the checkpoint is damaged, clone again"
    trace = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), max_new_tokens=1)
    token = int(trace.tokens[0, 0])
    greedy = int(logits[0, -1].argmax())
    if token != greedy:
        return False, f"{text}, but decodes token {token} instead of {greedy}: {REPAIR}"
    return True, f"{text}, {PROMPT!r} goes on with {tokenizer.decode([token])!r}"


def check_results(folder: str | os.PathLike = "results") -> Result:
    """The folder for results can be written, or made."""
    folder = Path(folder)
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return False, (
            f"results folder {folder} cannot be written ({reason}): "
            "choose another with --out, or run from a folder of your own"
        )
    return True, f"results folder: {folder} can be written"


def checks(results: str | os.PathLike = "results") -> list[Check]:
    """All checks in the order they are printed, as (label, function)."""
    packages = [(name, lambda name=name: check_package(name)) for name in PACKAGES]
    return [
        ("Python", check_python),
        ("kvlab", check_kvlab),
        *packages,
        ("threads", check_threads),
        ("device", check_device),
        ("memory bandwidth", check_bandwidth),
        ("free memory", check_memory),
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
            lines = str(error).strip().splitlines() or [""]
            ok, text = False, f"{label}: {type(error).__name__}: {lines[0]} ({REPAIR})"
        print(f"[{'ok' if ok else '!!'}] {text}", flush=True)
        failed += not ok
    return 1 if failed else 0


def model(name: str) -> int:
    """Print which methods are right on a model, tried on a tiny random one of its configuration class; return
    0, or 1 where no method can serve it. ValueError for a configuration that cannot be read."""
    from transformers import AutoConfig

    import kvlab
    from kvlab.models import source_of
    from kvlab.twin import row

    try:
        config = AutoConfig.from_pretrained(source_of(name), trust_remote_code=False)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"no configuration could be read from {name!r}: {lines[0]}") from error
    try:
        found = row(config, kvlab.make_cache)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"[!!] {name} ({config.model_type}): {lines[0]}")
        return 1
    equal = [method for method, why in found.items() if why == "equal"]
    print(f"[ok] {name} ({config.model_type}): equal with {', '.join(equal)}")
    for method, why in found.items():
        if why != "equal":
            print(f"[!!] {method}: {why}")
    return 0

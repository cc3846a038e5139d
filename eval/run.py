"""A run's settings, and what every cell of it records."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from .machine import Problem, commit, machine, versions

SMALL_MODEL = 200 * 2**20  # bytes on disk up to which one thread decodes fastest


@dataclass(frozen=True)
class Settings:
    """One command's settings; `model` None is the workshop model, `jobs` 0 means in this process."""

    model: str | None
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    out: Path
    device: str | None = None
    dtype: str | None = None
    batch_size: int = 64
    limit: int | None = None
    num_fewshot: int | None = None
    seed: int = 1234
    suite: str = "model"
    jobs: int | None = None

    @property
    def model_name(self) -> str:
        return "workshop" if self.model is None else self.model.rstrip("/")

    def small(self) -> bool:
        """Is it a model for one thread on a CPU?"""
        if self.device not in (None, "cpu"):
            return False
        from kvlab.models import source_of

        folder = Path(source_of(self.model))
        return folder.is_dir() and sum(f.stat().st_size for f in folder.glob("*")) < SMALL_MODEL


def record(settings, model, method, task, config, threads, found: dict) -> dict:
    """A cell: names, configuration, the numbers found, and what they stand on."""
    device = found.pop("device")
    return {
        "model": model,
        "method": method,
        "task": task,
        "config": config,
        **found,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "commit": commit(),
        "machine": machine(device, threads),
        "batch_size": settings.batch_size,
    }


def check_device(settings: Settings) -> None:
    """Raises Problem for a device or dtype that torch does not know or this machine does not have."""
    import torch

    if settings.device is not None:
        try:
            device = torch.device(settings.device)
        except RuntimeError:
            raise Problem(f"--device {settings.device!r}: expected cpu, cuda or cuda:N") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Problem(f"--device {settings.device!r}: torch finds no CUDA device on this machine")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise Problem(f"--device {settings.device!r}: there are {torch.cuda.device_count()} devices")

"""InfiniGen's published speeds, simulated: decode steps and prompts of OPT on the published machine.

The published numbers are of InfiniGen's evaluation (Lee et al. 2024; shares of transfers as Gong, Yi and
Zhang 2024 print them): an A6000 behind PCIe 3, beside FlexGen, here `offload`. They are compared with
simulations of the settings they were run with (`AS_RUN`); `OVERLAPPED` is kvlab's own schedule there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvlab.arithmetic import MACHINES, SHAPES, kv_bytes, prefill_flops
from kvlab.measure import simulate
from kvlab.models import ModelShape

SPEEDUPS = {  # OPT-13B, batch 8: times faster than FlexGen
    "offload+int4": {512: 1.28, 1024: 1.46, 1536: 1.56, 2048: 1.61},
    "offload+h2o": {512: 2.23, 1024: 2.83, 1536: 3.14, 2048: 3.40},
    "infinigen": {512: 1.71, 1024: 2.75, 1536: 3.86, 2048: 5.28},
}
TRANSFER_SHARE = {"offload": 96.9, "offload+h2o": 91.8}  # per cent of a step, OPT-13B, 8 rows of 2,048
MACHINE = MACHINES["A6000-PCIe3"]
WRITTEN = {"offload+int4": 4.25 / 16, "offload+h2o": 0.2}  # part of a prompt's bytes that goes to the host
NEW = 128  # tokens written behind a prompt


@dataclass(frozen=True)
class Run:
    """How a simulated system is run. overlap: what is fetched whole is asked for a layer ahead, not when it
    is needed. fetched: part of the tokens that a step of InfiniGen fetches, by the tokens in all where it
    differs; ratio: of the columns that it guesses by. on_host: {model: part of its
    weights that crosses the link at every step}."""

    name: str
    overlap: bool = True
    fetched: float | dict[int, float] = 0.1
    ratio: float = 0.3
    on_host: dict[str, float] = field(default_factory=dict)

    def on_host_of(self, shape: ModelShape) -> float:
        return next((part for model, part in self.on_host.items() if SHAPES[model] == shape), 0.0)


# The scripts of InfiniGen's official code, speedup/scripts, a folder for each figure: --overlap false,
# --partial-weight-ratio 0.2, a fifth of the tokens at most, --percent 70 30 0 100 100 0 (16b).
AS_RUN = Run("as published", overlap=False, fetched=0.2, ratio=0.2, on_host={"OPT-30B": 0.3})
# What alpha = 4 and a cap of a fifth fetch of a guessed layer of SmolLM2 (docs/results/offload.json).
ASKED = {512: 0.053, 1024: 0.046, 1536: 0.045, 2048: 0.039}
BY_ALPHA = replace(AS_RUN, name="as published, alpha on SmolLM2", fetched=ASKED)
ON_DEVICE = replace(AS_RUN, name="weights on the device", on_host={})
OVERLAPPED = Run("overlapped")


def works_of(system: str, shape: ModelShape, tokens: int, batch: int, run: Run) -> list[simulate.Work]:
    """The layers of a system's decode step on the published machine. InfiniGen's guesses are fetched ahead in
    either run: that is what the method is."""
    part = (
        run.fetched
        if isinstance(run.fetched, float)
        else run.fetched[min(n for n in run.fetched if n >= tokens)]
    )
    works = simulate.decode_works(system, MACHINE, shape, tokens, batch, fetched=part, ratio=run.ratio)
    if not run.overlap:
        works = [replace(w, ask=simulate.NEEDED if w.ask == simulate.AHEAD else w.ask) for w in works]
    crossing = run.on_host_of(shape) * 24 * shape.hidden**2 / MACHINE.link  # of a layer's 12 h^2 in 16 bits
    return [replace(w, project=w.project + crossing) for w in works]


def total_seconds(
    system: str, shape: ModelShape, prompt: int, new: int, batch: int, run: Run = OVERLAPPED
) -> tuple[float, float]:
    """(prefill, decode) of a system on the published machine, simulated. The prefill computes at the roofline
    and writes out what is held of K and V: meanwhile where the run overlaps, else behind it. Under unified
    memory it waits for its page faults."""
    over = simulate.link_of(MACHINE, system)
    compute = prefill_flops(shape, prompt, batch) / MACHINE.flops
    compute += run.on_host_of(shape) * 24 * shape.layers * shape.hidden**2 / MACHINE.link
    held = int(WRITTEN.get(system, 1.0) * kv_bytes(shape, prompt, batch))
    out = over.seconds(held) if system != "full" else 0.0
    one_by_one = system.startswith("uvm") or not run.overlap
    prefill = compute + out if one_by_one else max(compute, out)
    steps = [works_of(system, shape, prompt + step, batch, run) for step in range(new)]
    return prefill, simulate.simulate(steps, over).seconds


def faster(shape: ModelShape, tokens: int, batch: int, run: Run) -> dict[str, float]:
    """{system: times faster than FlexGen}, of prompts that leave room for the new tokens."""
    seconds = {
        system: sum(total_seconds(system, shape, tokens - NEW, NEW, batch, run))
        for system in ("offload", *SPEEDUPS)
    }
    return {system: seconds["offload"] / seconds[system] for system in SPEEDUPS}

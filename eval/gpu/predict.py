"""Predictions of the roofline and the simulator before any measurement, for the same bars."""

from __future__ import annotations

from kvlab.arithmetic import Machine, prefill_flops
from kvlab.measure import simulate
from kvlab.models import ModelShape

PUBLISHED_LINK = 16e9  # bytes per second: the paper's PCIe 3.0
STEPS = 128  # tokens that the paper's experiment writes
SYSTEMS = {  # of the simulator: the method that is measured; h2o holds a fifth, infinigen fetches a tenth
    "full": "static",
    "uvm": "uvm",
    "uvm+h2o": "uvm+h2o",
    "offload": "offload",
    "offload+int4": "offload+int4",
    "offload+h2o": "offload+h2o",
    "infinigen": "infinigen:budget=0.1",
}


def step_seconds(
    system: str, machine: Machine, shape: ModelShape, stored: int, batch: int,
    launches: float | None = None, paged: bool = True,
) -> float:  # fmt: skip
    """Seconds of one decode step of a system: the second of two, so that what is asked for a step ahead is on
    its way. launches: see `decode_works`; paged: whether unified memory pays for its pages."""
    works = [
        simulate.decode_works(system, machine, shape, stored + step, batch, launches=launches)
        for step in range(2)
    ]
    link = simulate.link_of(machine, system if paged else "offload")
    return simulate.simulate(works, link).seconds - simulate.simulate(works[:1], link).seconds


def prefill_seconds(system: str, machine: Machine, shape: ModelShape, tokens: int, batch: int) -> float:
    """Seconds of a prompt: computed at the roofline while K and V leave; under unified memory, one after the
    other."""
    compute = prefill_flops(shape, tokens, batch) / machine.flops
    if system == "full":
        return compute
    size = 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens * batch
    out = simulate.link_of(machine, system).seconds(size)
    return compute + out if system.startswith("uvm") else max(compute, out)


def bar(
    system: str, machine: Machine, shape: ModelShape, tokens: int, batch: int, **launched
) -> dict[str, float]:
    """prefill_s, step_ms and total_s of prompts of `tokens` tokens and STEPS more, as the stage measures
    them: a prompt that reaches to the middle of the run, and STEPS steps from there. launched: as
    `step_seconds` takes it."""
    middle = tokens + STEPS // 2
    prefill = prefill_seconds(system, machine, shape, middle, batch)
    step = step_seconds(system, machine, shape, middle, batch, **launched)
    return {"prefill_s": prefill, "step_ms": step * 1e3, "total_s": prefill + STEPS * step}

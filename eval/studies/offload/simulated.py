"""Experiments with time that play a schedule: what the simulator says of larger models and machines.

The published numbers are of InfiniGen's evaluation (Lee et al. 2024; shares of transfers and the table of
Longchat-7B as Gong, Yi and Zhang 2024 print them): an A6000 behind PCIe 3, beside FlexGen, here `offload`.
"""

from __future__ import annotations

from kvlab.arithmetic import MACHINES, SHAPES, kv_bytes, prefill_flops, required_bandwidth
from kvlab.measure import simulate
from kvlab.measure.machines import like, measured_layer_seconds
from kvlab.models import ModelShape
from kvlab.place import ModelledLink

from .rows import MEASURED, MODELLED, SIMULATED, row

SPEEDUPS = {  # OPT-13B, batch 8: times faster than FlexGen
    "offload+int4": {512: 1.28, 1024: 1.46, 1536: 1.56, 2048: 1.61},
    "offload+h2o": {512: 2.23, 1024: 2.83, 1536: 3.14, 2048: 3.40},
    "infinigen": {512: 1.71, 1024: 2.75, 1536: 3.86, 2048: 5.28},
}
TRANSFER_SHARE = {"offload": 96.9, "offload+h2o": 91.8}  # per cent of a step, OPT-13B, 8 rows of 2,048
# Longchat-7B, 16 bits, batch 1: ms of prefill and decode step, GB/s required by each.
LONGCHAT = {
    1024: (172.59, 27.99, 2.92, 17.99), 2048: (327.27, 30.73, 3.03, 32.27),
    4096: (670.07, 36.05, 2.94, 54.60), 8192: (1343.27, 46.91, 2.92, 83.60),
    16384: (3026.89, 68.35, 2.59, 114.52), 32768: (7640.90, 112.46, 2.05, 139.08),
}  # fmt: skip
LINKS = {"PCIe 3": 16e9, "PCIe 4": 28e9, "PCIe 5": 64e9, "NVLink-C2C": 450e9}
MACHINE = MACHINES["A6000-PCIe3"]
SYSTEMS = [system for system in simulate.SYSTEMS if system != "topk"]


def total_seconds(system: str, shape, prompt: int, new: int, batch: int) -> tuple[float, float]:
    """(prefill, decode) of a system on the published machine, simulated. The prefill computes at the roofline
    and writes K and V out meanwhile; under unified memory it waits for its page faults."""
    over = simulate.link_of(MACHINE, system)
    compute = prefill_flops(shape, prompt, batch) / MACHINE.flops
    out = over.seconds(int(kv_bytes(shape, prompt, batch))) if system != "full" else 0.0
    prefill = compute + out if system.startswith("uvm") else max(compute, out)
    steps = [simulate.decode_works(system, MACHINE, shape, prompt + step, batch) for step in range(new)]
    return prefill, simulate.simulate(steps, over).seconds


def latency(study) -> dict:
    """4. Prefill and decode of OPT on the published machine, simulated, and speed-ups over FlexGen."""
    name, rows = "latency", []
    for system in SYSTEMS:
        prefill, decode = total_seconds(system, SHAPES["OPT-13B"], 1920, 128, 20)
        rows += [
            row(name, f"{system}: prefill, OPT-13B, batch 20", prefill, "s", SIMULATED, 1920),
            row(name, f"{system}: decode, OPT-13B, batch 20", decode, "s", SIMULATED, 2048),
        ]
    for shape, batch, lengths in [
        ("OPT-13B", 8, (512, 1024, 1536, 2048)),
        ("OPT-6.7B", 4, (2048,)),
        ("OPT-13B", 4, (2048,)),
        ("OPT-30B", 4, (2048,)),
    ]:
        for tokens in lengths:
            base = sum(total_seconds("offload", SHAPES[shape], tokens - 128, 128, batch))
            for system in SPEEDUPS:
                faster = base / sum(total_seconds(system, SHAPES[shape], tokens - 128, 128, batch))
                published = SPEEDUPS[system][tokens] if (shape, batch) == ("OPT-13B", 8) else None
                label = f"{system}: faster than offload, {shape}, batch {batch}"
                rows.append(row(name, label, faster, "times", SIMULATED, tokens, published))
    return {"rows": rows}


def breakdown(study) -> dict:
    """5. Where a layer's time goes, OPT-13B with 8 rows of 2,048 tokens, simulated."""
    name, shape, rows = "breakdown", SHAPES["OPT-13B"], []
    for system in SYSTEMS:
        steps = [simulate.decode_works(system, MACHINE, shape, 2048, 8)] * 3
        timeline = simulate.simulate(steps, simulate.link_of(MACHINE, system))
        per_layer = 1e3 / (3 * shape.layers)
        for what in ("project", "attention", "ffn", "selection", "stall"):
            rows.append(
                row(name, f"{system}: {what}", timeline.total(what) * per_layer, "ms/layer", SIMULATED, 2048)
            )
        carried = sum(span.seconds for span in timeline.transfers if span.lane == "to device")
        rows.append(row(name, f"{system}: transfer", carried * per_layer, "ms/layer", SIMULATED, 2048))
        share = 100 * timeline.total("stall") / timeline.seconds
        published = TRANSFER_SHARE.get(system)
        rows.append(row(name, f"{system}: waiting for transfers", share, "%", SIMULATED, 2048, published))
    full = simulate.simulate([simulate.decode_works("full", MACHINE, shape, 2048, 8)] * 3, ModelledLink(1.0))
    ours = [simulate.decode_works("infinigen", MACHINE, shape, 2048, 8)] * 3
    ratio = simulate.simulate(ours, simulate.link_of(MACHINE, "infinigen")).seconds / full.seconds
    rows.append(row(name, "infinigen: over the ideal", ratio, "times", SIMULATED, 2048, 1.52))
    return {"rows": rows}


def bandwidth(study) -> dict:
    """8. Bytes per second that whole-layer offloading asks of its link: the published table recomputed, and
    this model on this machine."""
    name, shape, rows = "bandwidth", SHAPES["Llama-2-7B"], []
    needed = {}
    for tokens, (prefill, decode, first, then) in LONGCHAT.items():
        size = kv_bytes(shape, tokens)
        needed[tokens] = required_bandwidth(size, decode / 1e3) / 1e9
        of_prefill = required_bandwidth(size, prefill / 1e3) / 1e9
        rows += [
            row(name, "Longchat-7B, prefill", of_prefill, "GB/s", SIMULATED, tokens, first),
            row(name, "Longchat-7B, decode", needed[tokens], "GB/s", SIMULATED, tokens, then),
        ]
    rows += saturated(name, "Longchat-7B", needed, SIMULATED)
    model, _ = study.load()
    shape, needed = ModelShape.of(model), {}
    longest = shape.context or 16384
    for tokens in [n for n in (128, 256, 512, 1024, 2048, 4096, 8192) if n <= longest]:
        tokens = min(tokens, longest - 8)
        seconds = measured_layer_seconds(model, tokens) * shape.layers
        size = kv_bytes(shape, tokens, bits=8 * model.dtype.itemsize)
        needed[tokens] = required_bandwidth(size, seconds) / 1e9
        rows.append(row(name, f"{study.model_name}, decode", needed[tokens], "GB/s", MEASURED, tokens))
    notes = []
    for machine in MACHINES:
        scaled = like(machine, model)
        notes.append(f"{machine}: {scaled}")
        label = f"{study.model_name}: link like {machine}"
        rows.append(row(name, label, scaled.bandwidth / 1e9, "GB/s", MODELLED, min(2048, longest - 8)))
    return {"rows": rows + saturated(name, study.model_name, needed, MEASURED), "notes": notes}


def saturated(name: str, system: str, needed: dict[int, float], kind: str) -> list[dict]:
    """For every link the shortest of the lengths whose decode step asks for more than it carries."""
    rows = []
    for link, carries in LINKS.items():
        first = next((tokens for tokens, value in needed.items() if value * 1e9 > carries), None)
        if first is not None:
            rows.append(row(name, f"{system}: saturates {link} from", first, "tokens", kind, first))
    return rows


EXPERIMENTS = {"latency": latency, "breakdown": breakdown, "bandwidth": bandwidth}

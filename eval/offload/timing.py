"""Experiments with time: wall time over the modelled link, and what the simulator says of larger machines."""

from __future__ import annotations

import statistics
import time

import torch

import kvlab
from kvlab import plots
from kvlab.arithmetic import (
    MACHINES,
    SHAPES,
    kv_bytes,
    kv_bytes_per_token,
    prefill_flops,
    required_bandwidth,
)
from kvlab.models import Anatomy
from kvlab.place import ModelledLink, simulate
from kvlab.place.machines import fill_random, measured_layer_seconds
from kvlab.place.timeline import record

from .figures import save
from .rows import MEASURED, MODELLED, SIMULATED, Row

SPEEDUPS = {  # document 001, OPT-13B, batch 8: times faster than FlexGen
    "offload+int4": {512: 1.28, 1024: 1.46, 1536: 1.56, 2048: 1.61},
    "offload+h2o": {512: 2.23, 1024: 2.83, 1536: 3.14, 2048: 3.40},
    "infinigen": {512: 1.71, 1024: 2.75, 1536: 3.86, 2048: 5.28},
}
TRANSFER_SHARE = {"offload": 96.9, "offload+h2o": 91.8}  # document 001, OPT-13B, 8 * 2048
# Document 001, Longchat-7B, 16 bits, batch 1: ms of prefill and decode step, GB/s required by each.
LONGCHAT = {
    1024: (172.59, 27.99, 2.92, 17.99), 2048: (327.27, 30.73, 3.03, 32.27),
    4096: (670.07, 36.05, 2.94, 54.60), 8192: (1343.27, 46.91, 2.92, 83.60),
    16384: (3026.89, 68.35, 2.59, 114.52), 32768: (7640.90, 112.46, 2.05, 139.08),
}  # fmt: skip
LINKS = {"PCIe 3": 16e9, "PCIe 4": 28e9, "PCIe 5": 64e9, "NVLink-C2C": 450e9}
LINKED = ("uvm", "offload", "offload+int4", "offload+h2o", "topk:budget=0.1", "infinigen:budget=0.1")
WIDE_LAYERS, WIDE_TOKENS = 16, 8192
BOUND = 6  # the link of experiment `link`: a layer's transfer takes so many times its computation


def wide_model(layers: int = WIDE_LAYERS, context: int = WIDE_TOKENS + 64):
    """The speed suite's wider random-weight Llama with more layers: of its 4, InfiniGen reads 2 whole."""
    from transformers import LlamaForCausalLM

    from ..speed import wide_config

    config = wide_config()
    config.num_hidden_layers, config.max_position_embeddings, config.vocab_size = layers, context, 512
    torch.manual_seed(0)
    return kvlab.prepare(LlamaForCausalLM(config).eval())


def filled(model, method: str, tokens: int):
    """A cache of the method holding random K and V of `tokens` tokens."""
    length = ":" if ":" not in method else ","
    spec = f"static{length}length={tokens + 48}" if method == "full" else method
    cache = kvlab.make_cache(model, spec)
    fill_random(model, cache, tokens)
    return cache


@torch.no_grad()
def steps(model, cache, count: int) -> list[float]:
    """Milliseconds of each of `count` decode steps; the tokens do not matter."""
    ids, times = torch.zeros(1, 1, dtype=torch.long, device=model.device), []
    for _ in range(count):
        begun = time.perf_counter()
        model(ids, past_key_values=cache)
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def link(settings) -> list[Row]:
    """6. Wall time over a modelled link to which whole-layer offloading is bound, beside the ideal."""
    tokens = settings.tokens or WIDE_TOKENS
    model = wide_model(settings.layers or WIDE_LAYERS, tokens + 64)
    count, name = settings.repeats, "link"
    ideal = statistics.median(steps(model, filled(model, "full", tokens), count + 2)[2:])
    per_layer = ideal / 1e3 / len(model.model.layers)
    size = kv_bytes_per_token(Anatomy(model).shape, 32) / len(model.model.layers) * tokens
    bandwidth = size / (BOUND * per_layer)
    rows = [
        Row(name, "ideal: all on the device", ideal, "ms/token", MEASURED, tokens),
        Row(name, "bandwidth of the link", bandwidth / 1e9, "GB/s", MODELLED, tokens),
    ]
    found = {}
    for method in LINKED:
        spec = f"{method}{',' if ':' in method else ':'}link="
        fast = filled(model, f"{spec}1e12", tokens)
        steps(model, fast, 2)
        with record(model, fast) as timeline:
            steps(model, fast, count)
        del fast
        plain = ModelledLink(bandwidth)
        over = plain.paged(65536, 2e-6) if method == "uvm" else plain
        predicted = simulate.simulate(simulate.works(timeline), over)
        cache = filled(model, f"{spec}{bandwidth}", tokens)
        steps(model, cache, 2)
        with record(model, cache) as timeline:
            measured = statistics.mean(steps(model, cache, count))
        del cache
        keep_timeline(timeline, method, settings.out)
        found[method] = measured
        outside = measured - timeline.seconds * 1e3 / count
        expected = predicted.seconds * 1e3 / count + outside
        rows += [
            Row(name, method, measured, "ms/token", MODELLED, tokens),
            Row(name, method, expected, "ms/token", SIMULATED, tokens),
            Row(name, f"{method}: simulated over measured", expected / measured, "times", SIMULATED, tokens),
            Row(name, f"{method}: over the ideal", measured / ideal, "times", MODELLED, tokens),
        ]
        if method.startswith("infinigen"):
            rows[-1] = rows[-1].beside(1.52)
        rows += [
            Row(name, f"{method}: {what}", timeline.total(what) * 1e3 / count, "ms/token", MODELLED, tokens)
            for what in ("project", "selection", "stall", "attention", "ffn")
        ]
    speedup = found["offload"] / found["infinigen:budget=0.1"]
    rows.append(Row(name, "infinigen: faster than offload", speedup, "times", MODELLED, tokens))
    return rows


def keep_timeline(timeline, method: str, out) -> None:
    """A picture and a trace file of a recorded run's last step."""
    stem = out / f"offload-timeline-{method.partition(':')[0].replace('+', '-')}"
    step = timeline.steps(max(span.step for span in timeline.compute))
    step.save(stem.with_suffix(".json"))
    save(plots.gantt(step, title=method), stem)


MACHINE = MACHINES["A6000-PCIe3"]
SYSTEMS = [system for system in simulate.SYSTEMS if system != "topk"]


def total_seconds(system: str, shape, prompt: int, new: int, batch: int) -> tuple[float, float]:
    """(prefill, decode) of a system on the slides' machine, simulated. The prefill computes at the roofline
    and writes K and V out meanwhile; under unified memory it waits for its page faults."""
    over = simulate.link_of(MACHINE, system)
    compute = prefill_flops(shape, prompt, batch) / MACHINE.flops
    out = over.seconds(int(kv_bytes(shape, prompt, batch))) if system != "full" else 0.0
    prefill = compute + out if system.startswith("uvm") else max(compute, out)
    steps = [simulate.decode_works(system, MACHINE, shape, prompt + step, batch) for step in range(new)]
    return prefill, simulate.simulate(steps, over).seconds


def latency(settings) -> list[Row]:
    """4. Prefill and decode of the slides' models on their machine, simulated, and speed-ups over FlexGen."""
    name, rows = "latency", []
    for system in SYSTEMS:
        prefill, decode = total_seconds(system, SHAPES["OPT-13B"], 1920, 128, 20)
        rows += [
            Row(name, f"{system}: prefill, OPT-13B, batch 20", prefill, "s", SIMULATED, 1920),
            Row(name, f"{system}: decode, OPT-13B, batch 20", decode, "s", SIMULATED, 2048),
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
                rows.append(Row(name, label, faster, "times", SIMULATED, tokens, published))
    return rows


def breakdown(settings) -> list[Row]:
    """5. Where a layer's time goes, OPT-13B with 8 rows of 2,048 tokens, simulated."""
    name, shape, rows = "breakdown", SHAPES["OPT-13B"], []
    for system in SYSTEMS:
        steps = [simulate.decode_works(system, MACHINE, shape, 2048, 8)] * 3
        timeline = simulate.simulate(steps, simulate.link_of(MACHINE, system))
        per_layer = 1e3 / (3 * shape.layers)
        for what in ("project", "attention", "ffn", "selection", "stall"):
            rows.append(
                Row(name, f"{system}: {what}", timeline.total(what) * per_layer, "ms/layer", SIMULATED, 2048)
            )
        carried = sum(span.seconds for span in timeline.transfers if span.lane == "to device")
        rows.append(Row(name, f"{system}: transfer", carried * per_layer, "ms/layer", SIMULATED, 2048))
        share = 100 * timeline.total("stall") / timeline.seconds
        published = TRANSFER_SHARE.get(system)
        rows.append(Row(name, f"{system}: waiting for transfers", share, "%", SIMULATED, 2048, published))
    full = simulate.simulate([simulate.decode_works("full", MACHINE, shape, 2048, 8)] * 3, ModelledLink(1.0))
    ours = [simulate.decode_works("infinigen", MACHINE, shape, 2048, 8)] * 3
    ratio = simulate.simulate(ours, simulate.link_of(MACHINE, "infinigen")).seconds / full.seconds
    rows.append(Row(name, "infinigen: over the ideal", ratio, "times", SIMULATED, 2048, 1.52))
    return rows


def bandwidth(settings) -> list[Row]:
    """8. Bytes per second that whole-layer offloading asks of its link: the slides' table recomputed, and
    this model on this machine."""
    name, shape, rows = "bandwidth", SHAPES["Llama-2-7B"], []
    needed = {}
    for tokens, (prefill, decode, first, then) in LONGCHAT.items():
        size = kv_bytes(shape, tokens)
        needed[tokens] = required_bandwidth(size, decode / 1e3) / 1e9
        of_prefill = required_bandwidth(size, prefill / 1e3) / 1e9
        rows += [
            Row(name, "Longchat-7B, prefill", of_prefill, "GB/s", SIMULATED, tokens, first),
            Row(name, "Longchat-7B, decode", needed[tokens], "GB/s", SIMULATED, tokens, then),
        ]
    rows += saturated(name, "Longchat-7B", needed, SIMULATED)
    model, _ = settings.load()
    anatomy, needed = Anatomy(model), {}
    longest = anatomy.context or 16384
    for tokens in [n for n in (128, 256, 512, 1024, 2048, 4096, 8192) if n <= longest]:
        tokens = min(tokens, longest - 8)
        seconds = measured_layer_seconds(model, tokens) * anatomy.layers
        size = kv_bytes(anatomy.shape, tokens, bits=8 * model.dtype.itemsize)
        needed[tokens] = required_bandwidth(size, seconds) / 1e9
        rows.append(Row(name, f"{settings.name}, decode", needed[tokens], "GB/s", MEASURED, tokens))
    for machine in MACHINES:
        scaled = ModelledLink.like(machine, model)
        settings.line(f"  {machine}: {scaled}")
        label = f"{settings.name}: link like {machine}"
        rows.append(Row(name, label, scaled.bandwidth / 1e9, "GB/s", MODELLED, min(2048, longest - 8)))
    return rows + saturated(name, settings.name, needed, MEASURED)


def saturated(name: str, system: str, needed: dict[int, float], kind: str) -> list[Row]:
    """For every link the shortest of the lengths whose decode step asks for more than it carries."""
    rows = []
    for link, carries in LINKS.items():
        first = next((tokens for tokens, value in needed.items() if value * 1e9 > carries), None)
        if first is not None:
            rows.append(Row(name, f"{system}: saturates {link} from", first, "tokens", kind, first))
    return rows

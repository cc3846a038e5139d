"""The simulator beside a real GPU's bars: operators as they were counted once, seconds from the same run."""

import json
from pathlib import Path

import pytest

from kvlab.arithmetic import SHAPES, Machine, prefill_flops
from kvlab.measure import simulate

H200 = Path(__file__).parents[2] / "docs" / "results" / "gpu" / "h200-61d36dd.json"
PLANNED = {"full": 1, "offload": 1, "uvm": 1, "infinigen": 2}  # lengths of a step that cuDNN had not met yet
OPERATORS = {  # of a layer in an eager step, views among them, as `eval gpu` of commit fcf9eb7c counts them
    "full": 48.53, "uvm": 68.53, "uvm+h2o": 174.53, "offload": 68.28, "offload+int4": 178.03,
    "offload+h2o": 188.53, "infinigen": 136.72, "hf-static": 80.34, "hf-dynamic": 72.72,
}  # fmt: skip
PROMPT, STEPS, LAYERS = 64, 128, 32  # tokens beyond the paper's prompt, of its answer; layers of Llama-3-8B


def test_every_bar_of_the_h200_run_is_predicted_within_a_fifth():
    """What the run's other rows say: an operator's time is that of transformers' static cache; cuDNN, which
    attended then, planned for every new length, which is what their dynamic cache takes more; whole layers
    were gathered on the host, at the speed of one bar of `offload`; and where a token goes at every step the
    host moved all others, which one bar of `offload+h2o` shows, to unified memory by a pageable copy."""
    units = json.loads(H200.read_text())["units"]
    rows = [row for name, unit in units.items() for row in unit["rows"] if name.startswith("headline")]
    eager = [row for name, unit in units.items() if "eager" in name for row in unit["rows"]]
    steps = {row["method"]: row["ms"] / 1e3 for row in eager}
    operator = steps["hf-static"] / OPERATORS["hf-static"] / LAYERS
    plan = steps["hf-dynamic"] - operator * OPERATORS["hf-dynamic"] * LAYERS
    assert 5e-6 < operator < 20e-6 and 0.02 < plan < 0.06
    told = next(row for row in rows if "flops" in row)
    bars = {(row["system"], row["link"], row["batch"]): row for row in rows if "ms" in row}
    one = bars["offload", "real", 20]
    lane, shape = one["moved_bytes"] / one["ms"] * 1e3, SHAPES["OPT-13B"]

    def step_and_prompt(row: dict) -> tuple[float, float]:
        """Milliseconds of the second of two steps, and seconds of the prompt."""
        on = Machine(told["flops"], told["memory"], lane if row["link"] == "real" else min(16e9, lane))
        system, tokens, batch = row["system"], row["prompt"] + PROMPT, row["batch"]
        host = operator * OPERATORS[system]
        works = [simulate.decode_works(system, on, shape, tokens + n, batch, launches=host) for n in range(2)]
        link = simulate.link_of(on, "offload" if row["link"] == "real" else system)
        step = simulate.simulate(works, link).seconds - simulate.simulate(works[:1], link).seconds
        prompt = prefill_flops(shape, tokens, batch) / on.flops
        if system != "full":
            size = 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens * batch
            out = simulate.link_of(on, system).seconds(size)
            prompt = prompt + out if system.startswith("uvm") else max(prompt, out)
        return 1e3 * step + 1e3 * plan * PLANNED.get(system, 0), prompt

    # The host's moves go on while the fetch of the next layer does, so they take the fetch's place.
    alone = 1e3 * shape.layers * operator * OPERATORS["offload+h2o"]
    moves = bars["offload+h2o", "real", 20]["ms"] - alone
    held = 0.2 * (1920 + 64) * 20 * shape.kv_heads * shape.head_dim * 4 * shape.layers
    copies = [row["gbps"] for row in units["link:copies"]["rows"] if row["what"] == "to device, pageable"]
    for (system, link, batch), row in bars.items():
        step, prompt = step_and_prompt(row)
        if system == "offload+h2o":
            step = moves + alone
        elif system == "uvm+h2o":
            step += moves + held / copies[-1] / 1e6
        assert step == pytest.approx(row["ms"], rel=0.2), (system, link, batch)
        assert prompt + STEPS * step / 1e3 == pytest.approx(row["total_s"], rel=0.2), (system, link, batch)

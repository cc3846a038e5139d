"""The offloading experiments: rows, figures, numbers that can be worked out, and the command."""

import json

import pytest

from eval.command import main
from eval.report import studies as shown
from eval.studies.offload import simulated, walltime
from kvlab.arithmetic import SHAPES, kv_bytes

NEW = 40  # tokens that are simulated, not 128
KEYS = ["experiment", "system", "tokens", "value", "unit", "kind", "published"]


def run(out, *experiments: str) -> list[dict]:
    """Run experiments by the command; returns the rows of its file."""
    assert main(["offload", "--out", str(out), "--experiments", *experiments]) == 0
    return json.loads((out / "offload.json").read_text())


def values(rows):
    return {(row["system"], row["tokens"]): row["value"] for row in rows}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("offload")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "NEW", NEW)
        return out, run(out, "latency", "breakdown")


def test_the_file_holds_the_rows(quick):
    out, rows = quick
    assert all(list(row) == KEYS and row["kind"] == "simulated" for row in rows)
    assert json.loads((out / "offload-machine.json").read_text())["threads"] == 1


def test_simulated_latencies_obey_the_link(quick):
    """FlexGen cannot be faster than its bytes over 16 GB/s, nor slower than these and the ideal together; run
    as published it is as slow as that."""
    found = values(quick[1])
    size = sum(kv_bytes(SHAPES["OPT-13B"], 2048 - NEW + step, 20) for step in range(NEW))
    where = "decode, OPT-13B, batch 20"
    ideal = found[f"full: {where}, overlapped", 2048]
    assert size / 16e9 <= found[f"offload: {where}, overlapped", 2048] <= size / 16e9 + ideal
    assert found[f"offload: {where}, as published", 2048] == pytest.approx(size / 16e9 + ideal, rel=1e-3)
    published = [row for row in quick[1] if row["published"] and "faster" in row["system"]]
    assert len(published) == 12  # three systems at four lengths
    assert all(row["system"].endswith("OPT-13B, batch 8, as published") for row in published)
    label = "{}: faster than offload, OPT-13B, batch 8, overlapped"
    for tokens in (1024, 1536, 2048):  # the published order
        faster = [found[label.format(system), tokens] for system in simulated.SPEEDUPS]
        assert 1 < faster[0] < faster[1] < faster[2]
    for run in ("as published", "overlapped"):
        waiting = [found[f"{s}: waiting for transfers, {run}", 2048] for s in ("offload", "offload+h2o")]
        assert waiting[0] > waiting[1] > 50


def test_the_link_experiment_at_a_small_size(tmp_path):
    cell = walltime.link(tokens=96, layers=3, repeats=1)
    rows = cell["rows"]
    found = values(rows)
    for method in walltime.LINKED:
        assert found[f"{method}: stall", 96] >= 0 and found[f"{method}: attention", 96] > 0
        kinds = {row["kind"] for row in rows if row["system"] == method}
        assert kinds == {"modelled", "simulated"}
    cell |= {"machine": {}}
    shown.write({"link": json.loads(json.dumps(cell))}, tmp_path)
    assert len(list(tmp_path.glob("offload-timeline-*.json"))) == len(walltime.LINKED)
    assert (tmp_path / "offload-timeline-infinigen.png").stat().st_size > 5000

"""What a study costs, and the files that start a cluster."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from eval.cluster import hours
from eval.core.machine import machine
from eval.core.results import Store

ROOT = Path(__file__).resolve().parents[3]


def test_hours_come_from_the_cells_own_seconds(tmp_path, capsys):
    stands = {"config": {}, "machine": machine(threads=1), "versions": {}, "metrics": []}
    store = Store(tmp_path)
    store.prepare()
    for task, prefill in (("a", 3000.0), ("b", 600.0)):
        for method in ("full", "int8"):
            cell = {
                "model": "m",
                "method": method,
                "task": task,
                "seconds": 300.0,
                "prefill_seconds": prefill,
            }
            store.save(cell | stands | {"together": 2})
    store.save({"model": "m", "method": "", "task": "study", "seconds": 1e6} | stands)  # no job of a sweep's
    assert hours.jobs_of(store.summaries()) == {("m", "a"): 3600.0, ("m", "b"): 1200.0}
    assert hours.main([str(tmp_path), "--times", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "12 cells in 6 jobs, the longest 3600 s"
    assert told[-3:] == ["| 1 | 4.00 | 100% |", "| 8 | 1.00 | 50% |", "| 64 | 1.00 | 6% |"]
    assert hours.wall([4, 3, 3, 2, 2], 2) == 8  # 4 + 2 + 2 and 3 + 3
    assert hours.main([str(tmp_path / "nothing")]) == 2


def test_the_manifests_say_what_the_options_are():
    kube = yaml.safe_load((ROOT / "deploy" / "kuberay-job.yaml").read_text())
    words = kube["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "eval"] and {"--on", "--out"} <= set(words)
    made = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())
    assert {"cluster_name", "provider", "setup_commands"} <= set(made)


RAY = getattr(importlib.util.find_spec("ray"), "origin", None)  # None also for a mere folder of that name


@pytest.mark.skipif(RAY is None, reason="make test-ray installs ray")
def test_the_cluster_file_fits_rays_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(RAY).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text()), schema)

"""What a study costs, and the files that start a cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eval.__main__ import chosen
from eval.cluster import curve, hours
from eval.core.machine import machine
from eval.core.results import Store

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def measured(tmp_path):
    """A folder of cells: two tasks with two methods, 300 s each, and a prefill of an hour or ten minutes."""
    stands = {"config": {}, "machine": machine(threads=1), "versions": {}, "metrics": []}
    store = Store(tmp_path / "out")
    store.prepare()
    for task, prefill in (("a", 3600.0), ("b", 600.0)):
        for method in ("full", "int8"):
            cell = {"model": "m", "method": method, "task": task, "seconds": 300.0}
            store.save(cell | stands | {"prefill_seconds": prefill, "together": 2})
    store.save({"model": "m", "method": "", "task": "study", "seconds": 1e6} | stands)  # no job of a sweep's
    return store.where


def test_hours_come_from_the_cells_own_seconds(measured, tmp_path, capsys):
    assert hours.main([str(measured), "--methods", "12", "--times", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "72 cells: 3 sweeps of 2 tasks with 12 methods"
    assert told[1] == "a task's prefill: 600.0 to 3600.0 s; a method on it: 300.00 to 300.00 s"
    # 1: 3 (1 h + 1 h + 10 min + 1 h); 8 whole: 3 x 2 h; 64: one method a job, 3 (1 h + 5 min)
    assert told[-3] == "| 1 | 9.50 | 9.50 | 2 |"
    assert told[-2].startswith("| 8 | 6.00 | 3.") and told[-1].startswith("| 64 | 6.00 | 3.25 |")
    assert hours.wall([4, 3, 3, 2, 2], 2) == 8  # 4 + 2 + 2 and 3 + 3
    kept = tmp_path / "kept.json"
    assert hours.main([str(measured), "--keep", str(kept)]) == 0
    assert capsys.readouterr().out.startswith("4 cells: 1 sweeps of 2 tasks with 2 methods")
    assert hours.main([str(kept), "--methods", "12", "--times", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == told


@pytest.mark.parametrize("where", ["nothing", "nothing.json"])
def test_hours_of_nothing(tmp_path, capsys, where):
    assert hours.main([str(tmp_path / where)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and where in line


PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_page_says_how_many_hours():
    """20 methods at 6 budgets on 10 tasks, under 2 protocols, of 3 models."""
    cells = hours.read(ROOT / "docs" / "results" / "hours.json")
    told = hours.said(cells, 120, 6)
    assert told[0].startswith("7200 cells: 6 sweeps of 10 tasks")
    assert "\n".join(told) in PAGE


def test_the_page_says_how_even_a_share_is():
    rows = json.loads((ROOT / "docs" / "results" / "ray.json").read_text())["rows"]
    assert "\n".join(curve.table(rows)) in PAGE


def entered(entrypoint: str, address: str) -> list[str]:
    """The words of the program that KubeRay's operator starts: its shell reads the entrypoint on a pod that
    knows no RAY_ADDRESS, `ray job submit` joins the words, and a shell on the head reads them again."""
    print_words = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    bare = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    submitted = subprocess.run(f"{print_words} {entrypoint} ;", shell=True, env=bare, capture_output=True)
    line = subprocess.list2cmdline(json.loads(submitted.stdout))
    shown = line.replace("python -m eval", "printf '%s\\n' python -m eval", 1)
    run = subprocess.run(
        shown, shell=True, env=bare | {"RAY_ADDRESS": address}, capture_output=True, text=True
    )
    return run.stdout.split()


def test_the_manifests_say_what_the_options_are():
    kube = yaml.safe_load((ROOT / "deploy" / "kuberay-job.yaml").read_text())
    words = entered(kube["spec"]["entrypoint"], "10.0.0.1:6379")
    assert words[:3] == ["python", "-m", "eval"]
    (sweep,) = chosen(words[3:])
    assert sweep.on == "ray:10.0.0.1:6379" and sweep.out == "s3://BUCKET/STUDY"
    workers = kube["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == sweep.gpus_per_actor
    made = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())
    assert {"cluster_name", "provider", "setup_commands"} <= set(made)


RAY = getattr(importlib.util.find_spec("ray"), "origin", None)  # None also for a mere folder of that name


@pytest.mark.skipif(RAY is None, reason="make test-ray installs ray")
def test_the_cluster_file_fits_rays_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(RAY).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text()), schema)

"""The files that start a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from eval.command import chosen

ROOT = Path(__file__).resolve().parents[3]


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
    kube = yaml.safe_load((ROOT / "docs" / "deploy" / "kuberay-job.yaml").read_text())
    words = entered(kube["spec"]["entrypoint"], "10.0.0.1:6379")
    assert words[:3] == ["python", "-m", "eval"]
    (sweep,) = chosen(words[3:])
    assert sweep.on == "ray:10.0.0.1:6379" and sweep.out == "s3://BUCKET/STUDY"
    workers = kube["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == sweep.gpus_per_actor
    made = yaml.safe_load((ROOT / "docs" / "deploy" / "cluster.yaml").read_text())
    assert {"cluster_name", "provider", "setup_commands"} <= set(made)

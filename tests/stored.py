"""A cell as runs store it, for tests of what is made of cells."""

from eval.core.machine import machine, versions


def cell(method="full", task="recall", outcomes=(1.0, 0.0, 1.0, 0.0), **more) -> dict:
    """Whole, with accuracy `acc` of the outcomes; more replaces any of its fields."""
    value, count = sum(outcomes) / len(outcomes), len(outcomes)
    stderr = (value * (1 - value) / count) ** 0.5
    metric = {"metric": "acc", "value": value, "stderr": stderr, "n": count, "higher_is_better": True}
    return {
        "model": "m", "method": method, "task": task, "config": {"limit": 4}, "metrics": [metric],
        "values": {"acc": list(outcomes)}, "seconds": 1.0, "machine": machine(threads=1),
        "bytes": {"device_bytes": 8.0, "host_bytes": 0.0, "moved_bytes": 0.0, "row_steps": 9},
        "versions": versions(), **more,
    }  # fmt: skip

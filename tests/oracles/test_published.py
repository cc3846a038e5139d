"""What was published and nobody here can compute stands where it is shown as it was printed."""

import ast
import json
import re
from pathlib import Path

import pytest

from eval.studies.offload.quality import POOL
from eval.studies.offload.rehearsal import PUBLISHED
from eval.studies.offload.simulated import LONGCHAT, SPEEDUPS, TRANSFER_SHARE

ROOT = Path(__file__).resolve().parents[2]


def code_of(chapter: str) -> str:
    cells = json.loads((ROOT / "notebooks" / f"{chapter}.ipynb").read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_speed_over_flexgen():
    """Lee et al. 2024: OPT-13B, 128 tokens made, batch 8, at 512, 1,024, 1,536 and 2,048 tokens."""
    assert {name: list(row.values()) for name, row in SPEEDUPS.items()} == {
        "offload+int4": [1.28, 1.46, 1.56, 1.61],
        "offload+h2o": [2.23, 2.83, 3.14, 3.40],
        "infinigen": [1.71, 2.75, 3.86, 5.28],
    }
    assert all(list(row) == [512, 1024, 1536, 2048] for row in SPEEDUPS.values())
    assert TRANSFER_SHARE == {"offload": 96.9, "offload+h2o": 91.8}


def test_perplexity_with_a_full_pool():
    full = {(policy, part): value for (policy, part), value in POOL.items() if policy != "any"}
    assert full == {("fifo", 0.8): 30.99, ("lru", 0.8): 10.55, ("counter", 0.8): 10.55}
    assert POOL["any", 1.0] == 10.55


def test_cosines_of_successive_blocks():
    """Gong, Yi and Zhang 2024: block input, attention output, FFN output of OPT-6.7B and Llama-2-7B."""
    assert PUBLISHED == {"opt": (0.95, 0.29, 0.34), "llama": (0.89, 0.31, 0.37)}


def test_the_longchat_table():
    assert list(LONGCHAT.values()) == [
        (172.59, 27.99, 2.92, 17.99),
        (327.27, 30.73, 3.03, 32.27),
        (670.07, 36.05, 2.94, 54.60),
        (1343.27, 46.91, 2.92, 83.60),
        (3026.89, 68.35, 2.59, 114.52),
        (7640.90, 112.46, 2.05, 139.08),
    ]


def test_accuracy_by_the_number_of_keys():
    """Gong, Yi and Zhang 2024, after Gupta et al. 2021: flat from 1,024 of 65,536 keys on."""
    shown = ast.literal_eval(re.search(r"published = (\{64: .*\})", code_of("05_eviction"))[1])
    assert shown == {
        64: 82.9,
        128: 87.8,
        256: 91.1,
        512: 91.1,
        1024: 91.9,
        2048: 91.9,
        4096: 91.9,
        65536: 91.9,
    }
    assert {shown[k] for k in shown if k >= 1024} == {91.9}


@pytest.mark.parametrize("figure", ["17.99", "32.27", "54.60", "83.60", "114.52", "139.08"])
def test_the_bandwidths_of_chapter_6(figure):
    assert figure in code_of("06_offloading")

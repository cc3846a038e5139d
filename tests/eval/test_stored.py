"""The documents say what the collected studies say, and those are whole."""

import json
from pathlib import Path

import pytest

from eval.report.statistics import differs, mcnemar
from eval.reproduce import collect, documents
from eval.reproduce.studies import STUDIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
OTHERS = {
    RESULTS / f"{name}.json"
    for name in ("attention", "clock", "harness", "harness_avx2", "harness_all", "offload", "scales")
}  # of other commands
STORED = sorted(set(RESULTS.glob("*.json")) - OTHERS)
STUDIED = [file for file in STORED if file.stem in STUDIES]
POINTS = [file for file in STUDIED if STUDIES[file.stem].get("points")]
KEYS = {"model", "model_digest", "data_digest", "code_digest", "method_digest", "machine", "torch", "made"}


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_stored_studies_are_whole(file):
    """Means and tests follow from the outcomes that are stored beside them."""
    for row in collect.read(file):
        assert row.keys() >= KEYS
        if isinstance(row.get("outcomes"), str):
            assert row["value"] == pytest.approx(row["outcomes"].count("1") / row["n"], abs=1e-6)
    assert json.loads(file.read_text())["study"] == file.stem


@pytest.mark.parametrize("file", STUDIED, ids=lambda file: file.stem)
def test_mcnemar_compares_within_a_protocol_only(file):
    """Lost, won, p and the star follow from the outcomes of `full` under the same protocol."""
    told = [row for row in collect.read(file) if "outcomes" in row]
    full = {(r["model"], r["protocol"], r["task"]): r for r in told if r["method"] == "full"}
    for row in told:
        reference = full[row["model"], row["protocol"], row["task"]]
        both = [list(map(float, one["outcomes"])) for one in (row, reference)]
        test = mcnemar(*both)
        assert [row[name] for name in ("lost", "won")] == list(test[:2] if test else (None, None))
        assert row["p"] == (pytest.approx(test[2], rel=1e-5) if test else None)
        assert row["differs"] == (differs(*both) if row["compared"] else None)


@pytest.mark.parametrize("file", POINTS, ids=lambda file: file.stem)
def test_a_study_of_points_has_its_pictures(file):
    protocols = {row["protocol"] for row in collect.read(file)}
    assert all(file.with_name(f"{file.stem}-{protocol}.png").is_file() for protocol in protocols)


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda document: document.name)
def test_documents_say_what_is_stored(document):
    text = document.read_text(encoding="utf-8")
    assert documents.MARKED.search(text) and documents.filled(text) == text

"""The suite `attention`: every kernel beside fp32, and rows of other processors beside those of this one."""

from eval.command import main
from eval.reproduce import documents, tables
from eval.reproduce.collect import read
from eval.studies import kernels, measurements

HEAD = 32


def test_the_attention_suite_measures_every_kernel(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measurements, "LENGTHS", (64,))
    monkeypatch.setattr(kernels, "FORMATS", {"int8": kernels.FORMATS["int8"]})
    monkeypatch.setattr(kernels, "SHAPES", {"one": (8, 1, HEAD), "groups": (2, 3, HEAD)})
    monkeypatch.setattr(kernels, "DECODED", "one")
    monkeypatch.setattr(kernels, "SWEPT", 64)
    (tmp_path / "stored").mkdir()
    monkeypatch.setattr(documents, "RESULTS", tmp_path / "stored")
    monkeypatch.setattr(documents, "DOCUMENTS", ())
    words = ["attention", "--limit", "1", "--out", str(tmp_path)]
    assert main(words) == 0 == main([*words, "--collect"])
    rows = read(tmp_path / "attention.json")
    assert [row["kernel"] for row in rows] == ["fp32-sdpa", "int8", "int8-decode", "fp32-sdpa", "int8"]
    assert rows[0]["speedup"] == rows[3]["speedup"] == 1
    assert rows[1]["bytes"] == 2 * 8 * 64 * (HEAD + 2)
    assert rows[1]["bits"] == 8 + 16 / HEAD
    assert all(row["ms"] > 0 and row["tokens"] == 64 for row in rows)
    assert "fp32-sdpa" in capsys.readouterr().out
    monkeypatch.setattr(kernels, "simd", lambda: "another processor's")
    assert main(words) == 0 == main([*words, "--collect"])  # whose rows stand beside
    stored = read(tmp_path / "stored" / "attention.json")
    assert [row["simd"] for row in stored] == [rows[0]["simd"]] * 5 + ["another processor's"] * 5
    monkeypatch.setattr(tables, "study", lambda name: stored)
    shown = documents.TABLES["kernels"](rows[0]["simd"], "64")
    assert "(over sdpa) | one | groups |" in shown and "\n| `int8` | " in shown and "decode" not in shown
    assert documents.TABLES["kernels"]("AVX-1024", "64").startswith("Not made yet")

"""The figures of a model's card, on models whose answers are known beforehand."""

from course.recipes import cards


def test_prints_every_table(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The baker made soup. " * 5, encoding="utf-8")
    monkeypatch.setattr(
        cards, "TASKS", {"recall 20": cards.TASKS["recall 4"], "needle 250": cards.TASKS["recall 4"]}
    )
    monkeypatch.setattr(cards, "METHODS", ("full", "infinigen:budget=0.2"))
    for name in ("METHOD_TASKS", "LAYER_TASKS"):
        monkeypatch.setattr(cards, name, ("recall 20",))
    cards.main(["workshop", "--text", str(text), "--count", "5"])
    printed = capsys.readouterr().out
    for part in ("block inputs", "bits per byte", "> Once upon", "infinigen", "`sinks` in", "accuracy"):
        assert part in printed

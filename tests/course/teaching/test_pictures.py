"""The visual language: every state and curve tells itself apart, in colour and in grey."""

from __future__ import annotations

import io
from html import escape
from itertools import pairwise

import matplotlib.colors
import pytest
import torch
from PIL import Image

from course.page import build
from course.teaching import pictures
from kvlab import plots


def lightness(colour: str) -> float:
    """CIE L*, 0 to 100."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(colour)
    ]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_states_differ_in_grey_or_by_their_mark():
    looks = [(round(lightness(state.colour) / 8), state.mark) for state in pictures.STATES]
    assert len(set(looks)) == len(looks)
    assert len({state.colour for state in pictures.STATES}) == len(pictures.STATES)


def test_a_cache_picture_draws_every_state_where_it_is():
    states = torch.tensor([[1, 1, 1, 0, 0], [1, 5, 1, 2, 0], [1, 5, 3, 4, 2]])
    axes = pictures.cache_picture(states, tokens=list("abcde")).axes[0]
    drawn = axes.collections[0].get_array().reshape(states.shape)
    assert torch.equal(torch.as_tensor(drawn.data).long(), states)
    marks = [(int(t.get_position()[1]), int(t.get_position()[0]), t.get_text()) for t in axes.texts]
    wanted = [
        (row, column, pictures.STATES[state].mark)
        for row, line in enumerate(states.tolist())
        for column, state in enumerate(line)
        if pictures.STATES[state].mark
    ]
    assert marks == wanted
    assert [t.get_text() for t in axes.get_xticklabels()] == list("abcde")
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "kept", "quantized (q)", "on host (h)", "fetched (f)", "evicted (×)",
    ]  # fmt: skip


def test_a_large_picture_has_no_marks_but_all_cells():
    states = torch.randint(0, len(pictures.STATES), (50, 300))
    axes = pictures.cache_picture(states).axes[0]
    assert not axes.texts
    assert axes.collections[0].get_array().size == states.numel()


def test_lives_stand_side_by_side_under_one_legend():
    lives = {"one": [[1, 0], [1, 6]], "two": [[1, 5, 6], [5, 1, 6]]}
    figure = pictures.cache_pictures(lives, x="row")
    assert [axes.get_title() for axes in figure.axes] == ["one", "two"]
    assert [axes.collections[0].get_array().size for axes in figure.axes] == [4, 6]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["kept", "evicted", "computed now"]


@pytest.mark.parametrize("states", [[1, 2], [[7]], [[-1]], torch.zeros(0, 3)])
def test_a_picture_of_something_else_is_refused(states):
    with pytest.raises(ValueError, match="states"):
        pictures.cache_picture(states)


def test_curves_are_named_at_their_ends_and_no_name_lies_on_another():
    axes = pictures.lines([1, 2], {"full": [1, 2.0], "int4": [1, 2.01], "h2o": [1, 1]}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["full", "int4", "h2o"]
    heights = sorted(text.xyann[1] for text in axes.texts)
    letter = plots.LETTERS / 72 / axes.figure.get_figheight()
    assert all(above - below > letter for below, above in pairwise(heights))


def test_show_prints_its_sentence_and_wants_one(capsys):
    pictures.show(plots.canvas()[0], "The figure: two\n   bars.")
    assert capsys.readouterr().out == "The figure: two bars.\n"
    with pytest.raises(ValueError, match="sentence"):
        pictures.show(plots.canvas()[0], "  ")


def test_a_colour_of_one_marker_is_kept():
    """Few colours are stored, and the most frequent ones alone would turn int4's green into blue."""
    axes = plots.canvas()[1][0]
    for place, method in enumerate(("full", "int4", "h2o")):
        axes.plot(place, 0, plots.style(method)[1], color=plots.style(method)[0])
    drawn = Image.open(io.BytesIO(pictures._png(axes.figure))).convert("RGB")
    found = [colour for _, colour in drawn.getcolors()]
    for method in ("full", "int4", "h2o"):
        wanted = [int(plots.style(method)[0][at : at + 2], 16) for at in (1, 3, 5)]
        assert min(max(abs(a - b) for a, b in zip(one, wanted, strict=True)) for one in found) <= 8


def test_the_live_page_is_shown_with_its_choices_and_linked(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    monkeypatch.setattr(build, "BUILT", tmp_path)  # there already: none is built
    pictures.page("h2o:budget=0.2", question="the brown dog")
    address = "page.html#method=h2o&budget=20&question=the+brown+dog"
    assert shown[0]["text/html"].count(f'="{escape(address)}"') == 2
    assert shown[0]["text/plain"] == f"The live page with h2o:budget=0.2: {address}"
    for wrong in ("h2o:budget=0.22", "h2o:budget=64", "h2o:recent=0.5", "kivi4"):
        with pytest.raises(ValueError, match="the live page has full, int4"):
            pictures.page(wrong)


def test_in_a_kit_the_live_page_is_one_folder_up(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    monkeypatch.setattr(build, "BUILT", tmp_path)
    (tmp_path / "page.html").write_text("")
    (tmp_path / "learner").mkdir()
    monkeypatch.chdir(tmp_path / "learner")
    pictures.page()
    assert shown[0]["text/plain"] == "The live page with full: ../page.html#method=full"

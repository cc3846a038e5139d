"""The visual language: every state and curve tells itself apart, in colour and in grey."""

from __future__ import annotations

from html import escape

import matplotlib.colors
import pytest

from course.page import build
from course.teaching import pictures


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

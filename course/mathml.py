"""Formulas for pages that must work without a network: LaTeX in Markdown becomes MathML, which every browser
draws by itself."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

# Code first, so that a dollar inside it stays what it is; then $$display$$ and $inline$.
PARTS = re.compile(
    r"(```.*?```|~~~.*?~~~|`[^`\n]*`)|\$\$(.+?)\$\$|(?<![\\$\w])\$(\S|\S[^$]*?\S)\$(?![\d$])", re.S
)
TEXT = re.compile(r"\\text\{[^}]*\}")  # latex2mathml keeps the backslash of an escaped underscore there


def formulas(markdown: str) -> str:
    """The same Markdown with every formula as a <math> element."""

    def change(found: re.Match) -> str:
        code, display, inline = found.groups()
        if code is not None:
            return code
        latex = TEXT.sub(lambda text: text[0].replace(r"\_", "_"), " ".join((display or inline).split()))
        math = convert(latex, display="block" if display else "inline")
        math = re.sub(r"\s*\n\s*", " ", math)
        return f'\n\n<div class="formula">{math}</div>\n\n' if display else math

    return PARTS.sub(change, markdown)

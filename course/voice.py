"""Voice: does a chapter speak to one person, in whole sentences? Two figures, counted from its prose.

Prose is what a Markdown cell says in paragraphs: headings, code, formulas, lists, tables, HTML and figures do
not count. A sentence ends at `.`, `?` or `!`. Telegrams are sentences of eight words or fewer; address is how
often you, your, we, our and us stand in a hundred words. `python -m course.voice` prints both.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat

SHORT = 8  # words
MOST_SHORT = 0.15  # of the sentences
LEAST_ADDRESS = 1.5  # per hundred words
ADDRESS = {"you", "your", "yours", "we", "our", "ours", "us", "yourself", "ourselves", "you'll", "we'll"}
FENCED = re.compile(r"^(```|~~~).*?^\1\s*$|^\$\$.*?\$\$\s*$", re.DOTALL | re.MULTILINE)
HTML = re.compile(r"<(details|svg|table|figure)\b.*?</\1>", re.DOTALL)
NOT_PROSE = re.compile(r"\s*(#|\||[-*+] |\d+[.)] |> |:::|<|!\[)")
END = re.compile(r"[.?!][)\"'”*_]*(?=\s|$)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|etc|vs|cf|Fig|Eq|No|ch|resp|n\.d)\.$", re.IGNORECASE)


@dataclass(frozen=True)
class Voice:
    """What was counted in one text."""

    sentences: tuple[str, ...]
    words: int
    address: int

    @property
    def short(self) -> float:
        """The share of sentences with eight words or fewer."""
        telegrams = sum(len(_words(sentence)) <= SHORT for sentence in self.sentences)
        return telegrams / max(1, len(self.sentences))

    @property
    def per_hundred(self) -> float:
        """You, your, we, our, us in a hundred words."""
        return 100 * self.address / max(1, self.words)


def voice(path: Path) -> Voice:
    """The voice of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return listen("\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))


def listen(markdown: str) -> Voice:
    """The voice of a Markdown text."""
    sentences = [sentence for paragraph in paragraphs(markdown) for sentence in _sentences(paragraph)]
    words = [word.lower() for sentence in sentences for word in _words(sentence)]
    return Voice(tuple(sentences), len(words), sum(word in ADDRESS for word in words))


def paragraphs(markdown: str) -> list[str]:
    """The paragraphs of prose: a block that begins as a list, a table, a heading or a tag is none."""
    text = HTML.sub("\n\n", FENCED.sub("\n\n", markdown))
    blocks = re.split(r"\n\s*\n|\n(?=#)", text)
    return [" ".join(block.split()) for block in blocks if block.strip() and not NOT_PROSE.match(block)]


def _sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"`[^`]*`|\$[^$]*\$", "code", paragraph)
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^\*\*[^*]*\.\*\*", "", plain))  # a label such as **1.**
    found, start = [], 0
    for end in END.finditer(plain):
        sentence = plain[start : end.end()].strip()
        if not ABBREVIATION.search(sentence.rstrip(")\"'”*_")):
            found.append(sentence)
            start = end.end()
    return found


def _words(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-zÀ-ÿ0-9][A-Za-zÀ-ÿ0-9'’./%×-]*", sentence)


def main(arguments: list[str]) -> None:
    """Print the two figures of every chapter; with one notebook also its telegrams."""
    chapters = [Path(name) for name in arguments] or sorted(
        (Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb")
    )
    for path in chapters:
        heard = voice(path)
        print(f"{path.stem:24} {heard.words:5} words, {len(heard.sentences):4} sentences, "
              f"{heard.short:4.0%} short, {heard.per_hundred:.1f} you and we per hundred words")  # fmt: skip
    if len(chapters) == 1:
        print(*(f"  {s}" for s in heard.sentences if len(_words(s)) <= SHORT), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

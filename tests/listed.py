"""Lists of methods in docs/methods.md and docs/promises.md, from what every method says of itself: `python -m
tests.listed` writes them."""

import re
from pathlib import Path

from kvlab.finding import METHODS, PROFILED
from kvlab.named import CHOSEN

PROMISES = Path(__file__).parents[1] / "docs/promises.md"
UNSCORED = ("sinks", "duo", "random")  # keeps that go by nothing that arithmetic can shift
FETCHES = ("topk", "infinigen", "quest", "shadowkv")
PAGE = Path(__file__).parents[1] / "docs/methods.md"
BEGIN, END = "<!-- methods: python -m tests.listed -->", "<!-- end of methods -->"


def table() -> str:
    """Every method with its idea and its paper, family by family."""
    known = [*METHODS.values(), *PROFILED.values()]
    lines = ["| method | the idea | paper |", "|---|---|---|"]
    for family in dict.fromkeys(one.family for one in known):
        lines.append(f"| *{family}* | | |")
        mine = (one for one in known if one.family == family)
        lines += [f"| `{one.name}` | {one.summary} | {one.paper} |" for one in mine]
    return "\n".join(lines)


def parts() -> tuple[str, str, str]:
    """docs/methods.md before the table, the table, and what follows."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside.strip(), after


def promised() -> str:
    """docs/promises.md, with every method that chooses by scores in its lists."""
    known = METHODS | PROFILED
    chosen = [name for name, one in known.items() if one.family == CHOSEN and name not in UNSCORED]
    names = ", ".join(f"`{name}`" for name in (*chosen, *FETCHES))
    text = PROMISES.read_text(encoding="utf-8")
    text = re.sub(r"\(`h2o`, `d2o`[^)]*\)", f"({names}, a pool)", text)
    return re.sub(r"\| `h2o`, `d2o`[^|]* \|", f"| {names}, `offload+h2o`, `uvm+h2o` |", text)


if __name__ == "__main__":
    PROMISES.write_text(promised(), encoding="utf-8")
    before, _, after = parts()
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")

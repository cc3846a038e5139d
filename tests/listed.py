"""README's table of methods, from what every method says of itself: `python -m tests.listed` writes it."""

from pathlib import Path

from kvlab.finding import METHODS, PROFILED

README = Path(__file__).parents[1] / "README.md"
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
    """README before the table, the table, and what follows."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside.strip(), after


if __name__ == "__main__":
    before, _, after = parts()
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")

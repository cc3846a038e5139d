"""Drawing: a picture of boxes, arrows and rows of tokens, as SVG, that grows by one shape at a time."""

from __future__ import annotations

from html import escape

from kvlab.plots import BLUE, GREEN, GREY, GRID, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

WIDTH = 720
PALE = {GREEN: "#cfe8dd", SKY: "#d3e9f8", VERMILLION: "#f8d9c6", PURPLE: "#f3dde9"}  # of a box of methods


class Drawing:
    """A picture of WIDTH x height points that grows by one shape at a time."""

    def __init__(self, height: int, told: str):
        self.height, self.told, self.shapes = height, told, []

    def text(self, x, y, words, *, size=15, anchor="start", colour=INK, bold=False) -> None:
        """Words at a point; anchor: start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(self, x, y, wide, high, words="", *, fill="#ffffff", edge=INK, dashed=False, size=15, ink=INK):
        """A box with words in its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="4" fill="{fill}"'
            f' stroke="{edge}" stroke-width="1.4"{dash}/>'
        )
        if words:
            self.text(x + wide / 2, y + high / 2 + size * 0.35, words, size=size, anchor="middle", colour=ink)

    def tokens(self, x, y, kinds: str, *, size=22, gap=4) -> float:
        """A row of tokens, one letter each: c computed now, k kept, e evicted, p padding, f fetched, h on the
        host. Returns where the row ends."""
        fills = {"c": ORANGE, "k": BLUE, "e": GRID, "p": "#ffffff", "f": VERMILLION, "h": YELLOW}
        for kind in kinds:
            if kind != ".":
                self.box(
                    x, y, size, size, fill=fills[kind], edge=GREY if kind in "ep" else INK, dashed=kind == "p"
                )
            if kind == "e":
                self.line(x + 5, y + 5, x + size - 5, y + size - 5, colour=GREY)
                self.line(x + size - 5, y + 5, x + 5, y + size - 5, colour=GREY)
            x += size + gap
        return x - gap

    def line(self, x1, y1, x2, y2, *, colour=INK, wide=1.6, dashed=False) -> None:
        """A straight line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"'
            f' stroke-width="{wide}"{dash}/>'
        )

    def arrow(self, x1, y1, x2, y2, *, colour=INK, wide=1.6, dashed=False) -> None:
        """A line with a head at its end."""
        self.line(x1, y1, x2, y2, colour=colour, wide=wide, dashed=dashed)
        self.shapes[-1] = self.shapes[-1].replace("/>", f' marker-end="url(#{_name(colour)})"/>')

    def svg(self) -> str:
        """The picture as a file of its own."""
        colours = sorted(
            {c for c in (INK, GREY, BLUE, VERMILLION, ORANGE, GREEN) if f"#{_name(c)})" in self._all()}
        )
        heads = "".join(
            f'<marker id="{_name(c)}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
            f' markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{c}"/></marker>'
            for c in colours
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}"'
            f' height="{self.height}" role="img" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.told)}</title>\n<defs>{heads}</defs>\n"
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="#fbfaf6"/>\n'
            + self._all()
            + "\n</svg>\n"
        )

    def _all(self) -> str:
        return "\n".join(self.shapes)


def _name(colour: str) -> str:
    return "head" + colour.lstrip("#")

"""Drawing: a picture of boxes, arrows and words, as SVG, that grows by one shape at a time.

The drawing that a chapter begins with (notebooks/drawings/00.svg to 09.svg, 02_heads.svg, 06_flash.svg) is a
file of its own, edited as it is. There, too, orange is computed now, blue is kept, grey is gone, yellow is on
the host, vermillion is fetched, and letters are of 15 points and more.
"""

from __future__ import annotations

from html import escape

from kvlab.plots import GREY, INK

WIDTH = 720
HEAD = f"head{GREY.lstrip('#')}"  # the name of an arrow's head


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

    def line(self, x1, y1, x2, y2, *, colour=INK, wide=1.6, dashed=False) -> None:
        """A straight line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"'
            f' stroke-width="{wide}"{dash}/>'
        )

    def arrow(self, x1, y1, x2, y2) -> None:
        """A grey line with a head at its end."""
        self.line(x1, y1, x2, y2, colour=GREY)
        self.shapes[-1] = self.shapes[-1].replace("/>", f' marker-end="url(#{HEAD})"/>')

    def svg(self) -> str:
        """The picture as a file of its own."""
        shapes = "\n".join(self.shapes)
        head = (
            f'<marker id="{HEAD}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
            f' markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}"'
            f' height="{self.height}" role="img" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.told)}</title>\n<defs>{head if HEAD in shapes else ''}</defs>\n"
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="#fbfaf6"/>\n{shapes}\n</svg>\n'
        )

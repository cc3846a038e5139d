"""Drawings: each chapter's first one and the story, as SVG; `python -m course drawings` writes them.

Boxes, arrows and rows of tokens in the colours of `kvlab.plots`: orange is computed now, blue is kept, grey
is gone, yellow is on the host, vermillion is fetched, and no box of another kind has one of these colours. A
box that names methods has their colour, made pale.
They have a light ground of their own, so that a dark page shows them as they are. Letters are of 15 points
and more: a slide shows a drawing 1,184 pixels wide, and there they are 24 pixels high.
"""

from __future__ import annotations

from pathlib import Path

from kvlab.plots import BLUE, GREEN, GREY, GRID, INK, ORANGE, PURPLE, SKY, VERMILLION

from . import strips
from .drawing import PALE, Drawing
from .moving import story

FOLDER = Path(__file__).resolve().parents[1] / "notebooks" / "drawings"


def contract() -> Drawing:
    """0: the contract, the model and the GPU."""
    d = Drawing(
        250,
        "A contract of 200 pages becomes a cache of 15.7 GB, which has to stand beside 16.1 GB of "
        "weights on a GPU of 24 GB.",
    )
    for k in range(4):
        d.box(30 + 8 * k, 50 + 8 * k, 100, 130, fill="#ffffff")
    for k in range(6):
        d.line(66, 98 + 16 * k, 142, 98 + 16 * k, colour=GRID)
    d.box(60, 140, 90, 22, "clause 17", size=15)
    d.text(92, 228, "200 pages", anchor="middle")
    d.arrow(168, 128, 222, 128)
    d.tokens(232, 105, "kkkkkk", size=18, gap=3)
    d.tokens(232, 128, "kkkkkk", size=18, gap=3)
    d.text(293, 92, "120,000 tokens", anchor="middle")
    d.text(293, 172, "a key and a value each,", anchor="middle", size=15)
    d.text(293, 190, "in every layer", anchor="middle", size=15)
    d.arrow(372, 128, 424, 128)
    d.box(436, 40, 250, 172, fill="#ffffff")
    d.text(561, 30, "your GPU: 24 GB", anchor="middle")
    d.box(448, 42, 226, 115, "weights 16.1 GB", fill="#d5d8dd")  # 7.16 points a GB
    d.box(448, 157, 226, 112, fill=BLUE)
    d.text(561, 188, "cache 15.7 GB", anchor="middle", colour="#ffffff")
    d.line(430, 212, 692, 212, wide=2.5, dashed=True)
    d.height = 284
    return d


def recompute() -> Drawing:
    """1: every step computes everything again."""
    d = Drawing(
        210,
        "Three steps without a cache: each computes every token of the text again, and one new token "
        "joins it.",
    )
    for step in range(3):
        y = 40 + 50 * step
        d.text(30, y + 17, f"step {step + 1}")
        end = d.tokens(100, y, "c" * (10 + step))
        d.arrow(end + 8, y + 11, end + 58, y + 11)
        d.box(end + 66, y - 2, 124, 26, "one new token", size=15, fill="#ffffff")
    d.text(100, 196, "Orange is computed now. Only the last square of each row had to be.", size=15)
    return d


def kv_cache() -> Drawing:
    """2: one token is computed, the others are kept."""
    d = Drawing(
        240,
        "Two steps with a cache: the keys and values of earlier tokens are kept, one token is "
        "computed and joins them.",
    )
    for step in range(2):
        y = 46 + 84 * step
        d.text(30, y + 30, f"step {step + 1}")
        for lane, name in enumerate(("K", "V")):
            d.text(92, y + 17 + 28 * lane, name, bold=True)
            end = d.tokens(116, y + 28 * lane, "k" * (9 + step) + "c")
        d.box(end + 70, y + 12, 110, 28, "newest token", fill=ORANGE, size=15)
        d.arrow(end + 68, y + 26, end + 8, y + 26)
    d.text(116, 228, "Blue was computed before and is only read. The row grows by one.", size=15)
    return d


def static_buffers() -> Drawing:
    """3: a row of fixed length."""
    d = Drawing(
        226,
        "A buffer of fixed size: empty slots on the left, tokens on the right; each new token shifts "
        "the row by one.",
    )
    d.text(30, 40, "The engine was compiled for exactly twelve slots:")
    for step in range(3):
        y = 56 + 42 * step
        d.box(110, y - 4, 12 * 26 + 4, 30, fill="none", edge=INK)
        d.tokens(114, y, "p" * (8 - step) + "k" * (3 + step) + "c")
        d.text(30, y + 17, f"step {step + 1}")
    d.arrow(396, 194, 296, 194, colour=GREY)
    d.text(406, 199, "everything moves one slot to the left", size=15)
    d.text(450, 74, "dashed: reserved, paid for,", size=15)
    d.text(450, 92, "and not yet used", size=15)
    return d


def quantization() -> Drawing:
    """4: sixteen levels, and what one large number does to them."""
    d = Drawing(
        236,
        "Numbers are rounded to one of sixteen levels; a single large number stretches the levels, "
        "and all others fall onto few of them.",
    )
    small = (0.03, 0.1, 0.16, 0.22, 0.31, 0.36, 0.44, 0.5, 0.57, 0.66, 0.71, 0.8, 0.88, 0.95)
    for row, (y, scale, told) in enumerate(
        ((70, 1.0, "alike numbers"), (164, 0.16, "the same, and one that is large"))
    ):
        d.text(30, y - 28, told)
        d.line(60, y, 660, y, colour=GREY)
        for level in range(16):
            d.line(60 + 40 * level, y - 9, 60 + 40 * level, y + 9, colour=INK, wide=1.2)
        for value in small:
            x = 60 + 600 * value * scale
            d.shapes.append(f'<circle cx="{x:g}" cy="{y}" r="5" fill="{SKY}" stroke="{INK}"/>')
        if row:
            d.shapes.append(f'<circle cx="658" cy="{y}" r="6" fill="{INK}" stroke="{INK}"/>')
    d.text(60, 100, "four bits: sixteen levels between the smallest and the largest", size=15)
    d.text(60, 194, "three levels are left for fourteen numbers", size=15)
    return d


def heads() -> Drawing:
    """2, later: who shares keys and values with whom."""
    d = Drawing(
        250,
        "Eight query heads in four arrangements: with MHA each has a key and a value of its own, with GQA "
        "four share one, with MQA all eight share one, and with MLA all are made from one short vector.",
    )
    for n, (name, kept, told) in enumerate((
        ("MHA", 8, "one each"),
        ("GQA", 2, "four share one"),
        ("MQA", 1, "all share one"),
        ("MLA", 0, "one short vector"),
    )):  # fmt: skip
        x = 26 + 176 * n
        d.text(x + 66, 32, name, anchor="middle", bold=True, size=17)
        d.tokens(x, 48, "c" * 8, size=14, gap=3)
        for group in range(kept):
            middle = x + 136 * (group + 0.5) / kept - 1.5
            for head in range(8 // kept):
                d.line(x + 7 + 17 * (group * 8 // kept + head), 64, middle, 112, colour=GREY, wide=1)
            d.tokens(middle - 7, 112, "k", size=14)
            d.tokens(middle - 7, 130, "k", size=14)
        if not kept:
            for head in range(8):
                d.line(x + 7 + 17 * head, 64, x + 66, 118, colour=GREY, wide=1, dashed=True)
            d.box(x + 39, 120, 54, 20, fill=BLUE)
        d.text(x + 66, 176, told, anchor="middle")
    d.text(
        26,
        210,
        "Orange: eight heads ask for one new token. Blue: what each token leaves.",
    )
    d.text(26, 234, "Dashed: a matrix makes each head's key and value from it.")
    return d


def flash() -> Drawing:
    """6, later: block by block, and all blocks at once."""
    d = Drawing(
        300,
        "FlashAttention goes over the keys and values block by block and keeps a running maximum, sum and "
        "output; flash-decoding gives each processor a part of the cache and joins their results at the end.",
    )
    d.text(30, 34, "FlashAttention", bold=True, size=16)
    d.tokens(30, 50, "kkk.kkk.kkk.kkk", size=20)
    for n in range(4):
        d.line(30 + 96 * n, 78, 98 + 96 * n, 78, colour=INK)
        if n < 3:
            d.arrow(64 + 96 * n, 90, 156 + 96 * n, 90)
    d.text(30, 118, "one block after the other; a maximum, a sum and an output run along")
    d.text(30, 166, "flash-decoding", bold=True, size=16)
    d.tokens(30, 182, "kkk.kkk.kkk.kkk", size=20)
    for n in range(4):
        d.box(30 + 96 * n, 212, 68, 26, f"part {n + 1}", fill="#d5d8dd")
        d.line(64 + 96 * n, 238, 64 + 96 * n, 254, colour=GREY)
    d.line(64, 254, 585, 254, colour=GREY)
    d.arrow(585, 254, 585, 242, colour=GREY)
    d.box(510, 202, 150, 38, "one softmax", fill="#d5d8dd")
    d.text(30, 282, "every processor takes a part; what they found is joined by maximum and sum")
    d.text(440, 68, "no matrix of scores is written")
    return d


def eviction() -> Drawing:
    """5: what was thrown away is asked for."""
    d = Drawing(
        236, "A cache that keeps few tokens has thrown away clause 17 before the question about it arrives."
    )
    kinds = "kkeeeekeeeeeekeeekkk"
    heights = (60, 30, 6, 4, 5, 3, 38, 6, 5, 3, 4, 6, 5, 26, 4, 6, 5, 14, 18, 30)
    for n, (kind, high) in enumerate(zip(kinds, heights)):
        x = 40 + 30 * n
        d.box(x + 5, 92 - high, 14, high, fill=BLUE if kind == "k" else GRID, edge="none")
    d.tokens(40, 98, kinds, size=24, gap=6)
    d.text(40, 24, "attention received so far", size=15)
    d.text(40 + 30 * 10 + 12, 146, "clause 17", anchor="middle", size=15, bold=True)
    d.line(40 + 30 * 8, 130, 40 + 30 * 13 - 6, 130, colour=GREY)
    d.box(440, 178, 240, 32, "What does clause 17 say?")
    d.arrow(440, 192, 366, 154, wide=2)
    d.text(60, 200, "The question comes later.", size=15)
    return d


def offloading() -> Drawing:
    """6: a wide road and a narrow one."""
    d = Drawing(
        236,
        "The GPU reads its own memory at about 1,000 GB/s; what lies in the host's memory comes over "
        "a link of about 32 GB/s.",
    )
    d.box(30, 50, 200, 130, fill="#ffffff")
    d.text(130, 40, "host memory", anchor="middle")
    d.tokens(44, 66, "hhhhhhh", size=22)
    d.tokens(44, 94, "hhhhhhh", size=22)
    d.text(130, 148, "15.7 GB of cache", anchor="middle", size=15)
    d.box(430, 50, 260, 130, fill="#ffffff")
    d.text(560, 40, "GPU", anchor="middle")
    d.box(446, 66, 100, 96, "its memory", size=15, fill="#d5d8dd")
    d.box(598, 66, 82, 96, "compute", size=15, fill=ORANGE)
    d.arrow(548, 114, 594, 114, wide=18, colour=GREY)
    d.arrow(232, 114, 426, 114, wide=3, colour=VERMILLION)
    d.text(329, 104, "the link: 32 GB/s", anchor="middle", size=15)
    d.text(571, 202, "1,000 GB/s", anchor="middle", size=15)
    d.text(
        30,
        224,
        "Every step wants the whole cache: half a second a token on the narrow road.",
        size=15,
    )
    d.height = 240
    return d


def infinigen() -> Drawing:
    """7: guess one layer ahead, fetch what will be wanted."""
    d = Drawing(
        250,
        "While a layer computes, a guess says which tokens the next one will want; only these are fetched.",
    )
    d.text(30, 60, "GPU")
    for n, name in enumerate(("layer 3", "layer 4", "layer 5")):
        d.box(90 + 200 * n, 40, 190, 34, name, fill=ORANGE)
    d.text(30, 124, "guess")
    d.text(30, 190, "link")
    for n in range(2):
        d.box(130 + 200 * n, 104, 92, 32, "which?", size=15)
        d.arrow(150 + 200 * n, 74, 160 + 200 * n, 102)
        d.arrow(190 + 200 * n, 136, 196 + 200 * n, 168)
        d.tokens(172 + 200 * n, 172, "fff", size=24)
        d.arrow(254 + 200 * n, 172, 300 + 200 * n, 78, colour=VERMILLION)
    d.text(506, 124, "a few of the tokens,", size=15)
    d.text(506, 142, "chosen after the question", size=15)
    d.text(90, 234, "Two questions: is the guess ready in time, and is it right?", size=15)
    return d


def compare() -> Drawing:
    """8: three questions, one decision."""
    d = Drawing(
        220,
        "Three questions, keep, store and place, lead to one decision, which accuracy, bytes and time "
        "have to support.",
    )
    for n, (name, told, fill) in enumerate((
        ("Keep", "which tokens stay?", PALE[GREEN]),
        ("Store", "in what form?", PALE[SKY]),
        ("Place", "where?", PALE[VERMILLION]),
    )):  # fmt: skip
        y = 30 + 56 * n
        d.box(30, y, 226, 42, fill=fill)
        d.text(46, y + 27, name, bold=True, size=16)
        d.text(102, y + 27, told, size=15)
        d.arrow(258, y + 21, 318, 107)
    d.box(322, 76, 150, 62, "measure", fill="#d5d8dd", size=17)
    for n, told in enumerate(("right answers", "bytes held, bytes moved", "milliseconds a token")):
        d.text(397, 160 + 19 * n, told, anchor="middle", size=15)
    d.arrow(476, 107, 540, 107)
    d.box(546, 76, 146, 62, "decide", fill="#d5d8dd", size=17)
    d.text(619, 160, "clause 17, 24 GB", anchor="middle", size=15)
    return d


def after() -> Drawing:
    """9: what a method gives up, and when it must know the question."""
    d = Drawing(
        320,
        "A map: columns say what a method gives up, bits of all tokens, tokens for good, time on the link, "
        "or nothing, because the model was made that way; rows say when it must know the question. H2O, "
        "SnapKV and TOVA give up tokens by the queries they have seen; KVzip, KeyDiff and LagKV need none. "
        "Top-k, InfiniGen and Quest ask at every step.",
    )
    columns = ("bits", "tokens, for good", "time on the link", "nothing")
    rows = ("never", "when the prompt ends", "at every step")
    left, top, wide, high = 186, 58, 131, 74
    d.text(left + 2 * wide, 22, "What does it give up?", anchor="middle", bold=True, size=16)
    d.text(10, 28, "When must it", bold=True, size=16)
    d.text(10, 48, "know the question?", bold=True, size=16)
    for n, name in enumerate(columns):
        d.text(left + wide * (n + 0.5), 46, name, anchor="middle", size=15)
    for n, name in enumerate(rows):
        y = top + high * n
        d.text(10, y + 42, name, size=15)
        for column in range(len(columns)):
            d.box(left + wide * column + 3, y + 3, wide - 6, high - 6, edge=GRID)
    held = {
        (0, 0): (("int4, turned", "TurboQuant", "KVQuant"), PALE[SKY]),
        (1, 0): (("KVzip", "KeyDiff", "LagKV"), PALE[PURPLE]),
        (1, 1): (("SnapKV", "H2O, TOVA", "PyramidKV"), PALE[GREEN]),
        (2, 2): (("top-k, Quest", "InfiniGen", "ShadowKV"), PALE[VERMILLION]),
        (3, 0): (("GQA, MLA:", "the model was", "made that way"), "#eeeeee"),
    }
    for (column, row), (names, fill) in held.items():
        x, y = left + wide * column, top + high * row
        d.box(x + 3, y + 3, wide - 6, high - 6, fill=fill)
        for n, name in enumerate(names):
            d.text(x + wide / 2, y + 44 - 10 * (len(names) - 1) + 20 * n, name, anchor="middle", size=15)
    d.text(10, 306, "The higher a method stands, the less it matters who asks what, and when.", size=15)
    return d


DRAWINGS = {
    "00": contract, "01": recompute, "02": kv_cache, "03": static_buffers, "04": quantization,
    "05": eviction, "06": offloading, "07": infinigen, "08": compare, "09": after,
    "02_heads": heads, "06_flash": flash, "story": story,
}  # fmt: skip


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every chapter's drawing, and the strips; returns the files."""
    folder.mkdir(exist_ok=True)
    made = []
    for number, draw in DRAWINGS.items():
        made.append(folder / f"{number}.svg")
        made[-1].write_text(draw().svg(), encoding="utf-8")
    return made + strips.write(folder)

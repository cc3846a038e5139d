"""Moving: the story of the course in ninety seconds, as one SVG file that its own script moves.

A contract becomes tokens, they fill a GPU, a method throws some away, and the answer changes. Where no script
runs (README, paper) the file is its last scene, a still. Sizes are those of `course.teaching.contract`. Which
tokens stay, and what is said, is the workshop model's doing on nine clauses of the lease, with the live
page's weights: it is computed when the picture is drawn.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import torch

import kvlab
from kvlab.bill.data import model_named
from kvlab.decode import Stepper
from kvlab.plots import BLUE, GREY, GRID

from .drawing import Drawing
from .page.build import rounded
from .teaching import contract, lease

METHOD = "h2o:budget=0.2"
LENGTH = 90  # seconds
ENDS = (11, 24, 38, 50, 62, 76, LENGTH)  # of the scenes
BOXES, COLUMNS = 120, 12  # each box is a thousand tokens
WIDE, HIGH = 20, 16  # points of a box
LEFT, FLOOR, WHOLE = 24, 366, COLUMNS * WIDE  # the memory's left side, floor and width
RIGHT = 384  # where clause 17 is taken apart
WORDS = {"x": 24, "y": 384, "width": 672, "height": 100}  # where the script writes
LETTERS = 19  # points: read from the back of a room, and on a phone


class Moving(Drawing):
    """A drawing whose shapes are as in the last second; groups of them have a past."""

    scenes: tuple[tuple[int, str], ...] = ()  # (end in seconds, what is to be seen)

    def text(self, x, y, words, *, size=LETTERS, **look) -> None:
        super().text(x, y, words, size=size, **look)

    def box(self, x, y, wide, high, words="", *, size=LETTERS, **look) -> None:
        super().box(x, y, wide, high, words, size=size, **look)

    @contextmanager
    def moved(self, *frames: tuple[float, ...]) -> Iterator[None]:
        """What is drawn inside goes through frames of (second, opacity, dx, dy); dx, dy may be left out."""
        first = len(self.shapes)
        yield
        whole = [(*frame, 0, 0)[:4] for frame in frames]
        _, opacity, dx, dy = whole[-1]
        past = f"data-frames='{json.dumps(whole, separators=(',', ':'))}'"
        inner = "".join(self.shapes[first:])
        place = f' transform="translate({dx:g} {dy:g})"' if dx or dy else ""
        self.shapes[first:] = [f'<g {past} opacity="{opacity:g}"{place}>{inner}</g>']

    def svg(self) -> str:
        """The picture with its script, as a file of its own."""
        story = escape(json.dumps({"length": LENGTH, "scenes": self.scenes}, ensure_ascii=False), quote=False)
        told = escape(" ".join(sentence for _, sentence in self.scenes), quote=False)
        script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
        head, body = super().svg().split("</title>\n")
        head = head.replace(" role=", ' style="max-width: 100%; height: auto" role=', 1)  # a narrow window
        return (
            f"{head}</title>\n<desc>{told}</desc>\n<metadata>{story}</metadata>\n"
            + body.removesuffix("</svg>\n")
            + f"<script><![CDATA[\n{script}]]></script>\n</svg>\n"
        )


@dataclass(frozen=True)
class Heard:
    """What the workshop model keeps and says. kept: boxes that stay, of BOXES; asked: the box of the sentence
    that is asked for; words: (token, heads that hold it) of that sentence; heads: how many there are; full
    and few: the answers with the whole cache and with METHOD."""

    kept: tuple[int, ...]
    asked: int
    words: tuple[tuple[str, int], ...]
    heads: int
    full: str
    few: str


@cache
def heard(method: str = METHOD) -> Heard:
    """Read nine clauses, compress them, then ask: once with the whole cache and once with a method."""
    model, tokenizer = kvlab.load()
    rounded(model)
    context, question, name = lease.asked_of_workshop()[0]
    ids, after = tokenizer(context).input_ids, tokenizer(question).input_ids
    told = {}
    for spec in ("full", method):
        made = kvlab.make_cache(model, spec)
        stepper = Stepper(model, made)
        stepper.feed(torch.tensor([ids]))
        there = [layer.slot_positions.flatten() for layer in made.attending]
        held = torch.cat([slots[slots >= 0] for slots in there]).bincount(minlength=len(ids))
        made.hold()
        logits, said = stepper.feed(torch.tensor([after]), last=True), []
        for _ in range(6):
            said.append(int(logits.argmax()))
            logits = stepper.feed(torch.tensor([said[-1:]]), last=True)
        told[spec] = tokenizer.decode(said).partition(".")[0].strip() + "."
    share = [float(part.float().mean()) for part in held.tensor_split(BOXES)]
    best = sorted(range(BOXES), key=lambda n: (-share[n], n))[: BOXES // 5]
    sentence = tokenizer(" " + lease.DOG.format(name)).input_ids
    first = next(n for n in range(len(ids)) if ids[n : n + len(sentence)] == sentence)
    words = [(tokenizer.decode(ids[n]).strip(), int(held[n])) for n in range(first, first + len(sentence))]
    heads = sum(layer.kv_heads for layer in made.attending)
    return Heard(
        tuple(sorted(best)), first * BOXES // len(ids), tuple(words), heads, told["full"], told[method]
    )


def story() -> Moving:
    """The contract, the tokens, the GPU, the method, the question."""
    found, asked = heard(), contract.bill("full", METHOD)
    full, few = asked.lines
    layers = len(model_named(contract.MODEL)[1]["layers"])
    sizes = [size / 1e9 for size in (asked.memory, asked.weights_bytes, full.device_bytes, few.device_bytes)]
    memory, weights, cached, left = sizes
    name = found.full.rstrip(".")
    d = Moving(
        490,
        f"A contract of {contract.PAGES} pages becomes {contract.TOKENS:,} tokens. Their cache of "
        f"{cached:.1f} GB does not fit beside {weights:.1f} GB of weights on a GPU of {memory:.0f} GB. A "
        f"method throws tokens away, clause {lease.CLAUSE} among them, and the answer changes.",
    )
    sentences = (
        f"A contract of {contract.PAGES} pages is on your desk. You may ask one question about it, and "
        f"the answer is in clause {lease.CLAUSE}.",
        f"A model reads it as {contract.TOKENS:,} tokens. For each of them it keeps a key and a value in "
        f"every one of its {layers} layers: {contract.bytes_per_token(contract.MODEL) / 1e3:.0f} kB.",
        f"This cache goes into the memory of your GPU, an {contract.DEVICE}. It has {memory:.0f} GB, and the "
        f"weights of {contract.MODEL.partition('/')[2]} already take {weights:.1f}.",
        f"After {full.tokens:,} tokens the memory is full. The whole cache would take {cached:.1f} GB, and "
        f"{memory - weights:.1f} are free: out of memory.",
        f"A method throws tokens away. H2O keeps a fifth, those that got the most attention and the newest: "
        f"{left:.1f} GB. Now the contract fits.",
        f"Your question has not come yet. Look at clause {lease.CLAUSE} in our small model after H2O: the "
        f"name {name} is left in {dict(found.words)[name] or 'none'} of its {found.heads} heads.",
        f"Now you ask about the brown dog. With the whole cache the small model says “{found.full}” With a "
        f"fifth of it, it says “{found.few}”",
    )
    d.scenes = tuple(zip(ENDS, sentences, strict=True))
    point = BOXES / COLUMNS * HIGH / cached  # how high a GB is
    _pages(d)
    _memory(d, [memory, weights, cached], point)
    _boxes(d, found, FLOOR - weights * point)
    _limit(d, [memory, weights, cached], point)
    _clause(d, found)
    d.shapes.append(f"<g data-words='{json.dumps(WORDS)}'>")
    d.text(WORDS["x"], 412, f"Clause {lease.CLAUSE} is gone before you ask for it.", bold=True)
    d.text(WORDS["x"], 442, f"A still. In a browser the file moves: {LENGTH} seconds.")
    d.shapes.append("</g>")
    return d


def _pages(d: Moving) -> None:
    """The contract with its clause, then the tokens that come out of it."""
    with d.moved((25, 1), (27, 0)):
        for k in range(4):
            d.box(40 + 9 * k, 86 + 9 * k, 150, 206, fill="#ffffff")
        for k in range(11):
            d.line(84, 136 + 16 * k, 198, 136 + 16 * k, colour=GRID, wide=3)
        d.text(128, 350, f"{contract.PAGES} pages", anchor="middle")
    with d.moved((2, 0), (3, 1), (25, 1), (27, 0)):
        d.box(78, 204, 126, 30, f"clause {lease.CLAUSE}", fill="#ffffff")
    with d.moved((3, 0), (5, 1), (11, 1), (12, 0)):
        sentence = lease.DOG.format(lease.NAMES[0])
        clause = lease.LEAVING.format(f"\n{sentence}\n").split("\n")
        rows = [(line, text == sentence) for text in clause for line in textwrap.wrap(text, 40)]
        d.text(270, 100, f"Clause {lease.CLAUSE}.", bold=True)
        for n, (line, bold) in enumerate(rows):
            d.text(270, 134 + 28 * n, line, bold=bold)
    with d.moved((12, 0), (14, 1), (24, 1), (26, 0)):
        d.text(536, 90, f"{contract.TOKENS:,} tokens", anchor="middle", bold=True)
        d.text(536, 310, f"one box: {contract.TOKENS // BOXES:,} tokens", anchor="middle")


def _memory(d: Moving, sizes: list[float], point: float) -> None:
    """The GPU, with the weights on its floor. sizes: GB of it, of the weights and of the whole cache; point:
    how high a GB is."""
    memory, weights, _ = (size * point for size in sizes)
    with d.moved((25, 0), (27, 1)):
        d.box(LEFT - 6, FLOOR - memory, WHOLE + 12, memory + 6, fill="#ffffff")
        d.box(LEFT, FLOOR - weights, WHOLE, weights, f"weights {sizes[1]:.1f} GB", fill="#d5d8dd")


def _limit(d: Moving, sizes: list[float], point: float) -> None:
    """Over the boxes: where the memory ends, and what the whole cache would take."""
    end, top = FLOOR - sizes[0] * point, FLOOR - (sizes[1] + sizes[2]) * point
    beside = LEFT + WHOLE + 14
    with d.moved((25, 0), (27, 1)):
        d.line(LEFT - 12, end, LEFT + WHOLE + 12, end, wide=2.5, dashed=True)
        d.text(beside, end + 5, f"{sizes[0]:.0f} GB")
        d.text(beside, end + 29, contract.DEVICE)
    with d.moved((41, 0), (43, 0.6), (51, 0.6), (52, 0)):
        d.box(LEFT - 2, top - 2, WHOLE + 4, end - top, fill="#fbfaf6", edge="none")
    with d.moved((38, 0), (40, 1)):
        d.box(LEFT, top, WHOLE, sizes[2] * point, fill="none", edge=GREY, dashed=True)
        d.text(beside, top + 14, f"{sizes[2]:.1f} GB")
    with d.moved((42, 0), (43, 1), (51, 1), (52, 0)):
        d.text(beside + 84, top + 14, "of cache: out of memory", bold=True)


def _boxes(d: Moving, found: Heard, floor: float) -> None:
    """Every box leaves the contract, goes into the GPU, and stays or leaves. floor: where they begin."""

    def at(n: int) -> tuple[float, float]:
        return LEFT + n % COLUMNS * WIDE, floor - (n // COLUMNS + 1) * HIGH

    for n in range(BOXES):
        stays, asked = n in found.kept, n == found.asked
        (x, y), (first_x, first_y) = at(found.kept.index(n) if stays else n), at(n)
        read = 416 + n % COLUMNS * WIDE - x, 122 + n // COLUMNS * HIGH - y
        came, went = 14 + 8 * n / BOXES, 27 + (9 if n < BOXES / 2 else 12) * n / BOXES
        full = first_x - x, first_y - y
        frames = [(came - 1, 0, 160 - x, 200 - y), (came, 1, *read), (went, 1, *read), (went + 1.5, 1, *full)]
        out = 52 + 3 * (n % 7) / 7
        if stays:
            frames += [(57, 1, *full), (60, 1)]
        elif asked:
            frames += [
                (60, 1),
                (62, 1, RIGHT - x, 74 - y),
                (63, 1, RIGHT - x, 74 - y),
                (64, 0, RIGHT - x, 74 - y),
            ]
        else:
            frames += [(out, 1), (out + 4, 0, 40)]
        with d.moved(*frames):
            box, mark = (x + 1, y + 1, WIDE - 2, HIGH - 2), str(lease.CLAUSE) if asked else ""
            d.box(*box, mark, fill=BLUE, ink="#ffffff", size=14)
            if asked and not stays:
                with d.moved((54, 0), (55, 1)):
                    d.box(*box, mark, fill=GRID, edge=GREY, size=14)
                    d.line(x - 3, y + HIGH / 2, x + WIDE + 3, y + HIGH / 2, wide=2)


def _clause(d: Moving, found: Heard) -> None:
    """The words that are asked for, with the heads that still hold them, the question, the answers."""
    x, y = RIGHT, 84
    with d.moved((62, 0), (64, 1)):
        d.text(RIGHT, 50, f"Clause {lease.CLAUSE} in a small model", bold=True)
        d.text(RIGHT, 208, f"How many of {found.heads} heads hold it")
    for n, (word, heads) in enumerate(found.words):
        wide = 12 + 10.6 * len(word)
        if x + wide > 704:
            x, y = RIGHT, y + 60
        with d.moved((63, 0, 0, -20), (65, 1)):
            d.box(x, y - 18, wide, 30, word, fill=BLUE, ink="#ffffff")
        with d.moved((66 + n * 0.6, 0), (67 + n * 0.6, 1)):
            if heads < found.heads / 2:
                d.box(x, y - 18, wide, 30, word, fill=GRID, edge=GREY)
                d.line(x, y - 3, x + wide, y - 3, wide=2)
            d.text(x + wide / 2, y + 33, str(heads), anchor="middle")
        x += wide + 5
    with d.moved((76, 0), (77, 1)):
        d.box(RIGHT, 226, 320, 34, "Question: the brown dog …", fill="#ffffff")
    answers = ("whole", f"{found.full} ✓", 80), ("a fifth", f"{found.few} ✗", 84)
    for row, (told, said, second) in enumerate(answers):
        with d.moved((second, 0), (second + 1, 1)):
            d.text(RIGHT, 298 + 46 * row, told)
            d.box(RIGHT + 84, 275 + 46 * row, 236, 34, said, fill="#ffffff", dashed=bool(row))


def write(folder: Path) -> Path:
    """Draw the story into a folder, as SVG; returns the file."""
    path = folder / "story.svg"
    path.write_text(story().svg(), encoding="utf-8")
    return path

"""Show: a gate as a table of text, as Markdown, and as HTML with a picture of the keys' channels."""

from __future__ import annotations

import html as escaping

from ..bill.show import counted, elsewhere, size
from .rules import BREAKS, DECODED, FORETOLD, POINTS, PROMPT, SAFE, SAME

CELL, LEFT = 4, 70  # pixels of a channel, and before the first
LEAST, MOST = 2, 20  # medians at which a channel is seen, and is darkest
LABEL = "Channels of keys, a line for each KV head, darker the larger beside the median channel of the head"
LLAMA = (
    "llama.cpp reads the prompt through the rounded cache as well, and rounds queries: its q8_0 cost 3 times "
    "the nats of the same blocks here on Qwen2.5-Coder-0.5B, and 17 times on Gemma 3 270M (docs/ledger.md)"
)
OVER = "the time was over"  # why a method has no verdict
HEAD = ("method", "verdict", "holds", "of full", "scores move", "same token", "why")


def cells(gate, line) -> tuple[str, ...]:
    held = "–" if line.bytes is None else size(line.bytes) + ("" if line.fits is not False else ", too much")
    part = "–" if line.bytes is None else f"{100 * line.bytes / gate.full_bytes:.0f} %"
    whole = line.cost is not None and line.accuracy is None  # or the cost is that of its store alone
    same = f"{100 * line.cost.agrees:.1f} %" if whole else "–"
    moved = "–" if line.noise is None else f"{line.noise:.2g}{' !' if line.noise >= FORETOLD else ''}"
    return line.method, line.verdict, held, part, moved, same, line.why


def text(gate) -> str:
    """The table in plain text, with the notes above and below it."""
    body = [HEAD, *(cells(gate, line) for line in gate.lines)]
    widths = [max(len(row[i]) for row in body) for i in range(len(HEAD) - 1)]
    rows = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in body]
    return "\n".join([*above(gate), "", *rows, "", *below(gate)])


def markdown(gate) -> str:
    """The same for a document."""
    body = [
        HEAD,
        ("---",) * len(HEAD),
        *((f"`{c[0]}`", *c[1:]) for c in (cells(gate, line) for line in gate.lines)),
    ]
    told = [f"```\n{line}\n```" if "\n" in line else line for line in below(gate)]
    return "\n\n".join([*above(gate), "\n".join(f"| {' | '.join(row)} |" for row in body), *told])


def html(gate) -> str:
    """The same for a notebook or a page, with the picture."""
    safe = escaping.escape
    head = "".join(f"<th scope='col'>{safe(name)}</th>" for name in HEAD)
    rows = "".join(
        f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in cells(gate, line))}</tr>" for line in gate.lines
    )
    said = [f"<p>{safe(line)}</p>" for line in above(gate)]
    told = [f"<pre>{safe(line)}</pre>" if "\n" in line else f"<p>{safe(line)}</p>" for line in below(gate)]
    norms = lambda layer: f"root mean square {layer.key:.3g} of the keys, {layer.value:.3g} of the values"
    layers = "".join(
        f"<li value='{index}'>{safe(layer.said)}; {norms(layer)}</li>"
        for index, layer in enumerate(gate.layers)
    )
    every = f"<details><summary>Every layer</summary><ol>{layers}</ol></details>" if layers else ""
    table = f"<div style='overflow-x:auto'><table><tr>{head}</tr>{rows}</table></div>"
    return f"{''.join(said)}{picture(gate)}{every}{table}{''.join(told)}"


def page(gate) -> str:
    """The same as a file of HTML."""
    style = ":root{color-scheme:light dark}body{font:16px sans-serif;margin:2em;max-width:75em}"
    style += "td,th{text-align:left;padding:.2em .8em;vertical-align:top}pre{white-space:pre-wrap}"
    style += "td:not(:last-child),th{white-space:nowrap}td:last-child{min-width:14em}"
    head = "<!doctype html><html lang='en'><meta charset='utf-8'><title>kvlab gate</title>"
    head += f"<meta name='viewport' content='width=device-width'><style>{style}</style>"
    return f"{head}<body>{html(gate)}</body></html>"


def above(gate) -> list[str]:
    """The keys of the worst layer, and the others in a word."""
    asked = f"{counted(gate.users, 'user')} of {counted(gate.context, 'token')}"
    there = "" if gate.memory is None else f" beside 16-bit weights in {size(gate.memory)}"
    much = "" if gate.full_fits is not False else ", too much"
    lines = [f"{gate.model}: {asked}{there}, full in 16 bits: {size(gate.full_bytes)}{much}"]
    if gate.layers:
        worst = max(range(len(gate.layers)), key=lambda index: gate.layers[index].outlier)
        lines.append(f"layer {worst}: {gate.layers[worst].said}")
        far = [index for index, layer in enumerate(gate.layers) if layer.outlier >= 10 and index != worst]
        if far:
            lines.append(f"a channel of ten medians or more in layers {', '.join(map(str, far))}, too")
    return [*lines, *([gate.stopped] if gate.stopped else [])]


def below(gate) -> list[str]:
    """How to read it, and what to switch on."""
    lines = []
    if gate.tokens:
        lines.append(
            f"Formats: {gate.tokens} tokens decoded in texts of {PROMPT + DECODED} (far into a longer one a "
            f"format may lose more); safe: surely below {SAFE:g} nats a token from the full cache, and "
            f"{100 * SAME:.0f} % of the most probable tokens are the same; breaks: surely above {BREAKS:g}; "
            "scores move: by how many nats rounding the keys changes the scores, in the layer where it does "
            f"so most; known before decoding, and from {FORETOLD:g} on (!) a sign that a format breaks"
        )
    if any(gate.questions.values()):
        asked = ", ".join(f"{count} {name}" for name, count in gate.questions.items())
        lines.append(
            f"Keeps: {asked} questions on documents of some 110 to 190 tokens; safe: surely loses less than "
            f"{100 * POINTS:.0f} points under both protocols, breaks: surely more under one; an answer is a "
            "name out of four, so whether the model still writes well is not judged"
        )
    fitting = [line.method for line in gate.safe]
    larger = [line.method for line in gate.lines if line.verdict == "safe" and line.fits is False]
    over = sum(line.why.endswith(OVER) for line in gate.lines)
    if fitting:
        lines.append(f"Safe, the fewest bytes first: {', '.join(fitting)}")
    elif larger:
        lines.append(f"Safe, and too much for {size(gate.memory)}: {', '.join(larger)}")
    elif any(line.verdict != "no verdict" for line in gate.lines):
        then = ": keep the full cache" if gate.full_fits is not False else ", and the full cache does not fit"
        lines.append(f"Nothing was found to be safe{then}")
    elif over < len(gate.lines):
        lines.append("Nothing could be judged")
    if over:
        lines.append(f"The time was over before {counted(over, 'method')}: give more minutes")
    if found := elsewhere([line.method for line in gate.lines if line.verdict == "safe"]):
        lines += [found, LLAMA] if "llama.cpp  " in found else [found]
    return lines


def picture(gate) -> str:
    """Layers by channels: how large each channel of a KV head is beside the head's median, as SVG below its
    caption."""
    rows = [head for layer in gate.layers for head in layer.channels]
    if not rows:
        return ""
    wide, y, marks = CELL * max(map(len, rows)), 0, []
    for index, layer in enumerate(gate.layers):
        marks.append(f"<text x='0' y='{y + 10}' font-size='10' fill='currentColor'>layer {index}</text>")
        for head in layer.channels:
            median = sorted(head)[len(head) // 2] or 1e-9
            marks += [_mark(channel, x / median, y) for channel, x in enumerate(head) if x >= LEAST * median]
            y += CELL
        y += max(2, 12 - CELL * len(layer.channels))
    marks.append(f"<rect x='{LEFT}' width='{wide}' height='{y}' fill='none' stroke='#c9ced6'/>")
    box = f"viewBox='0 0 {LEFT + wide} {y}' style='max-width:100%' width='{LEFT + wide}' role='img'"
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' {box} aria-label='{LABEL}'>{''.join(marks)}</svg>"
    return f"<p>{LABEL}: from {LEAST} to {MOST} times.</p>{drawn}"


def _mark(channel: int, ratio: float, y: int) -> str:
    shade = min(1.0, 0.15 + 0.85 * (ratio - LEAST) / (MOST - LEAST))
    where = f"x='{LEFT + channel * CELL}' y='{y}' width='{CELL}' height='{CELL}'"
    told = f"<title>channel {channel}: {ratio:.1f} medians</title>"
    return f"<rect {where} fill='#D55E00' fill-opacity='{shade:.2f}'>{told}</rect>"

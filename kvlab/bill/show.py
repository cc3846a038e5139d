"""Show: a bill as a table of 80 columns, and as HTML for a notebook."""

from __future__ import annotations

import html as escaping
import io
import re
import textwrap

from .data import table

WIDTH = 80


def text(bill) -> str:
    """The bill in lines of at most 80 characters."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=WIDTH, markup=False, emoji=False, highlight=False)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns(bill):
        side = "left" if name in ("method", "first to\nrun out") else "right"
        grid.add_column(name, justify=side, no_wrap=True)
    for line in bill.lines:
        if line.refused is None:
            grid.add_row(*cells(bill, line))
    console.print(grid)
    rows = [row.rstrip() for row in out.getvalue().splitlines()]
    return "\n".join([*wrapped(header(bill)), "", *rows, "", *refused(bill), *wrapped(notes(bill))])


def refused(bill) -> list[str]:
    """Methods that kvlab refuses on this model, by reason, and an empty line."""
    reasons: dict[str, list[str]] = {}
    for line in bill.lines:
        if line.refused:
            reasons.setdefault(line.refused, []).append(line.method)
    lines = [f"not on this model: {', '.join(methods)} ({reason})" for reason, methods in reasons.items()]
    return [*wrapped(lines), ""] if lines else []


def wrapped(lines: list[str]) -> list[str]:
    """Lines of at most 80 characters; continued ones are indented by two."""
    options = {"width": WIDTH, "subsequent_indent": "  ", "break_on_hyphens": False}
    return [part for line in lines for part in textwrap.wrap(line, **options)]


def html(bill) -> str:
    """The bill as HTML."""
    safe = escaping.escape
    head = "".join(f"<p>{safe(line)}</p>" for line in header(bill))
    names = "".join(f"<th scope='col'>{safe(name)}</th>" for name in columns(bill))
    rows = ""
    for line in bill.lines:
        if line.refused is None:
            row = "".join(f"<td>{safe(cell)}</td>" for cell in cells(bill, line)[1:])
        else:
            row = f"<td colspan='{len(columns(bill)) - 1}'>not on this model: {safe(line.refused)}</td>"
        rows += f"<tr><th scope='row'>{safe(line.method)}</th>{row}</tr>"
    foot = "".join(f"<li>{safe(note)}</li>" for note in notes(bill))
    return f"{head}<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table><ul>{foot}</ul>"


def header(bill) -> list[str]:
    """The lines above the table."""
    users, tokens = counted(bill.users, "user"), counted(bill.context, "token")
    left = bill.memory - bill.weights_bytes
    return [
        f"{bill.model} on {bill.device}: {users} of {tokens}",
        f"weights {size(bill.weights_bytes)} of {size(bill.memory)}; {size(left)} are left for caches",
        f"prefill of one user's context: at least {seconds(bill.prefill)}"
        + ("" if bill.prefill_cost is None else f", {money(bill.prefill_cost)} per million tokens"),
    ]


def columns(bill) -> list[str]:
    """Names of the columns; without a price there is no cost."""
    priced = [] if bill.price is None else ["cost per\n1M"]
    held = "cache on\ndevice", "cache on\nhost"
    return ["method", *held, "users\nfit", "tokens\nfit", "ms per\ntoken", *priced, "first to\nrun out"]


def notes(bill) -> list[str]:
    """The notes below the table."""
    budgets: dict[float | int, list[str]] = {}
    for line in bill.lines:
        if line.budget is not None and "budget=" not in line.method and line.refused is None:
            budgets.setdefault(line.budget, []).append(line.method)
    most = [line.method for line in bill.lines if line.at_most]
    all_users = "the user" if bill.users == 1 else f"all {bill.users:,} users"
    guessed = any(line.method.startswith("kvzap") and line.refused is None for line in bill.lines)
    said = ["kvzap: the share that its profile's own texts held, no lower bound: a text may hold less"]
    return [*explained(all_users, bill.price is not None, budgets, most), *(said if guessed else ())]


def explained(
    all_users: str, priced: bool, budgets: dict[float | int, list[str]], most: list[str]
) -> list[str]:
    """How the columns are made (`kvlab/arithmetic.py` has the formulas). budgets: methods that a table has at
    each budget without saying so; most: those whose moved bytes are no lower bound."""
    but = (
        f", except {', '.join(most)}: what they fetch depends on the text, so the whole budget is counted, "
        "and a step may move less"
    )
    notes = [
        f"Lower bounds, from sizes and data sheets: nothing real is smaller or quicker{but if most else ''}.",
        *(f"budget {share(budget)}: {', '.join(methods)}" for budget, methods in budgets.items()),
        f"cache of {all_users}: tokens held * KV heads * (key + value numbers) * bits / 8, over the layers; "
        "of what a host sends, one layer at a time is on the device; the host's own memory is not charged",
        "users fit: memory left / one user's cache on the device (any: nothing of it is there)",
        f"tokens fit: the longest context for {all_users} by the same rule, at most what the model was "
        "trained for",
        "ms per token: the longest of (weights + cache read) / bandwidth, bytes moved / link, and operations "
        "/ FLOP/s, for the users that fit",
        "cost per 1M: price per hour * seconds / 3600 * 1e6 / tokens, of tokens decoded",
        "first to run out: memory, where fewer fit than were asked for; else what the ms are made of",
    ]
    return [note for note in notes if priced or not note.startswith("cost")]


def share(budget: float | int) -> str:
    """A budget in words."""
    return f"{budget:,} tokens" if isinstance(budget, int) else f"{100 * budget:g} % of the tokens"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cells(bill, line) -> list[str]:
    """A line of the table, as text."""
    none = "–"
    priced = [] if bill.price is None else [none if line.cost is None else money(line.cost)]
    return [
        line.method,
        size(line.device_bytes),
        size(line.host_bytes) if line.host_bytes else none,
        "any" if line.users is None else f"{line.users:,}",
        "any" if line.tokens is None else f"{line.tokens:,}",
        none if line.step is None else number(line.step * 1e3),
        *priced,
        line.first,
    ]


def size(value: float) -> str:
    """Bytes in decimal units, three digits: 16.1 GB."""
    for unit, least in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * least:
            return f"{number(value / least)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    return f"{number(value)} s" if value >= 1 else f"{number(value * 1e3)} ms"


def money(value: float) -> str:
    """An amount in whatever currency the price was in."""
    if value >= 1e4:
        return f"{value:,.0f}" if value < 1e6 else f"{value:.2g}"
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def number(value: float) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 123, 1,234; 1.2e+07 from there on."""
    if value >= 1e7:
        return f"{value:.2g}"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"


def elsewhere(methods: list[str]) -> str:
    """The options that do what these methods do in the engines people use, in lines of 80 characters; nothing
    without a method."""
    known, methods = table("flags"), [re.sub(r":budget=[^,]*$", "", method) for method in methods]
    techniques = [one for one in known["techniques"] if set(one["methods"]) & set(methods)]
    if not methods:
        return ""
    engines = ", ".join(f"{name} {engine['version']}" for name, engine in known["engines"].items())
    lines, missing = wrapped([f"The same elsewhere: {engines}; read on {known['read']}"]), []
    found = {method for technique in techniques for method in technique["methods"]}
    for technique in techniques:
        there = {name: option for name, option in technique["options"].items() if option}
        title = f"{technique['name']} ({', '.join(technique['methods'])})"
        if not there:
            missing.append(title)
            continue
        lines += ["", title]
        for name, option in there.items():
            note = f"; {option['note']}" if option["note"] else ""
            lines += textwrap.wrap(
                f"  {name:<13}{option['option']}{note}",
                WIDTH,
                subsequent_indent=" " * 15,
                break_on_hyphens=False,
            )
    if missing:
        lines += ["", *textwrap.wrap(f"In none of the four: {', '.join(missing)}", WIDTH)]
    if others := [method for method in methods if method not in found]:
        lines += ["", *textwrap.wrap(f"Not looked for there: {', '.join(others)}", WIDTH)]
    return "\n".join(lines)

"""The live page's bill is kvlab's, and says what it leaves out."""

from __future__ import annotations

import functools
import json
import random
import shlex
from dataclasses import dataclass

import pytest
from live import SEED

import kvlab
from course.page import recipes
from kvlab import cli
from kvlab.finding import Method
from kvlab.keep import Keep
from kvlab.methods import METHODS as METHODS_OF_KVLAB


def test_the_bill_is_kvlabs(opened):
    """Every model on every device, at contexts, budgets and numbers of users drawn anew."""
    rng = random.Random(SEED)
    known = opened.run(
        "({models: charged.models, devices: charged.devices, recipes: charged.recipes, left: charged.left})"
    )
    assert sorted([*known["recipes"], *known["left"]]) == sorted(METHODS_OF_KVLAB)
    for name, model in known["models"].items():
        for device in rng.sample(list(known["devices"]), 2):
            context, users = rng.randrange(1, 1 + (model["context"] or 10**5)), rng.choice((1, 3, 8, 64))
            budget = rng.choice((0.01, 0.05, 0.2, 0.5, 0.77, 1))
            specs = [
                method if recipe["budget"] is None else f"{method}:budget={budget}"
                for method, recipe in known["recipes"].items()
            ]
            try:
                wanted = kvlab.bill(name, device, context, users, methods=specs)
            except ValueError:  # the weights do not fit
                size = opened.run(f"weightBytes(charged.models[{json.dumps(name)}])")
                assert size > known["devices"][device]["memory"]
                continue
            given = f"charged.models[{json.dumps(name)}], charged.devices[{json.dumps(device)}], {context}"
            recipes = f"Object.values(charged.recipes).map((r) => withBudget(r, {budget}))"
            lines = opened.run(f"{recipes}.map((r) => billLine(r, {given}, {users}))")
            assert opened.run(f"prefillSeconds({given})") == pytest.approx(wanted.prefill)
            pairs = zip(lines, known["recipes"].values(), wanted.lines, strict=True)
            for line, recipe, want in pairs:
                where = f"seed {SEED}: {want.method}, {name}, {device}, {context} tokens, {users} users"
                assert line.get("refused") == want.refused, where
                if want.refused is None:
                    got = [
                        line[part]
                        for part in ("device", "host", "moved", "users", "tokens", "seconds", "first")
                    ]
                    bytes_ = want.device_bytes, want.host_bytes, want.moved_bytes
                    right = [*bytes_, want.users, want.tokens, want.step, want.first]
                    assert got[:-1] == pytest.approx(right[:-1]) and got[-1] == right[-1], where
                    assert recipe.get("most", False) == want.at_most, where


@dataclass(frozen=True)
class Halving(Keep):
    """Half of the budget in every second layer."""

    def limits(self, layer) -> list[int]:
        return [tokens // (1 + layer.order % 2) for tokens in super().limits(layer)]


def test_a_method_that_the_page_cannot_reckon_is_named_there(monkeypatch):
    """And one that it can enters by itself."""
    for name, keep in (("halving", Halving), ("another", type("Another", (Keep,), {}))):
        policies = functools.partial(lambda keep, budget=0.3: {"keep": keep(budget)}, keep)
        monkeypatch.setitem(METHODS_OF_KVLAB, name, Method(name, "A method of tomorrow.", policies=policies))
    tables = recipes.tables()
    assert "layers in a way of its own" in tables["left"]["halving"] and "another" not in tables["left"]
    assert tables["recipes"]["another"]["keep"] == {"budget": 0.3}


def test_the_bill_says_what_it_is(looked_at):
    """Budgets in the rows, what columns mean, what is left out and where to ask, the cost of a prefill; and
    nothing of a table where there is none."""
    browser = looked_at(hash="#bill-budget=10&bill-price=2&bill-context=1&bill-users=1")
    rows = browser.run("[...panel.parts.rows.querySelectorAll('th')].map((th) => th.textContent)")
    budgets = {name: method.parameters.get("budget") for name, method in METHODS_OF_KVLAB.items()}
    left = browser.run("charged.left")
    assert rows == [
        name + (", 10 %" if budgets[name] else "") for name in METHODS_OF_KVLAB if name not in left
    ]
    for name, reason in left.items():
        assert f"{name} ({reason})" in browser.run("$('bill-left').textContent")
    if left:
        asking = shlex.split(browser.run("$('bill-left').querySelector('code').textContent"))
        assert asking[:2] == ["kvlab", "bill"] and cli.main(asking[1:]) == 0
    notes = browser.run("$('bill-notes').textContent")
    for part in (
        "users fit:",
        "tokens fit:",
        "first to run out:",
        "host's own memory is not",
        "cost per 1M:",
    ):
        assert part in notes
    assert "but for infinigen, infinigen+int4: what is fetched hangs on the text" in notes
    wanted = kvlab.bill("Llama-3.1-8B", "RTX 4090", 1, 1, 2.0, "full").prefill_cost
    said = browser.run(f"[panel.parts.said.textContent, digits({wanted})]")
    assert said[0].endswith(f", {said[1]} per million tokens.")
    for wrong in ({"users": "9999999"}, {"price": "1e308"}, {"budget": "0"}, {"context": "1e99"}):
        browser.run(f"panel.show({json.dumps(wrong)})")
        assert "expected" in browser.run("panel.parts.said.textContent")
        assert browser.run("['rows', 'head', 'left'].every((name) => panel.parts[name].textContent === '')")

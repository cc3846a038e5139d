"""The live page's bill is kvlab's, and says what it leaves out."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass

import pytest
from live import SEED

import kvlab
from course.page import recipes
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

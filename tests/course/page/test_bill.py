"""The live page's bill is kvlab's."""

import json
import random

import pytest
from live import SEED

import kvlab
from course.page.bills import BUDGETS, CONTEXTS
from kvlab.methods import METHODS


def test_the_bill_is_kvlabs(opened):
    """Every model on devices, contexts, budgets and numbers of users drawn anew."""
    rng = random.Random(SEED)
    models, devices = opened.run("[charged.models, Object.keys(charged.devices)]")
    for name, model in models.items():
        for device in rng.sample(devices, 2):
            known = [tokens for tokens in CONTEXTS if str(tokens) in model["rows"]]
            context, users, percent = rng.choice(known), rng.choice((1, 3, 8, 64)), rng.choice(BUDGETS)
            has = [METHODS[method].parameters.get("budget") is not None for method in METHODS]
            specs = [
                f"{method}:budget={percent / 100}" if one else method
                for method, one in zip(METHODS, has, strict=True)
            ]
            try:
                wanted = kvlab.bill(name, device, context, users, methods=specs)
            except ValueError:  # the weights do not fit
                memory = opened.run(f"charged.devices[{json.dumps(device)}].memory")
                assert model["weights"] > memory
                continue
            given = f"charged.models[{json.dumps(name)}], charged.devices[{json.dumps(device)}], {context}"
            lines = opened.run(
                f"{json.dumps(list(METHODS))}.map((m) => billLine(m, {given}, {percent}, {users}))"
            )
            assert opened.run(f"prefillSeconds({given})") == pytest.approx(wanted.prefill)
            for line, want in zip(lines, wanted.lines, strict=True):
                where = f"seed {SEED}: {want.method}, {name}, {device}, {context} tokens, {users} users"
                assert line.get("refused") == want.refused, where
                if want.refused is None:
                    got = [line[part] for part in ("device", "host", "moved", "users", "seconds", "first")]
                    bytes_ = want.device_bytes, want.host_bytes, want.moved_bytes
                    right = [*bytes_, want.users, want.step, want.first]
                    assert got[:-1] == pytest.approx(right[:-1]) and got[-1] == right[-1], where
                    fits = [tokens for tokens in known if tokens <= want.tokens]
                    assert line["tokens"] == max([0, *fits]), where

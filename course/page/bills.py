"""Bills: what the page's bill shows, as kvlab computes it: every method on every model, at a few contexts and
budgets. The page only multiplies by users and divides by what the device offers (panel.js)."""

from __future__ import annotations

from kvlab.bill.account import account, policies, prefill_operations, step_operations, weights
from kvlab.bill.bill import MOST
from kvlab.bill.data import table
from kvlab.bill.show import explained
from kvlab.finding import METHODS
from kvlab.spec import Spec, parse

from ..teaching import contract

CONTEXTS = 2048, 4096, 8192, 32768, 65536, contract.TOKENS
BUDGETS = 5, 10, 20, 40  # percent


def tables() -> dict:
    """Models, devices, methods, flags, and the words under the table, for panel.js."""
    flags, devices = table("flags"), table("devices")["devices"]
    methods = {name: at_budgets(name) for name in METHODS}
    fetches = {name: getattr(made[0][1].get("place"), "fetch", None) for name, made in methods.items()}
    most = [name for name, fetch in fetches.items() if fetch and fetch.at_most]
    notes = explained("all users", True, {}, most)
    return {
        "contexts": CONTEXTS,
        "budgets": BUDGETS,
        "models": {name: model_entry(model, methods) for name, model in table("models")["models"].items()},
        "devices": {
            name: {key: device[key] for key in ("memory", "bandwidth", "flops", "link")}
            for name, device in devices.items()
        },
        "pages": [name for name, fetch in fetches.items() if fetch and fetch.stays],
        "flags": {key: flags[key] for key in ("read", "engines", "techniques")},
        "notes": [note for note in notes if not note.startswith("tokens fit")],  # page.html has its own
        "most": {key: MOST[key] for key in ("users", "price")},
    }


def at_budgets(name: str) -> list[tuple[Spec, dict]]:
    """A method and its policies at every budget, or as it is if it has none."""
    has = METHODS[name].parameters.get("budget") is not None
    texts = [f"{name}:budget={percent / 100}" for percent in BUDGETS] if has else [name]
    return [(spec, policies(spec)) for spec in map(parse, texts)]


def model_entry(model: dict, methods: dict[str, list[tuple[Spec, dict]]]) -> dict:
    """A model's weights in bytes (all, those that a step reads, and those of its experts), and by context the
    operations of a prompt and every method's `row`s, one per budget."""
    known = [tokens for tokens in CONTEXTS if tokens <= (model["context"] or tokens)]
    return {
        "weights": weights(model),
        "read": weights(model, "step", "head"),
        "experts": [weights(model, "experts"), *(model["experts"] or [1, 1])],
        "prefill": {tokens: prefill_operations(model, tokens) for tokens in known},
        "rows": {
            tokens: {name: [row(*one, model, tokens) for one in each] for name, each in methods.items()}
            for tokens in known
        },
    }


def row(spec: Spec, made: dict, model: dict, tokens: int) -> list[float] | str:
    """Bytes on the device, on the host, moved and read, and the operations of a step, for one user. The
    reason where kvlab refuses the method."""
    try:
        cost = account(spec, made, model, tokens)
    except ValueError as error:
        return str(error)
    others = 0 if spec.name == "recompute" else step_operations(model)
    sizes = cost.device, cost.host, cost.moved, cost.read, cost.operations + others
    return [round(size) for size in sizes]

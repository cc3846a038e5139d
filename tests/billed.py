"""What the tests of the bill share: its data, a method's account, a model of the source texts."""

from kvlab.arithmetic import (
    SHAPES,
)
from kvlab.bill import data
from kvlab.bill.account import account, policies
from kvlab.spec import parse

MODELS, DEVICES = data.table("models")["models"], data.table("devices")["devices"]


def held(spec: str, model: dict, tokens: int):
    spec = parse(spec)
    return account(spec, policies(spec), model, tokens)


def shaped(name: str) -> dict:
    """A model of the source texts, as `describe` would have it."""
    shape = SHAPES[name]
    kind = {
        "heads": shape.kv_heads, "key": shape.head_dim, "value": shape.head_dim, "latent": False,
        "window": None, "reads": None, "index": 0, "state": 0, "scores": 2 * shape.hidden,
        "index_scores": 0, "shares": None,
    }  # fmt: skip
    blocks = 12 * shape.layers * shape.hidden**2
    rows = [["head", shape.vocabulary * shape.hidden, 16, "head"], ["blocks", blocks, 16, "step"]]
    return {
        "context": None,
        "layers": "A" * shape.layers,
        "kinds": {"A": kind},
        "weights": rows,
        "experts": None,
    }

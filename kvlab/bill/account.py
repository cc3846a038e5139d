"""Account: the bytes of a row's cache that a method holds, moves and reads, from its policies and a model.

The same policies that make a `KVCache` give the number of tokens kept (`Keep.limits`), the bits per number
(`Growing.bits_per_value`) and the tokens fetched (`Fetch`), so your own methods are counted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from ..arithmetic import causal_pairs, experts_read
from ..keep import KeepAll
from ..place import Device, Fetch
from ..spec import Spec, parse
from ..store import buffer_of


@dataclass(frozen=True)
class Account:
    """One row of tokens, all layers. Bytes held on the device (of what a host sends: one layer at a time) and
    on the host, moved over the link and read by the device in a step; operations of a step's attention.
    pages: the host's tokens stay on the device while they fit there. most: the bytes moved depend on the
    text, and the whole budget is counted; everything else is a lower bound."""

    device: float = 0.0
    host: float = 0.0
    moved: float = 0.0
    read: float = 0.0
    operations: float = 0.0
    pages: bool = False
    most: bool = False


def policies(spec: Spec) -> dict:
    """The keep, store and place of a method, buffers and all; for those that are no `KVCache`, {}.

    ValueError for parameters out of range, and for a link, which the bill takes from the device.
    """
    if "link" in spec.parameters:
        raise ValueError(f"method {spec.text!r}: the bill takes the link from the device; leave link= out")
    if spec.name == "recompute" or (spec.name == "padded" and not spec.parameters):
        return {}  # checked at no cost: the engine behind `padded` takes seconds to load
    try:
        made = spec.method.policies(**spec.parameters)
    except (ValueError, TypeError) as error:
        raise ValueError(f"method {spec.text!r}: {error}") from error
    if "cache" in made:
        return {}
    keep = made.get("keep") or KeepAll()
    store, place = buffer_of(made.get("store"), keep), made.get("place") or Device()
    return {"keep": keep, "store": store, "place": place}


def account(spec: Spec, made: dict, model: dict, tokens: int) -> Account:
    """The cost of `spec`, with its `policies`, for one row of `tokens` tokens. Nothing is rounded, and the
    memory of a keep or a table (some 8 bytes per token and head) is not counted. ValueError if kvlab would
    refuse the method on such layers."""
    if spec.name == "recompute":
        return Account(operations=prefill_operations(model, tokens))
    if spec.name == "padded":
        return _padded(spec, model, tokens)
    keep, store, place = made["keep"], made["store"], made["place"]
    store.suits(keep, place)
    kinds, fetch, context = model["kinds"], getattr(place, "fetch", Fetch()), model["context"]
    total = {"device": 0.0, "host": 0.0, "moved": 0.0, "read": 0.0, "operations": 0.0}
    largest, order, known, last = 0.0, 0, {}, {}
    attending = sum(kinds[letter]["heads"] > 0 for letter in model["layers"])
    for letter in model["layers"]:
        kind = kinds[letter]
        total["device"] += kind["state"]
        total["read"] += kind["state"]
        if kind["shares"]:  # reads what another layer holds
            total["read"] += last[kind["shares"]]["read"]
            total["operations"] += last[kind["shares"]]["operations"]
        if not kind["heads"]:
            continue
        limit, mine = _limit(keep, kind, tokens, order, attending), store.of(order, attending)
        first = getattr(fetch, "full_layers", 0)
        key = letter, limit, min(order, first + 1), mine  # layers that cost the same
        if key not in known:
            mine.check(kind["key"], kind["value"], kind["window"])
            known[key] = place.cost(Use(kind, limit, tokens, order, mine, context))
        part = last[letter] = known[key]
        for name in total:
            total[name] += part[name]
        largest, order = max(largest, part["staged"]), order + 1
    total["device"] += largest
    return Account(**total, pages=fetch.stays, most=fetch.at_most)


@dataclass(frozen=True)
class Use:
    """The argument of a place's `cost`: a layer of a model (`describe`) with `held` of `tokens` tokens in a
    store. order: among the layers that attend. stated: the context that the model states (None: none)."""

    kind: dict
    held: float
    tokens: int
    order: int
    store: object
    stated: int | None

    @property
    def context(self) -> int:
        """The tokens for which a buffer of fixed size has room by default."""
        return self.stated or self.tokens

    @property
    def reads(self) -> float:
        """Tokens whose K and V a query reads."""
        return min(self.held, self.kind["reads"] or self.held)

    @property
    def index(self) -> float:
        """Bytes of the model's own index keys."""
        return self.held * self.kind["index"] * 2

    def size(self, slots: float) -> float:
        """Bytes of so many slots."""
        shape = self.kind["heads"], max(self.held, 1)
        bits = sum(self.kind[x] * self.store.bits_per_value((*shape, self.kind[x])) for x in ("key", "value"))
        return slots * self.kind["heads"] * bits / 8


def bytes_per_token(model: dict, token: int) -> float:
    """Bytes in 16 bits that a row's token number `token` (from 1) adds to a cache that holds all: less once
    windows are full."""
    spec = parse("full")
    made = policies(spec)
    now, before = (account(spec, made, model, tokens).device for tokens in (token, token - 1))
    return now - before


def seen(kind: dict, tokens: int) -> int:
    """Tokens that a layer needs between two steps: W - 1 of a window of W."""
    return min(tokens, kind["window"] - 1) if kind["window"] else tokens


def _limit(keep, kind: dict, tokens: int, order: int, layers: int) -> float:
    """Tokens that stay in a layer, mean over its heads."""
    if not keep.evicts:
        return seen(kind, tokens)
    sizes = {"kv_heads": kind["heads"], "head_dim": kind["key"], "value_dim": kind["value"]}
    shape = SimpleNamespace(layers=layers, **sizes)
    layer = SimpleNamespace(lengths=[tokens], local=kind["window"], order=order, shape=shape)
    return min(keep.limits(layer)[0], seen(kind, tokens))


def _padded(spec: Spec, model: dict, tokens: int) -> Account:
    """(1 + spare part) * (S - 1) rows in every layer (QC AI Research, n.d.), of which S - 1 are read."""
    given = {**spec.method.parameters, **spec.parameters}
    length = given["length"] or model["context"] or tokens
    part = 0.5 if given["extra"] is None else given["extra"]
    spare = {"double": 1, "compromise": part}.get(given["policy"], 0)
    plain = ("window", "index", "state", "shares", "latent")
    if any(kind[name] for kind in model["kinds"].values() for name in plain):
        raise ValueError("a static graph knows full attention alone")
    rows, bits = length - 1, 8 if given["numbers"] in ("int8", "integers") else 16
    layers = list(_layers(model))
    numbers = sum(kind["heads"] * (kind["key"] + kind["value"]) for kind in layers)
    row_bytes = numbers * bits / 8
    return Account(
        device=(1 + spare) * rows * row_bytes, read=rows * row_bytes,
        operations=2 * rows * sum(kind["scores"] for kind in layers),
    )  # fmt: skip


def weights(model: dict, *when: str) -> float:
    """Bytes of a model's weights; with `when`, of those that are read then (see `describe`)."""
    return sum(count * bits / 8 for _, count, bits, read in model["weights"] if not when or read in when)


def step_weights(model: dict, rows: int) -> float:
    """The least bytes of weights that a step of `rows` rows reads: of experts, those that some row takes."""
    read = weights(model, "step", "head")
    if model["experts"]:
        read += weights(model, "experts") * experts_read(*model["experts"], rows) / model["experts"][0]
    return read


def step_operations(model: dict) -> float:
    """Operations of one token of a step without attention: two for every parameter it meets."""
    return 2 * (_met(model) + _parameters(model, "head"))


def prefill_operations(model: dict, tokens: int) -> float:
    """Operations of a prompt of `tokens` tokens: two for every parameter that a token meets, the head for the
    last one alone, and two for every multiply-add of the pairs that attention scores."""
    pairs = 0
    for kind in _layers(model):
        limit = min(kind["window"] or tokens, kind["reads"] or tokens)
        pairs += kind["scores"] * causal_pairs(tokens, limit)
        pairs += kind["index_scores"] * causal_pairs(tokens, kind["window"])
    return 2 * (tokens * _met(model) + _parameters(model, "head") + pairs)


def _layers(model: dict) -> Iterator[dict]:
    yield from (model["kinds"][letter] for letter in model["layers"])


def _parameters(model: dict, when: str) -> int:
    return sum(count for _, count, _, read in model["weights"] if read == when)


def _met(model: dict) -> float:
    """Parameters of the blocks that one token meets."""
    experts, taken = model["experts"] or (1, 1)
    return _parameters(model, "step") + _parameters(model, "experts") * taken / experts

"""What a row holds by definition, of methods that say it of the whole history.

`sinks` and `duo` say it by positions alone. Of a prompt every layer's queries, keys and values are known
without a cache, since compression comes after it. So what it leaves is known, and what later tokens do to it
where they all stay, or where only their number counts.
"""

import functools

import torch
from families.profiles import RECENT, SINKS, THRESHOLD, profiled
from reference.definitions import attention, keep
from safetensors.torch import load_file

from kvlab.attention import recorded
from kvlab.spec import parse


class Turn(tuple):
    """The tokens of a pass that was a later turn."""


# Not LagKV: in blocks of two a softmax is 0 or 1 but for rounding, so that tokens tie in fp32, not in fp64.
ONCE = ("snapkv", "keydiff", "keynorm", "expected", "random")


def held(spec: str, kind: str, model, row) -> list | None:
    """Positions by layer and KV head of a row, after its prompt and all passes; None: no definition says."""
    parsed, tokens = parse(spec), len(row.text)
    given = parsed.method.parameters | parsed.parameters
    turns = any(isinstance(part, Turn) for part in row.passes) and parsed.name != "duo"
    if kind == "window" or given.get("every") or given.get("chunk", 1) != 1 or turns:
        return None
    limit = keep.budget(given.get("budget", 1), len(row.prompt))
    if parsed.name == "sinks":
        layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
        return [[keep.sinks(tokens, limit, given["sinks"])] * heads] * layers
    if parsed.name == "duo":
        return _duo(spec, model, tokens, given["heads"])
    if parsed.name == "kvzap" and not row.passes:  # of later tokens no keys are known
        return _kvzap(spec, model, row.prompt)
    if parsed.name in ONCE and len(row.prompt) > given.get("sinks", 0):
        later = list(range(len(row.prompt), tokens))
        of_prompt = _of_prompt(spec, row.prompt, limit, model)
        return [[[*mine, *later] for mine in layer] for layer in of_prompt]
    return None


def _profile(spec: str, model) -> dict:
    """The tensors of the profile that this model was given."""
    return load_file(parse(profiled(spec, model)).parameters["profile"])


def _duo(spec: str, model, tokens: int, heads: float) -> list:
    gates = _profile(spec, model)["gates"].tolist()
    order = sorted((-gate, layer, head) for layer, row in enumerate(gates) for head, gate in enumerate(row))
    whole = {(layer, head) for _, layer, head in order[: round(heads * len(order))]}
    held = [*range(tokens)]
    return [
        [keep.duo(held, (layer, head) in whole, SINKS, RECENT) for head in range(len(row))]
        for layer, row in enumerate(gates)
    ]


@functools.lru_cache(64)
def _kvzap(spec: str, model, prompt: tuple) -> list:
    tensors, size = _profile(spec, model), model.config.head_dim
    frequencies, found = [10000.0 ** (-2 * i / size) for i in range(size // 2)], []
    for layer, weights, biases in zip(
        recorded(model, torch.tensor([prompt])), tensors["weight"], tensors["bias"], strict=True
    ):
        keys, values = layer.keys[0].double(), layer.values[0].double()
        found.append([])
        for weight, bias in zip(weights.double(), biases.double(), strict=True):
            held = range(len(prompt))
            told = [keep.surrogate(keys[:, p], values[:, p], p, frequencies, weight, bias) for p in held]
            found[-1].append(keep.kvzap([*held], told.__getitem__, 0, THRESHOLD, RECENT))
    return found


@functools.lru_cache(64)
def _of_prompt(spec: str, prompt: tuple, limit: int, model) -> list:
    """What stays of a prompt, by layer and head."""
    parsed, found = parse(spec), []
    given = parsed.method.parameters | parsed.parameters
    limit, size = min(limit, len(prompt)), model.config.head_dim
    frequencies = [10000.0 ** (-2 * i / size) for i in range(size // 2)]
    for index, layer in enumerate(recorded(model, torch.tensor([prompt]))):
        all_keys, all_values = layer.keys[0].double(), layer.values[0].double()
        groups = layer.query[0].double().unflatten(0, (len(all_keys), -1))
        found.append([])
        for head, (queries, keys, values) in enumerate(zip(groups, all_keys, all_values, strict=True)):
            if len(prompt) <= limit:
                chosen = list(range(len(prompt)))
            elif parsed.name == "snapkv":
                first = len(prompt) - given["window"]
                votes = attention.received(queries, keys, layer.scaling, first).tolist()
                chosen = keep.snapkv(votes, limit, given["window"], given["kernel"])
            elif parsed.name == "keydiff":
                chosen = keep.keydiff(keys, limit)
            elif parsed.name == "keynorm":
                chosen = keep.keynorm(keys, limit)
            elif parsed.name == "expected":
                future, first = given["future"], given["sinks"]
                about = frequencies, layer.scaling, future, limit, first
                chosen = keep.expected(queries, keys, values, *about)
            else:
                chosen = keep.random(len(prompt), head, index, given["seed"], limit)
            found[-1].append(chosen)
    return found

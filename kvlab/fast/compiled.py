"""Compiled: a decode step that runs compiled, around any kvlab cache; its body for Llama-shaped models."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..decode import Stepper
from ..errors import first_line
from ..interface import told
from ..models import cache_name
from ..models.stamp import Stamp
from ..parameters import check_one_of
from ..visibility import CAUSAL, Visibility
from .forward import Replaced, answer, named
from .narrow import WEIGHTS, NarrowEmbedding, NarrowLinear, narrow, weights_of
from .suited import Unsuited, check

TABLE = 1024  # positions whose rotary embedding is computed at a time
TOLERANCE = 1e-4  # of the largest logit
NOTHING = np.empty(0, np.float32)
LINEAR, EMBEDDING = (nn.Linear, NarrowLinear), (nn.Embedding, NarrowEmbedding)


def compiled(model, weights: str = "fp32"):
    """Let decode steps of this prepared model run compiled, where they can; returns the model.

    They can for Llama-shaped models in fp32 on a CPU (`Body`), with a `KVCache` and as many rows as
    `block.py` multiplies faster than torch. Prompts, and everything else that a forward is asked for, go
    through the model's own modules. Every step computes with the modules, weights and numbers that the model
    has then (`Stamp`): if any has changed, the body is read again and, unless only weights have, tried again.
    The parameters lose their gradients: `requires_grad_` brings these back, from the model's own modules. A
    model whose steps cannot be compiled, for example while a foreign hook is on a module, decodes with the
    eager engine, and a warning says why.

    weights: "fp32" as they are, or "bf16" or "int8": then the model's linear layers hold theirs so from now
    on (`narrow`), for prompts too, which widen them layer by layer. ValueError for another name, and for a
    model that is not Llama-shaped or has them already.
    """
    check_one_of("weights", weights, WEIGHTS)
    if isinstance(model.forward, Forward) and weights in ("fp32", weights_of(model)):
        model.forward.current(model)
        return model
    forward = Forward(model)
    if weights != "fp32":
        _narrowed(model, weights)
    if forward.current(model) is not None:
        model.requires_grad_(False)  # else every step outside of no_grad would be eager
        model.forward = forward
    return model


def _narrowed(model, weights: str) -> None:
    """Hold the weights of a Llama-shaped model so. ValueError, and nothing has changed, for any other one."""
    if (held := weights_of(model)) != "fp32":
        raise ValueError(f"weights={weights!r}: the model holds them in {held} already; load it again")
    try:
        stamp = Stamp(model)
        check(model, stamp)
        Body(model)
    except (Unsuited, AttributeError, ImportError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"weights={weights!r}: only compiled code for Llama-shaped models on a CPU reads them, and "
            f"{type(model).__name__} cannot use it: {first_line(error)}"
        ) from error
    narrow(model, weights)


def engine_of(model, rows: int = 1) -> str:
    """By which engine the model decodes as it is now: "eager", "compiled" or "graph"; narrow weights are
    named beside it, as in "compiled, int8 weights", and where steps have up to so many rows, how few of them
    are compiled, as in "compiled, eager above 8 rows"."""
    forward, weights = model.forward, weights_of(model)
    if type(forward).__module__.endswith(".graph"):
        return "graph"
    body = forward.current(model) if isinstance(forward, Forward) else None
    named = "eager" if body is None else "compiled"
    named += "" if weights == "fp32" else f", {weights} weights"
    if body is not None and rows > body.rows:
        named += f", eager above {body.rows} row{'s' if body.rows > 1 else ''}"
    return named


class Forward(Replaced):
    """A decode step goes through the compiled body, all else through the model's own forward.

    body: of the model as it was at `stamp`; None where it could not be compiled, for the reason `why`.
    """

    engine, body, why = "compiled", None, None

    def step_of(self, model, cache) -> Body | None:
        return self.current(model)

    def current(self, model) -> Body | None:
        """The body of the model as it is now; None, after a warning, where there is none."""
        before = self.stamp
        if before is not None and before.same(model):
            return self.body
        body, why = None, None
        try:
            body = self._read(model, Stamp(model))
        except Unsuited as error:
            why = str(error)
        if why is not None and why != self.why:
            warnings.warn(f"{type(model).__name__} decodes with the eager engine: {why}", stacklevel=3)
        self.body, self.why, self.stamp = body, why, Stamp(model)  # a first pass may have changed something
        return body

    def _read(self, model, stamp: Stamp) -> Body:
        """A body of the model as it is now, with the model's own logits. Unsuited where there is none."""
        check(model, stamp)
        before = self.stamp  # of a model that was tried with other numbers at most?
        tried = before is not None and before.same_parts(model) and before.forms == stamp.forms
        try:
            body = Body(model)
            off = 0.0 if tried and self.body is not None else _difference(model, body)
        except (AttributeError, ImportError, TypeError, ValueError, RuntimeError) as error:
            raise Unsuited(first_line(error)) from None
        if not off <= TOLERANCE:
            raise Unsuited(f"its logits would be {off:.1g} off")
        return body


class Body:
    """A Llama-shaped model's weights, as the compiled code takes them. Unsuited for any other model.

    rows: of a step, at most; with more, torch's matrix products are faster, even those of narrow weights,
    which the model's modules widen at every step.
    """

    def __init__(self, model):
        config, inner = model.config, getattr(model, "model", None)
        _are(model, {"model": None, "lm_head": LINEAR})
        parts = {"embed_tokens": EMBEDDING, "layers": (nn.ModuleList,), "norm": None, "rotary_emb": None}
        _are(inner, parts)
        if len(inner.layers) != config.num_hidden_layers:
            raise Unsuited("its configuration says another number of layers")
        self.attentions = [layer.self_attn for layer in inner.layers]
        self.embedding, self.rotary = inner.embed_tokens, inner.rotary_emb
        self.kv_heads, self.heads = config.num_key_value_heads, config.num_attention_heads
        self.head_dim = self.attentions[0].head_dim
        self.eps = _eps(inner.norm)
        into, out_of = zip(*map(self._weights, inner.layers), strict=True)
        last = _array(inner.norm.weight), _linear(model.lm_head)
        self.into, self.last = [*map(_counted, into)], _counted((*out_of[-1], *last))
        self.out_of = [*map(_counted, out_of[:-1])]
        self.vocabulary = len(last[1][0])
        self.width = 2 * (len(last[0]) + max(len(linear[0]) for after in out_of for linear in after[3:5]))
        self.rows = 8 if weights_of(model) == "fp32" else 32
        self.rotations = {}  # position -> cos and sin of `TABLE` from there on

        from . import all_layers, block, team  # compiled by numba, which may not be there

        self.code, self.together = block, team.together
        self.whole = all_layers.AllLayers(self, into, out_of, last)

    def _weights(self, layer) -> tuple[tuple, tuple]:
        """A layer's arrays before and after its attention, as `block.into` and `block.out_of` take them."""
        _are(layer, dict.fromkeys(("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")))
        attention, mlp = layer.self_attn, layer.mlp
        projections = {f"{name}_proj": LINEAR for name in "qkvo"}
        headed = hasattr(attention, "q_norm")
        _are(attention, projections | ({"q_norm": None, "k_norm": None} if headed else {}))
        _are(mlp, {"gate_proj": LINEAR, "up_proj": LINEAR, "down_proj": LINEAR, "act_fn": None})
        heads = (attention.q_norm, attention.k_norm) if headed else ()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, *heads):
            if _eps(norm) != self.eps:
                raise Unsuited("its norms differ")
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        per_head = [_array(norm.weight) for norm in heads] or [NOTHING, NOTHING]
        after = map(_linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return (
            (_array(layer.input_layernorm.weight), self.eps, *map(_linear, qkv), *per_head),
            (_linear(attention.o_proj), _array(layer.post_attention_layernorm.weight), self.eps, *after),
        )

    def takes(self, input_ids, cache, **others) -> bool:
        """Whether it serves such a step: of so many rows, in layers that see all that they hold."""
        return len(input_ids) <= self.rows and all(layer.local is None for layer in cache.attending)

    def step(self, input_ids, cache, attention_mask=None, position_ids=None, **others):
        """As the model's own forward, for one new token per row."""
        rows = len(input_ids)
        visibility = CAUSAL if attention_mask is None else Visibility(attention_mask.bool())
        if position_ids is None:
            position_ids = torch.full((1, 1), cache.get_seq_length(), device="cpu")
        cos, sin = self._rotations(position_ids.expand(rows, 1)[:, 0])
        x = self._embedded(input_ids)
        code, room = self.code, np.empty(rows * self.width, np.float32)
        padded = attention_mask is not None and not (
            attention_mask.shape[1] == cache.get_seq_length() + 1 and bool(attention_mask.all())
        )
        found = torch.empty(rows, 1, self.vocabulary, dtype=torch.float32, device="cpu")
        said = found[:, 0].numpy()
        if padded or not self.whole.step(cache, x, cos, sin, room, said):
            x = self._embedded(input_ids)
            attended = self._layer_by_layer(cache, x, cos, sin, room, visibility)
            numbers, given = self.last
            self.together(rows * numbers, code.logits, attended, x, *given, said, room)
        return answer(found, cache)

    def _embedded(self, input_ids: Tensor) -> np.ndarray:
        """The input of the first layer, `[rows, hidden]`."""
        return self.embedding.forward(input_ids[:, 0]).detach().numpy()

    def _layer_by_layer(self, cache, x, cos, sin, room, visibility: Visibility) -> np.ndarray:
        """x `[rows, hidden]` becomes the input of the last layer; returns what that attends to, `[rows, heads
        * head_dim]`, whatever the cache does in each layer."""
        code, rows, heads = self.code, len(x), (self.heads, self.kv_heads, self.kv_heads)
        shapes = [(rows, count, 1, self.head_dim) for count in heads]
        for index, attention in enumerate(self.attentions):
            # A cache may keep what it was given, so nothing is written twice.
            q, k, v = (torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes)
            numbers, given = self.into[index]
            new = q.numpy(), k.numpy(), v.numpy()
            self.together(rows * numbers, code.into, x, *given, cos, sin, *new, room)
            held, _ = cache.layers[index].update(k, v)
            attended = held.attend(q, visibility, attention.scaling).reshape(rows, -1).numpy()
            if index + 1 == len(self.attentions):
                return attended
            numbers, given = self.out_of[index]
            self.together(rows * numbers, code.out_of, attended, x, *given, room)

    def _rotations(self, positions: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin for positions `[rows]`, `[rows, channels]` each, as the model's own module has them."""
        at = positions.numpy()  # whose numbers are read at once: an operation of torch takes microseconds
        begin = int(at[0]) // TABLE * TABLE
        if len(at) > 1 and (at.min() < begin or at.max() >= begin + TABLE):
            return self._rotated(positions)
        if begin not in self.rotations:
            self.rotations[begin] = self._rotated(torch.arange(begin, begin + TABLE, device="cpu"))
        cos, sin = self.rotations[begin]
        if len(at) == 1:
            place = int(at[0]) - begin
            return cos[place : place + 1], sin[place : place + 1]
        return cos[at - begin], sin[at - begin]

    def _rotated(self, positions: Tensor) -> tuple[np.ndarray, np.ndarray]:
        like = torch.empty(0, dtype=torch.float32, device="cpu")  # the module answers in its dtype
        return tuple(part[0].numpy() for part in self.rotary(like, positions[None]))


def _are(module, expected: dict) -> None:
    """Unsuited where a module has other children than these, by name and classes; None: of any class."""
    found = {} if module is None else dict(module.named_children())
    wrong = found.keys() ^ expected.keys()
    wrong |= {name for name, kinds in expected.items() if kinds and type(found.get(name)) not in kinds}
    if wrong:
        raise Unsuited(f"it is no Llama-shaped model ({type(module).__name__}: {', '.join(sorted(wrong))})")


def _eps(norm) -> np.float32:
    found = getattr(norm, "variance_epsilon", None)
    if found is None:
        raise Unsuited(f"{type(norm).__name__} is no root mean square norm that it knows")
    return np.float32(found)


def _array(weight: Tensor) -> np.ndarray:
    return weight.detach().contiguous().numpy()


def _linear(linear: nn.Linear | NarrowLinear) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(Weight, scale, bias), as `block._product` takes them."""
    held = (linear.codes, linear.scale) if isinstance(linear, NarrowLinear) else (linear.weight, None)
    if not held[0].is_contiguous():
        raise Unsuited("its weights are not contiguous")
    parts = *held, linear.bias
    return tuple(NOTHING if part is None else _array(part) for part in parts)


def _counted(given: tuple) -> tuple[int, tuple]:
    """(How many numbers the weights of linear layers among these arguments are, the arguments)."""
    return sum(one[0].size for one in given if isinstance(one, tuple)), given


@torch.no_grad()
def _difference(model, body: Body) -> float:
    """How far the compiled body's logits are from the model's own, of its largest logit; Unsuited where its
    layers see by a rule. It is tried at the model's last position, too: some models scale by it."""
    ids = torch.arange(7, 12, device="cpu")[None] % model.config.vocab_size
    own, found = type(model).forward.__get__(model), []
    before, name = vars(model).get("forward"), cache_name(model)
    for step in (own, lambda **given: body.step(**named(given))):
        model.forward = own
        try:
            stepper = Stepper(model, KVCache(model))
            with told() as rules:
                stepper.feed(ids)
            if not all(each.known and each.rule is None for each in rules):
                raise Unsuited("its layers see by a rule of their own")
            model.forward = step
            said = [stepper.feed(ids[:, i : i + 1], last=True) for i in range(3)]
            last = torch.tensor([[model.config.max_position_embeddings - 1]], device="cpu")
            said.append(step(input_ids=ids[:, :1], **{name: stepper.cache}, position_ids=last).logits[:, -1])
            found.append(torch.cat(said))
        finally:
            del model.forward
            if before is not None:
                model.forward = before
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())

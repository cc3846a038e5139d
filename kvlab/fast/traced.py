"""Traced: a decode step of a model of any shape, its own forward compiled by torch around any kvlab cache."""

from __future__ import annotations

import copy
import inspect
import os
import shutil
import sys
import types
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from .. import scratch
from ..attention import recorded
from ..cache import KVCache
from ..errors import first_line
from ..visibility import CAUSAL, Visibility
from .stamp import HOOKED, Stamp
from .suited import Unsuited

NAME = "kvlab_step"  # of the attention function with which a model is traced
BACKEND = "inductor"  # of torch.compile
COMPILERS = ("clang++", "g++") if sys.platform == "darwin" else ("g++", "clang++", "cl")
PROMPT = 5  # tokens of the pass that shows what every layer may see

_running: ContextVar[tuple] = ContextVar(
    "kvlab_running"
)  # (cache, visibility per layer) of the step that runs


class Traced:
    """A model's own forward on one token of one row, as one graph of `torch.compile`. Unsuited where a layer
    holds something else than K and V or sees by a rule that is no window, and where torch does not take it.

    Traced is a twin of the model that shares its parameters. In the graph stands an opaque operator for each
    layer's attention, which hands q, k and v to the cache. The graph is this object's alone (`_alone`) and
    has no guards: `Stamp` tells when the model has become another one.
    """

    rows = 1  # that it takes at most

    def __init__(self, model, stamp: Stamp):
        if "position_ids" not in inspect.signature(type(model).forward).parameters:
            raise Unsuited("its forward takes no positions")
        if BACKEND == "inductor" and not compiler():
            raise Unsuited("torch.compile needs a C++ compiler, and found none (install g++; CXX names one)")
        self.sees = _sees(model)
        self.form = _form(stamp)
        self.parameters = stamp.parameters
        self.ready = False  # torch compiles at the first call
        twin = _twin(model)

        def step(ids, positions):
            return twin(input_ids=ids, position_ids=positions, use_cache=False).logits

        scratch.set_up()
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        if BACKEND == "inductor":
            options["cpp.cxx"] = (compiler(),)  # torch itself takes the whole of $CXX for a program's name
            options["cpp.dynamic_threads"] = True  # as many as torch has in a step, not when it was compiled
        self.graph = torch.compile(
            _alone(step), fullgraph=True, dynamic=False, backend=BACKEND, options=options
        )

    def still(self, stamp: Stamp) -> bool:
        """Whether the graph is of a model with these weights, whatever their numbers are."""
        same = len(stamp.parameters) == len(self.parameters)
        return same and all(map(_is, stamp.parameters, self.parameters)) and _form(stamp) == self.form

    def knows(self, visibility: Visibility) -> bool:
        """Whether its layers may see by this rule: which one, `_sees` has asked."""
        return visibility.known

    def takes(self, input_ids, attention_mask=None, position_ids=None, **others) -> bool:
        """Whether the graph serves such a step: of one row, whose position does not hang on its padding."""
        return len(input_ids) <= self.rows and (attention_mask is None or position_ids is not None)

    @torch.no_grad()
    def step(self, input_ids, past_key_values, attention_mask=None, position_ids=None, **others):
        """As the model's own forward, for one new token."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        cache = past_key_values
        padding = None if attention_mask is None else attention_mask.bool()
        plain = CAUSAL if padding is None else Visibility(padding)
        asked = {rule: plain if rule is None else Visibility(padding, *rule) for rule in set(self.sees)}
        if position_ids is None:
            position_ids = torch.full((1, 1), cache.get_seq_length())
        token = _running.set((cache, [asked[rule] for rule in self.sees]))
        try:
            logits = self.graph(input_ids.long(), position_ids.long())
        except Exception as error:
            if self.ready:
                raise
            raise Unsuited(f"torch.compile does not take it ({_said(error)})") from None
        finally:
            _running.reset(token)
        self.ready = True
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def compiler() -> str | None:
    """Where the C++ compiler is that torch.compile shall use; None where there is none. Options behind a
    program's name in $CXX, as in "g++ -O1", are left out: torch has its own."""
    named = os.environ.get("CXX", "")
    wanted = (named, named.split()[0]) if named.strip() else COMPILERS
    return next(filter(None, map(shutil.which, wanted)), None)


def _sees(model) -> list[tuple | None]:
    """By which rule every layer sees, `(rule, local)` as in `Visibility`; None: all that is not later."""
    held = KVCache(model)
    if not held.fillable:
        raise Unsuited("its layers hold something else than K and V")
    found = [given.visibility for given in recorded(model, torch.zeros(1, PROMPT, dtype=torch.long))]
    if len(found) != len(held.layers) or not all(each.rule is None or _slides(each) for each in found):
        raise Unsuited("its layers see by a rule of their own")
    return [None if each.rule is None else (each.rule, each.local) for each in found]


def _slides(visibility: Visibility) -> bool:
    """Whether it is a sliding window of `local` tokens, the same wherever it stands, and no chunk."""
    if (local := visibility.local) is None:
        return False
    queries = torch.tensor([local - 1, local, local + 1, 2 * local + 1])
    keys = torch.arange(2 * local + 2)
    near = (keys <= queries[:, None]) & (keys > queries[:, None] - local)
    return torch.equal(visibility.allowed(queries[None], keys[None, None])[0, 0], near)


def _twin(model):
    """A copy of the model with the same parameters, which attends through the operator and has no hooks."""
    _register()
    twin = copy.deepcopy(model, {id(each): each for each in model.parameters()})
    vars(twin).pop("forward", None)
    for module in twin.modules():
        for name in HOOKED:
            vars(module)[name].clear()
    twin.set_attn_implementation(NAME)
    return twin


def _alone(function):
    """The function with a code object of its own: torch keeps graphs by code, and without guards the graph of
    another model would be taken for this one's."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _form(stamp: Stamp) -> list[tuple]:
    return [(each.shape, each.stride(), each.dtype) for each in stamp.parameters]


def _is(one, other) -> bool:
    return one is other


def _said(error: Exception) -> str:
    """In one line, what torch says first of why it has given up."""
    return first_line(getattr(error, "inner_exception", error)).rstrip(":. ")


# The operator.


def _attend(query, keys, values, sinks, layer: int, scaling: float, softcap: float | None) -> Tensor:
    """The graph writes q, k and v `[1, heads or kv_heads, 1, head_dim]` into the same memory at every step,
    and a cache may keep what it is given: it gets copies."""
    cache, sees = _running.get()
    held, _ = cache.update(keys.clone(), values.clone(), layer)
    out = held.attend(query.clone(), sees[layer], scaling, softcap, sinks)
    return out.transpose(1, 2).contiguous()


def _shaped(query, keys, values, sinks, layer, scaling, softcap) -> Tensor:
    batch, heads, count, _ = query.shape
    return query.new_empty(batch, count, heads, values.shape[3])


def _calls(module, query, key, value, attention_mask, *, scaling=None, softcap=None, s_aux=None, **others):
    """The attention function of transformers' AttentionInterface with which a model is traced."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = query, key, value, s_aux, module.layer_idx, scaling, softcap
    return torch.ops.kvlab.attend(*given), None


@cache
def _register() -> torch.library.Library:
    """Define the operator, and enter what calls it into transformers' interfaces. The operator's library must
    be held: it goes with it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    library = torch.library.Library("kvlab", "DEF")
    library.define(
        "attend(Tensor query, Tensor keys, Tensor values, Tensor? sinks, int layer, float scaling, "
        "float? softcap) -> Tensor"
    )
    library.impl("attend", _attend, "CPU")
    torch.library.register_fake("kvlab::attend", _shaped, lib=library)
    AttentionInterface.register(NAME, _calls)
    AttentionMaskInterface.register(NAME, lambda **given: None)  # what a layer may see, its operator is told
    return library

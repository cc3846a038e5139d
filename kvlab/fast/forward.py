"""Forward: an engine's own in the place of a model's, for the decode steps that the engine serves."""

from __future__ import annotations

import functools
import inspect
import weakref

import torch
from torch import Tensor

from ..cache import KVCache
from ..models.passes import NAMES
from ..models.stamp import Stamp
from ..modes import keeping

GIVEN = {  # arguments of a forward that the compiled body knows; any other one, and it is eager
    "input_ids", "attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep",
    "return_dict", "cache_position",
}  # fmt: skip


class Replaced:
    """A model's forward that hands decode steps to an engine, and all else to the model's own.

    engine: its name. stamp: what the model was made of when the engine last looked.
    """

    engine = ""

    def __init__(self, model):
        self.model = weakref.ref(model)
        self.stamp: Stamp | None = None
        own = type(model).forward.__get__(model)
        functools.update_wrapper(self, own, updated=())
        del self.__wrapped__  # which holds the model
        self.__signature__ = inspect.signature(own)

    def __deepcopy__(self, memo) -> Replaced:
        return type(self)(memo[id(self.model())])  # its modules are not there yet

    def __reduce__(self):
        raise TypeError(
            f"a model with the {self.engine} engine is not pickled: save_pretrained writes its weights"
        )

    def __call__(self, *args, **kwargs):
        model = self.model()
        if len(args) == 1 and "input_ids" not in kwargs:
            args, kwargs = (), {"input_ids": args[0], **kwargs}
        given = named(kwargs)
        if not args and given.keys() <= GIVEN and is_step(model, **given):
            found = self.step_of(model, given["cache"])
            if found is not None and found.takes(**given):
                with keeping():  # buffers grow in a step, too
                    return found.step(**given)
        return type(model).forward(model, *args, **kwargs)

    def step_of(self, model, cache):
        """What serves this cache's next step by `takes` and `step`; None where the model does."""
        raise NotImplementedError


def named(given: dict) -> dict:
    """A forward's arguments, the cache under one name for all versions of transformers."""
    return {"cache" if name in NAMES else name: value for name, value in given.items()}


def answer(logits: Tensor, cache):
    """As a model's own forward answers."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    name = next(name for name in NAMES if name in CausalLMOutputWithPast.__dataclass_fields__)
    return CausalLMOutputWithPast(logits=logits, **{name: cache})


def is_step(model, input_ids=None, cache=None, attention_mask=None, use_cache=True,
            return_dict=True, **others) -> bool:  # fmt: skip
    """Whether a forward is asked for a decode step that the compiled code serves."""
    if input_ids is None or type(cache) is not KVCache or cache.attending[0].seen == 0:
        return False  # a class of one's own may have another `update`
    if input_ids.shape[1] != 1 or use_cache is False or not return_dict:
        return False
    if torch.is_autocast_enabled(input_ids.device.type):  # modules compute in another dtype
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        return False
    if not (attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2)):
        return False
    if any(layer.timeline is not None for layer in cache.attending):
        return False
    fetch = getattr(cache.attending[0].place.policy, "fetch", None)
    return fetch is None or not fetch.speculates  # else its places want the input of every block

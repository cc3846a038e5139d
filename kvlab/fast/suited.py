"""Suited: the requirements of any compiled step on a model, or one line that says why not."""

from __future__ import annotations

import torch

from ..attention import recorded
from ..models.stamp import Stamp
from ..visibility import Visibility

FIXED_ROTARY = ("default", "linear", "llama3", "yarn")  # kinds that do not depend on the text's length
PROMPT = 5  # tokens of the pass that shows what every layer may see


class Unsuited(Exception):
    """Why a model's steps are not compiled: one line."""


class Later(Unsuited):
    """It may be otherwise in a later step."""


def check(model, stamp: Stamp) -> None:
    """Unsuited for a model that nothing here compiles. stamp: of this model as it is now."""
    numbers = [p for p in stamp.parameters if p.is_floating_point()]  # what is none: see `narrow.py`
    if any(p.dtype != torch.float32 for p in numbers) or any(
        p.device.type != "cpu" for p in stamp.parameters
    ):
        raise Unsuited("it compiles models in fp32 on a CPU")
    if any(not of_ours(hook) for hook in stamp.hooking):
        raise Unsuited("a hook is on a module of it")
    if any("forward" in vars(module) for module in stamp.inside):
        raise Unsuited("a module of it has a forward of its own")
    check_configuration(model.config)


def check_configuration(config) -> None:
    """Unsuited if a model's configuration asks for an answer that no engine gives, or rotates by the text's
    length."""
    if any(getattr(config, f"output_{what}", False) for what in ("hidden_states", "attentions")):
        raise Unsuited("its configuration asks for more than logits")
    if getattr(config, "return_dict", True) is not True:
        raise Unsuited("its configuration asks for another kind of forward")
    rotation = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if rotation.get("rope_type", "default") not in FIXED_ROTARY:
        raise Unsuited("its rotary embedding depends on the text's length")


def check_windows(model, layers: int) -> None:
    """Unsuited if one of so many layers sees by any rule except a sliding window."""
    ids = torch.zeros(1, PROMPT, dtype=torch.long, device="cpu")
    found = [given.visibility for given in recorded(model, ids)]
    if len(found) != layers or not all(each.rule is None or slides(each) for each in found):
        raise Unsuited("its layers see by a rule of their own")


def slides(visibility: Visibility) -> bool:
    """Whether it is a sliding window of `local` tokens, the same at every position, and no chunk."""
    if (local := visibility.local) is None:
        return False
    queries = torch.tensor([local - 1, local, local + 1, 2 * local + 1], device="cpu")
    keys = torch.arange(2 * local + 2, device="cpu")
    near = (keys <= queries[:, None]) & (keys > queries[:, None] - local)
    return torch.equal(visibility.allowed(queries[None], keys[None, None])[0, 0], near)


def of_ours(hook) -> bool:
    """Whether a hook may go uncalled: those of transformers serve outputs that no such step is asked for, and
    of kvlab's own a step's cache and the layers' timelines tell."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.startswith(("kvlab.", "transformers."))

"""Choosing: the processing of logits by transformers' `generate`, as for lm-eval's own model.

A model's `generation_config` may name several end tokens, and processors of the logits: a repetition
penalty, tokens that are suppressed, a least number of new ones. `generate` makes them all and hands them to
a loop of one's own (`custom_generate`), so nothing of that is written here a second time.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import GenerationMode

from ..core.errors import Problem, one_line

NOT_APPLIED = ("guidance_scale", "max_time", "watermarking_config")  # they need more than logits


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen after one prompt: processors, end tokens, and how many tokens at most."""

    prompt: list[int]
    processors: LogitsProcessorList
    ends: frozenset[int]
    limit: int

    def next(self, made: list[int], logits: Tensor) -> int:
        """The token after those made; logits `[V]`."""
        device = logits.device
        ids = torch.tensor([[*self.prompt, *made]], device=device)
        return int(self.processors(ids, logits[None].clone()).argmax())


def choice(model, prompt: list[int], limit: int, device, said: dict) -> Choice:
    """What `model.generate` would make of its generation_config for this prompt alone.

    limit: tokens, unless generation_config has max_new_tokens, which lm-eval's own model prefers. said: what
    else it is told. Raises Problem for a generation_config that asks for more than logits processors.
    """
    found: list[Choice] = []

    def own_loop(model, input_ids, logits_processor, generation_config, **_):
        mode = generation_config.get_generation_mode()
        if mode is not GenerationMode.GREEDY_SEARCH:
            raise ValueError(f"it asks for {mode.value}; expected greedy search")
        for name in NOT_APPLIED:
            if (value := getattr(generation_config, name, None)) not in (None, 1):
                raise ValueError(f"{name}={value!r}: kvlab does not apply it")
        ends = generation_config.eos_token_id
        ends = frozenset(() if ends is None else ends if isinstance(ends, list) else [ends])
        most = generation_config.max_length - len(prompt)
        found.append(Choice(prompt, logits_processor, ends, most))
        return input_ids

    ids = torch.tensor([prompt], device=device)
    length = {} if model.generation_config.max_new_tokens else {"max_length": len(prompt) + limit}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=False,
                custom_generate=own_loop, **length, **said,
            )  # fmt: skip
    except Exception as error:
        raise Problem(f"the model's generation_config cannot be followed: {one_line(error)}") from error
    return found[0]

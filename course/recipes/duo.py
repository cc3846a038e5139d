"""Train the gates of DuoAttention: `python -m course.recipes.duo --model smollm2 --out duo.safetensors`."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

import kvlab
from eval.core.errors import one_line
from eval.tasks import corpus
from kvlab.calibrate import profile
from kvlab.keep.duo import KIND, LATENT
from kvlab.models import ModelShape, bodies_of, is_latent, layers_of
from kvlab.parameters import check_whole

SEED = 6_000_000  # not those of training, evaluation or other recipes
RATE, L1 = 0.02, 0.05  # of Adam; weight of the gates, as in the paper, here of their mean
NAME = "kvlab-gated"
TOO_LONG = 100  # documents in a row: there are none so short
SAME = 1e-3  # of the norm of hidden states: what fp32 may differ by


def documents(tokenizer, count: int, longest: int) -> list[tuple[list[int], int]]:
    """Token ids of facts in prose with a question and its answer, and how many of them are the answer.
    ValueError where none is so short."""
    rng, found, others = random.Random(SEED), [], []
    while len(found) < count:
        document = corpus.recall(rng, 8, filler=corpus.prose(rng, 8))
        ids, answer = tokenizer(document.text).input_ids, tokenizer(document.answer).input_ids
        if len(ids) + len(answer) <= longest:
            found.append((ids + answer, len(answer)))
            others.clear()
        elif len(others) < TOO_LONG:
            others.append(len(ids) + len(answer))
        else:
            raise ValueError(f"--tokens {longest}: too few; these documents have {min(others)} or more")
    return found


def streams(tokens: int, sinks: int, recent: int) -> Tensor:
    """Which tokens a query sees in a streaming head, bool `[tokens, tokens]`: a prefix and a window."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    return (key <= query) & ((key < sinks) | (key > query - recent))


class Gated:
    """An attention function in which every KV head's output is g * full + (1 - g) * streaming.
    gates `[layers that attend, kv_heads]`; orders: index of such a layer in the model -> its row."""

    def __init__(self, gates: Tensor, orders: dict[int, int], sinks: int, recent: int):
        self.gates, self.orders, self.sinks, self.recent = gates, orders, sinks, recent

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **_):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        mask = streams(query.shape[2], self.sinks, self.recent).to(query.device)
        full = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        near = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        gate = self.gates[self.orders[module.layer_idx]].repeat_interleave(group)[:, None, None]
        return (gate * full + (1 - gate) * near).transpose(1, 2).contiguous(), None


def train(
    model, rows: list[tuple[list[int], int]], sinks: int, recent: int, show=lambda line: None
) -> Tensor:
    """The gates `[layers that attend, kv_heads]` after one pass over the rows, as in section 3.2 of the
    paper: they begin at 1, the model's weights stay as they are, and the loss of a row is the squared
    difference of the last hidden states, with the gates and without, mean over the answer's tokens and
    channels, + L1 times the gates' mean. ValueError for a model that is another one with all gates open: one
    with windows shorter than a row, with a soft cap, or with scores beside those of the tokens; and for
    one that caches latents."""
    body = bodies_of(model)[-1]  # the innermost: what comes before the logits
    if is_latent(model):
        raise ValueError(LATENT)
    attending = [index for index, layer in enumerate(layers_of(model)) if isinstance(layer, DynamicLayer)]
    orders = {index: order for order, index in enumerate(attending)}
    gates = torch.ones(len(orders), ModelShape.of(model).kv_heads, requires_grad=True)
    open_gates = torch.ones_like(gates, requires_grad=False)
    adam, before = torch.optim.Adam([gates], lr=RATE), model.config._attn_implementation
    longest = {"input_ids": torch.tensor([max((ids for ids, _ in rows), key=len)]), "use_cache": False}
    wanted = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(False)
    gated = Gated(open_gates, orders, sinks, recent)
    AttentionInterface.register(NAME, gated)
    try:
        with torch.no_grad():
            own = body(**longest).last_hidden_state
            model.set_attn_implementation(NAME)
            found = body(**longest).last_hidden_state
        if not (found - own).norm() <= SAME * own.norm():
            raise ValueError(
                f"{type(model).__name__} attends by windows, a soft cap or sinks, which gates do not know: "
                "they cannot be trained on it"
            )
        for step, (ids, answer) in enumerate(rows):
            began, inputs = time.perf_counter(), {"input_ids": torch.tensor([ids]), "use_cache": False}
            told = slice(len(ids) - answer - 1, len(ids) - 1)  # where the answer's tokens are predicted
            with torch.no_grad():
                gated.gates = open_gates
                target = body(**inputs).last_hidden_state[0, told]
            gated.gates = gates
            found = body(**inputs).last_hidden_state[0, told]
            loss = (found - target).pow(2).mean()
            (loss + L1 * gates.abs().mean()).backward()
            adam.step()
            adam.zero_grad()
            with torch.no_grad():
                gates.clamp_(0, 1)
            seconds = time.perf_counter() - began
            show(f"{step + 1}/{len(rows)}: loss {loss:.4f}, gates {gates.mean():.3f}, {seconds:.1f} s")
    finally:
        model.set_attn_implementation(before)
        for weight, was in zip(model.parameters(), wanted, strict=True):
            weight.requires_grad_(was)
    return gates.detach()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course.recipes.duo", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a Llama-shaped model, by name or folder")
    parser.add_argument("--out", type=Path, required=True, help="file of the profile")
    parser.add_argument("--steps", type=int, default=120, help="documents, one a step")
    parser.add_argument("--tokens", type=int, default=400, help="the longest document")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that streaming heads hold")
    parser.add_argument("--recent", type=int, default=32, help="recent tokens that streaming heads hold")
    given = parser.parse_args()
    try:
        make(given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {one_line(error)}\n")


def make(given: argparse.Namespace) -> None:
    """Train and write what the command line asks for. ValueError, one line, for bad input."""
    for name, least in (("steps", 1), ("tokens", 1), ("sinks", 0), ("recent", 1)):
        check_whole(f"--{name}", getattr(given, name), least, "documents" if name == "steps" else "tokens")
    profile.check_folder(given.out)
    model, tokenizer = kvlab.load(given.model, device="cpu", dtype="float32")
    rows = documents(tokenizer, given.steps, given.tokens)
    gates = train(model, rows, given.sinks, given.recent, lambda line: print(line, flush=True))
    about = {"sinks": given.sinks, "recent": given.recent, "steps": given.steps}
    profile.write(given.out, KIND, model, {"gates": gates}, **about)
    print(f"{given.out}: {int((gates > 0.5).sum())} of {gates.numel()} gates above a half")


if __name__ == "__main__":
    main()

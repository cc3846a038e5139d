"""ShadowKV: low-rank keys stay on the device, values go to the host (Sun et al. 2024, arXiv 2410.21465)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..attention import scores_of
from ..gather import among, gather_slots, in_order
from ..models.rope import Rotation, rotation_of
from ..parameters import check_fraction_or_count, check_number, check_whole, resolve_budget
from ..policy import View
from ..store.growing import Growing, Packed, joined
from .device import Device, DeviceState
from .quest import slots_of_pages
from .topk import most_important


@dataclass(frozen=True)
class ShadowKV(Device):
    """Rebuild keys on the device from a few numbers each, and fetch the values of the chosen chunks.

    Before RoPE, a prompt's keys have a low rank, nearly. After the prompt, the concatenated keys of all KV
    heads, without their rotation, are reduced to the `rank` largest components of their SVD, which stay on
    the device; values go to the host. A chunk is `chunk` tokens, counted from the row's first one; its
    landmark is the mean of its keys after RoPE. At every step a query head weighs the landmarks (softmax of
    the scaled scores), a KV head takes the largest weight of its group, and for the best chunks the keys are
    rebuilt and rotated, and the values fetched. Some tokens stay on the device exactly: in every KV head, the
    `outliers` chunks in which some key has the smallest cosine with its landmark, and in every row the last
    `recent` whole chunks of the prompt and all later tokens.

    budget: tokens fetched at most per step and head, a fraction being of those seen; rounded down to chunks,
    one at least; 1: everything. rank: numbers per token, a count, or below 1 a fraction of kv_heads *
    head_dim (the paper's 160 of 1,024 are 0.156); 1: all. outliers: chunks, a count, or below 1 a fraction of
    the prompt's. chunk: tokens of one. recent: chunks at the prompt's end that stay exact.
    Deviations: the paper has 48 outliers of 15,000 chunks, which would be all of a short prompt, so they are
    a fraction here; the host also holds the values of exact chunks. A pass of several tokens reads every
    chunk. A layer with a sliding window holds few tokens and stays on the device unchanged. ValueError for
    models without RoPE, for keeps that evict, and for stores other than `Growing()`.
    """

    budget: float | int = 0.2
    rank: float | int = 0.156
    chunk: int = 8
    outliers: float | int = 0.05
    recent: int = 4

    on_host = True

    def __post_init__(self):
        object.__setattr__(self, "budget", check_fraction_or_count("budget", self.budget))
        whole = lambda x: 0 <= x < 1 or (x < math.inf and x == int(x) >= 1)
        parts = "a part below 1, or a whole number of"
        check_number("rank", self.rank, lambda x: x > 0 and whole(x), f"{parts} columns, above 0")
        check_number("outliers", self.outliers, whole, f"{parts} chunks")
        check_whole("chunk", self.chunk, 1)
        check_whole("recent", self.recent, 0, "chunks")

    def suits(self, keep, store) -> None:
        if keep.evicts:
            raise ValueError(f"{type(keep).__name__} lets tokens go, and ShadowKV holds a part of each")
        if type(store) is not Growing or not store.as_they_are:
            name = type(store).__name__
            raise ValueError(
                f"ShadowKV holds values as they are, in Growing(): {name}, or its format, does not"
            )

    def start(self, layer) -> DeviceState:
        if layer.ranks > 1:
            raise ValueError(
                "all KV heads share numbers in this format of keys, and tensor parallelism splits the heads "
                "among processes"
            )
        self.columns(layer.kv_heads * layer.shape.head_dim)  # refuses a rank that is too large
        rotation = rotation_of(layer)
        return ShadowState(self, rotation) if layer.local is None else DeviceState(Device())

    def cost(self, use) -> dict[str, float]:
        """The cost as if all tokens of the layer were the prompt's."""
        if use.kind["window"] or use.kind["latent"]:
            return super().cost(use)
        held, heads, key, value = use.held, *(use.kind[name] for name in ("heads", "key", "value"))
        rank, chunks = self.columns(heads * key), max(0, held // self.chunk - self.recent)
        offered = (chunks - self.outlying(chunks)) * self.chunk
        budget = resolve_budget(self.budget, held)
        made = offered if budget is None else min(max(1, budget // self.chunk) * self.chunk, offered)
        exact = (held - offered) * heads * (key + value) * 2
        landmarks, basis, row = chunks * heads * key * 2, rank * heads * key * 2, heads * value * 2
        staged = made * row
        return {
            "device": held * rank * 2 + basis + landmarks + exact, "host": held * row, "moved": staged + row,
            "read": landmarks + basis + made * heads * rank * 2 + staged + exact,
            "operations": 2 * use.kind["scores"] * (made + held - offered) + 2 * made * heads * rank * key,
            "staged": staged,
        }  # fmt: skip

    def columns(self, width: int) -> int:
        """The numbers that a token's keys are reduced to. ValueError for more than there are."""
        if self.rank > width:
            raise ValueError(f"rank={self.rank}: expected at most kv_heads * head_dim, {width}")
        return width if self.rank == 1 else max(1, int(self.rank * (width if self.rank < 1 else 1) + 1e-6))

    def outlying(self, chunks: int) -> int:
        """The number of chunks that stay exact, besides the last ones."""
        part = self.outliers * chunks if self.outliers < 1 else self.outliers
        return min(chunks, int(part + 1e-6))


class ShadowState(DeviceState):
    """One layer's tensors on the device. Its store, on the host, holds only values: its keys have no width.

    raw `[batch, kv_heads, slots, head_dim]`: keys, until the prompt has ended. low `[batch, 1, slots of the
    prompt, rank]` and basis `[batch, rank, kv_heads * head_dim]`: their product is the keys before RoPE.
    landmarks `[batch, kv_heads, chunks, head_dim]`; offered bool `[batch, kv_heads, chunks]`: which of them
    may be chosen. exact `[batch, kv_heads, n]`: slots (-1: none) whose exact keys and values `[batch,
    kv_heads, n, head_dim]` are here. rotation: how the layer rotates; None: not at all.
    """

    learns = chooses = True
    per_slot = ("raw", "low")
    per_row = ("basis", "landmarks", "offered", "exact", "keys", "values")
    of_prompt = ("low",)
    shared = ("rotation",)

    def __init__(self, policy: ShadowKV, rotation: Rotation | None):
        super().__init__(policy)
        self.rotation, self.fetched_bytes = rotation, 0

    @property
    def index(self) -> Iterator[Tensor]:
        return iter(() if self.landmarks is None else (self.landmarks,))

    def write(self, layer, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        batch, heads, tokens, _ = keys.shape
        layer.store.append(keys[..., :0].cpu(), values.cpu(), real)
        if layer.in_prompt:
            (self.raw,) = joined(None if self.raw is None else (self.raw,), (keys,))
        else:
            slots = torch.arange(layer.slots, layer.slots + tokens, device=keys.device)
            slots = slots.expand(batch, heads, -1)
            self.add(slots if real is None else slots.masked_fill(~real[:, None], -1), keys, values)
        written = batch * tokens if real is None else int(real.sum())
        layer.moved_bytes += written * heads * layer.store.bytes_per_slot

    def add(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Hold tokens exactly."""
        old, new = (self.exact, self.keys, self.values), (slots, keys, values)
        self.exact, self.keys, self.values = joined(None if self.exact is None else old, new)

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        if not layer.held_back:
            self.end_prefill(layer)

    def finish(self, layer) -> None:
        if layer.in_prompt and not layer.held_back:
            self.end_prefill(layer)

    def end_prefill(self, layer) -> None:
        """Reduce the keys, and choose the tokens that stay exact."""
        keys, at, self.raw = self.raw, layer.slot_positions[:, 0].long(), None
        wide = torch.promote_types(keys.dtype, torch.float32)
        plain = keys.to(wide)
        if not bool(plain.isfinite().all()):
            raise ValueError(f"layer {layer.index}: shadowkv: some keys are not finite")
        if self.rotation is not None:
            plain = self.rotation.undo(plain, at.clamp(min=0)[:, None].expand(keys.shape[:3]))
        plain = (
            plain.transpose(1, 2).flatten(2).masked_fill((at < 0)[..., None], 0.0)
        )  # [batch, slots, h * d]
        exactly = plain.double()
        main = torch.linalg.eigh(exactly.transpose(1, 2) @ exactly).eigenvectors  # V of plain = U S V'
        main = main[..., -self.policy.columns(main.shape[-1]) :].to(wide, copy=True)
        self.low, self.basis = ((plain @ main)[:, None].to(keys.dtype), main.transpose(1, 2).to(keys.dtype))
        chunk = self.policy.chunk
        whole = (torch.tensor(layer.lengths, device=at.device) // chunk - self.policy.recent).clamp(min=0)
        stays = in_order((at >= whole[:, None] * chunk)[:, None]).expand(-1, keys.shape[1], -1)
        if (count := int(whole.max())) > 0:
            stays = torch.cat([self.outliers(layer, keys, whole, count), stays], 2)
        (values,) = layer.store.pick(stays.cpu()).values
        layer.moved_bytes += int((stays >= 0).sum()) * layer.store.bytes_per_slot
        self.add(stays, gather_slots(keys, stays), values.to(keys.device))

    def outliers(self, layer, keys: Tensor, whole: Tensor, count: int) -> Tensor:
        """Set the landmarks of the first `whole` `[batch]` chunks; returns the slots of the outlying ones."""
        slots = slots_of_pages(View(layer, self), count, self.policy.chunk, keys.device)
        slots = slots.expand(*keys.shape[:2], -1, -1)
        chunks = gather_slots(keys, slots.flatten(2)).unflatten(2, (count, -1)).float()
        self.landmarks = chunks.mean(3).to(keys.dtype)
        worst = cosine_similarity(chunks, chunks.mean(3, keepdim=True), dim=-1).amin(-1)
        there = (torch.arange(count, device=whole.device) < whole[:, None])[:, None].expand_as(worst)
        counts = [self.policy.outlying(chunks) for chunks in whole.tolist()]
        chosen = most_important((-worst).masked_fill(~there, -torch.inf), counts)
        self.offered = there & ~among(chosen, count)
        return _chunks(slots, chosen)

    def read(self, layer, query: Tensor):
        if layer.in_prompt:
            values = layer.store.read(query.device)[1]
            before = sum(layer.rows_held) - sum(layer.table.fed)
            self.fetched_bytes = before * layer.kv_heads * layer.store.bytes_per_slot
            layer.moved_bytes += self.fetched_bytes
            return Packed.of_numbers(self.raw, values), None
        with layer.timed("selection"):
            slots = self.select(layer, query)
        (values,) = layer.store.pick(slots.cpu()).values
        self.fetched_bytes = int((slots >= 0).sum()) * layer.store.bytes_per_slot
        layer.moved_bytes += self.fetched_bytes
        keys = torch.cat([self.made(layer, slots), self.keys], 2)
        values = torch.cat([values.to(query.device), self.values], 2)
        return Packed.of_numbers(keys, values), torch.cat([slots, self.exact], 2)

    def select(self, layer, query: Tensor) -> Tensor:
        """The slots of the chunks that a pass rebuilds, `[batch, kv_heads, n]`, -1 where there is none."""
        if self.landmarks is None:
            return self.exact[..., :0]
        slots = slots_of_pages(View(layer, self), self.offered.shape[2], self.policy.chunk, query.device)
        later = slots >= self.low.shape[2]  # after a crop into the prompt, new tokens reuse its positions
        slots = slots.masked_fill(later | ~self.offered[..., None], -1)
        if query.shape[2] > 1 or self.policy.budget == 1:
            return slots.flatten(2)
        there = (slots >= 0).any(-1)
        grouped = query[:, :, 0].to(self.landmarks.dtype).unflatten(1, (layer.kv_heads, -1))
        scores = scores_of(grouped, self.landmarks, layer.scaling, layer.softcap)
        scores = scores.masked_fill(~there[:, :, None], -torch.inf)
        weight = scores.amax(2) if scores.shape[2] == 1 else scores.softmax(-1).amax(2)
        budgets = [resolve_budget(self.policy.budget, seen) for seen in layer.lengths]
        counts = [max(1, tokens // self.policy.chunk) for tokens in budgets]
        return _chunks(slots, most_important(weight.masked_fill(~there, -torch.inf), counts))

    def made(self, layer, slots: Tensor) -> Tensor:
        """The keys of slots `[batch, kv_heads, n]`, rebuilt from their few numbers."""
        wide = torch.promote_types(self.low.dtype, torch.float32)
        basis = self.basis.unflatten(2, (layer.kv_heads, -1)).transpose(1, 2)  # [batch, h, rank, d]
        low = gather_slots(self.low.expand(-1, layer.kv_heads, -1, -1), slots)
        keys = low.to(wide) @ basis.to(wide)
        if self.rotation is not None:
            at = layer.table.gathered(slots).clamp(min=0)
            keys = self.rotation.move(keys, torch.zeros_like(at), at) * self.rotation.scale
        return keys.to(self.low.dtype)

    def crop(self, length: int) -> None:  # by hand: exact tokens are in no order
        super().crop(length)
        if self.exact is not None:
            self.exact = self.exact.masked_fill(self.exact >= length, -1)


def _chunks(slots: Tensor, chosen: Tensor) -> Tensor:
    """The slots of the chosen chunks `[batch, kv_heads, n]` (-1: none), from `[batch, kv_heads, chunks,
    chunk]`: `[batch, kv_heads, n * chunk]`."""
    found = slots.gather(2, chosen.clamp(min=0)[..., None].expand(-1, -1, -1, slots.shape[3]))
    return found.masked_fill((chosen < 0)[..., None], -1).flatten(2)

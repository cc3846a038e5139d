"""Paged: blocks of 16 tokens from one pool, a block table per row (Kwon et al. 2023)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from ..policy import gather_slots
from .exact import Exact, Parts
from .growing import Growing, GrowingState


class BlockPool:
    """One allocation cut into blocks that any layer, row or cache may hold, with a count of its holders.

    blocks: how many there are, a hard limit (default: no limit; the pool grows by half when it is full).
    block: tokens per block.
    """

    def __init__(self, blocks: int | None = None, block: int = 16):
        for name, value in (("blocks", blocks), ("block", block)):
            bad = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if bad and not (name == "blocks" and value is None):
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
        self.limit, self.block = blocks, block
        self.parts: tuple[Tensor, ...] = ()  # K's parts, then V's: [blocks, kv_heads, block, width]
        self.counts: list[int] = []  # holders of each block
        self.free: list[int] = []

    def __deepcopy__(self, memo) -> BlockPool:
        return self  # the layers of a cache, and caches, share it

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return len(self.counts) - len(self.free)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V and scales."""
        return sum(part[0].numel() * part.element_size() for part in self.parts) if self.parts else 0

    def require(self, count: int, like: tuple[Tensor, ...]) -> None:
        """Make sure that `count` blocks, shaped for parts like these, are free (ValueError: it is full)."""
        if count > len(self.free) and self.limit is not None and self.parts:
            gc.collect()  # caches that are gone but not yet collected give theirs back
        if not self.parts:
            self.parts = tuple(part.new_empty((0, part.shape[1], self.block, part.shape[3])) for part in like)
        shapes = [(part.shape[1], part.shape[3], part.dtype) for part in like]
        if shapes != [(part.shape[1], part.shape[3], part.dtype) for part in self.parts]:
            raise ValueError("paged: the pool holds blocks of another shape, model or format")
        left = len(self.free) + (float("inf") if self.limit is None else self.limit - len(self.counts))
        if count > left:
            raise ValueError(
                f"paged: {count} blocks of {self.block} tokens are needed and {left} of {self.limit} are "
                "free: wait until a request ends, or reserve more blocks"
            )
        if count > len(self.free):
            held = len(self.counts)
            size = self.limit or max(held + count - len(self.free), held + held // 2)
            grown = tuple(part.new_zeros((size, *part.shape[1:])) for part in self.parts)
            for new, old in zip(grown, self.parts, strict=True):
                new[:held] = old
            self.parts, self.counts = grown, self.counts + [0] * (size - held)
            self.free = [*range(size - 1, held - 1, -1), *self.free]

    def take(self) -> int:
        """A block of one's own (`require` has been asked)."""
        index = self.free.pop()
        self.counts[index] = 1
        return index

    def hold(self, blocks: list[int]) -> None:
        for index in blocks:
            self.counts[index] += 1

    def release(self, blocks: list[int]) -> None:
        for index in blocks:
            self.counts[index] -= 1
            if self.counts[index] == 0:
                self.free.append(index)


class Paged(Growing):
    """Keep K and V in blocks of `block` tokens taken from a pool when they are needed.

    Nothing is reserved beyond a row's last block, and nothing is moved as a row grows. Forks share their
    blocks, and rows of a prompt batch share the full blocks in which they agree bit by bit; who writes into a
    shared block first copies it. Source: Kwon et al. 2023, section 4. A step here gathers the blocks
    into one tensor, where a paged attention kernel would read them in place.

    blocks: size of the pool, shared by all layers (default: it grows); a prompt that does not fit into all
    layers is refused before the first one writes; where a keep evicts, each layer gives blocks back before
    the next one asks. block: tokens per block. format: any format, since a format writes each token by
    itself; a store whose groups run over tokens (per-channel keys) is a buffer of its own and cannot be
    paged. pool: share one with other caches. Raises ValueError when full.
    """

    def __init__(
        self,
        blocks: int | None = None,
        block: int = 16,
        format: Exact | None = None,
        pool: BlockPool | None = None,
    ):
        if format is not None and not isinstance(format, Exact):
            raise ValueError(
                f"format={type(format).__name__}: expected a format, which writes each token by itself"
            )
        super().__init__(format)
        self.pool = BlockPool(blocks, block) if pool is None else pool

    def start(self, layer) -> PagedState:
        super().start(layer)
        return PagedState(self, layer)


class PagedState(GrowingState):
    """table `[batch, blocks]`: the blocks of every row in the pool."""

    per_slot = ()  # blocks are shared; see keep_slots and crop
    per_row = ("table", *GrowingState.per_row)
    kernel_ready = False

    def __init__(self, policy: Paged, layer):
        super().__init__(policy)
        self.pool, self.used = policy.pool, 0
        self.layer, self.layers, self.evicts = layer.order, layer.shape.layers, layer.evicts

    def __deepcopy__(self, memo) -> PagedState:
        twin = super().__deepcopy__(memo)
        if self.table is not None:
            self.pool.hold(self.table.flatten().tolist())
        return twin

    def __del__(self):
        if self.__dict__.get("table") is not None:
            self.pool.release(self.table.flatten().tolist())

    @property
    def length(self) -> int:
        return self.used

    @property
    def keys(self) -> Parts | None:
        return None if self.table is None else self.pool.parts[: len(self.pool.parts) // 2]

    @property
    def values(self) -> Parts | None:
        return None if self.table is None else self.pool.parts[len(self.pool.parts) // 2 :]

    def tensors(self) -> Iterator[Tensor]:
        if self.table is not None:
            yield from self.pool.parts
            yield from super().tensors()

    def add(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        parts = (*keys, *values)
        batch, _, tokens, _ = parts[0].shape
        block, held = self.pool.block, -(-self.used // self.pool.block)
        wanted = -(-(self.used + tokens) // block) - held  # new blocks per row
        rows = [[] for _ in range(batch)] if self.table is None else self.table.tolist()
        open_end = self.used % block and tokens
        copied = _shared_ends(rows, self.pool.counts) if open_end else []
        same = _same_blocks(parts, block) if self.used == 0 and batch > 1 else {}
        need = len(copied) + wanted * batch - len(same)
        whole_prompt = self.used == 0 and self.layer == 0 and not self.evicts
        self.pool.require(need * self.layers if whole_prompt else need, parts)
        for row in copied:
            old, new = rows[row][-1], self.pool.take()
            for part in self.pool.parts:
                part[new] = part[old]
            self.pool.release([old])
            rows[row][-1] = new
        for row in range(batch):
            for index in range(wanted):
                owner = same.get((row, index))
                if owner is None:
                    rows[row].append(self.pool.take())
                else:
                    rows[row].append(rows[owner][index])
                    self.pool.hold(rows[row][-1:])
        self.table = torch.tensor(rows, device=parts[0].device)
        slots = torch.arange(self.used, self.used + tokens, device=parts[0].device)
        where, offset = self.table[:, slots // block].flatten(), (slots % block).repeat(batch)
        for pooled, part in zip(self.pool.parts, parts, strict=True):
            pooled[where, :, offset] = part.transpose(1, 2).flatten(0, 1)
        self.used += tokens

    def parts(self) -> tuple[Parts, Parts]:
        return self._gathered(self.keys), self._gathered(self.values)

    def _gathered(self, parts: Parts) -> Parts:
        batch, count = self.table.shape
        found = []
        for part in parts:  # [blocks, kv_heads, block, width] -> [batch, kv_heads, slots, width]
            gathered = part.index_select(0, self.table.flatten()).unflatten(0, (batch, count))
            found.append(gathered.transpose(1, 2).flatten(2, 3)[:, :, : self.used])
        return tuple(found)

    def select_rows(self, rows: Tensor) -> None:
        old = self.table
        super().select_rows(rows)
        if old is not None:
            self.pool.hold(self.table.flatten().tolist())
            self.pool.release(old.flatten().tolist())

    def keep_slots(self, slots: Tensor) -> None:
        keys, values = (tuple(gather_slots(part, slots) for part in parts) for parts in self.parts())
        self._drop()
        self.add(keys, values)

    def crop(self, length: int) -> None:
        if length <= 0:
            self._drop()
        elif length < self.used:
            kept = -(-length // self.pool.block)
            self.pool.release(self.table[:, kept:].flatten().tolist())
            self.table, self.used = self.table[:, :kept].clone(), length

    def _drop(self) -> None:
        if self.table is not None:
            self.pool.release(self.table.flatten().tolist())
        self.table, self.used = None, 0


def _shared_ends(rows: list[list[int]], counts: list[int]) -> list[int]:
    """Rows whose last block is held by others too, so that writing into it needs a copy; the last holder
    in this batch keeps the block when nobody else does."""
    left, copied = dict.fromkeys((row[-1] for row in rows), 0), []
    for index, row in enumerate(rows):
        if counts[row[-1]] - left[row[-1]] > 1:
            left[row[-1]] += 1
            copied.append(index)
    return copied


def _same_blocks(parts: tuple[Tensor, ...], block: int) -> dict[tuple[int, int], int]:
    """(row, block index) -> an earlier row whose full block there holds the same bits."""
    batch, _, tokens, _ = parts[0].shape
    found = {}
    for index in range(tokens // block):
        first: dict[bytes, int] = {}
        for row in range(batch):
            cut = (part[row, :, index * block : (index + 1) * block] for part in parts)
            bits = b"".join(p.contiguous().view(torch.uint8).cpu().numpy().tobytes() for p in cut)
            if first.setdefault(bits, row) != row:
                found[row, index] = first[bits]
    return found

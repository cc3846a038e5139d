"""Paged: blocks of 16 tokens from one pool, a block table per row (Kwon et al. 2023)."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from ..gather import gather_slots
from ..parameters import FEW, check_kind, check_whole
from .exact import Exact, Parts
from .growing import Growing, GrowingState


class BlockPool:
    """One allocation, divided into blocks that any layer, row or cache may hold, with reference counts.

    blocks: how many there are, a hard limit (default: no limit; the pool grows by half when it is full).
    block: tokens per block. lock: held while blocks change hands or are written, since the caches of several
    threads may share them.
    """

    def __init__(self, blocks: int | None = None, block: int = 16):
        if blocks is not None:
            check_whole("blocks", blocks, 1, "blocks")
        check_whole("block", block, 1, most=FEW)
        self.limit, self.block = blocks, block
        self.parts: Parts = ()  # K's parts, then V's: [blocks, kv_heads, block, width]
        self.counts: list[int] = []  # holders of each block
        self.free: list[int] = []
        self.left: list[list[list[int]]] = []  # rows of states that are gone, to be given back
        self.lock = threading.RLock()

    def __deepcopy__(self, memo) -> BlockPool:
        return self  # the layers of a cache, and caches, share it

    @property
    def used(self) -> int:
        """Blocks in use."""
        with self.lock:
            self.collect()
            return len(self.counts) - len(self.free)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V and scales."""
        return sum(part[0].numel() * part.element_size() for part in self.parts)

    def require(self, count: int, like: Parts) -> None:
        """Make sure that `count` blocks for parts of these shapes are free (ValueError: the pool is full)."""
        if count > len(self.free) and self.limit is not None and self.parts:
            gc.collect()  # deleted caches that are not yet collected return their blocks
            self.collect()
        forms = [[(x.shape[1], x.shape[3], x.dtype) for x in parts] for parts in (like, self.parts or like)]
        if forms[0] != forms[1]:
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
            try:
                grown = tuple(x.new_zeros((size, x.shape[1], self.block, x.shape[3])) for x in like)
            except RuntimeError as error:
                raise ValueError(f"paged: {size} blocks of {self.block} tokens do not fit here") from error
            for new, old in zip(grown, self.parts, strict=False):
                new[:held] = old
            self.parts, self.counts = grown, self.counts + [0] * (size - held)
            self.free = [*range(size - 1, held - 1, -1), *self.free]

    def collect(self) -> None:
        """Take back the blocks of states that are gone. Whoever deletes one may hold another pool's lock, so
        it does not wait for this one's."""
        while self.left:
            self.release([block for row in self.left.pop() for block in row])

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

    Nothing is reserved beyond a row's last block, and nothing moves as a row grows. Forks share their blocks,
    and rows of a prompt batch share full blocks with identical bits; a shared block is copied before it is
    written. Source: Kwon et al. 2023, section 4. A step here gathers the blocks into one tensor; a paged
    attention kernel would read them in place.

    blocks: size of the pool, shared by all layers (default: it grows); a prompt that does not fit into all
    layers is refused before the first one writes; where a keep evicts, each layer gives blocks back before
    the next one asks. block: tokens per block. format: any format, since formats write each token alone; a
    store with groups over tokens (per-channel keys) has its own buffer and cannot be paged. pool: share one
    with other caches. Raises ValueError when full. A growing pool never shrinks, and its bytes depend on how
    it grew: in pieces, by steps, or at once when loaded.
    """

    def __init__(self, blocks: int | None = None, block: int = 16, format: Exact | None = None,
                 pool: BlockPool | None = None):  # fmt: skip
        if format is not None and not isinstance(format, Exact):
            raise ValueError(
                f"format={type(format).__name__}: expected a format, which writes each token by itself"
            )
        super().__init__(format)
        check_kind("pool", pool, BlockPool | None, "a BlockPool, or none")
        self.pool = BlockPool(blocks, block) if pool is None else pool

    def reserved(self, held: int, context: int) -> int:
        return -(-held // self.pool.block) * self.pool.block

    def start(self, layer) -> PagedState:
        super().start(layer)
        return PagedState(self, layer)


class PagedState(GrowingState):
    """rows: a list of each row's blocks in the pool, held until it is set again, so that forks and copies
    need no code for it; table `[batch, blocks]`: the same on the device, never read by the host."""

    per_slot = ()  # blocks are shared, and hold several slots: see keep_slots and crop
    per_row = ("rows", "table", *GrowingState.per_row)
    shared = (*GrowingState.shared, "layer", "layers", "for_all", "every_step")  # what the model says

    def __init__(self, policy: Paged, layer):
        super().__init__(policy)
        self.used = 0
        self.layer, self.layers = layer.order, layer.shape.layers
        self.for_all = self.layer == 0 and not layer.evicts  # asks for a prompt's blocks of all layers
        self.every_step = layer.local is None  # and for those of later tokens: no window gives any back

    def __setattr__(self, name: str, value) -> None:
        if name == "rows":
            old = vars(self).get("rows")
            with self.pool.lock:
                self.pool.hold([block for row in value or () for block in row])
                self.pool.release([block for row in old or () for block in row])
        super().__setattr__(name, value)

    def __del__(self):
        if (rows := vars(self).get("rows")) is not None:
            self.pool.left.append(rows)

    def hold(self, rows: list[list[int]] | None, device: torch.device | None = None) -> None:
        """Hold these blocks and no others."""
        self.rows, self.table = rows, None
        if rows is not None:
            table = torch.tensor(rows, device="cpu")
            pinned = table.pin_memory() if device.type == "cuda" else table
            self.table = pinned.to(device, non_blocking=True)

    @property
    def pool(self) -> BlockPool:
        return self.policy.pool

    @property
    def length(self) -> int:
        return self.used

    @property
    def spare_bytes(self) -> int:
        """Bytes of the pool's blocks that only other caches hold, such as copies of this one, summed over a
        cache's layers, or, after a `reset`, of all of them. A layer's own blocks are all in its table."""
        if self.table is None:
            return len(self.pool.counts) * self.pool.block_bytes if self.layer == 0 else 0
        taken = self.pool.used if self.layer == 0 else 0
        return (taken - len(self.table.unique())) * self.pool.block_bytes

    @property
    def keys(self) -> Parts | None:
        return None if self.table is None else self.pool.parts[: len(self.pool.parts) // 2]

    @property
    def values(self) -> Parts | None:
        return None if self.table is None else self.pool.parts[len(self.pool.parts) // 2 :]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.pool.parts
        if self.table is not None:
            yield from super().tensors()

    def contents(self) -> dict:  # by hand: block numbers mean nothing in another pool
        found = super().contents() | {"blocks": None}
        del found["rows"]
        if self.table is not None:
            own, found["table"] = self.table.unique(return_inverse=True)
            found["blocks"] = tuple(part[own] for part in self.pool.parts)
        return found

    def refill(self, contents: dict) -> None:
        blocks, table = contents.pop("blocks"), contents.pop("table")
        super().refill(contents)
        if blocks is None:
            return
        count, size = len(blocks[0]), -(-self.used // self.pool.block)
        if table.unique().tolist() != [*range(count)] or table.shape[1] != size:
            raise ValueError(f"{count} blocks for {self.used} tokens of {len(table)} rows")
        with self.pool.lock:
            self.pool.collect()
            self.pool.require(count, blocks)
            fresh = [self.pool.free.pop() for _ in range(count)]
            self.hold([[fresh[block] for block in row] for row in table.tolist()], table.device)
            for pooled, part in zip(self.pool.parts, blocks, strict=True):
                pooled[fresh] = part

    def add(self, keys: Parts, values: Parts) -> None:
        with self.pool.lock:
            self.pool.collect()
            self._add((*keys, *values))

    def _add(self, parts: Parts) -> None:
        batch, _, tokens, _ = parts[0].shape
        block, held = self.pool.block, -(-self.used // self.pool.block)
        wanted = -(-(self.used + tokens) // block) - held  # new blocks per row
        copied = self._shared_ends() if self.used % block and tokens else []
        same = _same_blocks(parts, block) if self.used == 0 and batch > 1 else {}
        need = len(copied) + wanted * batch - len(same)
        for_all = self.for_all and (self.used == 0 or self.every_step)
        self.pool.require(need * self.layers if for_all else need, parts)
        if wanted or copied:
            self.hold(self._longer(batch, wanted, copied, same), parts[0].device)
        slots = torch.arange(self.used, self.used + tokens, device=parts[0].device)
        where, offset = self.table[:, slots // block].flatten(), (slots % block).repeat(batch)
        for pooled, part in zip(self.pool.parts, parts, strict=True):
            pooled[where, :, offset] = part.transpose(1, 2).flatten(0, 1)
        self.used += tokens

    def _shared_ends(self) -> list[int]:
        """Rows whose last block others hold too, so that writing into it needs a copy; the last holder in
        this batch keeps the block if no other cache holds it."""
        left, copied = Counter(), []
        for row, block in enumerate(blocks[-1] for blocks in self.rows):
            if self.pool.counts[block] - left[block] > 1:
                left[block] += 1
                copied.append(row)
        return copied

    def _longer(self, batch: int, wanted: int, copied: list[int], same: dict) -> list[list[int]]:
        """The rows with this many new blocks each, and with copies of some rows' last blocks; same: see
        `_same_blocks`. `require` has been asked."""
        rows = [[] for _ in range(batch)] if self.rows is None else [list(row) for row in self.rows]
        for row in copied:
            old, rows[row][-1] = rows[row][-1], self.pool.free.pop()
            for part in self.pool.parts:
                part[rows[row][-1]] = part[old]
        for row, index in product(range(batch), range(wanted)):
            owner = same.get((row, index))
            rows[row].append(self.pool.free.pop() if owner is None else rows[owner][index])
        return rows

    def parts(self) -> tuple[Parts, Parts]:
        return self._gathered(self.keys), self._gathered(self.values)

    def _gathered(self, parts: Parts) -> Parts:
        batch, count = self.table.shape
        found = []
        for part in parts:  # [blocks, kv_heads, block, width] -> [batch, kv_heads, slots, width]
            gathered = part.index_select(0, self.table.flatten()).unflatten(0, (batch, count))
            found.append(gathered.transpose(1, 2).flatten(2, 3)[:, :, : self.used])
        return tuple(found)

    def keep_slots(self, slots: Tensor) -> None:  # by hand: kept tokens are written into new blocks
        keys, values = (tuple(gather_slots(part, slots) for part in parts) for parts in self.parts())
        with self.pool.lock:
            self.hold(None)
            self.used = 0
            self.add(keys, values)

    def crop(self, length: int) -> None:  # by hand: a block is freed when all its tokens are gone
        self.used = min(self.used, max(0, length))
        kept = -(-self.used // self.pool.block)
        if self.table is not None:
            device = self.table.device
            self.hold([row[:kept] for row in self.rows] if kept else None, device)


def _same_blocks(parts: Parts, block: int) -> dict[tuple[int, int], int]:
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

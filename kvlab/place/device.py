"""Device: K and V live where the model computes, and every step reads all of them."""

from __future__ import annotations

from torch import Tensor

from ..policy import Policy, State


class Device(Policy):
    """Everything stays on the device: nothing crosses a link."""

    on_host = False

    def suits(self, keep, store) -> None:
        """ValueError when this place cannot serve such a keep or store."""

    def start(self, layer) -> DeviceState:
        return DeviceState(self)

    def cost(self, use) -> dict[str, float]:
        """What a layer costs (see `bill.account.Use`): bytes on the device and on the host, moved and read in
        a step, operations of its attention, and `staged`, moved bytes that the device also holds."""
        operations = 2 * use.kind["scores"] * use.reads + 2 * use.kind["index_scores"] * use.held
        return {
            "device": use.size(use.store.reserved(use.held, use.context)) + use.index, "host": 0.0,
            "moved": 0.0, "read": use.size(use.reads) + use.index, "operations": operations, "staged": 0.0,
        }  # fmt: skip


class DeviceState(State):
    """A place's work for one layer; a host overrides part of it."""

    link = None  # carries bytes to the device; None: they are only counted
    index = ()  # tensors that a fetch policy chooses by
    learns = chooses = False  # whether it learns from a prompt, and a step reads only a part
    fetched_bytes = 0  # of the last pass (see `Stats`)
    complete = False  # whether the last choice certainly has no slot of -1
    lost = False  # whether a write has failed, so that tokens are gone

    @property
    def on_host(self) -> bool:
        return self.policy.on_host

    def resident_bytes(self, layer) -> int:
        """Bytes of a store on the host that are currently on the device."""
        return 0

    def write(self, layer, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        """Store new K and V, `[batch, kv_heads, tokens, head_dim]` each; real: see `GrowingState.append`."""
        layer.store.append(keys, values, real)

    def commit(self, layer) -> None:
        """Move everything written into the store."""

    def empties(self, layer) -> int:
        """Slots that may stay empty when tokens go step by step, since moving the others is expensive."""
        return 0

    def flush(self, layer) -> None:
        """`commit`, and discard what was prepared for the next read."""

    def drop(self) -> None:
        """Called before the layer forgets everything."""

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        """Called once after the prompt: query and keys `[batch, heads or kv_heads, tokens, head_dim]`."""

    def end_prefill(self, layer) -> None:
        """Called when a prompt that came in several passes has ended."""

    def append(self, layer, keys: Tensor) -> None:
        """Called for every later pass with its new keys `[batch, kv_heads, tokens, head_dim]`."""

    def speculate(self, layer, query) -> None:
        """Called before a decode step's previous block runs; `query()` returns the query that this layer
        would ask if its input were that block's input, `[batch, heads, 1, head_dim]` (`query(norm=i)`: with
        the norm of layer i)."""

    def prefetch(self, layer) -> None:
        """Called when the previous layer is about to attend: time to request what is always needed."""

    def read(self, layer, query: Tensor):
        """The tokens that this step attends to, in stored form: (held, slots), where `held` is the store or a
        `Packed` part of it, and slots None means all of it."""
        return layer.store, None

    def finish(self, layer) -> None:
        """Called after attention over the result of `read`."""

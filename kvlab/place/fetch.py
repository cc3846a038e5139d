"""Fetch: which tokens a decode step brings from the host to the device."""

from __future__ import annotations

from torch import Tensor

from ..policy import Policy, State


class Fetch(Policy):
    """The choice of what a step fetches. The base class fetches the whole layer when it is needed.

    A policy overrides `select`; `layer` is a `View`, and `layer.state` holds the tensors named in `per_row`
    and `per_slot`, which `prefill` and `append` may fill.
    """

    per_row = ()  # names in the state: tensors [batch, ...], or lists with an entry for each row
    per_slot = ()  # names in the state: tensors [batch, kv_heads, slots, ...]
    learns = chooses = True  # see `DeviceState`
    stays = False  # whether the host's tokens stay on the device while they fit there
    at_most = False  # whether a step's fetch depends on the text, so that a bill gives its upper limit
    speculates = False  # True: `speculate` chooses, before the layer's turn
    page = None  # bytes, where only whole pages cross the link ...
    fault = 0.0  # ... and seconds that each of them costs in addition

    def start(self, layer) -> State:
        return State(self, self)

    def whole(self, index: int) -> bool:
        """Whether every step needs all of layer `index`, so that it may be prefetched."""
        return False

    def select(self, layer, query: Tensor) -> Tensor | None:
        """Slots of past tokens to fetch, `[batch, kv_heads, n]` (-1: none), or None for all of them.

        The newest token needs no fetching: it is already on the device.
        """
        return None

    def speculate(self, layer, query) -> Tensor | None:
        """Choose before the layer's turn, by a guessed query (see `DeviceState.speculate`): a result as of
        `select`, or None to wait for it."""
        return None

    def cost(self, use) -> tuple[float, float]:
        """(Tokens that a step fetches, bytes of the index it chooses by) of a layer, see
        `bill.account.Use`."""
        return use.held, 0.0

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        """Called once after the prompt, or its first pass (see `extend`): query and keys `[batch, heads or
        kv_heads, tokens, head_dim]`."""

    def end_prefill(self, layer) -> None:
        """Called when a prompt that came in several passes has ended."""

    def append(self, layer, keys: Tensor) -> None:
        """Called for every later pass with its new keys `[batch, kv_heads, tokens, head_dim]`."""

    def extend(self, layer, query: Tensor, keys: Tensor) -> None:
        """Called after a pass of several tokens, or of more of the prompt (`layer.in_prompt`), has read all
        keys `[batch, kv_heads, slots, head_dim]`."""

    def resident(self, layer) -> float:
        """The share of the layer's tokens that is on the device, and not on the host, between two steps."""
        return 0.0

    def on_device(self, layer) -> bool:
        """Whether the layer's tokens remain on the device from the last step."""
        return False

"""Recompute: no cache at all, the baseline that every cache is measured against."""

from __future__ import annotations

import weakref

from .bound import Bound
from .stats import Stats


class NoCache(Bound):
    """Takes the place of a cache and holds nothing: every step feeds the whole sequence again.

    `kvlab.decode` and the harness support it. `model.generate` feeds one token at a time to any cache, so
    pass `use_cache=False` there instead; passing this raises ValueError.
    """

    recompute = True

    def __init__(self, model):
        super().__init__(layers=[])
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo) -> NoCache:
        twin = type(self)(self.model)
        twin.spec = self.spec
        return twin

    @property
    def model(self):
        """The model it was made for."""
        return self._model()

    def stats(self) -> Stats:
        return Stats(0, 0, 0, 0, 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, *args, **kwargs):
        raise ValueError(
            "recompute keeps no keys and values: use kvlab.decode(model, ids, cache, n), or "
            "model.generate(..., use_cache=False)"
        )

    has_previous_state = get_conv_state = update_conv_state = update  # a layer with a state reads this first

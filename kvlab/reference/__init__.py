"""Reference: every technique once more, by its definition: tensors of one head, loops, no tricks.

What a reader looks at first, and what tests hold the real ones against. Nothing here imports the rest of
kvlab. A position is a token's index among its row's own tokens; lists of positions are in order.
"""

from . import attention, keep, latent, place, static_graph, store

__all__ = ["attention", "keep", "latent", "place", "static_graph", "store"]

"""Reference: attention by its definition: tensors of one head, loops, no tricks. What a reader sees first.

Definitions that only tests compare stand in `tests/reference/definitions`. Nothing here imports the rest of
kvlab. A position is a token's index among its row's own tokens; lists of positions are in order.
"""

from . import attention, latent

__all__ = ["attention", "latent"]

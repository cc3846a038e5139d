"""Reference: attention by its definition: tensors of one head, loops, no tricks. Read this first.

Definitions that only tests use are in `tests/reference/definitions`. Nothing here imports the rest of kvlab.
A position is a token's index among its row's own tokens; lists of positions are in order.
"""

from . import attention, latent

__all__ = ["attention", "latent"]

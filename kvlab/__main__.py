"""`python -m kvlab`: the `kvlab` command, where its script is not on the path."""

import sys

from .harness import beside

if __name__ == "__main__":
    sys.exit(beside("eval", "start").kvlab())

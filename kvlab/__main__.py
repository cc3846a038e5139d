"""`python -m kvlab`: the `kvlab` command, where its script is not on the path."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

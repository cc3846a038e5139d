"""`python -m eval`: the command is in command.py."""

import sys

from .start import run

if __name__ == "__main__":
    sys.exit(run(f"{__package__}.command"))

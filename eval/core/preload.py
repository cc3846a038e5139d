"""Imports of the fork server, made once so that every worker process starts ready.

Imported objects stay, so garbage collection skips them: while they are made, and in every worker.
"""

import contextlib
import gc
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process too, while it imports
gc.disable()

import lm_eval.evaluator  # noqa: E402, F401
import torch  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: E402, F401

from kvlab import cache, make  # noqa: E402, F401

with contextlib.suppress(ImportError):  # kvlab works without it
    import numba

    import kvlab.fast.fused  # noqa: F401

    numba.njit(lambda: None)()  # reads numba's lists of functions, a quarter of a second

gc.freeze()
gc.enable()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # now it is for the command, which ends its workers

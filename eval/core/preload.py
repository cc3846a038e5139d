"""What the fork server imports once, so that every worker process starts ready.

What is imported stays, so nobody looks for garbage in it: not while it grows, and never in a worker.
"""

import gc
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its workers
gc.disable()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TQDM_DISABLE"] = "1"

import lm_eval.evaluator  # noqa: E402, F401
import torch  # noqa: E402, F401
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: E402, F401

import kvlab  # noqa: E402, F401

gc.freeze()
gc.enable()

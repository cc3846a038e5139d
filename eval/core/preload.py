"""What the fork server imports once, so that every worker process starts ready."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TQDM_DISABLE"] = "1"

import lm_eval.evaluator  # noqa: F401
import torch  # noqa: F401
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

import kvlab  # noqa: F401

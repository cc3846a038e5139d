"""Tiny random models of every family, made in milliseconds, and ways to run them."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from families.profiles import SETTINGS as PROFILED
from families.profiles import profiled
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvlab
from kvlab.methods import METHODS
from kvlab.models import ModelShape
from kvlab.spec import name_of, parse
from kvlab.store import Exact, Growing

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,  # a pad token has a zero embedding, so every score ties
}
GQA = {"num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, GQA),
    "mistral": (MistralForCausalLM, MistralConfig, GQA | {"head_dim": 8, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GQA),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GQA | {"head_dim": 16}),
    "phi": (PhiForCausalLM, PhiConfig, {"intermediate_size": 48, "num_key_value_heads": 4}),
    "opt": (OPTForCausalLM, OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {"intermediate_size": 48}),
}

# Each method says of itself a setting at which it must equal the full cache, and one that gives something up.
SAME = {name: one.spec(one.same) for name, one in METHODS.items() if one.same is not None}
LESS = {name: one.spec(one.less) for name, one in METHODS.items() if one.less is not None}
# More of both, of the options that they leave out.
NEUTRAL = [*(SAME | {"kvzip": "kvzip:budget=1"}).values(),
    "adakv:of=h2o,budget=1", "offload:link=1e9", "offload+h2o:budget=1,link=1e9", "uvm:link=1e9",
    "topk:budget=1,link=1e9", "infinigen:budget=1,alpha=inf,ratio=1",
    "infinigen:budget=1,alpha=inf,ratio=1,full_layers=0",
    "infinigen:budget=1,alpha=inf,ratio=1,link=1e9", "quest:budget=1",
    "quest:budget=200,page=5,full_layers=0", "quest:budget=200,page=4,link=1e9",
    "shadowkv:budget=1,rank=1,chunk=4",
]  # fmt: skip
LOSSY = [*LESS.values(),
    "int8:axis=channel", "int8:axis=tensor,symmetric=false", "int8:rotate=signs",
    "int4:smooth=0.5,sinks=3", "int4:rotate=true", "int5:group=4,rotate=true", "int5:skip_layers=0+-1",
    "fp8:format=e5m2,axis=token", "nvfp4:largest=4over6,skip_layers=1", "turboquant:bits=3",
    "turboquant:bits=3,sketch=true", "kvquant:bits=4,outliers=0.1", "kvquant:bits=2,outliers=0",
    "mixed:k=turboquant,v=nvfp4,skip_layers=0", "sinks:budget=0.4,renumber=true",
    "h2o:budget=9,recent=0.25", "d2o:budget=9,recent=0.25,every=3",
    "tova:budget=0.4,every=3,renumber=true", "adakv:of=h2o,budget=0.4,safeguard=0.5",
    "kvzip:budget=7,chunk=16,sinks=1", "kvzip:budget=0.4,over=head",
    "keydiff:budget=0.4,chunk=3,every=2", "keynorm:budget=0.4,merge=true,renumber=true",
    "lagkv:budget=0.5", "rkv:budget=6,window=2,kernel=3", "random:budget=7,seed=3",
    "offload+int4:rotate=true", "topk:budget=5", "topk:budget=0.3,link=1e9",
    "infinigen:budget=0.3,pool=0.7,alpha=inf",
    "infinigen:budget=0.3,variant=official-accuracy,alpha=inf",
    "infinigen:budget=0.5,alpha=inf,ratio=0.5,full_layers=1", "infinigen:budget=0.3,link=1e9",
    "quest:budget=9,page=2,full_layers=0,link=1e9", "quest:budget=0.4,page=3,digest=centre",
    "shadowkv:budget=5,rank=9,chunk=2,outliers=1,recent=0",
]  # fmt: skip
ELSEWHERE = {"padded": "tests/static_graph"}  # an engine of its own in place of the model
EACH = [*(SAME | LESS).values()]  # every method once


def policies(spec: str) -> dict:
    """The policies of a method that are not the defaults: {"keep": ..., "store": ..., "place": ...}."""
    read = parse(spec)
    return read.method.policies(**read.parameters | ({"link": None} if "link" in read.parameters else {}))


UNROTATED = {"expected", "kvquant", "shadowkv", "kvzap"}  # methods that undo rotary embeddings


def refused(model, spec: str) -> bool:
    """Whether the method is none for this model, which rotates no keys; it is then refused in one line."""
    undoes = spec.partition(":")[0] in UNROTATED or "renumber=true" in spec
    if not undoes or model.config.model_type not in ("opt", "gpt2"):
        return False
    with pytest.raises(ValueError, match=r"has no rotary embedding \(RoPE\)$"):
        kvlab.make_cache(model, profiled(spec, model))
    return True


def rounds(how: str | dict) -> bool:
    """Whether the store of a method, or of these policies, rounds what it holds."""
    if isinstance(how, str):
        how = {} if name_of(how) in PROFILED else policies(how)
    store = how.get("store", Growing())
    return type(getattr(store, "format", store)) is not Exact


@functools.cache
def tiny(family: str, attention: str = "kvlab", dtype: torch.dtype = torch.float32, **changes):
    """A seeded random model; the same family gives the same weights whatever the attention."""
    make, config, own = FAMILIES[family]
    torch.manual_seed(7)
    model = make(config(**(COMMON | own | changes))).to(dtype).eval()
    if attention == "kvlab":
        return kvlab.prepare(model)
    model.set_attn_implementation(attention)
    return model


def greedy(family: str, ids: torch.Tensor, steps: int, mask=None, **changes):
    """(Greedy tokens, their log-probabilities) of transformers alone, with its own cache and attention."""
    out = tiny(family, "sdpa", **changes).generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=steps,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    tokens = out.sequences[:, ids.shape[1] :]
    return tokens, torch.stack(out.logits, 1).log_softmax(-1).gather(2, tokens[..., None])[..., 0]


def interrupt(*_, **__):
    """Ctrl-C, wherever this is put."""
    raise KeyboardInterrupt


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)


def begun(model, how, *passes) -> kvlab.Stepper:
    """A stepper with a cache of a method or of policies into which these ids went, or (ids, mask), pass by
    pass."""
    cache = kvlab.KVCache(model, **how) if isinstance(how, dict) else kvlab.make_cache(model, how)
    stepper = kvlab.Stepper(model, cache)
    for given in passes:
        stepper.feed(*given if isinstance(given, tuple) else (given,))
    return stepper


def fed(model, how: str | dict, ids, mask=None, steps: int = 6, fork=None):
    """(Cache, logits `[rows, 1 + steps, vocabulary]` of a prompt's last token and of tokens behind it) of a
    method or of policies; fork: the rows that the steps go on with."""
    stepper = begun(model, how)
    found = stepper.feed(ids, mask, last=True)
    if fork is not None:
        stepper.fork(fork)
        found = found[fork]
    later = (prompt(1, len(found), seed=step) for step in range(steps))
    return stepper.cache, torch.stack([found, *(stepper.feed(ids, last=True) for ids in later)], 1)


@contextlib.contextmanager
def refusing(why: str):
    """Nothing is raised, or a ValueError that says why."""
    try:
        yield
    except ValueError as error:
        assert why in str(error)


def left_padded(prompts: list[torch.Tensor]):
    """Prompts `[1, tokens]` of different lengths -> (ids, mask), padded on the left."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.ones(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        ids[row, longest - one.shape[1] :] = one
        mask[row, longest - one.shape[1] :] = 1
    return ids, mask


def linked(spec: str, bandwidth="1e9") -> str:
    """A method's name with a link of so many bytes per second."""
    return f"{spec}{',' if ':' in spec else ':'}link={bandwidth}"


def started(policy, head_dim: int = 8, kv_heads: int = 2, context: int | None = None):
    """The state of a keep, store or place for the only layer of a model that is not there."""
    shape = ModelShape(1, kv_heads * head_dim, kv_heads, kv_heads, 96, head_dim, context)
    about = {"index": 0, "order": 0, "local": None, "model": None, "evicts": False}
    return policy.start(SimpleNamespace(kv_heads=kv_heads, shape=shape, **about))

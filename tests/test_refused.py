"""What is refused: every parameter of a method that is out of range, and policies that do not go together."""

import re

import pytest
import torch
from families import models as families
from reference.definitions import store as reference
from tiny import prompt, tiny

import kvlab
from kvlab.keep import H2O, AdaKV, KVzip, SnapKV
from kvlab.place import Host, ModelledLink, ShadowKV, TopK
from kvlab.store import Codebook, Float4, Growing, Int, Kivi, Paged, PreRope, Ragged, Static

SPECS = [
    ("h20", "unknown method 'h20', did you mean h2o"),
    ("", "unknown method ''"),
    ("h2o:bugdet=0.2", "no parameter 'bugdet', did you mean budget"),
    ("h2o:budget", "expected parameter=value, got 'budget'"),
    ("h2o:budget=0.2,budget=0.5", "budget is given twice"),
    ("sinks:budget=1e400", "method 'sinks:budget=1e400': budget=1e400 is no number that can be used"),
    ("fp8:scale=fp32", "scale='fp32': there is none without axis= or group="),
    ("sinks:sinks=true", "sinks=True: expected"),
    ("padded:numbers=3", "numbers=3: expected one of fp32, fp16, int8, integers"),
    ("topk:full_layers=99", "full_layers=99: the model has 3 layers"),
    ("h2o:budget=0", "budget=0: expected a fraction"),
    ("h2o:budget=1.5", "budget=1.5: expected a fraction"),
    ("int8:group=3", "group=3: does not divide the head dimension 8"),
    ("int4:axis=token,group=4", "group=4: only with axis='group'"),
    ("int2:nonfinite=ignore", "nonfinite='ignore': expected one of refuse, clip"),
    ("int4:smooth=2", "smooth=2: expected a strength from 0 to 1"),
    ("snapkv:window=true", "window=True: expected a whole number of at least 1 query"),
    ("snapkv:kernel=4", "kernel=4: expected an odd"),
    ("no_such_module.Keep", "No module named"),
    ("kvlab.keep.Nothing", "no attribute"),
    ("kvlab.decode.Trace", "expected a Keep, Store, format, Place or Fetch class"),
    ("sinks:every=0", "every=0: expected a whole number of at least 1"),
    ("lagkv:lag=0", "lag=0: expected a fraction of tokens"),
    ("rkv:window=0", "window=0: expected a whole number of at least 1 query"),
    ("rkv:share=1.5", "share=1.5: expected a part between 0 and 1"),
    ("kvzip:over=heads", "over='heads': expected one of model, layer, head"),
    ("kvzip:chunk=8", "chunk=8: expected a whole number of at least 16 tokens"),
    ("adakv:of=full", "of=full: expected a method that scores tokens"),
    ("adakv:of=adakv", "expected a keep that scores tokens"),
    ("adakv:safeguard=2", "safeguard=2: expected a part of the share between 0 and 1"),
    ("int4:rotate=hadamard", "rotate='hadamard': expected true, false or signs"),
    ("int4:skip_layers=9", "skip_layers=9: the model has 3 layers"),
    ("kvquant:outliers=0.5", "outliers=0.5: expected a part"),
    ("mixed:k=int9", "k='int9': expected one of full, int8"),
    ("mixed:v=nvfp4,group=4", "group=4: nvfp4 has no such parameter"),
    ("mxfp4:largest=4over6", "no parameter 'largest'"),
    ("offload:link=fast", "link='fast': expected bytes per second, 'cuda', none, or one of A6000"),
    ("infinigen:alpha=0", "alpha="),
    ("infinigen:ratio=1.2", "ratio="),
    ("infinigen:variant=fast", "variant='fast': expected one of paper, official-speed"),
    ("infinigen:victim=mru", "policy='mru': expected one of counter, lru, fifo"),
    ("quest:page=129", "page=129: expected at most the model's context, 128 tokens"),
    ("shadowkv:rank=0", "rank=0: expected a part below 1, or a whole number of columns, above 0"),
    ("shadowkv:rank=17", "rank=17: expected at most kv_heads * head_dim, 16"),
    ("padded:length=129", "max_length=129: more than the model's context of 128 tokens"),
    ("padded:policy=compromise,extra=-1", "extra=-1: expected a part"),
]


def one_line(says: str):
    """The refusal that a block ends in."""
    return pytest.raises(ValueError, match=re.compile(rf"\A[^\n]*{re.escape(says)}[^\n]*\Z"))


@pytest.mark.parametrize("spec, says", SPECS)
def test_bad_specs_say_what_is_wrong(spec, says):
    with one_line(says):
        kvlab.make_cache(tiny("llama"), spec)


ANEW = "merge rewrites tokens: they must be on the device, unrounded"
APART = [
    (
        {"keep": AdaKV(SnapKV()), "store": Growing()},
        "AdaKV lets heads hold different numbers of tokens, for which",
    ),
    (
        {"keep": AdaKV(SnapKV()), "store": Static(40)},
        "for which Static reserves the most that any holds: use",
    ),
    ({"keep": AdaKV(SnapKV()), "store": Paged()}, "for which Paged"),
    ({"keep": AdaKV(SnapKV()), "store": Ragged(), "place": Host()}, "held on the device, not on a host"),
    ({"keep": H2O(0.4, merge=True), "store": Int(8)}, ANEW),
    ({"keep": H2O(0.4, merge=True), "store": Paged()}, ANEW),
    ({"keep": H2O(0.4, merge=True), "place": Host()}, ANEW),
    ({"keep": KVzip(0.2, over="head"), "place": Host()}, "for which keys and values must be on the device"),
    ({"store": Kivi(), "keep": H2O(0.5)}, "H2O cannot drop single ones"),
    ({"store": Kivi(), "place": Host()}, "a host cannot fetch"),
    ({"store": Kivi(), "place": Host(TopK(0.5), ModelledLink(1e9))}, "a host cannot fetch"),
    ({"store": PreRope(), "place": Host()}, "keys are held before RoPE, and a host sends them as they are"),
    (
        {"store": Growing(Int(4), sinks=2), "place": Host()},
        "sinks: tokens held in full precision stay on the device",
    ),
    ({"keep": H2O(0.5), "place": ShadowKV()}, "H2O lets tokens go, and ShadowKV holds a part of each"),
    ({"store": Int(8), "place": ShadowKV()}, "ShadowKV holds values as they are, in Growing()"),
    ({"store": Static(60), "place": ShadowKV()}, "ShadowKV holds values as they are, in Growing()"),
]


@pytest.mark.parametrize("policies, says", APART)
def test_policies_that_do_not_go_together(policies, says):
    with one_line(says):
        kvlab.KVCache(tiny("llama"), **policies)


def test_formats_of_widths_that_they_do_not_fill():
    for make, says in (
        (lambda: Codebook(3).check(10), "bits=3: head dimension 10 does not fill whole bytes"),
        (lambda: Codebook(4, sketch=True).check(20), "bits=1: head dimension 20 does not fill whole bytes"),
        (lambda: Float4("mxfp4", "4over6"), "largest='4over6': only with nvfp4"),
        (lambda: Float4("fp4"), "format='fp4': expected one of nvfp4, mxfp4"),
        (lambda: Float4().check(9), "nvfp4: head dimension 9 does not fill whole bytes"),
        (lambda: Int(5).check(9), "bits=5: head dimension 9 does not fill whole bytes"),
        (lambda: Int(2).check(6), "whole bytes"),
        (lambda: Int(9), "bits=9: expected one of 2, 3, 4"),
        (lambda: Kivi(3), "bits=3: expected one of 2, 4, 8"),
        (lambda: reference.pack([1, 2, 3, 4], 6), "bits=6: does not divide 8"),
        (lambda: Paged(format=Growing()), "format=Growing: expected a format, which writes each token"),
    ):
        with one_line(says):
            make()


PADDING = r"attention_mask has shape .*padding mask"
NO_PASS = [  # what a pass is given, or `update`; what is said of it
    ({"input_ids": None}, "input_ids is a NoneType: expected a tensor"),
    ({"input_ids": torch.arange(3, 9)}, r"input_ids of shape \(6,\): expected \[batch, tokens\]"),
    ({"input_ids": prompt(4), "position_ids": True}, "position_ids is a bool: expected a tensor"),
    ({"input_ids": prompt(1), "attention_mask": torch.ones(1, 1, 1, 6)}, PADDING),
    ({"input_ids": prompt(1), "attention_mask": torch.ones(1, 3)}, r"expected \[batch, tokens seen \+ new\]"),
    ((torch.ones(1, 2, 1, 8), (), 0), "values: expected a tensor .*not tuple"),
    ((None, None, 0), "keys: expected a tensor .*not NoneType"),
    ((torch.ones(2), torch.ones(2), 0), r"keys: expected a tensor .*not \(2,\)"),
]


@pytest.mark.parametrize("given, line", NO_PASS, ids=[line for _, line in NO_PASS])
def test_what_is_no_pass_is_refused_in_one_line(given, line):
    """Nothing is lost by it: the cache goes on."""
    model = tiny("llama")
    cache = kvlab.make_cache(model, "int8")
    model(torch.ones(1, 5).long(), past_key_values=cache)
    with pytest.raises((TypeError, ValueError), match=line):
        cache.update(*given) if isinstance(given, tuple) else model(past_key_values=cache, **given)
    model(torch.ones(1, 1).long(), past_key_values=cache)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("name, value", [
    ("logit_cap", 200.0), ("softmax_scale", 0.1), ("position_bias", torch.zeros(1, 4, 7, 7)),
    ("sinks", torch.zeros(4)),
])  # fmt: skip
def test_a_number_under_another_keyword_is_not_swallowed(name, value):
    """A model of transformers hands on what it is given; a cap by another name would change every score."""
    model = tiny("llama")
    cache = kvlab.make_cache(model, "full")
    with pytest.raises(ValueError, match=f"^LlamaAttention hands its attention {name}, a number that kvlab"):
        model(prompt(7), past_key_values=cache, **{name: value})
    cache.reset()
    model(prompt(7), past_key_values=cache, token_type_ids=torch.zeros(1, 7, dtype=torch.long))
    assert torch.equal(model(prompt(7), **{name: value}).logits, model(prompt(7)).logits), "without our cache"


@pytest.mark.parametrize("name", ["Llama", "Jamba", "LFM2", "Qwen3-Next"])
def test_generate_through_recompute_is_refused(name):
    model = families.family(name)
    with pytest.raises(ValueError, match=r"recompute keeps no keys and values: use kvlab\.decode"):
        model.generate(prompt(9), past_key_values=kvlab.make_cache(model, "recompute"), max_new_tokens=2)

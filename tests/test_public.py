"""What a stranger calls, with nonsense in the place of every argument: refused by kvlab, in one line."""

import copy
import functools
import importlib
import inspect
import traceback

import pytest
import torch
from tiny import begun, prompt, tiny

import kvlab
from kvlab.arithmetic import MACHINES
from kvlab.keep import H2O, Keep
from kvlab.measure.machines import like
from kvlab.place import Device, Fetch
from kvlab.policy import Policy

WRONG = {
    "None": None, "True": True, "-1": -1, "0": 0, "2.5": 2.5, "NaN": float("nan"), "2**62": 2**62,
    "nothing": "", "text": "nonsense", "a spec": "h2o:budget=0.2", "bytes": b"x", "list": [],
    "numbers": [1, -2], "tuple": (1, 2), "dict": {"a": 1}, "object": object(), "a tensor": torch.tensor(1.5),
    "floats": torch.tensor([[1.5]]), "no ids": torch.zeros(0), "many": torch.zeros(2, 3, 4, 5),
    "function": len, "class": int, "keep": H2O(0.5), "a keep's class": H2O, "format": kvlab.store.Int(),
    "place": kvlab.place.Host(), "module": torch.nn.Linear(2, 2),
}  # fmt: skip


def model():
    return tiny("llama")


def cache():
    return kvlab.make_cache(model(), "full")


@functools.cache
def workshop():
    return kvlab.load()


def fed():
    return begun(model(), "full", prompt(6, 2))


CALLS = {  # name -> what gives the call, and a right value for each of its arguments
    "make_cache": lambda: (kvlab.make_cache, {"model": model(), "spec": "full"}),
    "prepare": lambda: (kvlab.prepare, {"model": model()}),
    "KVCache": lambda: (kvlab.KVCache, {"model": model(), "keep": None, "store": None, "place": None}),
    "load": lambda: (
        kvlab.load,
        dict.fromkeys(inspect.signature(kvlab.load).parameters)
        | {"engine": "eager", "weights": "fp32", "tensor_parallel": False},
    ),
    "load_cache": lambda: (kvlab.load_cache, {"path": "/nowhere", "model": model()}),
    "method": lambda: (kvlab.method, {"name": "mine"}),
    "decode": lambda: (
        kvlab.decode,
        {
            "model": model(),
            "input_ids": prompt(6),
            "cache": cache(),
            "max_new_tokens": 2,
            "attention_mask": None,
        },
    ),
    "ask": lambda: (
        kvlab.ask,
        dict(zip(("model", "tokenizer"), workshop(), strict=True))
        | {"context": "Mia ran.", "questions": ["Who?"], "method": "full", "protocol": "many-questions"}
        | {"chat": False, "max_new_tokens": 1, "streamer": None},
    ),
    "gate": lambda: (
        kvlab.gate,
        dict(zip(("model", "tokenizer"), workshop(), strict=True))
        | {"methods": ["int8"], "text": None, "minutes": 1e-9, "memory": None, "context": None, "users": 1},
    ),
    "Stepper": lambda: (kvlab.Stepper, {"model": model(), "cache": cache()}),
    "Stepper.feed": lambda: (
        kvlab.Stepper(model(), cache()).feed,
        {"ids": prompt(6), "attention_mask": None, "last": False, "chunk": None},
    ),
    "Stepper.fork": lambda: (fed().fork, {"rows": torch.tensor([0])}),
    "cache.crop": lambda: (fed().cache.crop, {"tokens_to_remove": -1}),
    "cache.reorder_cache": lambda: (fed().cache.reorder_cache, {"beam_idx": torch.tensor([1, 0])}),
    "cache.batch_select_indices": lambda: (fed().cache.batch_select_indices, {"indices": torch.tensor([1])}),
    "cache.batch_repeat_interleave": lambda: (fed().cache.batch_repeat_interleave, {"repeats": 2}),
    "cache.save": lambda: (fed().cache.save, {"path": "/nowhere/at/all"}),
    "place.fold": lambda: (kvlab.place.fold, {"model": copy.deepcopy(tiny("opt")), "ids": None}),
    "store.fold_smoothing": lambda: (
        kvlab.store.fold_smoothing,
        {"model": copy.deepcopy(tiny("opt")), "strength": 0.5, "ids": None},
    ),
    "store.buffer_of": lambda: (lambda store: kvlab.store.buffer_of(store, H2O()), {"store": None}),
    "measure.machines.like": lambda: (
        like,
        {"machine": next(iter(MACHINES)), "model": model(), "tokens": 16, "batch": 1},
    ),
}
CLASSES = {
    f"{module.__name__[6:]}.{name}": getattr(module, name)
    for module in (kvlab.keep, kvlab.store, kvlab.place)
    for name in module.__all__
    if inspect.isclass(getattr(module, name)) and not issubclass(getattr(module, name), Exception)
}


def on_purpose(error: BaseException) -> bool:
    """Whether kvlab raised it, in one line, and not Python, torch or transformers in its midst."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = "/kvlab/" in last.filename and (last.line or "").startswith("raise")
    return raised and isinstance(error, ValueError | TypeError) and "\n" not in str(error)


def said(make, name: str, leave_out=lambda kind: False) -> list[str]:
    """What a call says to every kind of nonsense under this name, where it is not kvlab who says it."""
    found = []
    for kind, wrong in WRONG.items():
        if leave_out(kind):
            continue
        call, arguments = make()
        try:
            call(**arguments | {name: wrong})
        except Exception as error:
            if not on_purpose(error):
                where = traceback.extract_tb(error.__traceback__)[-1]
                found.append(f"{name}={kind}: {type(error).__name__}: {error} ({where})")
    return found


@pytest.mark.parametrize("name", CALLS)
def test_every_call_refuses_nonsense_by_itself(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a path of one word is written
    for size in ("PROMPT", "DECODED"):  # of the texts that a gate reads
        monkeypatch.setattr(importlib.import_module("kvlab.gating.gate"), size, 8)
    named = {"nothing", "text", "a spec"} if name == "load" else set()  # looked for on disks and hubs
    for argument in CALLS[name]()[1]:
        much = {"2**62"} if argument in ("repeats", "tokens", "batch") else set()
        assert not said(CALLS[name], argument, leave_out=lambda kind, out=named | much: kind in out)


@pytest.mark.parametrize("name", CLASSES)
def test_every_policy_refuses_nonsense_by_itself(name):
    kinds = inspect.Parameter
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    parameters = [one for one in parameters if one.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    required = {one.name: None for one in parameters if one.default is one.empty}

    def make(**given):
        one = CLASSES[name](**given)
        if isinstance(one, Keep | Device | Policy):
            kind = (
                "keep" if isinstance(one, Keep) else "place" if isinstance(one, Device | Fetch) else "store"
            )
            kvlab.KVCache(model(), **{kind: kvlab.place.Host(one) if isinstance(one, Fetch) else one})

    for one in parameters:
        assert not said(lambda: (make, required), one.name)


class Mine(Keep):
    """Recent tokens."""

    def score(self, layer):
        return layer.slot_positions


@pytest.mark.parametrize(
    "given, same",
    [
        (H2O(), "h2o"), (H2O, "h2o"), (H2O(0.4, 0.25), "h2o:budget=0.4,recent=0.25"),
        (kvlab.store.Int(4), "int4"), (kvlab.store.Static, "static"), (kvlab.place.TopK(5), "topk:budget=5"),
        (kvlab.place.Host, "offload"), (Mine, "sinks:budget=0.2,sinks=0"),
        (Mine(7), "sinks:budget=7,sinks=0"),
        (kvlab.keep.AdaKV(kvlab.keep.KeyDiff(6)), "adakv:of=keydiff,budget=6"),
        ("kvlab.keep.H2O:budget=0.4", "h2o:budget=0.4"), ("kvlab.store.Int:bits=4", "int4"),
        ("kvlab.store.Static:length=60", "static"), ("kvlab.place.TopK:budget=5", "topk:budget=5"),
        ("kvlab.place.Host", "offload"),
    ],
)  # fmt: skip
def test_a_policy_its_class_or_its_path_makes_a_cache(given, same, tmp_path):
    found = [kvlab.decode(model(), prompt(30), kvlab.make_cache(model(), one), 6) for one in (given, same)]
    assert torch.equal(found[0].logprobs, found[1].logprobs)
    if not isinstance(given, str):
        with pytest.raises(ValueError, match=r"from a method's name$"):
            kvlab.make_cache(model(), given).save(tmp_path / "cache")


MODULES = {  # name -> (its text, what is said of it)
    "syntax": ("x = 1\n\ndef f(:\n", r"syntax_own.py, line 3: SyntaxError: invalid syntax$"),
    "name": ("x = 1\ny = z\n", r"name_own.py, line 2: NameError: name 'z' is not defined$"),
    "missing": ("import no_such_module\n", r"missing_own.py, line 1: ModuleNotFoundError: No module named"),
    "leaves": ("import sys\nsys.exit('gone')\n", r"leaves_own.py, line 2: SystemExit: gone$"),
    "many": ("raise ValueError('one\\ntwo')\n", r"many_own.py, line 1: ValueError: one$"),
    "other": ("class Keep: pass\n", r"expected a Keep, Store, format, Place or Fetch class$"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_ones_own_that_cannot_be_read_is_one_line(name, tmp_path, monkeypatch):
    text, says = MODULES[name]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}_own.py").write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        kvlab.make_cache(model(), f"{name}_own.Keep")
    assert "\n" not in str(error.value)
    assert "importlib" not in "".join(traceback.format_exception(error.value))


def test_what_only_some_objects_do_not_understand_is_refused_too():
    stepper = begun(model(), "recompute", prompt(6, 2))
    loaded, tokenizer = workshop()
    for call in (
        lambda: stepper.fork(range(2)),
        lambda: kvlab.gate(loaded, tokenizer, ["int8"], minutes=1e-9, say="x"),
        lambda: kvlab.results(torch.eye(3).to_sparse()),
        lambda: kvlab.place.ModelledLink(10**400),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert ": expected" in str(error.value) or " is a " in str(error.value)
        assert "\n" not in str(error.value)

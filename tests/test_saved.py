"""A saved cache answers as it would have: every method, in another process, and for no other model."""

import contextlib
import copy
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families.profiles import profiled
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import prompt, tiny

import kvlab
from kvlab.decode import Stepper
from kvlab.faster import compiled, lodger
from kvlab.finding import PROFILED
from kvlab.saved import contents_digest, model_digest

METHODS = [method for method in kvlab.METHODS if method not in ("recompute", "padded")] + [*PROFILED]
MORE = [
    "h2o:budget=12",
    "int4:axis=channel",
    "kivi2:group=8,recent=8",
    "infinigen:pool=0.5,budget=8",
    "topk:budget=4",
]


def continued(model, cache, ids) -> torch.Tensor:
    return torch.cat([model(one, past_key_values=cache).logits for one in ids.split(1, dim=1)], 1)


@pytest.mark.parametrize("name, method", [
    ("llama", "infinigen"), ("llama", "kivi2"), ("llama", "duo"), ("opt", "int4"), ("gpt2", "h2o:budget=12"),
])  # fmt: skip
def test_a_stepper_goes_on_with_a_loaded_cache(name, method, tmp_path):
    """A new one, one row padded on the left: what methods give after it tests/fuzz tells."""
    model, path = tiny(name), tmp_path / "cache.safetensors"
    ids = torch.randint(0, 96, (2, 46), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    first = Stepper(model, kvlab.make_cache(model, profiled(method, model)))
    first.feed(ids[:, :40], mask[:, :40])
    first.cache.save(path)
    second = Stepper(model, kvlab.load_cache(path, model))
    for stepper in (first, second):
        stepper.fork(torch.tensor([0, 1, 0]))
    for start, end in [(40, 41), (41, 45), (45, 46)]:
        step = ids[[0, 1, 0], start:end]
        assert torch.equal(first.feed(step), second.feed(step))
    with pytest.raises(ValueError, match="batch of 2 rows, but 3 were fed before"):
        second.feed(ids[:, :1])
    with pytest.raises(ValueError, match="130 tokens are more than the model's context"):
        second.feed(torch.zeros(3, 84, dtype=torch.long))
    with pytest.raises(RuntimeError, match="has seen 46 tokens, but 0 were fed here"):
        Stepper(model, second.cache).feed(step)


SCRIPT = """
import sys, torch, kvlab
sys.path.insert(0, "tests")
from tiny import prompt, tiny
from test_saved import continued
from pathlib import Path
ids = torch.arange(40, 46)[None]
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    model = tiny("llama")
    with torch.no_grad():
        found = continued(model, kvlab.load_cache(path, model), ids)
    torch.save(found, path.with_suffix(".found"))
"""


@pytest.mark.uncounted
def test_another_process_reads_every_method(tmp_path):
    """InfiniGen first: what it learns of a model has to be there at a process's first step."""
    methods = sorted(METHODS + MORE, key=lambda method: not method.startswith("infinigen"))
    model, expected = tiny("llama"), {}
    for number, method in enumerate(methods):
        path = tmp_path / f"{number:03}.safetensors"
        cache = kvlab.make_cache(model, profiled(method, model))
        with torch.no_grad():
            model(torch.arange(40).view(1, -1), past_key_values=cache)
            cache.save(path)
            expected[method] = path.with_suffix(".found"), continued(model, cache, torch.arange(40, 46)[None])
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=root, check=True)
    for method, (path, logits) in expected.items():
        assert torch.allclose(torch.load(path), logits, atol=1e-4), method


def test_another_thread_goes_on_as_this_one_would():
    model, ids = copy.deepcopy(tiny("llama")), torch.arange(46)[None]
    one, other = (kvlab.make_cache(model, "infinigen:budget=8") for _ in range(2))
    with torch.no_grad():
        for cache in (one, other):
            model(ids[:, :40], past_key_values=cache)
        expected = continued(model, one, ids[:, 40:])
    with ThreadPoolExecutor() as threads:
        found = threads.submit(torch.no_grad()(continued), model, other, ids[:, 40:]).result()
    assert torch.equal(found, expected)


def test_what_cannot_be_saved_or_read_is_refused_in_one_line(tmp_path):
    model, other = tiny("llama"), tiny("llama", intermediate_size=64)
    cache, path = kvlab.make_cache(model, "int4"), tmp_path / "cache"
    Stepper(model, cache).feed(torch.arange(20).view(1, -1))
    cache.save(path)
    changed = copy.deepcopy(model)  # every test shares the model itself
    with torch.no_grad():
        changed.lm_head.weight[3] += 1
    for stranger in (other, changed):
        with pytest.raises(ValueError, match="saved for another model"):
            kvlab.load_cache(path, stranger)
    (tmp_path / "text").write_text("no cache")
    for wrong in (tmp_path / "text", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="no cache can be read"):
            kvlab.load_cache(wrong, model)
    with pytest.raises(ValueError, match=r"not made by kvlab.make_cache"):
        kvlab.KVCache(model).save(path)
    with pytest.raises(ValueError, match="more than K and V"):
        kvlab.make_cache(model, "offload:link=1e9").save(path)
    for method in ("recompute", "padded"):
        with pytest.raises(ValueError, match="more than K and V"):
            kvlab.make_cache(model, method).save(path)
    open_one = kvlab.make_cache(model, "full")
    with open_one.prefill(), pytest.raises(ValueError, match="has not ended"):
        open_one.save(path)
    torch.save({"a": 1}, tmp_path / "pickle")
    with pytest.raises(ValueError, match="no cache can be read"):
        kvlab.load_cache(tmp_path / "pickle", model)


def test_no_other_configuration_or_weight_is_taken_for_the_models_own(tmp_path):
    model, path = tiny("llama", intermediate_size=8192), tmp_path / "cache"
    cache = kvlab.make_cache(model, "full")
    Stepper(model, cache).feed(torch.arange(20)[None])
    cache.save(path)
    turned, tripled, last = (copy.deepcopy(model) for _ in range(3))
    turned.config.rope_parameters["rope_theta"] = 500.0
    with torch.no_grad():
        tripled.model.layers[1].mlp.down_proj.weight.view(-1)[1::2] *= 3
        last.model.layers[1].mlp.down_proj.weight[-1, -1] += 1
    for stranger in (turned, tripled, last):
        with pytest.raises(ValueError, match="saved for another model"):
            kvlab.load_cache(path, stranger)
    kvlab.load_cache(path, copy.deepcopy(model))


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_a_model_that_was_written_and_read_is_the_same(name, tmp_path):
    """In both engines, after a pass, and whatever its configuration notes for those that write text."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    again = kvlab.prepare(type(model).from_pretrained(tmp_path).eval())
    again.config.use_cache, again.config.pad_token_id = False, 3
    assert model_digest(again) == model_digest(model)
    if lodger() is not None:
        compiled(again)
    Stepper(again, kvlab.make_cache(again, "full")).feed(torch.arange(20)[None])
    assert model_digest(again) == model_digest(model)


def saved(tmp_path, method="int4"):
    """(model, path) of a cache of 40 tokens."""
    model, path = tiny("llama"), tmp_path / "cache.safetensors"
    cache = kvlab.make_cache(model, method)
    with torch.no_grad():
        model(torch.arange(40)[None], past_key_values=cache)
    cache.save(path)
    return model, path, cache


def contents(path) -> tuple[dict, dict]:
    """What a file says, and its tensors."""
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def forge(path, about, tensors, **changes) -> None:
    """Write it anew, with a digest that fits."""
    about |= changes
    save_file(tensors, path, metadata=about | {"digest": contents_digest(about, tensors)})


def test_a_flipped_bit_is_told(tmp_path):
    """Of a tensor, first and last, and of what the header says."""
    model, path, _ = saved(tmp_path)
    whole = path.read_bytes()
    begins = 8 + int.from_bytes(whole[:8], "little")
    said = whole.index(b"moved_bytes") + len(b'moved_bytes\\": ')
    for place in (begins, (begins + len(whole)) // 2, len(whole) - 1, said):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="is damaged: what it holds is not what was saved") as error:
            kvlab.load_cache(path, model)
        assert "\n" not in str(error.value)
    path.write_bytes(whole)
    kvlab.load_cache(path, model)


def test_a_file_of_another_version_says_so(tmp_path):
    """Its digest of the model is made in another way."""
    model, path, _ = saved(tmp_path)
    about, tensors = contents(path)
    for told, said in ((about | {"format": "2"}, "was saved in format 2, but"), ({}, "holds no cache of")):
        save_file(tensors, path, metadata=told)
        with pytest.raises(ValueError, match=said):
            kvlab.load_cache(path, model)


def test_a_path_that_cannot_be_written_is_one_line(tmp_path):
    cache = saved(tmp_path)[-1]
    with pytest.raises(ValueError, match="no cache can be written there") as error:
        cache.save(tmp_path / "nodir" / "x.safetensors")
    assert "nodir" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_no_file(tmp_path):
    """Who opens one waits for ever, and safetensors hears no Ctrl-C."""
    (model, _, cache), pipe = saved(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    for ask in (
        lambda: kvlab.load_cache(pipe, model),
        lambda: cache.save(pipe),
        lambda: kvlab.make_cache(model, f"kvzap:profile={pipe}"),
        lambda: kvlab.load(device_map=str(pipe)),
    ):
        with pytest.raises(ValueError, match=r"it is no file\)?$"):
            ask()


@pytest.mark.parametrize("method", ["full", "int4", "h2o:budget=12", "topk:budget=4"])
def test_a_broken_cache_is_not_saved(method, tmp_path):
    model = copy.deepcopy(tiny("llama"))
    stepper = Stepper(model, kvlab.make_cache(model, method))
    stepper.feed(torch.arange(20)[None])

    def break_off(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(break_off)
    with pytest.raises(KeyboardInterrupt):
        stepper.feed(torch.tensor([[5]]))
    hook.remove()
    with pytest.raises(RuntimeError, match="broke off"):
        stepper.cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


ODD = [
    None, True, -1, 0, 3, 10**9, 2**70, 1.5, -2.5, float("nan"), "x", [], [1], {}, {"a": 1},
    {"attributes": {}}, {"tensor": "t0", "host": False}, {"tensor": "t0", "host": "x"},
    {"tensor": "t999", "host": False}, {"dtype": "load"}, {"list": 3},
]  # fmt: skip
FORGED = [name for name in METHODS if name not in PROFILED] + [
    "h2o:budget=12",
    "int4:sinks=4",
    "quest:page=4",
]


def places(value, path=()):
    """Where something stands in lists and dictionaries."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key)
        yield from places(one, (*path, key))


def inside(value):
    """Every dictionary in lists and dictionaries."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from inside(one)


def spoilt(x: torch.Tensor, dice: random.Random) -> torch.Tensor:
    ways = [
        lambda: torch.zeros(3), lambda: x[:0], lambda: torch.cat([x, x]), lambda: x.flatten(),
        lambda: x[..., :-1], lambda: x[..., None], lambda: x * torch.nan, lambda: x.transpose(0, -1),
    ]  # fmt: skip
    return (dice.choice(ways)() if x.dim() else torch.zeros(2)).contiguous().clone()


@pytest.mark.parametrize("seed", range(100))
def test_forged_contents_are_one_line(seed, tmp_path):
    """Anything in the place of anything, with a digest that fits."""
    dice = random.Random(seed)
    model, path, _ = saved(tmp_path, dice.choice(FORGED))
    about, tensors = contents(path)
    layers = json.loads(about["layers"])
    if dice.random() < 0.6:
        *above, last = dice.choice(list(places(layers)))
        inside = layers
        for key in above:
            inside = inside[key]
        if dice.random() < 0.3:
            del inside[last]
        else:
            inside[last] = dice.choice(ODD)
    else:
        name = dice.choice(list(tensors))
        tensors[name] = spoilt(tensors[name], dice)
    forge(path, about, tensors, layers=json.dumps(layers))
    try:
        cache = kvlab.load_cache(path, model)
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return
    with contextlib.suppress(ValueError):  # in one line, as that of any cache
        cache.stats()
        stepper = Stepper(model, cache)
        stepper.feed(prompt(1, len(cache.layers[0].lengths)))
        stepper.fork(torch.zeros(3, dtype=torch.long))
        stepper.feed(prompt(1, 3))


@pytest.mark.parametrize("seed", range(12))
def test_codes_of_another_kind_are_one_line(seed, tmp_path):
    """What a format stores in whole numbers or in floats, held as the other."""
    dice = random.Random(seed)
    method = dice.choice(["full", "int8", "int4", "mixed", "mxfp4", "fp8", "h2o:budget=0.5", "topk", "duo"])
    model, path, _ = saved(tmp_path, profiled(method, tiny("llama")))
    about, tensors = contents(path)
    store = json.loads(about["layers"])[0]["store"]
    held = [one["tensor"] for one in inside([store.get("keys"), store.get("left")]) if "tensor" in one]
    name = dice.choice(held)
    other = [torch.bool, torch.int8] if tensors[name].is_floating_point() else [torch.bool, torch.float32]
    tensors[name] = tensors[name].to(dice.choice(other))
    forge(path, about, tensors)
    with pytest.raises(ValueError, match="holds no cache of"):
        kvlab.load_cache(path, model)


@pytest.mark.parametrize("seed", range(24))
def test_a_layer_whose_counts_are_not_its_tokens_is_one_line(seed, tmp_path):
    """A number, or what would take another turn: each alone would be read, and answer otherwise."""
    dice = random.Random(seed)
    methods = ("full", "h2o:budget=12", "topk:budget=4", "kivi2", "paged", "tova", "kvzip", "int4")
    model, path, _ = saved(tmp_path, methods[seed % 8])
    about, tensors = contents(path)
    layer = dice.choice(layers := json.loads(about["layers"]))
    table = layer["table"]
    what = ("rows_held", "lengths", "count", "in_prompt", "host", "limits")[seed // 4]
    if what in ("rows_held", "lengths"):
        table[what]["list"][0] += dice.choice((-1, 1, -10))
    elif what == "count":
        table["count"] -= dice.choice((1, 5))
    elif what == "in_prompt":
        layer["in_prompt"] = True
    elif what == "host":
        dice.choice([one for one in inside(layer) if "tensor" in one])["host"] = dice.choice(
            (0, 1, "x", None)
        )
    else:
        layer["keep"]["longest"] = {"list": [dice.choice((-3, -2.5, 2**70, None))]}
    forge(path, about, tensors, layers=json.dumps(layers))
    with pytest.raises(ValueError, match=r"holds no cache of [^\n]*$"):
        kvlab.load_cache(path, model)


def test_a_file_imports_no_module(tmp_path):
    model, path, _ = saved(tmp_path, "h2o:budget=0.5")
    about, tensors = contents(path)
    for method in ("antigravity.Keep", "adakv:of=antigravity.Keep", "a.b.antigravity.Keep:budget=0.5"):
        forge(path, about, tensors, method=method)
        with pytest.raises(ValueError, match="since no file imports a module"):
            kvlab.load_cache(path, model)
    assert "antigravity" not in sys.modules
    kvlab.load_cache(saved(tmp_path, "h2o:budget=0.5")[1], model)  # 0.5 is no module


@pytest.mark.counted
@pytest.mark.parametrize("way", ["steps", "crop"])
@pytest.mark.parametrize("method", METHODS + MORE + ["paged:block=4,blocks=260"])
def test_bytes_and_answers_are_the_saved_ones_after_any_steps(method, way, tmp_path):
    """Padded rows, steps, forks, `hold` and `crop` before it is saved; and more steps after it was loaded."""
    dice = random.Random(method + way)
    model = tiny("llama", dtype=dice.choice([torch.float32, torch.float64]))
    path = tmp_path / "cache.safetensors"
    ids = torch.randint(0, 96, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[dice.randrange(2), : dice.randrange(9)] = 0
    first = Stepper(model, kvlab.make_cache(model, profiled(method, model)))
    first.feed(ids[:, : (end := dice.randrange(30, 44))], mask[:, :end])
    rows = torch.arange(2)
    for fork in ([0, 1], [dice.randrange(2) for _ in range(dice.randrange(1, 4))]):
        for _ in range(dice.randrange(5)):
            first.feed(ids[rows, end : end + 1])
            end += 1
        first.fork(torch.tensor(fork))
        rows = rows[fork]
    if dice.random() < 0.5:
        first.cache.hold()
    if way == "crop":
        with contextlib.suppress(ValueError):  # in one line, where tokens do not come back
            first.cache.crop(-dice.randrange(1, 20))
    first.cache.save(path)
    both = [first.cache, kvlab.load_cache(path, model)]
    told = lambda: [(one.device_bytes, one.host_bytes) for one in (cache.stats() for cache in both)]
    grows = method == "paged"  # by half of what it was once: its rows hold as many blocks
    used = lambda: [cache.layers[0].store.pool.used for cache in both] if grows else told()
    assert len(set(used())) == 1
    with torch.no_grad():
        found = [continued(model, cache, ids[rows, end : end + 3]) for cache in both]
    assert torch.equal(*found) and len(set(used())) == 1

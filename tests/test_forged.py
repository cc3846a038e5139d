"""A file that is damaged, forged or another model's is refused in one line; so is what cannot be saved."""

import contextlib
import copy
import json
import os
import random
import re
import sys

import pytest
import torch
from families.profiles import profiled
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import begun, prompt, tiny

import kvlab
from kvlab.decode import Stepper
from kvlab.models.files import check_said
from kvlab.saved import SCALARS, contents_digest


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


def test_what_cannot_be_saved_or_read_is_refused_in_one_line(tmp_path):
    model, path = tiny("llama"), tmp_path / "cache"
    (tmp_path / "text").write_text("no cache")
    torch.save({"a": 1}, tmp_path / "pickle")
    for wrong in ("text", "nowhere", "pickle"):
        with pytest.raises(ValueError, match="no cache can be read"):
            kvlab.load_cache(tmp_path / wrong, model)
    with pytest.raises(ValueError, match=r"not made by kvlab.make_cache"):
        kvlab.KVCache(model).save(path)
    with pytest.raises(ValueError, match="not hold just K and V"):
        kvlab.make_cache(model, "offload:link=1e9").save(path)
    for method in ("recompute", "padded"):
        with pytest.raises(ValueError, match="not hold just K and V"):
            kvlab.make_cache(model, method).save(path)
    open_one = kvlab.make_cache(model, "full")
    with open_one.prefill(), pytest.raises(ValueError, match="has not ended"):
        open_one.save(path)


def test_no_other_configuration_or_weight_is_taken_for_the_models_own(tmp_path):
    model, path = tiny("llama", intermediate_size=8192), tmp_path / "cache"
    cache = begun(model, "full", torch.arange(20)[None]).cache
    cache.save(path)
    turned, tripled, last, head = (copy.deepcopy(model) for _ in range(4))
    turned.config.rope_parameters["rope_theta"] = 500.0
    with torch.no_grad():
        head.lm_head.weight[3] += 1
        tripled.model.layers[1].mlp.down_proj.weight.view(-1)[1::2] *= 3
        last.model.layers[1].mlp.down_proj.weight[-1, -1] += 1
    for stranger in (tiny("llama"), turned, tripled, last, head):
        with pytest.raises(ValueError, match="saved for another model"):
            kvlab.load_cache(path, stranger)
    kvlab.load_cache(path, copy.deepcopy(model))


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
    folder_of_pipes = tmp_path / "model"
    folder_of_pipes.mkdir()
    os.mkfifo(folder_of_pipes / "generation_config.json")
    for ask in (
        lambda: kvlab.load_cache(pipe, model),
        lambda: cache.save(pipe),
        lambda: kvlab.make_cache(model, f"kvzap:profile={pipe}"),
        lambda: kvlab.load(device_map=str(pipe)),
        lambda: check_said(folder_of_pipes, set()),
    ):
        with pytest.raises(ValueError, match=r"it is no file\)?$"):
            ask()


ODD = [
    None, True, -1, 0, 3, 10**9, 2**70, 1.5, -2.5, float("nan"), "x", [], [1], {}, {"a": 1},
    {"attributes": {}}, {"tensor": "t0", "host": False}, {"tensor": "t0", "host": "x"},
    {"tensor": "t999", "host": False}, {"dtype": "load"}, {"list": 3},
]  # fmt: skip
FORGED = [name for name in kvlab.METHODS if name not in ("recompute", "padded")]
FORGED += ["h2o:budget=12", "int4:sinks=4", "quest:page=4"]


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


@pytest.mark.parametrize("seed", range(10))
def test_a_name_that_a_header_says_twice_is_one_line(seed, tmp_path):
    dice = random.Random(seed)
    model, path, _ = saved(tmp_path, dice.choice(FORGED))
    about, tensors = contents(path)
    name = dice.choice(sorted(set(re.findall(r'"\w+": ', about["layers"]))))
    at = dice.choice([found.start() for found in re.finditer(name, about["layers"])])
    forge(path, about, tensors, layers=f"{about['layers'][:at]}{name}3, {about['layers'][at:]}")
    with pytest.raises(ValueError, match=f"holds no cache of .* it says '{name[1:-3]}' twice"):
        kvlab.load_cache(path, model)


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


@pytest.mark.parametrize("seed", range(14))
def test_a_format_is_what_the_methods_name_says(seed, tmp_path):
    """Another parameter of a format would turn the same codes into other numbers."""
    dice = random.Random(seed)
    methods = ("int8", "int4:rotate=true", "fp8:axis=token", "nvfp4", "turboquant", "kvquant", "mixed")
    model, path, _ = saved(tmp_path, methods[seed % 7])
    about, tensors = contents(path)
    layers = json.loads(about["layers"])
    held = dice.choice(layers)["store"]
    formats = [one for name in ("format", "value_format") for one in inside(held[name]) if "_made" in one]
    one = dice.choice(formats)
    name = dice.choice([name for name, value in one.items() if isinstance(value, SCALARS)])
    others = [not one[name]] if isinstance(one[name], bool) else [3, "token", "fp32", "clip", 0.5, None]
    one[name] = dice.choice([other for other in others if other != one[name]])
    forge(path, about, tensors, layers=json.dumps(layers))
    with pytest.raises(ValueError, match=rf"holds no cache of [^\n]*{name} is "):
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

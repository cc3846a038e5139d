"""A saved cache answers as it would have: every method, in another process; after any steps: tests/fuzz."""

import copy
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families.profiles import profiled
from tiny import begun, tiny

import kvlab
from kvlab.decode import Stepper
from kvlab.faster import compiled, lodger
from kvlab.finding import PROFILED
from kvlab.saved import model_digest
from kvlab.scratch import written_whole

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


SCRIPT = """
import sys, torch, kvlab
sys.path.insert(0, "tests")
from tiny import prompt, tiny
from test_saved import continued
from pathlib import Path
ids = torch.arange(40, 43)[None]
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    model = tiny("llama")
    with torch.no_grad():
        found = continued(model, kvlab.load_cache(path, model), ids)
    torch.save(found, path.with_suffix(".found"))
"""


def test_a_loaded_cache_does_not_change_with_its_file(tmp_path):
    model, path, ids = tiny("llama"), tmp_path / "cache.safetensors", torch.arange(40)[None]
    for method in ("full", "int8", "offload", "kivi2:group=8,recent=8"):
        cache = begun(model, method, ids).cache
        cache.save(path)
        loaded = kvlab.load_cache(path, model)
        with path.open("r+b") as file:  # in place, as `cp` writes
            file.write(bytes(path.stat().st_size))
        assert torch.equal(continued(model, loaded, ids[:, :3]), continued(model, cache, ids[:, :3]))


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
            expected[method] = path.with_suffix(".found"), continued(model, cache, torch.arange(40, 43)[None])
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=root, check=True)
    for method, (path, logits) in expected.items():
        assert torch.allclose(torch.load(path), logits, atol=1e-4), method


@pytest.mark.parametrize("method", ["recompute", "padded"])
def test_why_a_cache_cannot_be_saved_is_true_of_its_copy(method, tmp_path):
    cache = kvlab.make_cache(tiny("llama"), method)
    for one in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match=f"'{method}' .* does not hold just K and V"):
            one.save(tmp_path / "cache.safetensors")


def test_a_full_disk_costs_nothing_that_was_there(tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = kvlab.make_cache(tiny("llama"), "full")
    cache.model(torch.arange(40).view(1, -1), past_key_values=cache)
    cache.save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(ValueError, match="no cache can be written there"):
            cache.save(path)
        with pytest.raises(OSError, match=path.name), written_whole(path) as part:
            part.write_bytes(before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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

"""A saved cache answers as it would have: every method, in another process, after any steps."""

import contextlib
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families.profiles import profiled
from tiny import tiny

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
ids = torch.arange(40, 46)[None]
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    model = tiny("llama")
    with torch.no_grad():
        found = continued(model, kvlab.load_cache(path, model), ids)
    torch.save(found, path.with_suffix(".found"))
"""


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


@pytest.mark.parametrize("method", METHODS + MORE + ["paged:block=4,blocks=260"])
def test_bytes_and_answers_are_the_saved_ones_after_any_steps(method, tmp_path):
    """Padded rows, steps, forks, `hold` and `crop` before it is saved; and more steps after it was loaded."""
    dice = random.Random(method)
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
    if dice.random() < 0.5:
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

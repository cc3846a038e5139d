"""Loading the embedded models: what is damaged, missing or no model of its kind is named."""

import json
import os
import random
import shutil

import pytest
import torch
from families.models import FAMILIES, family
from safetensors.torch import load_file, save_file
from tiny import tiny

import kvlab
from kvlab import models
from kvlab.models.files import SAID


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the embedded model that `kvlab.load("workshop")` loads instead."""
    folder = shutil.copytree(models.EMBEDDED["workshop"], tmp_path / "checkpoint")
    monkeypatch.setitem(models.EMBEDDED, "workshop", folder)
    return folder


def test_every_embedded_model_is_whole_and_small():
    for name, folder in models.EMBEDDED.items():
        model, tokenizer = kvlab.load(name, device="cpu")
        assert model.config.num_hidden_layers == 8 and model.config.hidden_size == 256
        assert len(tokenizer) == model.config.vocab_size <= 4096
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 20e6
        assert {line.split()[1] for line in (folder / "sha256.txt").read_text().splitlines()} == {
            file.name for file in folder.iterdir() if file.name != "sha256.txt"
        }


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_changed_byte_is_noticed(copied, name):
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged: its [\d,]+ bytes have another sha256"):
        kvlab.load("workshop")


@pytest.mark.parametrize("name", ["model.safetensors", "sha256.txt"])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    with pytest.raises(ValueError, match=f"incomplete: {name} is missing"):
        kvlab.load()


def test_missing_or_misshapen_weights_are_no_model(copied, tmp_path):
    other = shutil.copytree(copied, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, other / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks 1 of the model's weights, '{name}'"):
        kvlab.load(other)
    save_file(weights | {"model.layers.9.x": weights[name].clone()}, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds 'model\.layers\.9\.x', 1 such in all"):
        kvlab.load(other)
    save_file(weights | {name: weights[name][:5].clone()}, other / "model.safetensors")
    with pytest.raises(ValueError, match="no model could be loaded"):
        kvlab.load(other)


def as_hub_id(folder, root, monkeypatch):
    """The name by which a folder's files are loaded from a hub's cache: links to blobs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    home = root / "models--some--model"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(folder, home / "blobs")
    (home / "refs").mkdir()
    (home / "refs/main").write_text("a" * 40)
    (home / "snapshots" / ("a" * 40)).mkdir(parents=True)
    for file in (home / "blobs").iterdir():
        (home / "snapshots" / ("a" * 40) / file.name).symlink_to(file)
    return "some/model"


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["blob", "link", "half"])
def test_a_hub_id_that_is_only_half_there_is_one_line(tmp_path, monkeypatch, lost, how):
    name = as_hub_id(models.EMBEDDED["workshop"], tmp_path / "hub", monkeypatch)
    file = next((tmp_path / "hub").glob(f"*/snapshots/*/{lost}"))
    if how == "half":
        content = file.read_bytes()
        file.resolve().write_bytes(content[: len(content) // 2])
    else:
        (file if how == "link" else file.resolve()).unlink()
    with pytest.raises(
        ValueError, match=r"^no (model|tokenizer) could be loaded from 'some/model'[^\n]*whole"
    ):
        kvlab.load(name)


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("content", [b'{"eos_token_id": [0, 1', bytes(60), b"[1]", b"\xef\xbb\xbf{}", None])
def test_what_transformers_passes_over_is_named(tmp_path, name, content):
    """Also a link whose end did not come."""
    folder = shutil.copytree(models.EMBEDDED["workshop"], tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    if content is None:
        (folder / name).symlink_to(folder / "gone")
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"^no (model|tokenizer) could be loaded from [^\n]*whole"):
        kvlab.load(folder)


def test_a_text_of_other_tokens_is_noticed(tmp_path):
    """merges.txt lacks its end, or lines, or one line that later ones need; a template is empty or cut."""
    folder = shutil.copytree(models.EMBEDDED["workshop"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text(" ")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is empty"):
        kvlab.load(folder)
    said = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    for end in random.Random(6).sample(range(1, len(said) - 1), 6):
        (folder / "chat_template.jinja").write_text(said[:end])
        with pytest.raises(ValueError, match=r"^no tokenizer could be loaded from [^\n]*whole"):
            kvlab.load(folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    kvlab.load()[1].backend_tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    kvlab.load(folder)
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    for seed in range(6):
        dice = random.Random(seed)
        lost = set(dice.sample(range(1, len(lines)), dice.randrange(20, 2000)))
        less = lines[: -len(lost)] if seed % 2 else [x for at, x in enumerate(lines) if at not in lost]
        (folder / "merges.txt").write_text("\n".join(less), encoding="utf-8")
        with pytest.raises(ValueError, match=r"^no (model|tokenizer) could be loaded from [^\n]*whole"):
            kvlab.load(folder)
    for at in random.Random(7).sample(range(1, len(lines)), 6):
        (folder / "merges.txt").write_text("\n".join(lines[:at] + lines[at + 1 :]), encoding="utf-8")
        with pytest.raises(ValueError, match=r"merges\.txt: no line (before .* )?makes "):
            kvlab.load(folder)
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    one, other = random.Random(8).sample(sorted(ids), 2)
    (folder / "vocab.json").write_text(json.dumps(ids | {one: ids[other]}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"gives two words one id"):
        kvlab.load(folder)


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma 2"])
def test_a_tokenizer_without_words_is_none(tmp_path, kind):
    """Whose file did not come: transformers makes an empty one."""
    family(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^no tokenizer could be loaded from [^\n]*whole"):
        kvlab.load(tmp_path)


@pytest.mark.parametrize("seed", range(12))
def test_whole_numbers_are_no_weights(tmp_path, seed, monkeypatch):
    """In any weight of any family, experts among them, in either kind of file, in a folder or by a hub id;
    the masks that old checkpoints of GPT-2 and GPT-NeoX hold under the name of a bias are none."""
    dice = random.Random(seed)
    name = ("gpt-oss", "GPT-2", "GPT-NeoX", *dice.sample(sorted(FAMILIES), 9))[seed]
    family(name).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED["workshop"] / file, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if seed % 3:
        write = lambda tensors: save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        write = lambda tensors: torch.save(tensors, tmp_path / "pytorch_model.bin")
    weight = dice.choice([key for key in weights if "proj" in key] or sorted(weights))
    kind = dice.choice([torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64])
    write(weights | {weight: weights[weight].mul(90).to(kind)})
    name = as_hub_id(tmp_path, tmp_path.parent / f"hub{seed}", monkeypatch) if seed % 2 else tmp_path
    with pytest.raises(ValueError, match=f"'{weight}' holds whole or complex numbers"):
        kvlab.load(name)
    mask = {"GPT-2": "transformer.h.0.attn.bias", "GPT-NeoX": "gpt_neox.layers.0.attention.bias"}.get(name)
    write(weights | ({mask: torch.ones(1, 1, 9, 9).tril().bool()} if mask else {}))
    kvlab.load(tmp_path)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_the_files_that_an_index_names_are_looked_at(tmp_path, ending):
    """A pipe among them, whole numbers in a folder below, a path that leaves; others beside them are not."""
    folder, pickled = tmp_path / "model", ending == "pt"
    tiny("llama").save_pretrained(folder, max_shard_size="40KB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED["workshop"] / file, folder)
    index = folder / "model.safetensors.index.json"
    if pickled:
        for file in folder.glob("*.safetensors"):
            torch.save(load_file(file), file.with_suffix(".pt"))
            file.unlink()
        told = index.read_text().replace(".safetensors", ".pt")
        index = index.rename(folder / "pytorch_model.bin.index.json")
        index.write_text(told)
        (folder / "training_args.bin").write_bytes(b"none")
    (folder / f"notes.{ending}").write_bytes(b"none")
    kvlab.load(folder)
    shard = next(iter(json.loads(index.read_text())["weight_map"].values()))
    (folder / "below").mkdir()
    held = torch.load(folder / shard) if pickled else load_file(folder / shard)
    held = {name: (99 * part).int() for name, part in held.items()}
    if pickled:
        torch.save(held, folder / "below" / shard)
    else:
        save_file(held, folder / "below" / shard, metadata={"format": "pt"})
    shutil.copy(folder / shard, tmp_path)
    os.mkfifo(folder / f"pipe.{ending}")
    for instead, said in (
        (f"below/{shard}", "holds whole or complex numbers"), (f"../{shard}", "a file outside of the folder"),
        (str(folder / shard), "a file outside of the folder"), (f"pipe.{ending}", "it is no file"),
        (7, "expected the file of every weight"),
    ):  # fmt: skip
        named = json.loads(index.read_text())
        named["weight_map"] = {
            name: instead if file == shard else file for name, file in named["weight_map"].items()
        }
        (copy := tmp_path / "copy").mkdir()
        for file in folder.iterdir():
            (copy / file.name).symlink_to(file)
        (copy / index.name).unlink()
        (copy / index.name).write_text(json.dumps(named))
        with pytest.raises(ValueError, match=said):
            kvlab.load(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, "mps", "vulkan"])
def test_a_device_that_is_not_here_is_one_line(device):
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    with pytest.raises(ValueError, match=r"^device=[^\n]+$"):
        kvlab.load(device=device)


def test_layers_without_end_are_refused_at_once(copied, tmp_path):
    other = shutil.copytree(copied, tmp_path / "other")
    said = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 2**31}))
    with pytest.raises(ValueError, match="num_hidden_layers=2147483648: expected at most 10000"):
        kvlab.load(other)

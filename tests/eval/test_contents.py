"""A model's digest is of its contents: copies and new conversions share it, another weight does not."""

import os
import shutil

import pytest

from eval.core import contents, digests
from eval.core.digests import digest, model_digest
from kvlab.models import files


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights, many of them")
    (folder / "config.json").write_text('{"layers": 2, "transformers_version": "5.20.0"}')
    return folder


def test_other_weights_have_another_digest(model):
    before = contents.of_model(model)
    (model / "model.safetensors").write_bytes(b"weights, more of them")
    assert contents.of_model(model) != before


def test_a_copy_has_the_same_digest(model):
    copy = shutil.copytree(model, model.parent / "copy", copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / files.SUMS).write_text("sums of these files")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "fetched").write_text("today")
    assert contents.of_model(copy) == contents.of_model(model)
    assert len(contents.of_model(copy)) == 12


def test_who_wrote_a_configuration_counts_for_nothing_and_all_else_counts(model):
    """Names, too."""
    found = {contents.of_model(model)}
    (model / "config.json").write_text('{"transformers_version": "5.23.0", "layers": 2}')
    assert found == {contents.of_model(model)}
    for change in (
        lambda: (model / "config.json").write_text('{"layers": 3, "transformers_version": "5.23.0"}'),
        lambda: (model / "config.json").write_text("[no object]"),
        lambda: (model / "model.safetensors").rename(model / "other.safetensors"),
        lambda: shutil.move(model / "other.safetensors", model / "deep" / "other.safetensors"),
        lambda: (model / "deep" / "tokenizer.json").write_text("{}"),
    ):
        (model / "deep").mkdir(exist_ok=True)
        change()
        assert contents.of_model(model) not in found
        found.add(contents.of_model(model))


def test_large_data_are_known_by_their_contents_too(model, monkeypatch):
    monkeypatch.setattr(digests, "LARGE", 8)
    copy = shutil.copyfile(model / "model.safetensors", model.parent / "model.safetensors")
    os.utime(copy, (1, 1))
    assert digest([copy]) == digest([model / "model.safetensors"])


def test_a_folder_s_digest_is_of_its_contents(model):
    assert model_digest(str(model)) == contents.of_model(model)
    assert model_digest("someone/a-model-of-the-hub") == "someone/a-model-of-the-hub"


def test_a_hub_id_is_known_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--some--model"
    (home / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        (home / "refs/main").write_text(commit)
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "snapshots" / commit / "config.json").write_text("{}")
        assert contents.on_hub("some/model") == f"some/model@{commit[:12]}"

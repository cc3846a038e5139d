"""A model's digest is of its contents: copies and new conversions share it, another weight does not."""

from __future__ import annotations

import os
import shutil

import pytest

from eval.core import contents
from eval.core.digests import digest, model_digest
from kvlab.models import files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """kvlab's cache folder, empty; files of more than 8 bytes are large."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "LARGE", 8)
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch) -> list:
    """The files that are read whole."""
    found, read = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: found.append(path) or read(path))
    return found


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights, many of them")
    (folder / "config.json").write_text('{"layers": 2, "transformers_version": "5.20.0"}')
    return folder


def test_a_large_file_is_read_once(cache, reads, model):
    weights = model / "model.safetensors"
    first = contents.sha256(weights)
    assert first == files.sha256(weights) and len(reads) == 2
    assert contents.sha256(weights) == first and len(reads) == 2
    link = model.parent / "link"
    link.symlink_to(model)
    assert contents.sha256(link / weights.name) == first and len(reads) == 2


@pytest.mark.parametrize("restored", [False, True])
def test_other_weights_have_another_sum(cache, model, restored):
    """Of the same size, and also where somebody sets the time of the file back."""
    weights = model / "model.safetensors"
    before, stat = contents.of_model(model), weights.stat()
    weights.write_bytes(b"weights, more of them")
    assert weights.stat().st_size == stat.st_size
    if restored:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert contents.of_model(model) != before


def test_a_copy_has_the_same_digest(cache, model):
    copy = shutil.copytree(model, model.parent / "copy", copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / files.SUMS).write_text("sums of these files")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "fetched").write_text("today")
    assert contents.of_model(copy) == contents.of_model(model)
    assert len(contents.of_model(copy)) == 12


def test_who_wrote_a_configuration_counts_for_nothing_and_all_else_counts(cache, model):
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


def test_what_is_written_meanwhile_is_not_kept(cache, model, monkeypatch):
    weights, read = model / "model.safetensors", files.sha256

    def slowly(path):
        found = read(path)
        weights.write_bytes(b"what another process writes")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", slowly)
        contents.sha256(weights)
    assert not (cache / "sums").exists()
    assert contents.sha256(weights) == read(weights)


def test_large_data_are_known_by_their_contents_too(cache, model):
    copy = shutil.copyfile(model / "model.safetensors", model.parent / "model.safetensors")
    os.utime(copy, (1, 1))
    assert digest([copy]) == digest([model / "model.safetensors"])


def test_a_folder_s_digest_is_of_its_contents(cache, model):
    assert model_digest(str(model)) == contents.of_model(model)
    assert model_digest("someone/a-model-of-the-hub") == "someone/a-model-of-the-hub"

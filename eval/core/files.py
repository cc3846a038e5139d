"""Files: a folder by its address, on this machine or wherever fsspec reaches, and files written whole."""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
import uuid
from pathlib import Path

from kvlab.scratch import written_whole

from .errors import Problem, one_line

WRITING = ".writing-"  # how the name of a file begins that is tried
LOCAL = "file://"


def address(text: str) -> Path | str:
    """A local folder as a Path, anything else as the address that fsspec takes (`s3://bucket/study`)."""
    if text.startswith(LOCAL):
        return Path(text.removeprefix(LOCAL))
    return text.rstrip("/") if "://" in text else Path(text)


def finite(value):
    """Arrays and their numbers become Python's, and NaN and infinities None: they are not JSON, and a reader
    must not trip over them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def as_json(data) -> bytes:
    """The text of a JSON file."""
    text = json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole, on the disk before it has its name, or not at all. An OSError names `path`."""
    with written_whole(path) as part, part.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, data) -> None:
    """Write JSON atomically."""
    write_file(path, as_json(data))


class Folder:
    """A local folder of files."""

    def __init__(self, path: Path):
        self.path = path

    def prepare(self) -> None:
        """Make the folder and try a file in it. Raises OSError when it cannot be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=WRITING):
            pass

    def names(self) -> list[str]:
        """The JSON files, in order."""
        return sorted(file.name for file in self.path.glob("[!.]*.json"))

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is none. OSError for what is no file, such as a pipe, whose
        reader would wait."""
        try:
            if not stat.S_ISREG((self.path / name).stat().st_mode):
                raise OSError(0, "it is no file", str(self.path / name))
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        write_file(self.path / name, data)

    def at(self, name: str) -> str:
        """The address of a file, for a line."""
        return str(self.path / name)


class Remote:
    """A folder at any address of fsspec: `s3://`, `gs://`, `memory://`, ... An object store shows a file when
    all of it is there."""

    def __init__(self, where: str):
        """Raises Problem for an address that fsspec has nothing for."""
        import fsspec

        self.where = where
        try:
            self.system, self.path = fsspec.core.url_to_fs(where)
        except (ImportError, ValueError) as error:
            raise Problem(f"--out {where}: {one_line(error)}") from error

    def prepare(self) -> None:
        """Try a file there, and make the folder where file systems have folders; a bucket is never made.
        Raises OSError when none can be written."""
        name = f"{self.path}/{WRITING}{uuid.uuid4().hex}"
        slash, top = self.path[: len(self.path) - len(self.path.lstrip("/"))], self.path.lstrip("/")
        try:
            try:
                self.system.pipe_file(name, b"")
            except FileNotFoundError:
                if not self.system.exists(slash + top.partition("/")[0]):
                    raise
                self.system.makedirs(self.path, exist_ok=True)
                self.system.pipe_file(name, b"")
            self.system.rm_file(name)
        except Exception as error:  # every file system has errors of its own
            raise OSError(0, one_line(error), self.where) from error

    def names(self) -> list[str]:
        self.system.invalidate_cache(self.path)
        try:
            found = (path.rpartition("/")[2] for path in self.system.ls(self.path, detail=False))
            return sorted(name for name in found if name.endswith(".json") and not name.startswith("."))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes | None:
        try:
            return self.system.cat_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        try:
            self.system.pipe_file(f"{self.path}/{name}", data)
        except Exception as error:
            raise OSError(0, one_line(error), self.at(name)) from error

    def at(self, name: str) -> str:
        return f"{self.where}/{name}"


def folder_at(where: Path | str) -> Folder | Remote:
    """The folder with this address."""
    return Folder(where) if isinstance(where, Path) else Remote(where)

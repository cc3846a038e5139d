"""Study files: the options of a command as YAML or JSON, and lm-eval's spellings of them.

    run: accuracy
    model: smollm2
    methods: [full, "snapkv:budget=0.2"]
    tasks: [recall, niah_single_1]
    metadata: {max_seq_lengths: [1024]}
    limit: 50

`python -m eval --config study.yaml` is the same as these options on the command line; what is said there as
well counts more. A run's run.json is such a file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

from kvlab.parameters import from_json, shown

from .errors import Problem, one_line

COMMAND, RUN = "command", "run"  # the line that made a run.json, for readers; the sub-command
LOADED = {
    "pretrained": "model",
    "dtype": "dtype",
    "device": "device",
}  # lm-eval's --model_args -> our options
UNNAMED = "folders"  # what a command line says without a name, behind the sub-command
LIBRARIES = (None, "hf", "kvlab")  # what lm-eval's users say for --model beside them


def expanded(words: list[str]) -> list[str]:
    """The words of a command line, in which a file's options are in the place of --config FILE, and names of
    options have dashes. Raises Problem for a file that says no options."""
    words = [_dashed(word) for word in words]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?", const="")
    found, rest = finder.parse_known_args(words)
    if (path := found.config) is None:
        return words
    if not path:
        raise Problem("--config: expected a file")
    said = read(path)
    named = [rest.pop(0)] if rest and not rest[0].startswith("-") else [said.get(RUN)]
    if named == [None]:
        raise Problem(f"--config {path}: it does not say what to run; add a line such as {RUN}: accuracy")
    plain = said.pop(UNNAMED, [])
    if not rest or rest[0].startswith("-"):
        named += map(str, plain if isinstance(plain, list) else [plain])
    return named + [word for name, value in said.items() for word in _words(name, value)] + rest


def read(path: str) -> dict:
    """The options in a file; {name: value}."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        said, texts = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Problem(f"--config {path}: {one_line(error)}") from error
    if not isinstance(said, dict) or not all(isinstance(name, str) and name != "config" for name in said):
        raise Problem(f"--config {path}: expected options, as name: value, and no further file")
    said = {name: _word(one, texts.get(name)) for name, one in said.items()}
    names = [_dashed(f"--{name.value}") for name, _ in yaml.compose(text).value]
    if twice := [name for name in said if names.count(_dashed(f"--{name}")) > 1]:
        raise Problem(f"--config {path}: it says {shown(twice[0])} twice")
    if not isinstance(said.get(RUN, ""), str):
        raise Problem(f"--config {path}: {RUN}: {shown(said[RUN])}: expected a word, such as accuracy")
    return said


def _word(one, text):
    """A value in which `no`, `off`, `yes` and `on` are words, such as a task's name; text: as it is written.
    In a mapping, which lm-eval reads, they are what YAML says."""
    if isinstance(one, list) and isinstance(text, list):
        return [_word(*pair) for pair in zip(one, text, strict=True)]
    return text if isinstance(one, bool) and text and text.lower() not in ("true", "false") else one


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _words(name: str, value) -> list[str]:
    """An option of a file as words."""
    option = f"--{name.replace('_', '-')}"
    if name in (COMMAND, RUN) or value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, list):
        return [option, *map(str, value)]
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise Problem(f"--config: {name}: {one_line(error)}") from error
    return [f"{option}={value}"]


def options(kind) -> list:
    """The fields of a measurement that are options."""
    return [field for field in fields(kind) if "help" in field.metadata]


def said(run: str, measurements: list, command: str) -> dict:
    """What run.json has: the options of a command that are not their defaults."""
    found = {COMMAND: command, RUN: run}
    for name, field in {field.name: field for one in measurements for field in options(one)}.items():
        given = [getattr(one, name) for one in measurements if hasattr(one, name)]
        value, *others = dict.fromkeys(given)  # several protocols are several measurements
        if others or value != field.default:
            found[name] = [value, *others] if others else [*value] if isinstance(value, tuple) else value
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def arguments(text: str) -> dict:
    """lm-eval's "a=1,b=two", or JSON, as a dictionary. Raises Problem for what is neither."""
    from lm_eval.utils import simple_parse_args_string

    try:
        return from_json(text) if text.lstrip().startswith("{") else simple_parse_args_string(text)
    except ValueError as error:
        raise Problem(f"{shown(text)}: expected name=value,name=value or JSON") from error


def loaded(given: dict) -> dict:
    """Options in which what lm-eval's --model_args says of a model is said by our own names."""
    if not (text := given.get("model_args")):
        return given
    rest, given = arguments(text), dict(given)
    for name, ours in LOADED.items():
        if (value := rest.pop(name, None)) is None:
            continue
        if given[ours] not in (LIBRARIES if ours == "model" else (None, value)):
            raise Problem(f"--model-args {name}={value}: --{ours} is {given[ours]}; name one of them")
        given[ours] = str(value)
    if given["dtype"] not in (None, "float32", "bfloat16", "float16"):
        raise Problem(f"--model-args dtype={given['dtype']}: expected float32, bfloat16 or float16")
    return given | {"model_args": ",".join(f"{name}={value}" for name, value in rest.items())}

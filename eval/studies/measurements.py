"""The measurements that are studies: their options, and the cells of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from kvlab.extras import EXTRAS

from ..accuracy.taskset import STORIES
from ..core.comparable import differences, said
from ..core.digests import code_digest, digest, model_digest
from ..core.errors import Failed, Problem, describe
from ..core.measurement import Cell, Collected, Measurement, OfMethods, OnModel, count, option

LENGTHS = (2048, 8192, 16384, 32768, 65536)  # tokens attended to by the study attention


@dataclass(kw_only=True)
class Study(Measurement):
    """A measurement of named experiments, one cell each, made in this process.

    `makers`: {experiment: the module beside the study's whose EXPERIMENTS holds it}; an experiment takes the
    study and returns what its cell is to hold.
    """

    makers: ClassVar[dict[str, str]]

    experiments: tuple[str, ...] = option(
        lambda kind: f"{', '.join(kind.makers)} (default: all)", (), many=True, metavar="NAME"
    )

    def check(self) -> None:
        super().check()
        for name in self.experiments:
            if name not in self.makers:
                raise Problem(f"--experiments {name}: expected one of {', '.join(self.makers)}")

    def cell(self, experiment: str) -> Cell:
        """The cell of an experiment."""
        raise NotImplementedError

    def cells(self) -> list[Cell]:
        return [self.cell(name) for name in self.experiments or self.makers]

    def task(self, experiment: str) -> str:
        return f"{self.name}:{experiment}"

    def make(self, cell: Cell) -> dict:
        name = cell.task.removeprefix(self.task(""))
        room = type(self).__module__.rpartition(".")[0]
        return import_module(self.makers[name], room).EXPERIMENTS[name](self)

    def found(self, store, say) -> dict[str, dict]:
        """{experiment: its stored cell} of this configuration, also those that were not asked for now; a line
        says which were made under other settings."""
        found, unlike = {}, {}
        for name, cell in ((name, self.cell(name)) for name in self.makers):
            if stored := store.stored(cell):
                if reasons := differences(stored["config"], cell.config):
                    unlike[name] = reasons
                else:
                    found[name] = stored
        if unlike:
            say(f"left out, made under other settings: {said(unlike)}")
        return found


@dataclass(kw_only=True)
class ModelStudy(Study, OnModel):
    """A study of loaded models, which its experiments share."""

    _loaded: dict = field(default_factory=dict, init=False, repr=False)

    def cell(self, experiment: str) -> Cell:
        settings = {"stories": digest([STORIES]), "threads": self.threads}
        # an experiment names its methods itself
        config = self.configuration(**settings)
        return Cell(self.model_name, "", self.task(experiment), config)

    def load(self, name: str | None = None):
        """(model, tokenizer), loaded once; default: the study's own model."""
        import kvlab

        name = name or self.model_name
        if name not in self._loaded:
            try:
                self._loaded[name] = kvlab.load(name, device=self.device, dtype=self.dtype)
            except ValueError as error:
                raise Problem(str(error)) from error
        return self._loaded[name]

    def make(self, cell: Cell) -> dict:
        import torch

        found = super().make(cell)
        devices = [str(model.device) for model, _ in self._loaded.values()]
        return {"device": devices[0] if devices else "cpu", "threads": torch.get_num_threads()} | found


@dataclass(kw_only=True)
class Offload(ModelStudy):
    """The measurements of InfiniGen (Lee et al. 2024), each beside the published number."""

    name = home = "offload"
    about = "measure or simulate the claims of InfiniGen (offload.json, timelines and a figure)"
    threads = 1  # the link's threads have the other cores
    makers = {
        "similarity": ".offload.rehearsal",
        "recall": ".offload.rehearsal",
        "sensitivity": ".offload.quality",
        "latency": ".offload.simulated",
        "breakdown": ".offload.simulated",
        "link": ".offload.walltime",
        "pool": ".offload.quality",
        "bandwidth": ".offload.simulated",
        "accuracy": ".offload.quality",
        "turnover": ".offload.claims",
        "fetched": ".offload.claims",
        "columns": ".offload.claims",
        "knee": ".offload.claims",
        "repeats": ".offload.claims",
    }

    @property
    def models(self) -> list[str]:
        """The model, or by default every workshop model."""
        from kvlab.models import EMBEDDED

        return [name for name in EMBEDDED if EMBEDDED[name].is_dir()] if self.model is None else [self.model]

    def configuration(self, **more) -> dict:
        models = [model_digest(name) for name in self.models]
        return super().configuration(models=models, **more)


@dataclass(kw_only=True)
class Quant(ModelStudy, OfMethods):
    """What bits buy, and what re-quantizing costs."""

    name = home = "quant"
    about = "measure accuracy against true bits per value, and the drift of re-quantization (quant.json)"
    makers = dict.fromkeys(("bits", "drift"), ".quant")

    methods: tuple[str, ...] = option("methods of the experiment bits", (
        "full", "int8", "int8:group=8", "int4", "int4:group=8", "int4:axis=channel", "int4:symmetric=false",
        "int2", "int2:group=8,symmetric=false", "kivi2", "fp8:format=e5m2", "fp8:format=e4m3",
    ), many=True, metavar="METHOD")  # fmt: skip

    def cell(self, experiment: str) -> Cell:
        cell = super().cell(experiment)
        if experiment != "drift":
            cell.config["methods"] = [list(pair) for pair in self.codes.items()]
        return cell


@dataclass(kw_only=True)
class StaticGraph(Study):
    """Padded static buffers measured beside what people use."""

    name = "static-graph"
    home = "static_graph"
    needs = (*Study.needs, *EXTRAS["static-graph"])
    about = "measure padded buffers on a static-graph engine beside other caches (measured.json and tables)"
    parts = (
        "engines-512",
        "managing",
        "prompt",
        "wide",
        "numbers",
        "memory",
        "drift",
        "requests",
        "engines-2048",
    )
    makers = dict.fromkeys(parts, ".static_graph")

    threads: int = option("threads of torch (default: 1)", 1, type=count)

    def cell(self, experiment: str) -> Cell:
        config = {
            "model": model_digest(None),
            "code": code_digest(),
            "stories": digest([STORIES]),
            "threads": self.threads,
        }
        return Cell("workshop", "", self.task(experiment), config)


@dataclass(kw_only=True)
class Attention(Collected):
    """Decode attention alone, over packed K and V and over what there is without kernels. A cell is one
    length."""

    name = "attention"
    about = "time decode attention alone, on random K and V (attention.json)"
    threads = 1

    limit: int | None = option("measure only the shortest length, with few repeats", type=count)

    def cells(self) -> list[Cell]:
        from .kernels import simd

        lengths, repeats = (LENGTHS[:1], 3) if self.limit else (LENGTHS, 15)
        config = {"code": code_digest(), "repeats": repeats, "threads": 1, "simd": simd()}
        return [
            Cell("random", "", f"{self.name}:{tokens}", config | {"tokens": tokens}) for tokens in lengths
        ]

    def make(self, cell: Cell) -> dict:
        from . import kernels

        return {"rows": kernels.measure(cell.config["tokens"], cell.config["repeats"])}


@dataclass(kw_only=True)
class Perplexity(OfMethods):
    """Perplexity of a text against the position in it. A cell is one method; all share their prefills."""

    name = home = "perplexity"
    about = "measure perplexity against position through the cache (perplexity.json and a figure)"

    text: Path | None = option("file of text (default: kvlab's own stories)", type=Path)  # noqa: RUF009
    chunk: int = option("tokens per chunk (default: 2048)", 2048, type=count)
    prompt: int | None = option("tokens of each chunk to prefill (default: half)", type=count)
    limit: int | None = option("number of chunks (default: all)", type=count)
    batch_size: int = option("chunks to decode together (default: 8)", 8, type=count)
    beyond_context: bool = option(
        "allow chunks longer than the model's trained length (models with RoPE)",
        False,
        action="store_true",
    )

    @property
    def prefilled(self) -> int:
        """Tokens of a chunk that are its prompt."""
        return self.prompt or self.chunk // 2

    def check(self) -> None:
        super().check()
        if self.text is not None and not self.text.is_file():
            raise Problem(f"--text {self.text}: there is no such file")
        if not 1 < self.prefilled < self.chunk:
            raise Problem(f"--prompt {self.prefilled}: expected 2 to {self.chunk - 1} of the chunk's tokens")

    def cells(self) -> list[Cell]:
        text = digest([self.text or STORIES])
        settings = {"text": text, "chunk": self.chunk, "prompt": self.prefilled}
        settings |= {"batch_size": self.batch_size, "threads": self.threads}
        settings |= {"beyond_context": True} if self.beyond_context else {}
        return [
            Cell(
                self.model_name,
                method,
                f"{self.name}:{self.text.stem if self.text else 'stories'}",
                self.configuration(method=code, **settings),
            )
            for method, code in self.codes.items()
        ]

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        import kvlab

        from . import perplexity

        wanted = {cell.method: cell for cell in cells}
        specs = [spec for spec in self.specs if spec.text in wanted]
        started = time.perf_counter()
        try:
            model, tokenizer = kvlab.load(self.model, device=self.device, dtype=self.dtype)
            ids = perplexity.chunks(tokenizer, self.text, self.chunk, self.limit)
            if self.beyond_context:
                perplexity.lengthen(model, self.chunk)
        except ValueError as error:
            raise Problem(str(error)) from error
        advance = lambda part: bar.at(self.name, part * len(cells))
        found = perplexity.measure(model, specs, ids, self.prefilled, self.batch_size, advance)
        about = {"device": str(model.device), "seconds": (time.perf_counter() - started) / len(cells)}
        for method, one in found.items():
            if isinstance(one, Exception):
                yield wanted[method], Failed(*describe(one))
            else:
                told = perplexity.numbers(one.pop("losses"), self.prefilled)
                yield wanted[method], about | one | told
        bar.at(self.name, len(cells))

    def result(self, found: dict) -> str:
        return f"{found['perplexity']:.2f}"

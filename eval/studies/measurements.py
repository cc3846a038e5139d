"""The measurements that are studies: their options, and the cells of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from ..accuracy.taskset import STORIES
from ..core.digests import code_digest, digest
from ..core.errors import Failed, Problem, describe
from ..core.measurement import Cell, Collected, Measurement, OfMethods, count, option

LENGTHS = (2048, 8192, 16384, 32768, 65536)  # tokens attended to by the study attention


@dataclass(kw_only=True)
class Offload(Measurement):
    """InfiniGen's published speeds (Lee et al. 2024), each beside ours: experiments, one cell each.

    makers: {experiment: the module whose EXPERIMENTS holds it}; it returns what its cell is to hold.
    """

    name = home = "offload"
    about = "time or simulate what InfiniGen published (offload.json and timelines)"
    threads = 1  # the link's threads have the other cores
    makers: ClassVar[dict[str, str]] = {
        "latency": ".offload.simulated",
        "breakdown": ".offload.simulated",
        "link": ".offload.walltime",
    }

    experiments: tuple[str, ...] = option(
        f"{', '.join(makers)} (default: all)", (), many=True, metavar="NAME"
    )

    def check(self) -> None:
        for name in self.experiments:
            if name not in self.makers:
                raise Problem(f"--experiments {name}: expected one of {', '.join(self.makers)}")

    def cell(self, experiment: str) -> Cell:
        config = {"code": code_digest(), "threads": self.threads}
        return Cell("random", "", f"{self.name}:{experiment}", config)

    def cells(self) -> list[Cell]:
        return [self.cell(name) for name in self.experiments or self.makers]

    def make(self, cell: Cell) -> dict:
        name = cell.task.removeprefix(f"{self.name}:")
        found = import_module(self.makers[name], __package__).EXPERIMENTS[name]()
        return {"device": "cpu", "threads": self.threads} | found

    def found(self, store) -> dict[str, dict]:
        """{experiment: its stored cell}, also those that were not asked for now."""
        cells = {name: store.load(self.cell(name)) for name in self.makers}
        return {name: cell for name, cell in cells.items() if cell}


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
        try:
            model, tokenizer = kvlab.load(self.model, device=self.device, dtype=self.dtype)
            ids = perplexity.chunks(tokenizer, self.text, self.chunk, self.limit)
            if self.beyond_context:
                perplexity.lengthen(model, self.chunk)
        except ValueError as error:
            raise Problem(str(error)) from error
        advance = lambda part: bar.at(self.name, part * len(cells))
        measured = perplexity.measure(model, specs, ids, self.prefilled, self.batch_size, advance)
        for method, found in measured:
            if isinstance(found, Exception):
                yield wanted[method], Failed(*describe(found))
            else:
                told = perplexity.numbers(found.pop("losses"), self.prefilled)
                yield wanted[method], {"device": str(model.device)} | found | told
        bar.at(self.name, len(cells))

    def result(self, found: dict) -> str:
        return f"{found['perplexity']:.2f}"

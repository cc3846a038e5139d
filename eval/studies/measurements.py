"""The measurement `perplexity`: its options and cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..accuracy.taskset import STORIES
from ..core.digests import digest
from ..core.errors import Failed, Problem, describe
from ..core.measurement import Cell, OfMethods, count, option


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
        model, tokenizer = kvlab.load(self.model, device=self.device, dtype=self.dtype)
        ids = perplexity.chunks(tokenizer, self.text, self.chunk, self.limit)
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

"""Run notebooks and store what they print, each in a process of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def run(paths: list[Path], processes: int = 2) -> list[str]:
    """Run the notebooks at `paths` and write them back; returns one line for each that failed."""
    with ThreadPoolExecutor(processes) as pool:
        return [problem for problem in pool.map(_run_and_store, paths) if problem]


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in place, in `folder`; ValueError names the cell that fails or writes to stderr."""
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, coalesce_streams=True,
    )  # fmt: skip
    try:
        client.execute()
    except CellExecutionError as error:
        raise ValueError(f"{error.ename}: {error.evalue}\n{_cell_of(notebook)}") from None
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"cell {cell.id} writes to stderr: {output.text.strip().splitlines()[0]}")
    notebook.metadata.language_info = {"name": "python"}  # no version: it would change with the machine
    return notebook


def _cell_of(notebook) -> str:
    """The source of the cell that raised."""
    for cell in notebook.cells:
        if any(output.output_type == "error" for output in cell.get("outputs", [])):
            return f"in cell {cell.id}:\n{cell.source}"
    return ""


def _run_and_store(path: Path) -> str:
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    try:
        execute(notebook, path.parent)
    except ValueError as error:
        return f"{path}: {error}"
    nbformat.write(notebook, path)
    print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)
    return ""

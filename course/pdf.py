"""PDF: a page of HTML, printed by an installed Chromium or Chrome."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The installed Chromium or Chrome; the variable KVLAB_BROWSER names another one."""
    return os.environ.get("KVLAB_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


def write(html: str, path: Path) -> Path:
    """Print a page to a PDF file, in the size that its CSS gives, and return the file; ValueError where no
    browser is installed, or where it prints nothing."""
    program = find()
    if program is None:
        raise ValueError(
            "PDF is printed by Chromium or Chrome, and none is installed: install one, or name its program "
            "in KVLAB_BROWSER"
        )
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html, encoding="utf-8")
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={folder}/profile", "--no-first-run", "--no-pdf-header-footer"]
        command += [f"--print-to-pdf={path.resolve()}", page.as_uri()]
        said = subprocess.run(command, capture_output=True, text=True)
    if not path.exists():
        lines = said.stderr.strip().splitlines() or ["it said nothing"]
        raise ValueError(f"{program} did not print {path}: {lines[-1]}")
    return path

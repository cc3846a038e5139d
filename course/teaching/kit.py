"""What the first cell of a kit's notebook asks: does this notebook belong to the kvlab that is installed?"""

from __future__ import annotations

import importlib.util
import warnings
from importlib import metadata


class Stop(Exception):
    """An end that a notebook shows as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def belongs(version: str, *needs: str) -> None:
    """Stop a notebook that was made for another version of kvlab, or needs modules that are not installed.

    Two harmless warnings are kept quiet from here on.
    """
    installed = metadata.version("kvlab")
    if installed != version:
        raise Stop(
            f"kvlab {installed} is installed and this notebook needs {version}: close JupyterLab and run "
            "start.sh or start.bat in the folder that the notebook came in."
        )
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise Stop(
            f"This chapter needs {', '.join(missing)} (140 MB more): close JupyterLab and run "
            "`sh start.sh --all` (Windows: `start.bat --all`)."
        )
    for harmless in ("IProgress not found", "kvlab decodes quantized caches without"):
        warnings.filterwarnings("ignore", message=harmless)

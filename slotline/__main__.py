"""`slotline` and `python -m slotline`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

#: The folder that our packages lie in: site-packages, or a checkout.
HOME = Path(__file__).resolve().parent.parent

OURS = ("shared", "webapi", "worker")


def settle_path() -> None:
    """Make sure that `shared`, `webapi` and `worker` are ours, wherever we are started.

    The current directory goes from the path, in which `python -m` and an empty `PYTHONPATH` entry put it,
    unless it is where we live ourselves or `PYTHONPATH` names it; then it goes to the end, behind us. Child processes
    of a checkout find it by `PYTHONPATH`.
    """
    here = str(HOME)
    if (cwd := _current_directory()) != HOME:
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != cwd]
        if cwd is not None and str(cwd) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            sys.path.append(str(cwd))
    if not all(_is_ours(name) for name in OURS):
        sys.path.insert(0, here)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if HOME.name not in ("site-packages", "dist-packages") and given[0] != here:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, given)])


def main() -> None:
    """Run the command line; ends the process."""
    settle_path()
    for stream in (sys.stdout, sys.stderr):
        # A model's text may hold what the terminal's encoding does not.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    from slotline.cli import cli

    cli(prog_name="slotline")


def _current_directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _is_ours(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().is_relative_to(HOME / name)


if __name__ == "__main__":
    main()

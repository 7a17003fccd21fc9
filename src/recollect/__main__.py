"""`python -m recollect` and the script `recollect`: who answers a command.

`run` and `--version` need torch alone (`_run.py`). All other commands need typer and rich (`cli.py`), which may be
absent.
"""

from __future__ import annotations

import os
import sys

from recollect import _run

_NEEDS = ("typer", "rich")


def main(arguments: list[str]) -> None:
    """A command line. Ends as Python ends: by returning, or by an exception."""
    if arguments[:1] not in (["run"], ["--version"]):
        try:
            from recollect import cli
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _NEEDS:
                raise
        else:
            cli.main(arguments)
            return
    _run.main(arguments)


def script() -> None:
    """The same for the script, with the current directory in the search path as it is under `python -m`."""
    if not getattr(sys.flags, "safe_path", False):  # not in Python 3.10
        sys.path[0] = os.getcwd()
    main(sys.argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])

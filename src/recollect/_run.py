"""Run somebody's script under a patched torch: `recollect run script.py ...`. Needs nothing but torch.

The script shall not notice: it is `__main__`, with the arguments, the search path, the exit code and the tracebacks
that it would have under `python script.py ...` or `python -m module ...`. One thing differs: torch is loaded first.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any

from recollect import __version__, patch_torch
from recollect._errors import not_one_of

HELP = """\
usage: recollect run script.py [arguments ...]
       recollect run -m module [arguments ...]
       recollect --version
       python -m recollect ...  is the same

run     Runs a Python script, or a module, under recollect.patch_torch(): whatever in it calls torch.utils.checkpoint
        is served by recollect, without a change to the script. Its arguments, exit code and tracebacks are
        as under python itself. Launchers: torchrun -m recollect run script.py ...

environment
  RECOLLECT_PATCH   1 (default): patch. 0: run the script as it is, to compare.
  RECOLLECT_CHECK   none, default, first or values: the determinism_check of every region.
"""
WITHOUT_EXTRA = """
plan, frontier, explain, check, demo and doctor need typer and rich: pip install 'recollect[cli]'
"""

# Answered by `cli.py`, if what it needs is installed; who comes here with one of them has it not.
COMMANDS = ("plan", "frontier", "explain", "check", "demo", "doctor")
_HELP = ("-h", "--help")


class RefusedError(Exception):
    """What was asked for cannot be run: what to say, and the exit code that Python has for it."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: list[str]) -> None:
    """The command line. Ends as Python ends: by returning, or by an exception."""
    command, *rest = arguments or [""]
    if command in _HELP:
        print(HELP + WITHOUT_EXTRA, end="")
    elif command == "run" and rest[:1] and rest[0] in _HELP:
        print(HELP, end="")
    elif command == "--version":
        print(f"recollect {__version__}")
    else:
        try:
            if command in COMMANDS:
                raise RefusedError(f"{command} needs typer and rich, which are missing: pip install 'recollect[cli]'")
            if command != "run":
                raise RefusedError(f"there is no command {command!r}, only 'run'" if command else "what shall it do?")
            _run(rest)
        except RefusedError as refused:
            print(f"recollect: {refused}\nTry python -m recollect --help", file=sys.stderr)
            sys.exit(refused.code)


def _run(arguments: list[str]) -> None:
    first, *rest = arguments or [""]
    is_module = first == "-m"
    if is_module:
        first, *rest = rest or [""]
    if not first or (first.startswith("-") and not is_module):
        raise RefusedError(f"run takes a script, or -m and a module, got {' '.join(arguments) or 'nothing'}")
    if _wants_patch():
        patch_torch()
    own_main = vars(sys.modules["__main__"])
    try:
        (_run_module if is_module else _run_script)(first, rest)
    except BaseException:
        sys.excepthook = _without_frames_before(own_main, sys.excepthook)
        raise


def _wants_patch() -> bool:
    chosen = os.environ.get("RECOLLECT_PATCH") or "1"
    if chosen not in ("0", "1"):
        raise RefusedError(str(not_one_of("the environment variable RECOLLECT_PATCH", chosen, ("0", "1"))))
    return chosen == "1"


# --- As Python does it ---


def _run_script(path: str, arguments: list[str]) -> None:
    """`python path ...`: a file, or a directory or archive that has a `__main__`."""
    sys.argv = [path, *arguments]
    importer: Any = pkgutil.get_importer(path)
    if importer is not None:
        _put_first_in_search_path(os.path.abspath(path))
        spec = importer.find_spec("__main__")
        if spec is None:
            raise RefusedError(f"can't find '__main__' module in {path!r}", code=1)
        _execute(lambda: spec.loader.get_code("__main__"), spec.origin, spec.loader, spec)
        return
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise RefusedError(f"can't open file {os.path.abspath(path)!r}: {error.strerror}") from None
    _put_first_in_search_path(os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    _execute(lambda: compile(source, path, "exec", dont_inherit=True), path, loader, None)


def _put_first_in_search_path(path: str) -> None:
    """Where Python has put the current directory, for `-m recollect`; under `python -P` it has put nothing."""
    if not getattr(sys.flags, "safe_path", False):  # not in Python 3.10
        sys.path[0] = path


def _run_module(name: str, arguments: list[str]) -> None:
    """`python -m name ...`: a module, or a package that has a `__main__`."""
    sys.argv = ["-m", *arguments]
    spec = _spec_of(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec_of(name)
    if spec is None:
        raise RefusedError(f"No module named {name}", code=1)
    loader: Any = spec.loader
    if not hasattr(loader, "get_code") or loader.get_code(name) is None:
        raise RefusedError(f"{name} is not written in Python, and cannot be run", code=1)
    sys.argv[0] = spec.origin or name
    _execute(lambda: loader.get_code(name), spec.origin, loader, spec)


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    package = name.rpartition(".")[0]
    if package:
        try:
            __import__(package)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{package}.".startswith(f"{error.name}."):
                raise  # it is there, and misses something
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        hint = f". Try {name[:-3]!r} instead" if name.endswith(".py") else ""
        raise RefusedError(f"No module named {name} ({error}){hint}", code=1) from None


def _execute(code: Callable[[], Any], file: str | None, loader: Any, spec: Any) -> None:
    """Run code as `__main__`, for good: what runs after its end, as handlers and threads do, finds it there."""
    main = types.ModuleType("__main__")
    namespace = vars(main)
    namespace.update(__file__=file, __loader__=loader, __spec__=spec, __builtins__=builtins, __annotations__={})
    namespace.update(
        __package__=None if spec is None else spec.parent, __cached__=None if spec is None else spec.cached
    )
    sys.modules["__main__"] = main
    exec(code(), namespace)


def _without_frames_before(own_main: dict[str, Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook` with the traceback that Python itself would show: without the frames that led to the script."""

    def is_before(of_frame: dict[str, Any]) -> bool:
        return of_frame is own_main or of_frame.get("__name__") in ("runpy", "recollect.__main__", __name__)

    def show(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and is_before(traceback.tb_frame.f_globals):
            traceback = traceback.tb_next
        hook(kind, error.with_traceback(traceback), traceback)

    return show

"""What a command line is about: `package.module:build` or `path/to/file.py:build`, found, called and looked at.

`build()` is somebody's function that returns a model and a batch, and may add the step: `(model, batch) -> loss`.
Whatever is wrong with it is said in a sentence, with the line of the user's own code that it comes from.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn import Module

from recollect import _errors
from recollect._torch import is_library_file

_FORMS = "pkg.module:build or path/to/file.py:build"
_RETURNS = "build() must return (model, batch) or (model, batch, step)"
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))


class Failure(Exception):  # noqa: N818 - no error of the program: what a command has to say instead of a result
    """Why there is no result.

    Attributes:
        code: The exit code.
        data: What a program may want to know of it.
    """

    def __init__(self, message: str, *, code: int = 2, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data or {}


@dataclass(frozen=True)
class Target:
    """What `build()` gave."""

    name: str
    model: Module
    batch: Any
    step: Callable[[Any, Any], Any] | None

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """What to run to see the model at work: the step that was given, or the model on the batch."""
        if self.step is not None:
            return self.step, (self.model, self.batch), {}
        if isinstance(self.batch, dict):
            return self.model, (), self.batch
        if isinstance(self.batch, (tuple, list)):
            return self.model, tuple(self.batch), {}
        return self.model, (self.batch,), {}


def load(text: str) -> Target:
    """Find a function by its name on the command line, and call it."""
    place, colon, name = text.rpartition(":")
    if not (place and colon and name):
        raise Failure(f"the target must be {_FORMS}, got {text!r}")
    module = _module_of_file(place) if place.endswith(".py") or os.sep in place else _module_by_name(place)
    build = _find(module, place, name)
    with _guarded(f"{name}() of {place}"):
        built = build()
    return _looked_at(text, built)


@contextlib.contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Around code of the user."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"{what} raised {in_words(error)}") from error
    except SystemExit as error:
        line = line_of(error)
        raise Failure(
            f"{what} ended the program with sys.exit({error.code!r}){f' ({line})' if line else ''}. What a script does "
            'when it is run belongs under if __name__ == "__main__":'
        ) from error


# --- Finding it ---


def _module_by_name(name: str) -> ModuleType:
    with _guarded(f"importing {name}"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise Failure(f"there is no module {name}, neither in {os.getcwd()} nor installed") from None
            raise  # it is there, and misses something
    return module


def _module_of_file(path: str) -> ModuleType:
    full = os.path.abspath(path)
    if not os.path.isfile(full):
        raise Failure(f"there is no file {path}")
    # As for a script: what lies beside it can be imported, and so can what lies in the current directory.
    sys.path.insert(0, os.path.dirname(full))
    name = os.path.splitext(os.path.basename(full))[0]
    if name in sys.modules:
        name = f"__{name}__"
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look themselves up there
    with _guarded(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            functions = (
                [key for key, value in vars(found).items() if callable(value)] if hasattr(found, "__dict__") else []
            )
            close = difflib.get_close_matches(part, functions, n=3, cutoff=0.5)
            raise Failure(f"there is no {name!r} in {place}" + (f"; it has {', '.join(close)}" if close else ""))
        found = getattr(found, part)
    if isinstance(found, Module) or not callable(found):
        raise Failure(f"{name} of {place} must be a function without arguments, got {_shown(found)}. {_RETURNS}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise Failure(f"{name} of {place} is called without arguments, and needs some: {error}") from None
    except ValueError:  # it has no signature that Python knows of
        pass
    result: Callable[[], Any] = found
    return result


def _looked_at(name: str, built: Any) -> Target:
    if not isinstance(built, (tuple, list)) or len(built) not in (2, 3):
        many = f" of {len(built)}" if isinstance(built, (tuple, list)) else ""
        raise Failure(f"{_RETURNS}, got {_shown(built)}{many}")
    model, batch, step = (*built, None)[:3]
    if not isinstance(model, Module):
        raise Failure(f"{_RETURNS}: the first is a torch.nn.Module, got {_shown(model)}")
    if step is not None and not callable(step):
        raise Failure(f"{_RETURNS}: the third is a function (model, batch) -> loss, got {_shown(step)}")
    return Target(name, model, batch, step)


def _shown(value: Any) -> str:
    """A model's own words would fill the screen."""
    if isinstance(value, (Module, torch.Tensor, tuple, list, dict)):
        return f"a {type(value).__name__}"
    return "None" if value is None else _errors.describe_value(value)


# --- Somebody's errors ---


def in_words(error: BaseException) -> str:
    """`ValueError: no data (train.py:12)`, in one line."""
    said = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    first = said.splitlines()[0] if said else ""
    where = line_of(error)
    return type(error).__name__ + (f": {first}" if first else "") + (f" ({where})" if where else "")


def line_of(error: BaseException) -> str | None:
    """The line of the user's own code that an error comes from, if there is one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library_file(frame.filename) and not frame.filename.startswith((*_INSTALLED, "<")):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return None


def is_our_own(error: BaseException) -> bool:
    """Whether recollect itself raised it, in words that are meant to be read."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(os.path.join(os.path.dirname(__file__), ""))


def _short(path: str) -> str:
    inside = os.path.join(os.getcwd(), "")
    return os.path.abspath(path).removeprefix(inside)

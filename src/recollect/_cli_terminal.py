"""Where a command writes: its result to stdout, and everything else, progress and errors among it, to stderr.

What user code prints is no result either, so it goes to stderr too: `--json` gives one document and nothing else,
whatever a model has to say.

Exit codes: 0 all is well; 1 the check failed; 2 bad usage or bad input; 3 no plan fits; 130 interrupted; 141, as for
other programs, if nobody reads the result.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from recollect._cli_tables import fitted
from recollect._cli_target import Failure, in_words, is_our_own
from recollect._errors import CheckpointError
from recollect.fit import BudgetError

FAILED, BAD, TOO_SMALL, INTERRUPTED, CLOSED = 1, 2, 3, 130, 141
_WIDE = 160  # where there is no terminal to say how wide it is


@dataclass(frozen=True)
class Output:
    """The two streams of one command."""

    results: Console
    rest: Console
    as_json: bool
    progress: Steps

    def show(self, *lines: RenderableType) -> None:
        """The result, or a part of it, for people."""
        for line in lines:
            if isinstance(line, Table):
                line = fitted(line, self.results.width)
            # Text is not cut into lines of our own: a terminal does that, and a pipe has no need of it.
            self.results.print(line, soft_wrap=isinstance(line, (str, Text)))

    def document(self, data: Any) -> None:
        """The result, all of it, for programs."""
        # Written past rich, which would wrap and colour it.
        self.results.file.write(json.dumps(_finite(data), allow_nan=False) + "\n")
        self.results.file.flush()


def _finite(data: Any) -> Any:
    """JSON has no word for what is no number, or endless."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process with 1, which has another meaning here."""
        raise BrokenPipeError


def console(file: TextIO) -> Console:
    """A console that takes what it is given as it is: a shape in brackets is no markup."""
    is_free = not file.isatty() and not os.environ.get("COLUMNS")
    return _Console(file=file, markup=False, highlight=False, emoji=False, width=_WIDE if is_free else None)


@contextlib.contextmanager
def output(*, as_json: bool = False, with_traceback: bool = False) -> Iterator[Output]:
    """Around all that a command does. What goes wrong in it is said, and ends the process with a code that tells."""
    rest = console(sys.stderr)
    with _results() as file, Steps(rest) as progress:
        out = Output(console(file), rest, as_json, progress)
        try:
            yield out
            return
        except BrokenPipeError:  # nobody reads the result any more, as under `| head`
            code = CLOSED
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), file.fileno())  # what is left goes there when it is closed
        except (Exception, KeyboardInterrupt) as error:
            progress.end()
            code = _tell(out, error, with_traceback=with_traceback)
    sys.exit(code)


def _tell(out: Output, error: BaseException, *, with_traceback: bool) -> int:
    failure = _failure(error)
    if with_traceback and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error.__cause__ or error, file=sys.stderr)
    say(out.rest, str(failure))
    if out.as_json:
        out.document({"error": str(failure), "code": failure.code, **failure.data})
    return failure.code


def say(rest: Console, message: str) -> None:
    """An error."""
    rest.print(Text.assemble(("recollect: ", "bold red"), message), soft_wrap=True)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", code=INTERRUPTED)
    if isinstance(error, BudgetError):
        data = {"smallest": error.smallest, "where": error.where}
        return Failure(f"{error}\nThe smallest in bytes: --budget {error.smallest}", code=TOO_SMALL, data=data)
    if isinstance(error, CheckpointError):  # several lines, each of which matters
        return Failure(str(error), code=FAILED)
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(f"the device has not enough memory for it: {in_words(error)}", code=TOO_SMALL)
    if isinstance(error, (ValueError, TypeError, OSError, ImportError)) and is_our_own(error):
        return Failure(str(error))
    return Failure(f"a training step raised {in_words(error)}\n--traceback shows where it comes from")


@contextlib.contextmanager
def _results() -> Iterator[TextIO]:
    """Stdout for results alone: what is printed meanwhile, by libraries and child processes too, goes to stderr."""
    stdout, stderr = sys.stdout, sys.stderr
    with contextlib.redirect_stdout(stderr):
        if not (_is_at(stdout, 1) and _is_at(stderr, 2)):  # somebody catches what is written
            yield stdout
            return
        stdout.flush()
        with open(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors) as results:
            os.dup2(2, 1)
            try:
                yield results
            finally:
                os.dup2(results.fileno(), 1)


def _is_at(file: TextIO, number: int) -> bool:
    try:
        return file.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False


# --- Progress ---


class _Count(ProgressColumn):
    """`2/5`, and nothing where there is one thing to do."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else Text(f"{int(task.completed)}/{int(task.total)}")


@dataclass
class Steps:
    """What goes on: a bar on a terminal, else a line for each thing that begins. Called as `(what, done, of)`."""

    rest: Console
    _bar: Progress | None = None
    _task: Any = None
    _said: set[tuple[str, int]] = field(default_factory=set)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def __call__(self, what: str, done: int, of: int) -> None:
        if self.rest.is_terminal:
            self._draw(what, done, of)
        elif done < of and (what, done) not in self._said:
            self._said.add((what, done))
            self.rest.print(f"{what} ({done + 1}/{of})" if of > 1 else what, style="dim", soft_wrap=True)

    def _draw(self, what: str, done: int, of: int) -> None:
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), _Count())
            # Drawn seldom: it takes time from what is measured meanwhile.
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self.rest, transient=True, refresh_per_second=2)
            self._bar.start()
            self._task = self._bar.add_task(what, total=None)
        self._bar.update(self._task, description=what, completed=done, total=of if of > 1 else None)

    def end(self) -> None:
        """Nothing goes on any more."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

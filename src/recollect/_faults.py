"""Ranks of a distributed job that fail: each error says in which region its rank was, and who had failed before.

Theory. A rank that fails in a backward leaves the others in a collective that nobody completes. They end too, by the
means of the process group, when a connection is closed or its timeout is over, with an error that knows of bytes and
sockets. What it lacks is said in notes on the error (PEP 678); the error itself is left as it is.

- An error that leaves a replay passes code of ours: `raised`.
- An error of another part of a backward does not: a collective of a node within a region, FSDP's reduce-scatter, DDP's
  wait for its buckets. In a distributed job the first replay of a pass asks autograd for a word at the very end of the
  pass, after the callbacks of everybody else. A pass that drops that callback has failed; its error is about to arrive
  in the Python frame that called the engine, and is met there.

The first rank to fail leaves word in the store of the process group, and the others add it to their notes. One that
fails for the lack of a peer and finds word leaves none of its own: there would be as many as ranks.

Rules. Nothing here hangs, and nothing raises: the store may be gone with the rank that hosts it. Outside of a
distributed job nothing is done at all; within one, a replay is noted, and everything else is for errors.

What this is not: it ends no rank and shortens no timeout. Errors in a forward show the region in their traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from torch import distributed

from recollect import _errors
from recollect._torch import at_end_of_pass, default_store, graph_task_id

_KEY = "recollect/fault"
_PATIENCE = 5.0  # seconds, for a store that does not answer
_LONGEST = 300  # of what is said of an error to other ranks

_log = logging.getLogger("recollect")
# By autograd's number of a pass that goes on: the region that it replayed last.
_passes: dict[int, tuple[Any, str | None]] = {}


# --- What goes on ---


def replaying(function: Callable[..., Any], name: str | None) -> None:
    """A replay of a region begins."""
    task = graph_task_id()
    if task < 0:
        return
    if task not in _passes:
        at_end_of_pass(_Pass(task))
    _passes[task] = (_without_values(function), name)


def _without_values(function: Any) -> Any:
    """A function without what it is bound to: nobody's tensors live longer for the sake of a name."""
    while type(function) is partial:
        function = function.func
    return function.__code__ if type(function) is FunctionType else function


def _region(function: Any, name: str | None) -> str:
    if isinstance(function, CodeType):
        function = FunctionType(function, {}, closure=tuple(CellType() for _ in function.co_freevars))
    return _errors.describe_function(function, name)


class _Pass:
    """Is called by autograd when a pass has succeeded; is dropped without that, or right after, when it has not."""

    __slots__ = ("_task",)

    def __init__(self, task: int) -> None:
        self._task = task

    def __call__(self) -> None:
        try:
            at_end_of_pass(partial(_succeeded, self._task))  # after what others want to have done, which may fail
        except RuntimeError:  # not everybody who runs a backward takes one so late
            _succeeded(self._task)

    def __del__(self) -> None:
        last = _passes.pop(self._task, None)
        if last is not None:
            _pass_failed(_errors.in_backward(_region(*last)))


def _succeeded(task: int) -> None:
    _passes.pop(task, None)


def _pass_failed(where: str) -> None:
    """Have the error noted that is on its way, which no code of ours will see."""
    caller = sys._getframe(1).f_back  # who called the engine, under the callback that is being dropped
    if caller is None or sys.gettrace() is not None:
        # A thread of the engine's own was the last to hold the pass, or a debugger is at work.
        with contextlib.suppress(Exception):  # the group may have been destroyed meanwhile
            _log.error(_said(where, None))
        return

    def arrives(frame: FrameType, event: str, arg: Any) -> None:
        sys.settrace(None)
        caller.f_trace = None
        if event == "exception":
            tell(arg[1], where)

    caller.f_trace = arrives
    sys.settrace(_ignore_calls)


def _ignore_calls(*_: Any) -> None:
    pass


# --- What is said ---


def raised(error: BaseException, where: Callable[[str], str], region: Callable[[], str]) -> None:
    """An error leaves a region's replay or backward."""
    if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)):  # and not the signal that ends a replay
        with contextlib.suppress(Exception):
            tell(error, where(region()))


def tell(error: BaseException, where: str) -> None:
    """Note on an error where this rank was and who had failed before, and leave word for the others."""
    notes = getattr(error, "__notes__", ())
    if not any(str(note).startswith(_errors.RANK_NOTE) for note in notes):
        with contextlib.suppress(Exception):  # an error that takes no attributes
            _errors.note(error, _said(where, error))


def _said(where: str, error: BaseException | None) -> str:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    own = {"rank": rank, "at": time.time(), "where": where, "error": _in_short(error)}
    # What a collective raises when a peer is gone: a RuntimeError of no kind of its own, on some backends.
    may_follow = error is None or type(error) is RuntimeError or isinstance(error, distributed.DistError)
    lines = [_errors.on_rank(rank, ranks, where)]
    word = _words.exchange(json.dumps(own).encode(), may_follow=may_follow)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if word:
            other = json.loads(word)
            at = time.strftime("%H:%M:%S", time.gmtime(other["at"]))
            lines.append(_errors.other_rank(other["rank"], at, other["where"], other["error"]))
    return "\n".join(lines)


def _in_short(error: BaseException | None) -> str:
    if error is None:
        return "an error in backward"
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:_LONGEST]}"


class _Words:
    """What this rank and the others have said to each other through the store."""

    def __init__(self) -> None:
        self._known = b""  # the last word that was told here, or left

    def exchange(self, own: bytes, *, may_follow: bool) -> bytes:
        """Another rank's word that is new here, else nothing; leaves ours unless this error `may_follow` from that."""
        found: list[bytes] = []
        # In a thread of its own, because a store takes its time: another thread may be waiting for a key of its own,
        # and who hosts it may have been cut off without a word.
        talk = threading.Thread(target=self._talk, args=(own, may_follow, found), daemon=True)
        talk.start()
        talk.join(_PATIENCE)
        return found[0] if found else b""

    def _talk(self, own: bytes, may_follow: bool, found: list[bytes]) -> None:
        with contextlib.suppress(Exception):  # it is gone, or it is of a kind that keeps nothing
            store = default_store()
            there = bytes(store.get(_KEY)) if store.check([_KEY]) else b""
            if there and there != self._known:
                self._known = there
                found.append(there)
            if not found or not may_follow:
                store.set(_KEY, own)
                self._known = own


_words = _Words()

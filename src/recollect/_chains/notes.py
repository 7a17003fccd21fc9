"""Which step of a chain runs in this thread, and what happens once in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from recollect._engine.scope import here


class Stepping:
    __slots__ = ("around", "replaying")

    def __init__(self, chain: Any, around: Any, replaying: bool) -> None:
        self.around = around
        self.replaying = replaying or (around is not None and around.replaying)


@contextlib.contextmanager
def stepping(chain: Any, *, replaying: bool) -> Iterator[None]:
    """Steps of a chain run: regions around it are none of their concern."""
    scope, around = here.scope, here.chain
    here.scope, here.chain = None, Stepping(chain, around, replaying or (scope is not None and scope.following))
    try:
        yield
    finally:
        here.scope, here.chain = scope, around

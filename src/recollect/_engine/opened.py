"""A region whose forward a module's own hooks begin, instead of a function of ours that calls it.

The halves of `run_region` (frame.py), and what ties them to the module's call (calls.py).
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

from torch import Tensor

from recollect import _errors
from recollect._engine.calls import ModuleFunction, Opened
from recollect._engine.frame import Contexts, Options, forward_ended, prepare
from recollect._engine.scope import Scope, here
from recollect._torch import current_node, never_begin_in, push_hooks, remove_hooks_of, version_of


class _OpenRegion(Opened):
    __slots__ = ("_arguments",)

    def __init__(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        super().__init__(scope)
        self._arguments = args, kwargs, tensors

    def _close(self, scope: Scope, *, succeeded: bool) -> None:
        remove_hooks_of(scope.pack)  # where the call was cut off, others may lie above them by now
        args, kwargs, tensors = self._arguments
        self._arguments = (), {}, []
        forward_ended(scope, args, kwargs, tensors, succeeded)


def open_region(
    function: ModuleFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    contexts: tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]] | None,
    hook_caller: FrameType,
) -> None:
    """Begin a region for the module's call in which `hook_caller` called a hook before its forward."""
    context, replay_context = (None, None) if contexts is None else contexts
    scope, tensors = prepare(function, args, kwargs, options, replay_context)
    opened = _OpenRegion(scope, args, kwargs, tensors)
    _let_go_where_cut_off(opened)
    try:
        opened.tie(hook_caller)
        for recording in (scope.frame.trace, scope.recorder):
            if recording is not None:
                recording.call = opened.call
        here.scope = scope
        push_hooks(scope.pack, scope.unpack)
        if context is not None or not scope.is_bare:
            opened.contexts = Contexts(scope, context)
    except BaseException as error:
        opened.end(error)
        raise


class _NotOurs:
    """A tensor that somebody saved after the region's call had been cut off."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = version_of(tensor)


def _let_go_where_cut_off(opened: Opened) -> None:
    """Let the hooks of a region ask whether its call is still going on, as long as it could end unnoticed."""
    scope = opened.scope
    pack, unpack = scope.pack, scope.unpack

    def asking(tensor: Tensor) -> Any:
        if opened.is_exposed and not opened.is_running():
            opened.abandon()
            return _NotOurs(tensor)
        return pack(tensor)

    def answering(packed: Any) -> Tensor:
        if type(packed) is not _NotOurs:
            return unpack(packed)
        if version_of(packed.tensor) != packed.version:
            raise _errors.plain_tensor_changed(packed.tensor, current_node())
        return packed.tensor

    scope.pack, scope.unpack = asking, answering


never_begin_in(sys.modules[__name__])

"""A region whose forward a module's own hooks begin, instead of a function of ours that calls it.

The halves of `run_region` (frame.py), and what ties them to the module's call (calls.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from recollect import _errors
from recollect._engine.calls import ModuleFunction, Opened
from recollect._engine.frame import Contexts, Options, forward_ended, prepare
from recollect._engine.scope import Scope, Watch, here
from recollect._torch import current_node, never_begin_in, push_hooks, remove_hooks_of, top_hooks, version_of


class _OpenRegion(Opened):
    __slots__ = ("_arguments",)

    def __init__(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        super().__init__(scope)
        self._arguments: tuple[tuple[Any, ...], dict[str, Any], list[Tensor]] | None = (args, kwargs, tensors)

    def _close(self, scope: Scope, *, succeeded: bool) -> None:
        remove_hooks_of(scope.pack)  # where the call was cut off, others may lie above them by now
        if self._arguments is not None:
            forward_ended(scope, *self._arguments, succeeded)
            self._arguments = None


def open_region(
    function: ModuleFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    contexts: tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]] | None,
    hook_caller: FrameType,
    watch: Watch | None = None,
) -> None:
    """Begin a region for the module's call in which `hook_caller` called a hook before its forward."""
    context, replay_context = (None, None) if contexts is None else contexts
    kwargs = dict(kwargs)  # other hooks may change it
    scope, tensors = prepare(function, args, kwargs, options, replay_context, watch=watch)
    opened = _OpenRegion(scope, args, kwargs, tensors)
    scope.pack, scope.unpack = _Pack(opened, scope.pack), _unpack_by(scope.unpack)
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


class WatchedCall:
    """A call of a module by us, in which its region has these options and is watched."""

    __slots__ = ("_function", "_options", "_watch", "module")

    def __init__(self, function: ModuleFunction, options: Options, watch: Watch) -> None:
        self.module = function.__wrapped__
        self._function = function
        self._options = options
        self._watch = watch

    def begin(self, hook_caller: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        open_region(self._function, args, kwargs, self._options, None, hook_caller, self._watch)


# --- The hooks of such a region ---


class _NotOurs:
    """A tensor that somebody saved after the region's call had been cut off: in the care of the hooks around it."""

    __slots__ = ("_packed", "_unpack", "_version")

    def __init__(self, tensor: Tensor) -> None:
        hooks = top_hooks()
        self._version = version_of(tensor)
        self._packed: Any = tensor.detach() if hooks is None else hooks[0](tensor)
        self._unpack = None if hooks is None else hooks[1]

    def get(self) -> Tensor:
        tensor: Tensor = self._packed
        if self._unpack is not None:
            return self._unpack(self._packed)
        if version_of(tensor) != self._version:
            raise _errors.plain_tensor_changed(tensor, current_node())
        return tensor


class _Pack:
    """The hook of such a region: asks whether its call is still going on, as long as that could end unnoticed."""

    __slots__ = ("_opened", "_pack")

    def __init__(self, opened: Opened, pack: Callable[[Tensor], Any]) -> None:
        self._opened = opened
        self._pack = pack

    def __call__(self, tensor: Tensor) -> Any:
        opened = self._opened
        if opened.is_exposed and not opened.is_running():
            opened.abandon()
            remove_hooks_of(self)  # if that was done in a backward, autograd has put them back
            return _NotOurs(tensor)
        return self._pack(tensor)


def _unpack_by(unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    def unpack_any(packed: Any) -> Tensor:
        return packed.get() if type(packed) is _NotOurs else unpack(packed)

    return unpack_any


never_begin_in(sys.modules[__name__])

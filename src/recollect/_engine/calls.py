"""Calls of modules whose hooks begin something that must end: a region's forward, or its part of a replay.

Theory. A function that we call has a `finally` of ours around it. A module whose hooks are ours has none: it is called
by whoever likes, and a hook before its forward is all there is. Who ends what that hook began?

1. The forward itself. The hook puts a guard in the place of the forward that this call is about to run
   (`_torch.replace_forward`): whatever the forward raises, what is open ends there and then.
2. Before the forward has begun, the module's other hooks run. If one of them raises an Exception, torch calls our
   hook after the forward all the same (`always_call`), and that one ends it.
3. An interrupt there (anything but an Exception) is heard by nobody. What is open is tied to the Python frame of the
   module's call: the next region that begins in this thread, or ends around it, and the next tensor that autograd
   wants to save ask whether this frame is still on the stack, and end what is open if not. So does the end of the frame
   itself, which takes the guard with it; an exception that somebody holds keeps the frame.

Where torch has no such place for a guard, the hook after the forward does all of 1, and 3 is asked throughout.

A replay calls the module, so that its other hooks run again. What the region is of that call, its window, is what the
same two hooks enclose. There the replay's own `finally` is around the call, and 3 is no matter.

What this is not: how a region is begun and ended (opened.py), and what is recovered in a replay (replay.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from recollect._ambient import RandomState
from recollect._engine.scope import Scope, here
from recollect._inputs import Arguments
from recollect._torch import (
    call_of_hook,
    called_module,
    pop_hooks,
    pop_hooks_of,
    push_hooks,
    pushed_hooks,
    remove_hooks_of,
    replace_forward,
)
from recollect._verify import traces_start_here


class Applied(Protocol):
    """What a module's hooks belong to."""

    is_applied: bool  # whether the module has the hooks

    def lent_to(self, module: Module) -> contextlib.AbstractContextManager[None]:
        """The hooks for a while, where they have been taken off since."""


class ModuleFunction:
    """A module as the function of a region that its own hooks begin. `call_for_replay` calls it."""

    __slots__ = ("__wrapped__", "applied")

    def __init__(self, module: Module, applied: Applied) -> None:
        self.__wrapped__ = module
        self.applied = applied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Around(Protocol):
    """Contexts that were entered."""

    def leave(self, error: BaseException | None) -> None:
        """Leave them, with what was raised inside."""


class Opened:
    """What a hook before a module's forward opened. It ends once, with the forward."""

    __slots__ = ("_frame", "_is_gone", "_thread", "call", "contexts", "ended", "is_exposed", "scope")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.contexts: Around | None = None
        self.ended = False
        self.is_exposed = True  # nobody tells if the call is cut off
        self._is_gone = False
        self.call = 0  # the identity of the Python frame of the module's call
        self._frame: FrameType | None = None
        self._thread = get_ident()

    def tie(self, hook_caller: FrameType) -> None:
        """Tie it to the module's call that `hook_caller`, which called the hook, belongs to."""
        self.scope.opened = self
        frame = call_of_hook(hook_caller)
        self.call = id(frame)
        if not replace_forward(frame, lambda forward: _Guard(self, forward)):
            # Without a guard nothing in the frame refers to this; with one, the guard says when the frame is gone.
            self._frame = frame

    def is_of(self, hook_caller: FrameType) -> bool:
        """Whether `hook_caller` belongs to the same call of the module."""
        return id(call_of_hook(hook_caller)) == self.call

    def is_running(self) -> bool:
        """Whether the call is still going on, or does not end unnoticed."""
        if not self.is_exposed or get_ident() != self._thread:  # a backward inside has threads of its own
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_gone:
            if id(frame) == self.call:
                return True
            frame = frame.f_back
        return False

    def end(self, error: BaseException | None) -> None:
        """The forward has ended, with `error` if it failed.

        Does nothing the second time, unless an interrupt came in the midst of the first.
        """
        if self.ended:
            return
        scope, succeeded = self.scope, error is None
        scope.opened = self._frame = None
        contexts, self.contexts = self.contexts, None
        try:
            if here.scope is not scope:
                innermost()
            if contexts is not None:
                contexts.leave(error)
        except BaseException:
            succeeded = False
            raise
        finally:
            error = None  # a traceback that holds this Python frame must not be held by it
            self._close(scope, succeeded=succeeded)
            self.ended = True
            del self.scope  # the hooks, which live as long as the graph, have this

    def _close(self, scope: Scope, *, succeeded: bool) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        """End it, after something cut the call off unnoticed."""
        try:
            self.end(sys.exc_info()[1] or GeneratorExit("the module's call was cut off"))
        except Exception:
            pass  # by a context that could not be left; there is nobody to hear of it

    def frame_ended(self) -> None:
        """The call is over for good."""
        if not self.ended:
            self._is_gone = True
            # Else it is another thread's to end, or something runs that began since.
            if get_ident() == self._thread and here.scope is self.scope:
                self.abandon()


class _Guard:
    """Stands in for the forward of one call of a module."""

    __slots__ = ("_forward", "_opened")

    def __init__(self, opened: Opened, forward: Callable[..., Any]) -> None:
        self._opened = opened
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        opened = self._opened
        opened.is_exposed = False
        try:
            result = self._forward(*args, **kwargs)
            opened.end(None)
        except BaseException as error:
            opened.end(error)
            raise
        return result

    def __del__(self) -> None:
        opened = getattr(self, "_opened", None)  # an interrupted __init__ leaves none
        if opened is not None:
            opened.frame_ended()


def innermost() -> Scope | None:
    """The scope of what runs in this thread, after ending what was cut off."""
    scope = here.scope
    while scope is not None and scope.opened is not None and not scope.opened.is_running():
        scope.opened.abandon()
        scope = here.scope
    return scope


def take_off(pack: object) -> None:
    """Pop the saved-tensor hooks of `pack`, after ending what was cut off above them.

    After an interrupt they may not have been pushed.
    """
    hooks = pushed_hooks()
    if hooks is not None and hooks[0] is pack:
        pop_hooks()
    else:
        innermost()
        pop_hooks_of(pack)


def end_of_call(hook_caller: FrameType, error: BaseException | None) -> None:
    """A hook after a module's forward is called: end what the hook before it began, if it is still open."""
    scope = innermost()
    if scope is not None and scope.opened is not None and scope.opened.is_of(hook_caller):
        scope.opened.end(error)


# --- Calls that the hook knows of ---


class Awaited(Protocol):
    """What the hook of a module begins when we call the module, instead of what it begins for others."""

    module: Module

    def begin(self, hook_caller: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Begin, in the place of the hook; gives other arguments for the module, or None."""


def is_awaited(module: Module, hook_caller: FrameType) -> bool:
    """Whether a hook is called for the very call of the module that is awaited, and not for one inside of it."""
    if here.awaited is None or here.awaited.module is not module:
        return False
    frame = call_of_hook(hook_caller).f_back
    while frame is not None and frame.f_code is not call_awaited.__code__:
        if called_module(frame) is module:
            return False
        frame = frame.f_back
    return True


def call_awaited(awaited: Awaited, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module so that its hook begins `awaited`."""
    before, here.awaited = here.awaited, awaited
    try:
        return awaited.module(*args, **kwargs)
    finally:
        here.awaited = before


class Window(Opened):
    """The part of a module's call that its region is, opened by the hook that began the region in the forward.

    Other hooks run before and after it: what they save, draw, decide and make of the arguments is none of the region's.
    """

    __slots__ = ("_arguments", "_enter", "_policy", "_random", "module")

    def __init__(
        self, scope: Scope, module: Module, arguments: Arguments, enter: Callable[[], contextlib.ExitStack]
    ) -> None:
        super().__init__(scope)
        self.module = module
        self._arguments = arguments
        self._enter = enter
        self._random = RandomState.like(scope.frame.ambient)
        self._policy = scope.policy
        self._shut(scope)

    @staticmethod
    def _shut(scope: Scope) -> None:
        scope.decide_by(None)
        scope.position = sys.maxsize  # behind all that is in the journal

    def begin(self, hook_caller: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Give the arguments that the region began with."""
        scope = self.scope
        try:
            self.tie(hook_caller)
            scope.decide_by(self._policy)
            scope.position = scope.frame.start
            self._random.put()
            push_hooks(scope.pack, _identity)
            self.contexts = _Left(self._enter())
        except BaseException as error:
            self.end(error)
            raise
        args, kwargs = self._arguments
        return args, dict(kwargs)  # other hooks may change it

    def _close(self, scope: Scope, *, succeeded: bool) -> None:
        if self.call:
            remove_hooks_of(scope.pack)
        self._shut(scope)


class _Left:
    """Contexts that are left and cannot suppress what was raised inside."""

    __slots__ = ("_stack",)

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def leave(self, error: BaseException | None) -> None:
        if error is None:
            self._stack.close()
        else:
            self._stack.__exit__(type(error), error, error.__traceback__)


def _identity(packed: Tensor) -> Tensor:
    return packed


@traces_start_here
def call_for_replay(scope: Scope, arguments: Arguments, enter: Callable[[], contextlib.ExitStack]) -> None:
    """Call a region's module again; `enter` enters what is around the region's part of it."""
    function: Any = scope.frame.function
    module, applied = function.__wrapped__, function.applied
    window = Window(scope, module, arguments, enter)
    try:
        with contextlib.nullcontext() if applied.is_applied else applied.lent_to(module):
            call_awaited(window, *arguments)
        window.end(None)
    except BaseException as error:
        window.end(error)
        raise

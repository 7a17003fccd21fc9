"""What happens once: side effects that a replay must not repeat, and decisions that it must not make anew.

Both run in the forward only. The result stands in the journal (scope.py), which the outermost region owns, so every
later run of the same code is handed it: the region's own replay, and that of a region around it, which runs this
forward again. Autograd's side of it is that of a kept region (inside.py): what is saved inside is kept, but for the
arguments, which a replay packs again; tensors that need grad are handed out as results that do.

A result is copied when it is kept and again when it is handed out, so nobody can change it: it is meant for things as
small as decisions are.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from recollect import _compile, _errors
from recollect._ambient import RandomState
from recollect._engine.inside import NO_PART, Inside, call_unseen, call_within, hooks_of, pack_again
from recollect._engine.scope import Scope, here
from recollect._inputs import copy_of, find_tensors, rebuild
from recollect._torch import as_inner_result, is_view_without_grad, never_begin_in, top_hooks, view_without_grad

P = ParamSpec("P")
R = TypeVar("R")


def is_recomputing() -> bool:
    """Whether a checkpointed function runs again for backward, rather than for the first time.

    True also in what a replay runs of the regions inside. False outside of any region.

    Example:
        >>> import torch, recollect
        >>> seen = []
        >>> def block(x):
        ...     seen.append(recollect.is_recomputing())
        ...     return x.sin().exp()
        >>> recollect.checkpoint(block, torch.ones(2, requires_grad=True)).sum().backward()
        >>> seen
        [False, True]
    """
    if is_dynamo_compiling():
        return False
    scope, chain = here.scope, here.chain
    return (
        here.reentrant == "replay" or (scope is not None and scope.following) or (chain is not None and chain.replaying)
    )


def once(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in the forward of a region only: for logging, counters, metrics.

    Args:
        function: What to call.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returns; in a replay, what it returned in the forward. If it raised, it raises the same again.

    Example:
        >>> import torch, recollect
        >>> losses = []
        >>> def block(x):
        ...     recollect.once(losses.append, x.detach().sum())
        ...     return x.sin().exp()
        >>> recollect.checkpoint(block, torch.ones(2, requires_grad=True)).sum().backward()
        >>> len(losses)
        1
    """
    if is_dynamo_compiling():
        return function(*args, **kwargs)
    if not callable(function):
        raise _errors.not_callable("function", function)
    result: R = call_once(function, args, kwargs)
    return result


def pin(function: Callable[P, R]) -> Callable[P, R]:
    """Let a decision be made in the forward and hold in the replay: routing, sampled branches, sizes of splits.

    Args:
        function: What decides. It may return tensors, with gradients too, and any Python value.

    Returns:
        A function that does the same; in a replay it returns what it returned in the forward.

    Example:
        >>> import torch, recollect
        >>> def experts(x):
        ...     scores = x.softmax(-1)
        ...     weights, chosen = recollect.pin(torch.topk)(scores, 2)
        ...     return (x.gather(-1, chosen) * weights).sum(-1)
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> recollect.checkpoint(experts, x).sum().backward()
    """
    if not is_dynamo_compiling() and not callable(function):
        raise _errors.not_callable("function", function)

    @functools.wraps(function)
    def pinned(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _compile.run_pinned if is_dynamo_compiling() else call_pinned
        result: R = run(function, args, kwargs)
        return result

    return pinned


def skip_on_replay(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook of a module (or any function whose result may be left out) do nothing in a replay.

    Args:
        hook: A forward hook or pre-hook that has no part in the computation.

    Returns:
        A function that calls it in the forward, and gives None in a replay.

    Example:
        >>> import torch, recollect
        >>> shapes = []
        >>> layer = torch.nn.Linear(2, 2)
        >>> handle = layer.register_forward_hook(
        ...     recollect.skip_on_replay(lambda module, args, output: shapes.append(output.shape)))
        >>> block = torch.nn.Sequential(layer, torch.nn.Tanh())
        >>> recollect.checkpoint(block, torch.ones(1, 2)).sum().backward()
        >>> len(shapes)
        1
    """
    if not callable(hook):
        raise _errors.not_callable("hook", hook)

    @functools.wraps(hook)
    def skipped(*args: Any, **kwargs: Any) -> Any:
        return None if is_recomputing() else hook(*args, **kwargs)

    return skipped


# --- In the journal ---


class _Pinned:
    """A tensor of a result."""

    __slots__ = ("is_passed_over", "needs_grad", "value")

    def __init__(self, tensor: Tensor) -> None:
        self.needs_grad = tensor.requires_grad
        self.is_passed_over = is_view_without_grad(tensor)
        self.value = copy_of(tensor.detach())


class _Weight:
    """Stands in a result for a leaf that needs grad, which is handed out as itself: gradients go there."""

    __slots__ = ("value",)

    def __init__(self, tensor: Tensor) -> None:
        self.value = tensor


class _Argument:
    """Stands in a result for an argument that was returned."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Entry:
    """One call."""

    __slots__ = ("after", "arguments", "code", "error", "random", "result")

    def __init__(self, code: object) -> None:
        self.code = code  # of the function, to notice that a replay comes to another one
        self.after = 0  # the journal's position behind it
        self.arguments: list[int] = []  # those that were saved inside, in order
        self.result: list[Any] = []  # the result, if the call has ended
        self.error: Exception | None = None
        self.random: list[RandomState] = []  # after the call, of each region around it, from the inside out

    def keep(self, result: Any, tensors: Sequence[Tensor]) -> None:
        """Keep the result of a call whose arguments had these tensors."""
        made: dict[int, Any] = {id(argument): _Argument(index) for index, argument in enumerate(tensors)}

        def keep(tensor: Tensor) -> Any:
            if id(tensor) not in made:
                is_weight = tensor.requires_grad and tensor.is_leaf and tensor._base is None
                made[id(tensor)] = _Weight(tensor) if is_weight else _Pinned(tensor)
            return made[id(tensor)]

        self.result = [rebuild(result, Tensor, keep)]

    def hand_out(self, tensors: Sequence[Tensor], give: Callable[[Tensor, bool, bool], Tensor]) -> Any:
        """The result again, for arguments with these tensors.

        What `give` makes of a copy, whether it needed grad, and whether operators passed it over, is handed out.
        """
        made: dict[int, Tensor] = {}

        def one_of(one: _Pinned | _Argument | _Weight) -> Tensor:
            if isinstance(one, _Argument):
                return tensors[one.index]
            if isinstance(one, _Weight):
                return one.value
            if id(one) not in made:
                made[id(one)] = give(copy_of(one.value), one.needs_grad, one.is_passed_over)
            return made[id(one)]

        return rebuild(self.result[0], (_Pinned, _Argument, _Weight), one_of)


def call_once(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `once` does with a function."""
    return _call(function, args, kwargs, is_pinned=False)


def call_pinned(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function that is pinned does when it is called."""
    return _call(function, args, kwargs, is_pinned=True)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_pinned: bool) -> Any:
    scope, chain = here.scope, here.chain
    if chain is not None and (scope is None or not scope.following):
        # The step may be run again, and then it is the chain that remembers.
        if scope is None:
            return chain.call(function, args, kwargs, is_pinned=is_pinned)
        function = _RunByChain(chain, function, is_pinned)
    if scope is None:
        if here.reentrant is not None:
            raise _errors.not_in_reentrant(_errors.describe_function(function))
        return function(*args, **kwargs)
    code = code_of(function)
    entry = scope.noted(Entry, code)
    if entry is None:  # a replay within an unfinished forward, which has not come here yet
        return function(*args, **kwargs)
    if not isinstance(entry, Entry) or entry.code != code:
        raise _errors.pinned_elsewhere(scope.frame.region(), _errors.describe_function(function))
    if not scope.following:
        return _run(scope, entry, function, args, kwargs)
    return _hand_out(scope, entry, args, kwargs, function)


def code_of(function: Callable[..., Any]) -> object:
    """What a function is told by, to notice that another run comes to another one."""
    if isinstance(function, _RunByChain):
        function = function.__wrapped__
    return getattr(function, "__code__", None) or getattr(function, "__name__", type(function))


class _RunByChain:
    """A function that runs within a region within a step of a chain."""

    def __init__(self, chain: Any, function: Callable[..., Any], is_pinned: bool) -> None:
        self.__wrapped__ = function
        self._chain = chain
        self._is_pinned = is_pinned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chain.call(self.__wrapped__, args, kwargs, is_pinned=self._is_pinned)


def _run(
    scope: Scope, entry: Entry, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensors = find_tensors(args, kwargs)[0]
    outside, hooks, inside = top_hooks(), None, Inside()
    # Within a kept region nothing becomes a slot, but what it keeps goes to the hooks around: not what happens once.
    # Else, if the hooks are not the region's, the function has pushed some of its own: they decide.
    if outside is not None and (outside[0] is scope.pack or scope.saving):
        name = _errors.describe_function(function)
        slots = tensors if outside[0] is scope.pack else []
        inside.part = name, slots, list(map(id, slots)), entry.arguments, None
        hooks = hooks_of(inside, scope, outside, None)
    try:
        result = call_within(scope, hooks, function, args, kwargs, is_pinned=True)
    except Exception as error:
        entry.error = twin(error)
        raise
    finally:
        inside.part = NO_PART
        entry.after = scope.position
    entry.random = [RandomState.like(one.frame.ambient) for one in (scope, *scope.outer())]
    call_unseen(scope, entry.keep, result, tensors)
    return result


def twin(error: Exception) -> Exception:
    """The same exception without its traceback, which holds everything that was alive."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:  # one that cannot be made from its own arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


def _hand_out(
    scope: Scope, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any]
) -> Any:
    tensors = find_tensors(args, kwargs)[0]
    pack_again(scope, tensors, entry.arguments)
    scope.position = entry.after
    if entry.error is not None:
        raise twin(entry.error)
    # Of the region that is being replayed: its replay has put these generators where they were, and no others.
    for one, state in zip((scope, *scope.outer()), entry.random, strict=False):
        if one.replaying:
            state.put()
            break

    def give(value: Tensor, needs_grad: bool, is_passed_over: bool) -> Tensor:
        if is_passed_over:
            return view_without_grad(value)
        if not needs_grad:
            return value
        return as_inner_result(value, tensors, _errors.served_from_memory(_errors.describe_function(function)))

    result = call_unseen(scope, entry.hand_out, tensors, give)
    if scope.recorder is not None:
        scope.recorder.adopt(result)
    return result


never_begin_in(sys.modules[__name__])

"""Named regions: parts of a checkpointed function that its policy decides by name. No dispatch mode is involved.

A named region that is recomputed is a plain call, and one that is kept is kept_region.py's. Inside a kept region, one
that is to be recomputed becomes a checkpointed region of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from recollect import _compile, _errors
from recollect._engine.frame import run_region
from recollect._engine.kept_region import Mark, keep, replay
from recollect._engine.scope import Scope, here
from recollect._engine.selective import ask
from recollect._torch import begin_inside
from recollect.policy import Decision, Question, Recompute

P = ParamSpec("P")
R = TypeVar("R")


def region(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Name a part of a checkpointed function, so that a policy can decide about it.

    Args:
        name: Its name. Inside another named region the path counts: `mlp/act`.
        function: A function or module.

    Returns:
        A function that does the same. Outside of a checkpointed function, and where no policy asks for names, it
        is a plain call.

    Example:
        >>> import torch, recollect
        >>> calls = []
        >>> def attention(x):
        ...     calls.append(1)
        ...     return x.softmax(-1)
        >>> def block(x):
        ...     return recollect.region("attn", attention)(x).sin().exp()
        >>> x = torch.ones(3, requires_grad=True)
        >>> policy = recollect.by_name({"attn": recollect.Save()})
        >>> recollect.checkpoint(block, x, policy=policy).sum().backward()
        >>> len(calls)
        1
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {_errors.describe_value(name)}")
    if not name or "/" in name or "*" in name:
        raise ValueError(f"name must be a part of a path, without '/' and '*', and not empty, got {name!r}")
    if not is_dynamo_compiling() and not callable(function):  # Dynamo cannot tell of everything
        raise _errors.not_callable("function", function)

    return _Region(name, function)


class _Region(Generic[P, R]):
    """A function with a name. An object and no closure, so that a copy of a model has a copy of the module inside."""

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self.__name__ = name
        self.__wrapped__ = function

    @begin_inside
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            named: R = _compile.run_named(self.__name__, self.__wrapped__, args, kwargs)
            return named
        scope = here.scope
        if scope is None or scope.policy is None:
            return self.__wrapped__(*args, **kwargs)
        policy, outside = scope.policy, scope.path
        path = scope.path = f"{outside}/{self.__name__}" if outside else self.__name__
        try:
            decision: Decision | None = None
            if policy.table is not None:  # no function: the same path gives the same decision, and nothing is noted
                decision = policy.decide(path, _NO_QUESTION)
                if not policy.settled:
                    _settle(scope, path, decision)
                if not scope.saving and (decision is None or type(decision) is Recompute):
                    return self.__wrapped__(*args, **kwargs)
            result: R = _decided_call(scope, path, decision, self.__wrapped__, args, kwargs)
            return result
        finally:
            scope.path = outside

    def __repr__(self) -> str:
        return f"recollect.region({self.__name__!r}, {self.__wrapped__!r})"


_NO_QUESTION = Question((), {}, "")


def _decided_call(
    scope: Scope,
    path: str,
    decision: Decision | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a region that is kept, or inside of one that is, or whose decision is in the journal."""
    is_asked = scope.policy.table is None
    place, mark = scope.position, None
    if is_asked or not scope.saving:
        mark = scope.noted(lambda: Mark(path, _ask(scope, path, args, kwargs) if is_asked else decision))
        if mark is None and scope.replaying and scope.frame.finished:
            raise _errors.other_regions(scope.frame.region(), path)
        if mark is not None and getattr(mark, "path", None) != path:
            raise _errors.other_regions(scope.frame.region(), path)
        decision = None if mark is None else mark.decision
    if scope.saving and type(decision) is Recompute:  # what is around it is kept: it needs a frame of its own
        return run_region(function, args, kwargs, scope.frame.options, path=path)
    if mark is None or scope.saving or decision is None or type(decision) is Recompute:
        return function(*args, **kwargs)
    run = replay if scope.replaying else keep
    return run(scope, place, mark, function, args, kwargs)


def _ask(scope: Scope, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision | None:
    decision = ask(scope, scope.policy, path, args, kwargs)
    if not scope.policy.settled:
        _settle(scope, path, decision)
    return decision


def _settle(scope: Scope, path: str, decision: Decision | None) -> None:
    scope.names.append(path)
    scope.policy.settled = decision is not None and scope.policy.counts(decision)

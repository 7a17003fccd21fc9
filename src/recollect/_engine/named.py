"""Parts of a checkpointed function that are decided as a whole: named regions, by its policy, and modules, by `apply`.

A part that is recomputed is a plain call, and one that is kept is kept_region.py's. Inside a kept part, one
that is to be recomputed becomes a checkpointed region of its own. None of this takes a dispatch mode. A part that is
recomputed with a policy of its own is refined: as long as it runs, that policy is asked instead of the function's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from recollect import _compile, _errors
from recollect._engine.frame import Options, run_region
from recollect._engine.kept_region import Mark, keep, replay
from recollect._engine.replay import or_nothing
from recollect._engine.scope import Scope, here
from recollect._engine.selective import ask, forward_mode, replay_mode, tell_if_useless
from recollect._torch import begin_inside, in_transform
from recollect.policy import Decision, Policy, Question, Recompute

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
    """A function with a name. An object and no closure, so that a copy of a model has a copy of the module inside.

    Where nothing is decided about it, a call takes little more time than that of any object does: so without keywords
    it passes on none.
    """

    __slots__ = ("__name__", "__weakref__", "__wrapped__")

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self.__name__ = name
        self.__wrapped__: Callable[..., R] = function

    @begin_inside
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            named: R = _compile.run_named(self.__name__, self.__wrapped__, args, kwargs)
            return named
        scope = here.scope
        if scope is None or (known := scope.known) is None:
            return self.__wrapped__(*args, **kwargs) if kwargs else self.__wrapped__(*args)
        outside = scope.path
        scope.path = path = f"{outside}/{self.__name__}" if outside else self.__name__
        try:
            mark = known.get(path, _UNKNOWN)
            if mark is None and not scope.saving:
                return self.__wrapped__(*args, **kwargs) if kwargs else self.__wrapped__(*args)
            if type(mark) is Mark:
                result: R = call_part(scope, mark, self.__wrapped__, args, kwargs)
            else:
                result = _call_named(scope, path, self.__wrapped__, args, kwargs)
            return result
        finally:
            scope.path = outside

    def __repr__(self) -> str:
        return f"recollect.region({self.__name__!r}, {self.__wrapped__!r})"


_UNKNOWN = object()
_NO_QUESTION = Question((), {}, "")


def _call_named(
    scope: Scope, path: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a named region whose policy has to be asked.

    `Policy.known_paths` has the regions of which that is known: those to be marked in the journal, and None for those
    that are plain calls, unless they are inside of one that is kept.
    """
    policy = scope.policy
    if policy.table is None:  # a function, which is asked each time
        place = scope.position
        found = _checked(scope, path, scope.noted(_asked, scope, path, args, kwargs))
        if found is None or found.decision is None:
            return function(*args, **kwargs)
        if scope.saving:
            run: Callable[..., Any] = _call_inside
        elif type(found.decision) is Recompute:
            run = _call_recomputed
        else:
            run = replay if scope.replaying else keep
        return run(scope, place, found, function, args, kwargs)
    decision = policy.decide(path, _NO_QUESTION)
    is_plain = decision is None or (type(decision) is Recompute and decision.policy is None)
    mark = Mark(path, decision)
    if not policy.settled:
        _settle(scope, path, decision)
    if policy.settled:  # else this call of the function is to note all its paths
        policy.known_paths[path] = None if is_plain else mark
    if is_plain and not scope.saving:
        return function(*args, **kwargs)
    return call_part(scope, mark, function, args, kwargs)


def call_part(
    scope: Scope,
    mark: Mark,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options | None = None,
) -> Any:
    """Call a part of a checkpointed function: one that is kept or refined, or inside of one that is kept.

    `options` are those of a module, which stand for themselves: nothing is handed down to it.
    """
    place = scope.position
    if scope.saving:
        return _call_inside(scope, place, mark, function, args, kwargs, options)
    found = scope.note(mark)
    if found is not mark:
        found = _checked(scope, mark.path, found)
        if found is None:
            return function(*args, **kwargs)
    if type(found.decision) is Recompute:
        return _call_recomputed(scope, place, found, function, args, kwargs, options)
    return (replay if scope.replaying else keep)(scope, place, found, function, args, kwargs)


def _checked(scope: Scope, path: str, found: Any) -> Mark | None:
    """What the journal has for a part; None in a replay that has got further than an unfinished forward."""
    if found is None and not (scope.replaying and scope.frame.finished):
        return None
    if type(found) is not Mark or found.path != path:
        raise _errors.other_regions(scope.frame.region(), path)
    return found


def _call_recomputed(
    scope: Scope,
    place: int,
    mark: Mark,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options | None = None,
) -> Any:
    policy = mark.decision.policy  # type: ignore[union-attr]
    if policy is not None or options is not None:
        return _call_refined(scope, place, policy, function, args, kwargs)
    return function(*args, **kwargs)


def _call_inside(
    scope: Scope,
    place: int,
    mark: Mark,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options | None = None,
) -> Any:
    """Call a part inside of one that is kept: what is to be recomputed needs a frame of its own."""
    decision = mark.decision
    if type(decision) is not Recompute or in_transform():  # a region needs arguments that are of use in its replay
        return function(*args, **kwargs)
    if options is not None:
        return run_region(function, args, kwargs, options)
    inherited = scope.frame.options
    policy, path = scope.policy, mark.path
    if decision.policy is not None:
        # Paths are its own from here on, as where such a part is inside of nothing that is kept: see `_call_refined`.
        policy, path = decision.policy, ""
    if policy is not inherited.policy:
        inherited = dataclasses.replace(inherited, policy=policy)
    return run_region(function, args, kwargs, inherited, path=path)


def _call_refined(
    scope: Scope,
    place: int,
    policy: Policy | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a part that is recomputed, and in which `policy` decides what to keep all the same."""
    outside = scope.policy, scope.modes, scope.names, scope.outside, scope.path
    paused = [mode for mode in scope.modes if not mode.paused]
    for one in paused:
        one.paused = True
    scope.decide_by(policy)
    scope.names, scope.outside, scope.path = (), scope.whole_path(), ""
    mode: Any = None
    try:
        if policy is not None:
            mode = (replay_mode if scope.replaying else forward_mode)(policy, scope, place)
        # Those who look at operators are above the modes that keep and hand out: see `_call_in_contexts` of frame.py.
        with or_nothing(mode), or_nothing(mode and scope.trace), or_nothing(mode and scope.recorder):
            result = function(*args, **kwargs)
        if policy is not None and not policy.settled and not scope.following:
            tell_if_useless(policy, scope, () if mode is None else mode.seen)
        return result
    except TypeError:
        if mode is None or scope.replaying or mode.refused is None:
            raise
        raise mode.refused from None
    finally:
        mode = None  # it holds the scope, and a traceback may hold this frame
        before, scope.modes, scope.names, scope.outside, scope.path = outside
        scope.decide_by(before)
        for one in paused:
            one.paused = False


def _asked(scope: Scope, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mark:
    decision = ask(scope, scope.policy, path, args, kwargs)
    if not scope.policy.settled:
        _settle(scope, path, decision)
    return Mark(path, decision)


def _settle(scope: Scope, path: str, decision: Decision | None) -> None:
    if not scope.names:
        scope.names = []
    scope.names.append(path)
    scope.policy.settled = decision is not None and scope.policy.counts(decision)

"""Under `torch.compile`: regions become the compiler's own, and decisions its recompute tags.

Theory. Dynamo, the compiler's front, reads Python code. It knows `torch.utils.checkpoint.checkpoint` and makes an
operator of it that holds the function's graph. AOTAutograd, behind it, runs that operator under two dispatch modes,
the first of which asks a policy about every operator and puts a tag on its node; at last the partitioner copies the
nodes with the tag "recompute" into the backward, and saves where it says "save". So there is nothing to replay and
nothing to compare: this file gives Dynamo the function that it knows (`run`), and AOTAutograd a policy (`_Tags`).

A named region is a mark on its nodes (`torch.fx.traceback.annotate`), which the policy finds again when AOTAutograd
comes to them: a fresh number for every call, so that marks of regions in each other stay apart and in order.

The rule that the rest of the package keeps: the compiler never traces the engine. The functions that a user calls ask
`is_dynamo_compiling()`, which Dynamo takes for True, and come here; every other function of ours that the compiler
meets as a call (after a graph break, in a hook of autograd, in a dispatch mode) is run as it is, with all that it
calls. So a graph break inside a region leads to the eager engine.

What this is not: an engine. What the compiler cannot do (offload, comparing values) is said once (`say`).
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch.fx import traceback

from recollect import (
    _ambient,
    _differences,
    _digest,
    _errors,
    _generators,
    _guards,
    _inputs,
    _known,
    _optimizers,
    _record,
    _steps,
    _stores,
    _torch,
    _verification,
    _verify,
)
from recollect._engine import caching, calls, frame, groups, kept_region, reentrant, replay, scope, selective
from recollect._torch import (
    ID_IS_GUARDED,
    STOCK,
    TAGS,
    TorchDispatchMode,
    constant_when_traced,
    is_traced_by_autograd,
    level_of_user_code,
    makes_a_graph,
    never_begin_in,
    stock_names,
)
from recollect.policy import Decision, Offload, Operators, Policy, Question, Recompute, as_policy

# --- For Dynamo to read ---


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy: Any = None,
    context_fn: Callable[[], Any] | None = None,
    has_parts: bool = False,
) -> Any:
    """Call `function` as a region of the compiler; `has_parts` if there may be some with decisions of their own."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def call(*args: Any) -> Any:  # so that no keyword of the function is taken for an option
        return function(*args, **kwargs)

    called = call if kwargs else function
    if policy is None and context_fn is None and not has_parts:
        return torch.utils.checkpoint.checkpoint(called, *args, use_reentrant=False)
    if ID_IS_GUARDED and policy is not None:
        id(policy)  # Dynamo compiles anew for another function, also if only what it has closed over is another
    contexts = functools.partial(_contexts, policy, context_fn)
    return torch.utils.checkpoint.checkpoint(called, *args, use_reentrant=False, context_fn=contexts)


def run_named(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` as a part of a region that has a name."""
    with traceback.annotate({_fresh_mark(): name}):
        return function(*args, **kwargs)


def run_decided(number: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` as a part of a region for which the decision with that number holds, in place of the policy's."""
    with traceback.annotate({_fresh_mark(): number}):
        return function(*args, **kwargs)


def run_pinned(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` as a part of a region that is saved, whatever is decided about the region."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def call(*args: Any) -> Any:
        return function(*args, **kwargs)

    # The mark is for a policy around it, which may have the last word; the contexts are for where there is none.
    with traceback.annotate({_PINNED: True}):
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False, context_fn=_pinning_contexts)


# The decisions of modules by number: what Dynamo puts on a node must be a constant.
_decisions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(owner: Any) -> int:
    """A number for what `owner.decision` is, as long as there is an owner."""
    number = next(_numbers)
    _decisions[number] = owner
    return number


_MARK = "recollect region "
_PINNED = "recollect pinned"
_numbers = itertools.count()


@constant_when_traced
def _fresh_mark() -> str:
    return f"{_MARK}{next(_numbers)}"


_said: set[str] = set()


@constant_when_traced
def say(what: str) -> None:
    """Warn, once in a process, that the compiler cannot do something that was asked for."""
    if what not in _said:
        _said.add(what)
        warnings.warn(f"{_CANNOT[what]} (said once)", UserWarning, stacklevel=level_of_user_code())


_CANNOT = {
    "values": (
        'determinism_check="values" has no effect under torch.compile: a region that is compiled is not replayed, so '
        "there is nothing to compare. Its backward comes from the same graph as its forward"
    ),
    "debug": (
        "debug=True has no effect under torch.compile: a region that is compiled is not replayed, so there are no two "
        "runs whose operators could be listed"
    ),
    "offload": (
        "Offload() becomes Save() under torch.compile: the compiler has no tag for it, so what was to be kept on the "
        "host is kept on the device"
    ),
}


# --- For AOTAutograd to call ---


def _contexts(policy: Any, context_fn: Callable[[], Any] | None) -> tuple[Any, Any]:
    """The two dispatch modes that AOTAutograd needs for a policy, for what `context_fn` gives, or for both."""
    if context_fn is None:
        return _stock_contexts(_Tags(_NOTHING if policy is None else as_policy(policy)))
    forward, again = _two_modes(context_fn)
    if policy is None:
        return forward, again
    asked = getattr(forward, "policy_fn", None)
    if asked is None:
        raise _errors.policy_and_contexts(forward)
    return _stock_contexts(_Tags(as_policy(policy), otherwise=asked))


def _pinning_contexts() -> tuple[Any, Any]:
    return _stock_contexts(lambda ctx, op, *args, **kwargs: _save_unless_free(op))


def _two_modes(context_fn: Callable[[], Any]) -> tuple[Any, Any]:
    """What `context_fn` gives, as the compiler needs it: of ours, which keep and tag nothing, its own are made."""
    got = context_fn()
    if (
        not isinstance(got, (tuple, list))
        or len(got) != 2
        or not all(isinstance(one, TorchDispatchMode) for one in got)
    ):
        raise _errors.not_dispatch_modes(got)
    forward, again = got
    if not isinstance(forward, caching._CachingTorchDispatchMode):
        return forward, again
    may_be_changed = getattr(again, "allow_cache_entry_mutation", False)
    modes = _stock_contexts(functools.partial(_drop_in_tag, forward.policy_fn), may_be_changed)
    if hasattr(forward, "ac_graph_id"):  # which region it is, where the compiler has said so already
        modes[0].ac_graph_id = forward.ac_graph_id
    return modes


def _stock_contexts(asked: Callable[..., Any], may_be_changed: bool = False) -> tuple[Any, Any]:
    with stock_names():
        modes: tuple[Any, Any] = STOCK["create_selective_checkpoint_contexts"](asked, may_be_changed)
    return modes


def _drop_in_tag(asked: Callable[..., Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The tag for what a drop-in policy answers, with ours or torch's members or a bool."""
    answer = asked(ctx, op, *args, **kwargs)
    if isinstance(answer, bool):
        return answer
    caching.verdict(answer)  # or it says what a policy may answer
    return _tag(answer.name)


def _tag(name: str) -> Any:
    if name.endswith("OFFLOAD"):
        say("offload")
        name = "MUST_SAVE"
    return TAGS[name]


def _save_unless_free(op: Any) -> Any:
    """The tag for an operator of a part that is saved. What a view costs is nothing, and its memory is another's."""
    return TAGS["MUST_SAVE" if selective.kinds[op].is_kept else "PREFER_RECOMPUTE"]


_NOTHING = Operators({}, "nothing")


class _Tags:
    """A policy as AOTAutograd asks it: about every operator of one call of a region.

    Where both a named region and an operator in it are decided, what is kept is kept: as in the eager engine, a named
    region that is to be recomputed is an ordinary part of the function.
    """

    def __init__(self, policy: Policy, otherwise: Callable[..., Any] | None = None) -> None:
        self._policy = policy
        self._otherwise = otherwise  # a drop-in policy, for what `policy` leaves open
        self._named: dict[str, Decision | None] = {}  # by mark: each call of a named region is asked about once
        self._answers: dict[Any, list[Any]] = {}  # in order: torch 2.11 asks again in the replay

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if ctx.is_recompute:
            return self._answers[op].pop(0)
        if is_traced_by_autograd() and not makes_a_graph():  # only to see what comes out: the policy may count calls
            return TAGS["PREFER_RECOMPUTE"]
        tag = self._decide(ctx, op, args, kwargs)
        self._answers.setdefault(op, []).append(tag)
        return tag

    def _decide(self, ctx: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        marks: dict[str, Any] = traceback.get_current_meta().get("custom", {})
        if _PINNED in marks:
            return _save_unless_free(op)
        around, path, policy = self._around(marks)
        if around is not None and type(around) is not Recompute:
            if isinstance(around, Offload):
                say("offload")
            return _save_unless_free(op)
        kind, decision = selective.kinds[op], None
        if not kind.is_passed_over(args, kwargs):
            decision = policy.decide(op, Question(args, kwargs, path))
        if decision is None and self._otherwise is not None and policy is self._policy:
            return _drop_in_tag(self._otherwise, ctx, op, *args, **kwargs)
        if decision is not None:
            policy.settled = policy.settled or policy.counts(decision)
        if decision is None or not kind.is_kept:
            return TAGS["PREFER_RECOMPUTE" if around is None else "MUST_RECOMPUTE"]
        if type(decision) is Recompute:
            return TAGS["MUST_RECOMPUTE"]
        return _tag("MUST_CPU_OFFLOAD" if isinstance(decision, Offload) else "MUST_SAVE")

    def _around(self, marks: dict[str, Any]) -> tuple[Any, str, Policy]:
        """What is decided about the innermost part that is decided, the path of named regions, and the policy there.

        A part is a named region, which the policy decides, or a module, which has a decision of its own.
        """
        decision, path, policy = None, "", self._policy
        numbers = sorted(int(mark.removeprefix(_MARK)) for mark in marks if mark.startswith(_MARK))
        for number in numbers:
            mark = f"{_MARK}{number}"
            if isinstance(marks[mark], int):
                decision, path = _decisions[marks[mark]].decision, ""
                if type(decision) is Recompute:
                    policy = decision.policy or _NOTHING
                continue
            path = f"{path}/{marks[mark]}" if path else marks[mark]
            if mark not in self._named and policy.decides_names():
                decided = self._named[mark] = policy.decide(path, Question((), {}, path))
                if decided is not None:
                    policy.settled = policy.settled or policy.counts(decided)
            decision = self._named.get(mark) or decision
        return decision, path, policy


def hand_over(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Callable[[], Any]
) -> Any:
    """Run a region that AOTAutograd has come to under our name: `torch.utils.checkpoint.checkpoint` is ours then."""
    with stock_names():
        return STOCK["checkpoint"](
            function,
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_two_modes, context_fn),
            early_stop=False,
            preserve_rng_state=False,
            **kwargs,
        )


# --- What the compiler runs as it is ---

for _module in (
    *(_ambient, _differences, _digest, _errors, _generators, _guards, _inputs, _known, _optimizers, _record, _steps),
    *(_stores, _torch, _verification, _verify),
    *(caching, calls, frame, groups, kept_region, reentrant, replay, scope, selective),
):
    never_begin_in(_module)

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

What this is not: an engine. What the compiler cannot do (offload, comparing values) is said once (`_say`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch.fx import traceback

from recollect import (
    _ambient,
    _differences,
    _digest,
    _errors,
    _faults,
    _gathering,
    _generators,
    _guards,
    _inputs,
    _kept,
    _known,
    _meshes,
    _optimizers,
    _record,
    _restored,
    _shards,
    _steps,
    _torch,
    _verification,
    _verify,
)
from recollect._engine import caching, calls, frame, groups, inside, kept_region, reentrant, replay, scope, selective
from recollect._stores import chosen, courses, disk, files, flights, forms, links, media, pool, ranges, store
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
from recollect.policy import Decision, Offload, Policy, Question, Recompute, Save, as_policy

# --- For Dynamo to read ---


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy: Any = None,
    context_fn: Callable[[], Any] | None = None,
    needs_tags: bool = False,
    cannot: tuple[str, ...] = (),
) -> Any:
    """Call `function` as a region of the compiler.

    It `needs_tags` if parts of it are decided without a policy. What the compiler `cannot` do is said when it compiles
    the region, and not if it breaks its graph in there and leaves it to the eager engine, which can.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def call(*args: Any) -> Any:  # so that no keyword of the function is taken for an option
        return function(*args, **kwargs)

    called = call if kwargs else function
    mark = _fresh_mark()
    with traceback.annotate({mark: _REGION}):
        # torch.export takes no region without contexts.
        plain = policy is None and context_fn is None and not cannot
        if plain and not needs_tags and not _is_exporting():
            return torch.utils.checkpoint.checkpoint(called, *args, use_reentrant=False)
        if ID_IS_GUARDED and policy is not None:
            id(policy)  # Dynamo compiles anew for another function, also if only what it has closed over is another
        contexts = functools.partial(_contexts, policy, context_fn, mark, cannot)
        return torch.utils.checkpoint.checkpoint(called, *args, use_reentrant=False, context_fn=contexts)


def run_named(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` as a part of a region that has a name."""
    with traceback.annotate({_fresh_mark(): name}):
        return function(*args, **kwargs)


def run_kept(decision: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` as a part that is kept: "Save" or "Offload", as the classes are called.

    It is kept in a region around it that has a policy or `needs_tags`.
    """
    with traceback.annotate({_fresh_mark(): f"{_DECIDED}{decision}"}):
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


# What is noted with the nodes. Marks are numbered as they are made, so those from further in have higher numbers.
_MARK = "recollect "
_REGION = "*"  # where a region begins; neither is a name
_DECIDED = "/"  # followed by a decision
_PINNED = "recollect pinned"
_numbers = itertools.count()


@constant_when_traced
def _fresh_mark() -> str:
    return f"{_MARK}{next(_numbers)}"


@constant_when_traced  # Dynamo of 2.11 takes it for True
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


def _number(mark: str) -> int:
    return int(mark.removeprefix(_MARK))


# --- For AOTAutograd to call ---

_said: set[str] = set()


def _say(what: str) -> None:
    """Warn, once in a process, that the compiler cannot do something that was asked for."""
    if what not in _said:
        _said.add(what)
        warnings.warn(f"{_CANNOT[what]} (said once)", UserWarning, stacklevel=level_of_user_code())


@constant_when_traced
def say(what: str) -> None:
    """`_say`, for Dynamo to call."""
    _say(what)


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
    "inputs": (
        "inputs= has no effect under torch.compile: the inputs of a region that is compiled stay where they are, whole"
    ),
}


def _contexts(
    policy: Any, context_fn: Callable[[], Any] | None, region: str, cannot: tuple[str, ...]
) -> tuple[Any, Any]:
    """The two dispatch modes that AOTAutograd needs for a policy, for what `context_fn` gives, or for both."""
    for what in cannot:
        _say(what)
    checked = None if policy is None else as_policy(policy)
    if context_fn is None:
        return _stock_contexts(_Tags(checked, _number(region)))
    forward, again = _two_modes(context_fn)
    if checked is None:
        return forward, again
    asked = getattr(forward, "policy_fn", None)
    if asked is None:
        raise _errors.policy_and_contexts(forward)
    return _stock_contexts(_Tags(checked, _number(region), otherwise=asked))


def _pinning_contexts() -> tuple[Any, Any]:
    return _stock_contexts(lambda ctx, op, *args, **kwargs: _save_unless_free(op))


def _two_modes(context_fn: Callable[[], Any]) -> tuple[Any, Any]:
    """What `context_fn` gives, as the compiler needs it: of ours, which keep and tag nothing, its own are made."""
    got = context_fn()
    is_pair = isinstance(got, (tuple, list)) and len(got) == 2
    if not is_pair or not all(isinstance(one, TorchDispatchMode) for one in got):
        raise _errors.not_dispatch_modes(got)
    forward, again = got
    if isinstance(forward, caching._CachingTorchDispatchMode):
        may_be_changed = getattr(again, "allow_cache_entry_mutation", False)
        ours = forward
        forward, again = _stock_contexts(functools.partial(_drop_in_tag, ours.policy_fn), may_be_changed)
        if hasattr(ours, "ac_graph_id"):  # which region it is, where the compiler has said so already
            forward.ac_graph_id = ours.ac_graph_id
    if getattr(forward, "ac_graph_id", 0) is None:  # AOTAutograd without Dynamo: nobody says so
        forward.ac_graph_id = next(_numbers)
    return forward, again


def _stock_contexts(asked: Callable[..., Any], may_be_changed: bool = False) -> tuple[Any, Any]:
    with stock_names():
        modes: tuple[Any, Any] = STOCK["create_selective_checkpoint_contexts"](asked, may_be_changed)
    return modes


def _drop_in_tag(asked: Callable[..., Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The tag for what a drop-in policy answers, with ours or torch's members or a bool."""
    with _no_type_error():
        answer = asked(ctx, op, *args, **kwargs)
        if answer is None or isinstance(answer, bool):
            return bool(answer)
        caching.verdict(answer)  # or it says what a policy may answer
    return _tag(answer.name)


@contextlib.contextmanager
def _no_type_error() -> Iterator[None]:
    """Torch takes a TypeError in an operator such as `@` for "not implemented"."""
    try:
        yield
    except TypeError as error:
        raise RuntimeError(str(error)) from error


def _tag(name: str) -> Any:
    if name.endswith("OFFLOAD"):
        _say("offload")
        name = "MUST_SAVE"
    return TAGS[name]


def _save_unless_free(op: Any) -> Any:
    """The tag for an operator of a part that is saved. What a view costs is nothing, and its memory is another's."""
    return TAGS["MUST_SAVE" if selective.kind_of(op).is_kept else "PREFER_RECOMPUTE"]


class _Tags:
    """A policy as AOTAutograd asks it: about every operator of one call of a region.

    Where both a named region and an operator in it are decided, what is kept is kept: as in the eager engine, a named
    region that is to be recomputed is an ordinary part of the function. In a region inside of this one, that has
    the word, and in a part that is recomputed with a policy of its own, that policy.
    """

    def __init__(
        self,
        policy: Policy | None,
        number: int,
        otherwise: Callable[..., Any] | None = None,
        around: Decision | None = None,
    ) -> None:
        self._policy = policy
        self._number = number  # of the mark where it begins
        self._otherwise = otherwise  # a drop-in policy, for what `policy` leaves open
        self._around = around  # what is decided about all of it
        self._parts: dict[int, _Tags] = {}  # with policies of their own, by number
        self._named: dict[int, Decision | None] = {}  # by number: each call of a named region is asked about once
        self._answers: dict[Any, list[Any]] = {}  # in order: torch 2.11 asks again in the replay
        self._calls: dict[Any, int] = {}  # how often the policy was asked about each operator

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if ctx.is_recompute:
            return self._answers[op].pop(0)
        if is_traced_by_autograd() and not makes_a_graph():  # only to see what comes out: the policy may count calls
            return TAGS["PREFER_RECOMPUTE"]
        with _no_type_error():
            tag = self._decide(ctx, op, args, kwargs)
        self._answers.setdefault(op, []).append(tag)
        return tag

    def _decide(self, ctx: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meta = traceback.get_current_meta()
        marks: dict[str, Any] = meta.get("custom", {})
        if _PINNED in marks:
            return _save_unless_free(op)
        inside = {_number(mark): what for mark, what in marks.items() if mark.startswith(_MARK)}
        inside = {number: inside[number] for number in sorted(inside) if number > self._number}
        if _REGION in inside.values():
            return meta.get("recompute") or TAGS["PREFER_RECOMPUTE"]
        around, path, part = self._find(inside)
        if part is not None:
            return part._decide(ctx, op, args, kwargs)
        if around is not None and type(around) is not Recompute:
            if isinstance(around, Offload):
                _say("offload")
            return _save_unless_free(op)
        kind = selective.kind_of(op)
        decision = None
        if not kind.is_passed_over(args, kwargs):
            call = self._calls.get(op, 0)
            self._calls[op] = call + 1
            decision = self._ask(op, Question(args, kwargs, path, call))
        if decision is None and self._otherwise is not None:
            return _drop_in_tag(self._otherwise, ctx, op, *args, **kwargs)
        if decision is None or not kind.is_kept:
            return TAGS["PREFER_RECOMPUTE" if around is None else "MUST_RECOMPUTE"]
        if type(decision) is Recompute:
            return TAGS["MUST_RECOMPUTE"]
        return _tag("MUST_CPU_OFFLOAD" if isinstance(decision, Offload) else "MUST_SAVE")

    def _find(self, marks: dict[int, str]) -> tuple[Decision | None, str, _Tags | None]:
        """What is decided about the innermost part that is decided, and the path of the innermost name.

        Or the first part that has a policy of its own: then all further in is that policy's to decide.
        """
        decision, path = self._around, ""
        for number, what in marks.items():
            if what.startswith(_DECIDED):
                decision = _DECISIONS[what.removeprefix(_DECIDED)]
                continue
            path = f"{path}/{what}" if path else what
            if number not in self._named and self._policy is not None and self._policy.decides_names():
                self._named[number] = found = self._ask(path, Question((), {}, path))
                if isinstance(found, Recompute) and found.policy is not None:
                    self._parts[number] = _Tags(found.policy, number, around=Recompute())
            if number in self._parts:
                return None, path, self._parts[number]
            decision = self._named.get(number) or decision
        return decision, path, None

    def _ask(self, what: Any, question: Question) -> Decision | None:
        policy = self._policy
        decision = None if policy is None else policy.decide(what, question)
        if policy is not None and decision is not None and not policy.settled:
            policy.settled = policy.counts(decision)
        return decision


_DECISIONS: dict[str, Decision] = {"Save": Save(), "Offload": Offload(), "Recompute": Recompute()}


def hand_over(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Callable[[], Any]
) -> Any:
    """Run a region that AOTAutograd has come to under our name: `torch.utils.checkpoint.checkpoint` is ours then."""
    with stock_names():
        return STOCK["checkpoint"](
            functools.partial(function, **kwargs),  # none of its keywords is an option
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_two_modes, context_fn),
            early_stop=False,
            preserve_rng_state=False,
        )


# --- What the compiler runs as it is ---

# The other files have the functions that a user calls: Dynamo looks into those, or they say for themselves.
HIDDEN = (
    *(_ambient, _differences, _digest, _errors, _generators, _guards, _inputs, _known, _optimizers, _record),
    *(_restored, _steps),
    *(_faults, _gathering, _kept, _meshes, _shards, _torch, _verification, _verify),
    *(caching, calls, frame, groups, inside, kept_region, reentrant, replay, scope, selective),
    *(chosen, courses, disk, files, flights, forms, links, media, pool, ranges, store),
    *(part for name, part in sys.modules.items() if name.startswith("recollect._errors.")),
)
for _module in HIDDEN:
    never_begin_in(_module)

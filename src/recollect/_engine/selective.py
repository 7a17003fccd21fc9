"""Selective checkpointing by operator: keep the outputs of some, run the others again.

Two dispatch modes: one around the forward, which keeps what the policy says, one around each replay, which hands out
what was kept instead of running the operator. Outputs are kept in the order of the calls, per operator; they leave
and re-enter below autograd, so autograd builds the same graph in the replay as in the forward.

The policy is asked in the forward alone and the replay follows what it said. What was handed out is let go of, unless
the graph is retained; a kept output that is gone is computed again, and so is one of an operator that the user did
not choose (`SaveOrCopy`), if it was changed where no copy could be made before. The drop-in's modes, which ask in
both passes and serve one backward, are in caching.py and share the first half of this file.

Never kept, whatever the policy says: the result of an operator that writes to its arguments (it is the argument), and
views (they are the memory of others, and free): both are run again. Natively neither is memory that has yet to be
written (`empty`): there is nothing in it, and it is about to be changed. Not asked about: operators that
only read metadata, and autocast's casts of weights, which come from its cache in one pass and not in the other.

A kept operator that draws random numbers leaves the generators as they were after it, so that what is drawn later
stays the same.
"""

from __future__ import annotations

import difflib
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import RandomState, get_cpu_state, set_cpu_state
from recollect._engine.scope import Scope
from recollect._inputs import copy_of, find_tensors, rebuild
from recollect._kept import Kept
from recollect._stores.chosen import store_of
from recollect._torch import (
    CAST,
    DETACH,
    METADATA_OPERATORS,
    SHARES_UNSAID,
    OperatorMode,
    changes_arguments,
    detach_below_autograd,
    direct_call,
    dropout_argument,
    gives_views,
    graph_is_kept,
    has_statistics,
    is_default_generator,
    level_of_user_code,
    makes_unwritten_memory,
    may_draw,
    only_reshapes,
    operator_name,
    out_of_sight,
    running_statistics,
    set_grad_enabled,
    storage_key,
    wait_for,
    written_arguments,
)
from recollect._verify import user_code
from recollect.policy import ByCall, Decision, Offload, Policy, Question, Recompute, Save, SaveOrCopy

if TYPE_CHECKING:
    from recollect._engine.frame import Frame


class _Kind:
    """What is to be known of an operator, looked up once."""

    __slots__ = (
        "detaches",
        "draws",
        "dropout",
        "is_cast",
        "is_kept",
        "is_unwritten",
        "is_usual",
        "only_reads",
        "operator",
        "reshapes",
        "run",
        "shares",
        "statistics",
        "writes",
        "written",
    )

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.only_reads = operator in METADATA_OPERATORS
        self.is_cast = operator is CAST
        self.writes = changes_arguments(operator)
        self.written = written_arguments(operator)
        self.statistics = has_statistics(operator)
        self.reshapes = only_reshapes(operator)
        self.shares = operator in SHARES_UNSAID
        self.detaches = operator is DETACH
        self.is_kept = not self.writes and not gives_views(operator)  # if the policy says so
        self.is_unwritten = makes_unwritten_memory(operator)
        self.draws = may_draw(operator)
        self.dropout = dropout_argument(operator) if self.draws else None
        # Whether it can be asked about and run, and nothing else is to be done.
        self.is_usual = not (self.only_reads or self.is_cast or self.writes or self.statistics or self.shares)
        self.run = direct_call(operator)

    def is_passed_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is not asked about: it only reads metadata, or may be autocast's cast of a weight."""
        return self.only_reads or (self.is_cast and is_cached(args, kwargs))


# By the operator's identity, which is quicker than its hash; its kind holds it, so that the identity stays its own.
known_kinds: dict[int, _Kind] = {}


def kind_of(operator: Any) -> _Kind:
    """What is to be known of an operator."""
    kind = known_kinds.get(id(operator))
    if kind is None:
        kind = known_kinds[id(operator)] = _Kind(operator)
    return kind


def is_cached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cast may be one of autocast's of a weight: made once per autocast context, so not in every pass.

    It is judged by the tensor, because inside a dispatch mode autocast looks switched off.
    """
    value = args[0]
    return bool(value.is_leaf and value.requires_grad and value.dtype is torch.float32 and kwargs.get("dtype") in _LOW)


_LOW = (torch.float16, torch.bfloat16)


# --- Keeping and handing out ---


def keep_results(
    scope: Scope | None, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, decision: Decision
) -> Any:
    """`result` with a Kept for each of its values, handed to the hooks around the region that `scope` is of."""
    hooks = None if scope is None else scope.frame.around
    watch = None if scope is None else scope.watch
    store = store_of(decision) if isinstance(decision, Offload) else None
    copies = isinstance(decision, Save) and decision.on_mutation == "copy"

    def keep(value: Any) -> Kept:
        if not isinstance(value, Tensor):
            return Kept(value)
        if watch is not None:
            watch(value, "kept" if store is None else "offloaded")
        if copies:
            return Kept(copy_of(value), hooks=hooks, is_private=True)
        return Kept(detach_below_autograd(value), store=store, hooks=hooks)

    kept = keep(result) if isinstance(result, Tensor) else rebuild_results(result, keep)
    if isinstance(decision, (SaveOrCopy, Offload)):
        for one in kepts_in(kept):
            one.copies_on_write = True
    if scope is not None:
        first = first_in(kept)
        if first is not None:
            first.packed = scope.packed()
            everything = scope.frame.options.preserve_rng_state == "all"  # a generator of the user's too
            if kind.draws and (everything or not _switched_off(kind, args, kwargs)):
                first.after = RandomState.like(scope.frame.ambient)
    return kept


def _switched_off(kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may draw does not, or draws from a generator that is the user's to preserve."""
    generator = kwargs.get("generator")
    if generator is not None and not is_default_generator(generator):
        return True
    if kind.dropout is None:
        return False
    position, name = kind.dropout
    return bool((args[position] if position < len(args) else kwargs.get(name, 0.0)) == 0.0)


def rebuild_results(result: Any, replace: Callable[[Any], Any]) -> Any:
    """Each value in an operator's result replaced; results are nested lists and tuples."""
    if isinstance(result, (list, tuple)):
        return type(result)([rebuild_results(part, replace) for part in result])
    return replace(result)


def kepts_in(kept: Any) -> Iterator[Kept]:
    if isinstance(kept, Kept):
        yield kept
    elif isinstance(kept, (list, tuple)):
        for part in kept:
            yield from kepts_in(part)


def first_in(kept: Any) -> Kept | None:
    """The one that stands for a call; a call without results has none."""
    return kept if type(kept) is Kept else next(kepts_in(kept), None)


Fetched = dict[Kept, Any]


def fetch(kept: Mapping[Any, list[Any]]) -> Fetched:
    """The values that only the replay of a region around can give.

    They are fetched before this region's replay begins: inside a dispatch mode autograd is switched off, and a
    backward inside the function would count as another pass.
    """
    fetched: Fetched = {}
    for operator, calls in kept.items():
        for one in (one for call in calls for one in kepts_in(call) if one.needs_replay):
            try:
                fetched[one] = one.get()
            except _errors.SavedTensorChangedError:
                if one.copies_on_write:
                    one.changed_by = "the function"
                    continue
                raise _errors.kept_output_changed(operator_name(operator), one.changed_by, one.changed_at) from None
    return fetched


def hand_out(operator: Any, kept: Any, fetched: Fetched, *, again: bool, may_be_changed: bool = False) -> Any:
    """The values of a call's Kepts; `again` if they will be asked for another time."""
    first = True

    def give(one: Kept) -> Any:
        nonlocal first
        if first and one.after is not None:
            one.after.put()
        first = False
        if not may_be_changed and one.is_changed():
            raise _errors.kept_output_changed(operator_name(operator), one.changed_by, one.changed_at)
        value = fetched.pop(one) if one in fetched else one.get()
        if again and isinstance(value, Tensor):
            # A version counter of its own: what the replay does to it in place, the forward did too, and was judged.
            return copy_of(value) if one.may_be_changed_in_replay() else value.detach()
        return value

    return give(kept) if isinstance(kept, Kept) else rebuild(kept, Kept, give)


class Changes:
    """Notes which operator changes a kept tensor in place, and where.

    Judged by memory and by what the operator says it writes to: the version is moved later, and not by all.
    """

    def __init__(self) -> None:
        self._new: list[Any] = []
        self._by_memory: dict[int, list[Kept]] = {}
        self._detached: list[tuple[weakref.ref[Tensor], list[Kept]]] = []

    def add(self, kept: Any) -> None:
        self._new.append(kept)

    def _over(self, values: Any) -> list[Kept]:
        """What is kept of the memory of the tensors in `values`."""
        for one in kepts_in(self._new):
            memory = one.memory()
            if memory is not None:
                self._by_memory.setdefault(memory, []).append(one)
        self._new.clear()
        if not self._by_memory:
            return []
        tensors = find_tensors((values,), {})[0]
        return [one for tensor in tensors for one in self._by_memory.get(storage_key(tensor), ())]

    def writes(self, operator: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = running_statistics(operator, args, kwargs) if kind.statistics else kind.written
        self.settle()
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
        for one in self._over(written):
            if one.is_copied_before_a_change():
                continue
            if kind.reshapes:
                one.is_reshaped()
            elif one.copies_on_write:
                one.make_private()
            elif not one.changed_by:
                lines = user_code(sys._getframe(2))[1]
                place = f" at {lines[-1]}" if lines else ""
                one.changed_by = f"{operator}{place}"
                one.changed_at = lines[-1] if lines else None

    def shares(self, args: tuple[Any, ...], result: Any) -> None:
        for one in self._over(args):
            for tensor in find_tensors((result,), {})[0]:
                one.also_held_by(detach_below_autograd(tensor))

    def detaches(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Torch itself detaches what `zeros`, `rand` and their like have made, and gives the result a version counter
        of its own once it has it: that one is the user's tensor. So it is looked at later, see `settle`.
        """
        kept = self._over(args)
        if kept:
            self._detached.append((weakref.ref(result), kept))

    def settle(self) -> None:
        """Watch what was detached: before anything is changed, and when the forward has ended."""
        if not self._detached:
            return
        with out_of_sight():
            for reference, kept in self._detached:
                tensor = reference()
                if tensor is not None and not tensor.is_inference():
                    for one in kept:
                        one.also_held_by(tensor.detach())
        self._detached.clear()


# --- Natively: the forward decides, replays follow ---

_GONE = object()  # handed out, and the graph was not retained


class Keeping(OperatorMode):
    """Around a forward: keeps what the policy says, call by call.

    `decisions` is what an earlier run of the same forward decided, if this one runs within a replay.
    """

    def __init__(
        self, policy: Policy, scope: Scope, kept: dict[Any, list[Any]], decisions: dict[Any, list[Any]] | None
    ) -> None:
        super().__init__()
        self._policy = policy
        self._table: Mapping[Any, Decision | ByCall] | None = policy.table
        self._scope = scope
        self._kept = kept
        self._decisions = decisions
        self._calls: dict[Any, int] = defaultdict(int)
        self._changes = Changes()
        self.paused = False
        self.seen: set[Any] = set()
        self.refused: TypeError | None = None

    def __exit__(self, *error: Any) -> None:
        self._changes.settle()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind.statistics:
            self._changes.writes(func, kind, args, kwargs)
        if self.paused or kind.is_passed_over(args, kwargs):
            if kind.writes:
                self._changes.writes(func, kind, args, kwargs)
            result = kind.run(*args, **kwargs)
            if kind.detaches and not self.paused:
                self._changes.detaches(args, result)
            return result
        table, policy = self._table, self._policy
        found = table.get(func) if table is not None else self._decide(func, args, kwargs)
        decision = found.at(len(self._kept[func])) if isinstance(found, ByCall) else found
        is_counted = table is None or isinstance(found, ByCall)
        can_be_kept = kind.is_kept and not kind.is_unwritten
        if not policy.settled:
            self.seen.add(func)
            # Of a view, and of what changes its argument, nothing is kept, whatever is said.
            policy.settled = decision is not None and policy.counts(decision if can_be_kept else Recompute())
        if not can_be_kept or (decision is None and not is_counted):
            if kind.writes:
                self._changes.writes(func, kind, args, kwargs)
            result = kind.run(*args, **kwargs)
            if kind.shares:
                self._changes.shares(args, result)
            return result
        calls = self._kept[func]
        place = len(calls)
        calls.append(None)  # counted also if it fails and the function goes on
        result = kind.run(*args, **kwargs)
        if kind.shares:
            self._changes.shares(args, result)
        if decision is not None and type(decision) is not Recompute:
            kept = calls[place] = keep_results(self._scope, kind, args, kwargs, result, decision)
            self._changes.add(kept)
        return result

    def _decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision | None:
        decisions = self._decisions
        if decisions is None:  # a replay of an unfinished forward that has got further than the forward
            return None
        if not self._scope.following:
            try:
                decision = ask(self._scope, self._policy, func, args, kwargs, call=len(decisions[func]))
            except TypeError as error:
                self.refused = error  # torch takes a TypeError in an operator such as `@` for "not implemented"
                raise
            decisions[func].append(decision)
            return decision
        index = self._calls[func]
        self._calls[func] = index + 1
        known = decisions.get(func, ())
        return known[index] if index < len(known) else None


class Serving(OperatorMode):
    """Around a replay: hands out what the forward kept."""

    def __init__(self, scope: Scope, kept: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._kept = kept
        self._region = scope.frame.region
        self._finished = scope.frame.finished
        self._packed = scope.packed
        self._calls: dict[Any, int] = defaultdict(int)
        self._again = graph_is_kept()
        self._fetched = fetch(kept)
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        calls = self._kept.get(func)
        if calls is None or self.paused or (func is CAST and is_cached(args, kwargs)):
            return func(*args, **kwargs)
        index = self._calls[func]
        self._calls[func] = index + 1
        if index >= len(calls):
            if self._finished:
                raise _errors.called_more_often(self._region(), operator_name(func), len(calls))
            return func(*args, **kwargs)
        kept = calls[index]
        if kept is None or kept is _GONE:
            return func(*args, **kwargs)
        first = first_in(kept)
        if first is not None and first.copies_on_write and any(one.is_changed() for one in kepts_in(kept)):
            return func(*args, **kwargs)
        if self._finished and first is not None and first.packed != self._packed():
            raise _errors.called_elsewhere(self._region(), operator_name(func))
        if types:
            wait_for(args)
        if not self._again:
            calls[index] = _GONE
        return hand_out(func, kept, self._fetched, again=self._again)


def ask(
    scope: Scope, policy: Policy, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, call: int = 0
) -> Decision | None:
    """A policy's decision. What a policy computes or draws for it is seen by no region: replays do not ask again."""
    random_state = get_cpu_state()
    alone = scope.around is None and scope.trace is None and scope.recorder is None
    paused = () if alone else scope.pause()
    grad_is_on = torch.is_grad_enabled()
    set_grad_enabled(False)  # autograd would save for what it computes
    try:
        return policy.decide(what, Question(args, kwargs, scope.path, call))
    finally:
        set_grad_enabled(grad_is_on)
        for mode in paused:
            mode.paused = False
        set_cpu_state(random_state)


WHOLE = -1  # the place of the function as a whole; parts of it with a policy of their own have one in the journal


def takes_a_mode(policy: Policy | None) -> bool:
    """Whether something is to be done for a policy around its function; named regions ask it by themselves."""
    return policy is not None and not (policy.settled and policy.table is not None and not policy.table)


def forward_mode(policy: Policy, scope: Scope, place: int = WHOLE) -> Keeping | None:
    """The mode that a region's forward needs, None if its policy decides no operators."""
    table = policy.table
    if table is not None and not table:
        return None
    frame = scope.frame
    decisions: dict[Any, list[Any]] | None = None
    if table is None:
        decisions = scope.noted(defaultdict, list)
    if frame.kept_outputs is None:
        frame.kept_outputs = {}
    kept = frame.kept_outputs[place] = defaultdict(list)
    mode = Keeping(policy, scope, kept, decisions)
    scope.modes += (mode,)
    return mode


def replay_mode(policy: Policy | None, scope: Scope, place: int = WHOLE) -> Serving | None:
    """The mode that a replay needs, None if no operator's output was kept in the forward."""
    all_kept = scope.frame.kept_outputs
    if all_kept is None or policy is None or place not in all_kept:
        return None
    if policy.table is None:
        scope.position += 1  # the decisions of the forward, which are not needed here
    kept = {op: calls for op, calls in all_kept[place].items() if any(call is not None for call in calls)}
    if not kept:
        return None
    mode = Serving(scope, kept)
    scope.modes += (mode,)
    return mode


def let_go(frame: Frame) -> None:
    """Let go of what was kept: a replay has ended, for a backward that does not retain the graph."""
    for kept in (frame.kept_outputs or {}).values():
        for calls in kept.values():
            calls[:] = [None if call is None else _GONE for call in calls]
    if frame.kept_regions is not None:
        frame.kept_regions.let_go()


def tell_if_useless(policy: Policy, scope: Scope, operators: Iterable[Any]) -> None:
    """Warn, once for a policy, if it matched nothing in a forward that has ended, and that ran these operators."""
    policy.settled = True
    wanted = policy.unmatched()
    if not wanted:
        message = (
            f"the policy {policy!r} kept nothing in {scope.frame.region()}: that equals plain checkpointing. A "
            "policy keeps something by giving recollect.Save() or recollect.Offload()"
        )
    else:
        exist = sorted({*map(str, operators), *scope.names})
        close = sorted({match for name in wanted for match in _close(name, exist)})
        hint = f"; close to it: {', '.join(close)}" if close else ""
        found = f"; what was there: {', '.join(exist[:12])}" if exist and not close else ""
        message = (
            f"the policy {policy!r} matched nothing in {scope.frame.region()}, so everything there is recomputed. "
            f"It looks for {', '.join(wanted[:12])}{', ...' if len(wanted) > 12 else ''}{hint}{found}"
        )
    warnings.warn(message, UserWarning, stacklevel=level_of_user_code())


def _close(name: str, exist: Iterable[str]) -> list[str]:
    """What exists and may have been meant by `name`: `aten.addmm` for `aten.mm`, `attn` for `atn`."""
    short = {one: _short(one) for one in exist}
    close = difflib.get_close_matches(_short(name), set(short.values()), n=3, cutoff=0.55)
    return [one for one in exist if short[one] in close]


def _short(name: str) -> str:
    """`mm` of `aten.mm.default` and of `aten.mm`; a region's path as it is."""
    return name.split(".")[1] if "." in name else name

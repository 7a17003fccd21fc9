"""Selective checkpointing as `torch.utils.checkpoint` has it: two dispatch modes that programs know by name.

They ask the policy in both passes, refuse where the answers differ, and serve one backward. What is kept, handed
out and noticed is as in selective.py.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from recollect import _errors
from recollect._engine.scope import Scope, here
from recollect._engine.selective import (
    Changes,
    Fetched,
    fetch,
    first_in,
    hand_out,
    keep_results,
    kind_of,
    known_kinds,
)
from recollect._torch import METADATA_OPERATORS, TAGS, OperatorMode, is_operator, is_packet, operator_name, wait_for
from recollect.policy import Decision, Offload, Recompute, Save

# What a drop-in policy answers. `MUST_*` may not be overridden by a compiler.
CheckpointPolicy = enum.Enum(
    "CheckpointPolicy",
    "MUST_SAVE PREFER_SAVE MUST_RECOMPUTE PREFER_RECOMPUTE MUST_CPU_OFFLOAD PREFER_CPU_OFFLOAD",
    module=__name__,
    start=0,
)


class SelectiveCheckpointContext:
    """What a drop-in policy is told: `is_recompute`, whether this is the replay; `op_output`, in the forward."""

    __slots__ = ("is_recompute", "op_output")

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output


SAC_IGNORED_OPS: set[Any] = set(METADATA_OPERATORS)

_SAVE, _RECOMPUTE = Save(), Recompute()
_VERDICTS: dict[str, Decision] = {
    "MUST_SAVE": _SAVE,
    "PREFER_SAVE": _SAVE,
    "MUST_RECOMPUTE": _RECOMPUTE,
    "PREFER_RECOMPUTE": _RECOMPUTE,
    "MUST_CPU_OFFLOAD": Offload(),
    "PREFER_CPU_OFFLOAD": Offload(),
}


def verdict(answer: Any) -> Decision:
    """A drop-in policy's answer as a decision. Torch's own enum has members of the same names."""
    if answer is None or isinstance(answer, bool):  # None: what a function gives that speaks of what it saves alone
        return _SAVE if answer else _RECOMPUTE
    if isinstance(answer, enum.Enum) and answer.name in _VERDICTS:
        return _VERDICTS[answer.name]
    raise TypeError(
        f"a selective checkpointing policy must return a CheckpointPolicy or a bool, "
        f"got {_errors.describe_value(answer)}"
    )


# The verdicts on the usual answers, by identity: an enum is slow to give its name, or a hash.
_THEIRS = [TAGS[name] for name in _VERDICTS if name in TAGS]  # versions differ in which there are
_VERDICT_ON = {id(answer): verdict(answer) for answer in (True, False, None, *CheckpointPolicy, *_THEIRS)}


_NONE: dict[str, Any] = {}


class _ListPolicy:
    """The policy that a list of operators means."""

    def __init__(self, operators: Iterable[Any]) -> None:
        self.operators = frozenset(operators)
        self.kinds = frozenset(map(kind_of, operators))

    def __call__(self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in self.operators else CheckpointPolicy.PREFER_RECOMPUTE


class _AskingMode(OperatorMode):
    """What the two modes have in common: the storage that they share, the policy, and the number of each call.

    There is one of their calls for every operator of a pass, so what is the same for all operators is looked up when
    they are made, and an operator about which there is nothing special takes the shortest way.
    """

    is_recompute: bool

    def __init__(self, policy_fn: Callable[..., Any], storage: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.policy_fn = policy_fn
        self.storage = storage
        self._listed = policy_fn.kinds if type(policy_fn) is _ListPolicy else None
        self._context = SelectiveCheckpointContext(is_recompute=self.is_recompute)
        self._calls: dict[Any, int] = defaultdict(int)
        self._scope: Scope | None = None
        self.paused = False
        self.refused: TypeError | None = None

    def __enter__(self) -> Any:
        self._scope = here.scope
        if self._scope is not None:
            self._scope.modes += (self,)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._scope = None
        super().__exit__(*error)


class _CachingTorchDispatchMode(_AskingMode):
    """Around the forward: asks the policy about every operator and keeps the outputs of some in `storage`."""

    is_recompute = False

    def __init__(self, policy_fn: Callable[..., Any], storage: dict[Any, list[Any]]) -> None:
        super().__init__(policy_fn, storage)
        self._changes = Changes()

    def __enter__(self) -> Any:
        if self._calls:
            raise _errors.contexts_used_twice()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._changes.settle()
        self._changes = Changes()  # it holds what is kept
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = known_kinds.get(id(func)) or kind_of(func)
        if self.paused or (not kind.is_usual and kind.is_passed_over(args, kwargs or _NONE)):
            result = kind.run(*args, **kwargs or _NONE)
            if kind.detaches and not self.paused:
                self._changes.detaches(args, result)
            return result
        call = self._calls[kind]
        self._calls[kind] = call + 1
        if kind.is_usual:
            result = kind.run(*args, **kwargs) if kwargs else kind.run(*args)
        else:
            result = self._watched(func, kind, args, kwargs or _NONE)
        if self._listed is not None:
            decision: Decision = _SAVE if kind in self._listed else _RECOMPUTE
        else:
            context = self._context
            context.op_output = result
            try:
                policy = self.policy_fn
                answer = policy(context, func, *args, **kwargs) if kwargs else policy(context, func, *args)
                decision = _VERDICT_ON.get(id(answer)) or verdict(answer)
            except TypeError as error:
                self.refused = error  # as in selective.Keeping
                raise
            finally:
                context.op_output = None  # the policy's to look at, not to keep
        if type(decision) is not Recompute and kind.is_kept:
            kept = keep_results(self._scope, kind, args, kwargs or _NONE, result, decision)
            first = first_in(kept)
            if first is not None:  # else the result is empty
                first.call = call
                self._changes.add(kept)
                self.storage[func].append(kept)
        return result

    def _watched(self, func: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that may change what is kept, or give another name to its memory."""
        if kind.writes or kind.statistics:
            self._changes.writes(func, kind, args, kwargs)
        result = kind.run(*args, **kwargs)
        if kind.shares:
            self._changes.shares(args, result)
        return result


class _CachedTorchDispatchMode(_AskingMode):
    """Around the replay: asks the policy again, and hands out of `storage` what the forward kept."""

    is_recompute = True
    passes_over_detach = True  # see replay.py

    def __init__(
        self, policy_fn: Callable[..., Any], storage: dict[Any, list[Any]], allow_cache_entry_mutation: bool
    ) -> None:
        super().__init__(policy_fn, storage)
        self.allow_cache_entry_mutation = allow_cache_entry_mutation
        self._replays = 0
        self._fetched: Fetched = {}

    def __enter__(self) -> Any:
        self._calls.clear()
        self._replays += 1
        self._fetched = fetch(self.storage)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = known_kinds.get(id(func)) or kind_of(func)
        if self.paused or (not kind.is_usual and kind.is_passed_over(args, kwargs or _NONE)):
            return kind.run(*args, **kwargs or _NONE)
        storage = self.storage
        call = -1
        if storage:  # else there is nothing to be found by the number of a call
            call = self._calls[kind]
            self._calls[kind] = call + 1
        if self._listed is not None:
            saves = kind in self._listed
        else:
            try:
                policy, context = self.policy_fn, self._context
                answer = policy(context, func, *args, **kwargs) if kwargs else policy(context, func, *args)
                saves = type(_VERDICT_ON.get(id(answer)) or verdict(answer)) is not Recompute
            except TypeError as error:
                self.refused = error  # as in selective.Keeping
                raise
        entries = storage.get(func) if storage and kind.is_kept else None
        first = first_in(entries[0]) if entries else None
        if not entries or first is None or first.call != call:
            if not saves or not kind.is_kept:
                return kind.run(*args, **kwargs) if kwargs else kind.run(*args)
            missing = _errors.backward_again if self._replays > 1 else _errors.not_kept
            raise missing(operator_name(func))
        if not saves:
            raise _errors.kept_in_vain(operator_name(func))
        if self._scope is not None and self._scope.frame.finished and first.packed != self._scope.packed():
            raise _errors.called_elsewhere(self._scope.frame.region(), operator_name(func))
        if types:
            wait_for(args)
        may_be_changed = self.allow_cache_entry_mutation
        return hand_out(func, entries.pop(0), self._fetched, again=False, may_be_changed=may_be_changed)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable[..., Any] | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[_CachingTorchDispatchMode, _CachedTorchDispatchMode]:
    """The two contexts of selective checkpointing, for `context_fn`.

    Args:
        policy_fn_or_list: Operators whose outputs are kept, or a function
            `policy(ctx, op, *args, **kwargs) -> CheckpointPolicy`, called in both passes.
        allow_cache_entry_mutation: Hand out kept outputs also if they were changed in place since.

    Returns:
        A context for the forward and one for the replay, made for one region call.

    Example:
        >>> import functools, torch
        >>> from recollect.dropin import checkpoint, create_selective_checkpoint_contexts
        >>> keep_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        >>> x = torch.ones(3, 3, requires_grad=True)
        >>> y = checkpoint(lambda x: (x.sin() @ x).cos(), x, use_reentrant=False, context_fn=keep_products)
        >>> y.sum().backward()
    """
    if isinstance(policy_fn_or_list, list):
        operators = policy_fn_or_list
        for operator in operators:
            if not is_operator(operator):
                raise _errors.not_an_overload(operator, is_packet=is_packet(operator))
        policy_fn: Callable[..., Any] = _ListPolicy(operators)
    elif callable(policy_fn_or_list):
        policy_fn = policy_fn_or_list
    else:
        raise TypeError(
            "policy_fn_or_list must be either a function or a list of ops. "
            f"Got {_errors.describe_value(policy_fn_or_list)}"
        )
    storage: dict[Any, list[Any]] = defaultdict(list)
    return (
        _CachingTorchDispatchMode(policy_fn, storage),
        _CachedTorchDispatchMode(policy_fn, storage, allow_cache_entry_mutation),
    )

"""Decisions, and the policies that give them.

A decision is a value: `Save`, `Recompute` or `Offload`. A policy gives one for an operator or for a named region, or
gives none, which leaves the matter to the next policy and at last to recomputation. `a | b` asks `a` first.

A policy says beforehand what it can decide (`operators`, `decides_names`), so that an engine does no work that no
answer could need: a policy by names costs nothing per operator, and one over a set of operators is a dict.

What this is not: policies keep nothing and know no tensor. Engines ask them (`_engine/selective.py`,
`_engine/named.py`) and remember the answers, so that a policy may have a state of its own.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, TypeAlias

from recollect import _errors
from recollect._shard import Shard
from recollect._sizes import MIN_BYTES, bytes_of
from recollect._steps import ByCode
from recollect._torch import operator_from_name, operator_name, overloads_of, packet_of

# --- Decisions ---

_ON_MUTATION = ("error", "copy")
_PLACES = ("cpu", "disk")


@dataclass(frozen=True, slots=True)
class Save:
    """Keep it where it is.

    Args:
        on_mutation: What to do about a kept output of an operator that is changed in place later: "error" says so
            when the replay comes to it, "copy" keeps a private copy from the start.

    Example:
        >>> import recollect
        >>> recollect.Save(on_mutation="copy")
        Save(on_mutation='copy')
    """

    on_mutation: str = "error"

    def __post_init__(self) -> None:
        if self.on_mutation not in _ON_MUTATION:
            raise _errors.not_one_of("on_mutation", self.on_mutation, _ON_MUTATION)


class SaveOrCopy(Save):
    """`Save`, for operators that the user did not choose one by one: what the region itself changes is copied first."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Save()"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Let it go and compute it again in the replay.

    Args:
        policy: For a named region or a module: what to keep inside all the same, in place of what the region around
            keeps. The paths that it decides begin inside.
        inputs: For a module: where its inputs wait for the replay, which are all that is left of it until then.
            None leaves them on their device, `Offload()` puts them on the host, `Shard("tp")` leaves one part on each
            of the ranks that have copies of them.

    Example:
        >>> import torch, recollect
        >>> recollect.Recompute()
        Recompute()
        >>> recollect.Recompute(policy=recollect.save_ops(torch.ops.aten.mm))
        Recompute(policy=recollect.save_ops(aten.mm))
        >>> recollect.Recompute(inputs=recollect.Offload())
        Recompute(inputs=Offload(to='cpu'))
    """

    policy: Policy | None = None
    inputs: Offload | Shard | None = None

    def __post_init__(self) -> None:
        if self.policy is not None:
            object.__setattr__(self, "policy", as_policy(self.policy))
        if self.inputs is not None:
            checked_inputs(self.inputs)

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in ("policy", "inputs") if getattr(self, name) is not None]
        return f"Recompute({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep it off the device and bring it back for backward. A tensor that is there already just stays.

    Copies go on beside the computation, and come back ahead of their use. Never copied: parameters and buffers, and
    what is on no CUDA device (but tensors of the CPU can go to disk).

    Args:
        to: "cpu", page-locked memory of the host, or "disk", files.
        min_bytes: Smaller tensors stay where they are. Sizes are numbers of bytes or strings such as "1 GiB".
        max_host_bytes: With "cpu", how much memory of the host may be used in all; what finds no more room stays on the
            device. By default half of what is free when it is first used.
        in_flight: How much may be on its way out at a time, and so waits on the device for its copy: then the device
            waits, and with "disk" the program too. By default a 32nd of the device's memory.
        ahead: How much may be back on the device ahead of its use. By default a 32nd of the device's memory.
        directory: With "disk", where; by default where the system has its temporary files. The files have no
            names there and are gone with the process.

    Example:
        >>> import recollect
        >>> recollect.Offload()
        Offload(to='cpu')
        >>> recollect.Offload(max_host_bytes="64 GiB")
        Offload(to='cpu', max_host_bytes=68719476736)
    """

    to: str = "cpu"
    _: KW_ONLY
    min_bytes: int | str = MIN_BYTES
    max_host_bytes: int | str | None = None
    in_flight: int | str | None = None
    ahead: int | str | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.to not in _PLACES:
            raise _errors.not_one_of("to", self.to, _PLACES)
        for name in ("min_bytes", "max_host_bytes", "in_flight", "ahead"):
            value = getattr(self, name)
            if value is not None or name == "min_bytes":
                object.__setattr__(self, name, bytes_of(name, value))
        if self.directory is not None:
            if not isinstance(self.directory, (str, os.PathLike)):
                raise TypeError(f"directory must be a path, got {_errors.describe_value(self.directory)}")
            object.__setattr__(self, "directory", os.path.abspath(self.directory))
        if self.to == "cpu" and self.directory is not None:
            raise _errors.not_with("directory", self.directory, 'to="cpu"')
        if self.to == "disk" and self.max_host_bytes is not None:
            raise _errors.not_with("max_host_bytes", self.max_host_bytes, 'to="disk"')

    def __repr__(self) -> str:
        given = [one.name for one in fields(self) if one.name == "to" or getattr(self, one.name) != one.default]
        return f"Offload({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"


def checked_inputs(inputs: Any) -> Offload | Shard:
    """`inputs`, if it is what takes inputs of regions."""
    if isinstance(inputs, (Offload, Shard)):
        return inputs
    raise TypeError(
        f"inputs must be recollect.Offload(), recollect.Shard(...) or None, got {_errors.describe_value(inputs)}"
    )


Decision: TypeAlias = Save | Recompute | Offload
DECISIONS = (Save, Recompute, Offload)


@dataclass(frozen=True, slots=True)
class ByCall:
    """Decisions for an operator by the number of its call in a region, and one for all other calls of it.

    Numbers count the calls of this very overload, from 0 on.
    """

    calls: Mapping[int, Decision]
    otherwise: Decision | None = None

    def at(self, call: int) -> Decision | None:
        return self.calls.get(call, self.otherwise)

    def before(self, other: Decision | ByCall | None) -> ByCall:
        """This one, and the other for what it leaves open."""
        if self.otherwise is not None or other is None:
            return self
        if isinstance(other, ByCall):
            return ByCall({**other.calls, **self.calls}, other.otherwise)
        return ByCall(self.calls, other)


def checked_decision(decision: Any, who: str) -> Decision | None:
    """`decision`, if it is one or None."""
    if decision is None or isinstance(decision, DECISIONS):
        return decision
    raise TypeError(
        f"{who} must give recollect.Save(), Recompute(), Offload() or None (no opinion), "
        f"got {_errors.describe_value(decision)}"
    )


# --- Policies ---


@dataclass(frozen=True, slots=True)
class Question:
    """What a policy is told besides the operator or the name: the call's arguments, and the named region around it.

    `call` is the number of this call among those of the same operator in the region, from 0 on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str
    call: int = 0


class Policy:
    """What gives a decision for an operator or a named region. Combine with `|`: the first decision wins."""

    # Once it has matched something, or its user was told that it did not.
    settled = False

    def operators(self) -> Mapping[Any, Decision | ByCall] | None:
        """All the operators that it decides, with the decisions; None if it has to be asked about every call."""
        return {}

    @functools.cached_property
    def table(self) -> Mapping[Any, Decision | ByCall] | None:
        """`operators()`, made once."""
        return self.operators()

    @functools.cached_property
    def known_paths(self) -> dict[str, Any]:
        """What is known of named regions, by path: see `_engine/named.py`. There are as many as in the code."""
        return {}

    def counts(self, decision: Decision) -> bool:
        """Whether a decision shows that the policy is of use."""
        return True

    def decides_names(self) -> bool:
        """Whether it could decide a named region."""
        return False

    def decide(self, what: Any, question: Question) -> Decision | None:
        """The decision for an operator or, given a string, for the named region with that path."""
        raise NotImplementedError

    def unmatched(self) -> list[str]:
        """What it looks for, in words; empty where nothing is looked for by name."""
        return []

    def __getstate__(self) -> dict[str, Any]:
        """Without what was made of it: a copy makes its own, and the operators in a table cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name not in ("table", "known_paths")}

    def __or__(self, other: Any) -> Policy:
        return _FirstOf([self, as_policy(other)])

    def __ror__(self, other: Any) -> Policy:
        return _FirstOf([as_policy(other), self])


class Operators(Policy):
    def __init__(self, decisions: Mapping[Any, Decision | ByCall], label: str) -> None:
        self._decisions = decisions
        self._label = label

    def operators(self) -> Mapping[Any, Decision | ByCall]:
        return self._decisions

    def decide(self, what: Any, question: Question) -> Decision | None:
        decision = self._decisions.get(what) if not isinstance(what, str) else None
        return decision.at(question.call) if isinstance(decision, ByCall) else decision

    def __reduce__(self) -> Any:  # operators themselves cannot be pickled
        by_name = {str(operator): decision for operator, decision in self._decisions.items()}
        return _operators_by_name, (by_name, self._label)

    def unmatched(self) -> list[str]:
        packets: dict[str, list[Any]] = {}
        for operator in self._decisions:
            packets.setdefault(operator_name(operator), []).append(operator)
        return [
            name if len(chosen) == len(overloads_of(packet_of(chosen[0]))) else ", ".join(map(str, chosen))
            for name, chosen in packets.items()
        ]

    def __repr__(self) -> str:
        return self._label


def _operators_by_name(decisions: Mapping[str, Decision | ByCall], label: str) -> Operators:
    return Operators({operator_from_name(name): decision for name, decision in decisions.items()}, label)


class _Names(Policy):
    def __init__(self, decisions: Mapping[str, Decision]) -> None:
        self._decisions = decisions
        self._known: dict[str, Decision | None] = {}  # paths that were asked for; there are as many as in the code

    def decides_names(self) -> bool:
        return True

    def decide(self, what: Any, question: Question) -> Decision | None:
        if not isinstance(what, str):
            return None
        if what not in self._known:
            matches = (one for pattern, one in self._decisions.items() if _matches(what, pattern))
            self._known[what] = next(matches, None)
        return self._known[what]

    def unmatched(self) -> list[str]:
        return list(self._decisions)

    def __repr__(self) -> str:
        return f"recollect.by_name({dict(self._decisions)!r})"


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatch.fnmatchcase(path, pattern)  # a name may hold brackets: `layers[3]`


class _Told:
    """Whether the user of a function as a policy needs to be told no more."""

    settled = False


_told: ByCode[_Told] = ByCode(_Told)


class Asked(Policy):
    """A function as a policy."""

    def __init__(self, function: Callable[[Any, Question], Decision | None]) -> None:
        self.function = function
        self._told = _told[function]  # a function becomes a policy anew at every call that it is passed to

    @property
    def settled(self) -> bool:
        return self._told.settled

    @settled.setter
    def settled(self, value: bool) -> None:
        self._told.settled = value

    def operators(self) -> None:
        return None

    def decides_names(self) -> bool:
        return True

    def decide(self, what: Any, question: Question) -> Decision | None:
        return checked_decision(self.function(what, question), f"policy {self!r}")

    def counts(self, decision: Decision) -> bool:
        return not isinstance(decision, Recompute)

    def __repr__(self) -> str:
        return _errors.describe_function(self.function)


class _FirstOf(Policy):
    def __init__(self, policies: Iterable[Policy]) -> None:
        self._policies: list[Policy] = [
            part for policy in policies for part in (policy._policies if isinstance(policy, _FirstOf) else [policy])
        ]

    def operators(self) -> Mapping[Any, Decision | ByCall] | None:
        together: dict[Any, Decision | ByCall] = {}
        for policy in reversed(self._policies):
            decisions = policy.operators()
            if decisions is None:
                return None
            for operator, decision in decisions.items():
                together[operator] = (
                    decision.before(together.get(operator)) if isinstance(decision, ByCall) else decision
                )
        return together

    def decides_names(self) -> bool:
        return any(policy.decides_names() for policy in self._policies)

    def decide(self, what: Any, question: Question) -> Decision | None:
        for policy in self._policies:
            decision = policy.decide(what, question)
            if decision is not None:
                return decision
        return None

    def unmatched(self) -> list[str]:
        return [name for policy in self._policies for name in policy.unmatched()]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._policies))


def as_policy(policy: Any) -> Policy:
    """What a user may pass as `policy=`: a policy, or a function of an operator or name and its circumstances."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy) and not isinstance(policy, type):
        return Asked(policy)
    raise TypeError(
        "policy must be a policy (recollect.save_ops, recollect.by_name, recollect.policies) or a function "
        f"(op_or_name, ctx) -> decision, got {_errors.describe_value(policy)}"
    )


# --- Making them ---


def _decided(
    function: str, operators: tuple[Any, ...], decision: Decision, calls: Iterable[int] | None = None
) -> Policy:
    decides: Decision | ByCall = decision
    words = list(map(str, operators))
    if calls is not None:
        numbers = _checked_calls(calls)
        decides = ByCall(dict.fromkeys(numbers, decision))
        words.append(f"calls={numbers!r}")
    found: dict[Any, Decision | ByCall] = {}
    for operator in operators:
        overloads = overloads_of(operator)
        if not overloads:
            raise TypeError(
                f"{function} takes operators, such as torch.ops.aten.mm (all its overloads) or "
                f"torch.ops.aten.mm.default, got {_errors.describe_value(operator)}" + _errors.operator_hint(operator)
            )
        found.update(dict.fromkeys(overloads, decides))
    if not found:
        raise TypeError(f"{function} takes at least one operator, such as torch.ops.aten.mm, got none")
    return Operators(found, f"recollect.{function}({', '.join(words)})")


def _checked_calls(calls: Any) -> list[int]:
    numbers: list[Any] = list(calls) if isinstance(calls, Iterable) and not isinstance(calls, (str, bytes)) else []
    if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError(
            "calls must be numbers of calls, such as [0, 2] for the first and the third, "
            f"got {_errors.describe_value(calls)}"
        )
    return numbers


def save_ops(*operators: Any, on_mutation: str = "error", calls: Iterable[int] | None = None) -> Policy:
    """Keep the outputs of these operators.

    Args:
        *operators: Operators (`torch.ops.aten.mm.default`), packets, which mean all their overloads
            (`torch.ops.aten.mm`), or higher-order operators.
        on_mutation: As for `Save`.
        calls: Only these of the calls of each overload in a region, counted from 0: `[0, 2]` are the first and the
            third. By default all.

    Returns:
        A policy.

    Example:
        >>> import torch, recollect
        >>> w = torch.ones(3, 3)
        >>> x = torch.ones(3, 3, requires_grad=True)
        >>> policy = recollect.save_ops(torch.ops.aten.mm)
        >>> y = recollect.checkpoint(lambda x: (x.sin() @ w).sin(), x, policy=policy)
        >>> y.sum().backward()  # runs sin again, and not the product
    """
    return _decided("save_ops", operators, Save(on_mutation), calls)


def offload_ops(*operators: Any, calls: Iterable[int] | None = None) -> Policy:
    """Keep the outputs of these operators on the host.

    Args:
        *operators: As for `save_ops`.
        calls: As for `save_ops`.

    Returns:
        A policy.

    Example:
        >>> import torch, recollect
        >>> policy = recollect.offload_ops(torch.ops.aten.mm)
    """
    return _decided("offload_ops", operators, Offload(), calls)


def by_name(decisions: Mapping[str, Decision]) -> Policy:
    """Decide named regions (`recollect.region`) by their paths.

    Args:
        decisions: Patterns and what they mean; the first that matches counts. `*` stands for anything, also for
            several parts of a path.

    Returns:
        A policy.

    Example:
        >>> import torch, recollect
        >>> policy = recollect.by_name({"attn": recollect.Save(), "mlp/*": recollect.Recompute()})
        >>> def block(x):
        ...     return recollect.region("attn", torch.sin)(x).exp()
        >>> x = torch.ones(3, requires_grad=True)
        >>> recollect.checkpoint(block, x, policy=policy).sum().backward()  # sin runs once
    """
    if not isinstance(decisions, Mapping) or not decisions:
        raise TypeError(
            f"by_name takes a dict with at least one pattern and decision, got {_errors.describe_value(decisions)}"
        )
    for pattern, decision in decisions.items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"by_name takes strings as patterns, got {_errors.describe_value(pattern)}")
        if not isinstance(decision, DECISIONS):
            raise TypeError(
                f"by_name takes recollect.Save(), Recompute() or Offload() for {pattern!r}, "
                f"got {_errors.describe_value(decision)}"
            )
    return _Names(dict(decisions))


__all__ = ["Offload", "Policy", "Question", "Recompute", "Save", "by_name", "offload_ops", "save_ops"]

"""Ways to treat a block: which of its parts and operators to keep, and which to compute again.

One forward of the block is looked at operator by operator: what each takes, what it gives, and which module runs it.
From that come sets of decisions, from "keep everything" to "recompute everything", in four families:

- the block is kept, and some parts of it are regions, those first whose memory costs the least time to win;
- the block is a region, and some parts of it are kept, those first that save the most time for their memory;
- the block is a region, and the outputs of some operators are kept, call by call, chosen the same way;
- the block is a region, and its input waits on the host, or the block is kept on the host as a whole.

Within a region every operator that is not kept runs again, so times add up and the best sets are close to those found
by taking what is best per byte first. What is proposed here is measured before anybody believes in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module


from recollect._calls import Call, Sample, hooks_on
from recollect._engine.selective import kinds
from recollect._inputs import find_tensors
from recollect._meters import Gpu, operator_seconds
from recollect._torch import OperatorMode, operator_name, storage_key
from recollect.policy import ByCall, Decision, Operators, Recompute, Save, SaveOrCopy

# How many sets of each family are tried.
_SETS = 6
_KEEP = SaveOrCopy()


@dataclass(frozen=True)
class Candidate:
    """Decisions for a block, by names within it; "" is the block itself."""

    name: str
    decisions: Mapping[str, Decision] = field(default_factory=dict)


@dataclass
class Operation:
    """An operator as it ran in a forward of a block."""

    operator: Any
    call: int  # its number among the calls of this operator that could be kept; -1 if it can't
    bytes: int  # of the memory that it made
    part: str  # the module within the block that ran it
    seconds: float = 0.0


class _Trace(OperatorMode):
    def __init__(self, stamp: Callable[[], Any], gpu: Gpu | None) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.stamps: list[tuple[Any, Any]] = []
        self.parts: list[str] = [""]
        self._stamp = stamp
        self._gpu = gpu
        self._calls: dict[Any, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kinds[func]
        given = {storage_key(tensor) for tensor in find_tensors(args, kwargs)[0]}
        before = self._stamp()
        result = func(*args, **kwargs)
        self.stamps.append((before, self._stamp()))
        made = {
            storage_key(tensor): tensor.numel() * tensor.element_size() for tensor in find_tensors((result,), {})[0]
        }
        call = -1
        if kind.is_kept and not kind.is_unwritten and not kind.is_passed_over(args, kwargs):
            call = self._calls[func] = self._calls.get(func, -1) + 1
        size = sum(size for memory, size in made.items() if memory not in given)
        seconds = 0.0 if self._gpu is None else operator_seconds(self._gpu, func, args, kwargs, result)
        self.operations.append(Operation(func, call, size, self.parts[-1], seconds))
        return result


def look_at(sample: Sample, run: Callable[[], object], device: torch.device, gpu: Gpu | None) -> list[Operation]:
    """The operators of a forward that a replay would run again, with what each takes; `run` runs the forward."""
    on_device = device.type not in ("cpu", "meta")

    def stamp() -> Any:
        if not on_device:
            return time.perf_counter()
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    mode = _Trace(stamp, gpu)
    names = {id(module): name for name, module in sample.module.named_modules()}
    last = 0

    def before(module: Module, _: Any) -> None:
        mode.parts.append(names[id(module)])

    def after(module: Module, _: Any) -> None:
        while len(mode.parts) > 1 and mode.parts.pop() != names[id(module)]:
            pass

    def pack(tensor: Tensor) -> Tensor:
        nonlocal last
        last = len(mode.operations)
        return tensor

    if on_device:
        _keep_busy(device)
    with hooks_on(sample.module.modules(), before, after), saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        run()
    if on_device:
        torch.accelerator.synchronize(device)
    if gpu is None:
        for operation, (begin, end) in zip(mode.operations, mode.stamps, strict=True):
            operation.seconds = begin.elapsed_time(end) / 1e3 if on_device else end - begin
    return mode.operations[:last]  # a replay stops when the last tensor is saved


def _keep_busy(device: torch.device) -> None:
    """Give the device some work, so that it does not wait for the host between the operators that follow."""
    factor = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    for _ in range(100):
        torch.mm(factor, factor, out=product)


# --- Sets ---


def candidates(call: Call, operations: Sequence[Operation]) -> list[Candidate]:
    """Ways to treat a block, given the tree of its calls and its operators. The first is to keep all of it."""
    parts = _parts_of(call, operations)
    found = [
        Candidate("keep"),
        Candidate("recompute", {"": Recompute()}),
        *_recomputed_parts(parts),
        *_kept_parts(parts),
        *_kept_operators(operations),
    ]
    return list({repr(sorted(one.decisions.items())): one for one in found}.values())


@dataclass(frozen=True)
class _Part:
    """Modules within a block that are alike."""

    names: tuple[str, ...]
    bytes: int  # what autograd saves in them, besides their inputs
    seconds: float


def _parts_of(call: Call, operations: Sequence[Operation]) -> list[_Part]:
    prefix = f"{call.name}." if call.name else ""
    alike: dict[Any, list[Call]] = {}

    def collect(one: Call) -> None:
        for part in one.parts:
            if part.bytes() > 0 and part.name.startswith(prefix) and part.module is not call.module:
                alike.setdefault((type(part.module), part.signature, len(part.shapes)), []).append(part)
            collect(part)

    collect(call)
    found = []
    for group in alike.values():
        names = tuple(dict.fromkeys(part.name[len(prefix) :] for part in group))
        seconds = sum(one.seconds for one in operations if any(_is_in(one.part, name) for name in names))
        found.append(_Part(names, sum(part.bytes() for part in group), seconds))
    return found


def _is_in(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def _together(parts: Iterable[_Part]) -> list[list[str]]:
    """Growing sets of the parts, in this order, none inside of another."""
    sets: list[list[str]] = []
    names: list[str] = []
    for part in parts:
        new = [one for one in part.names if not any(_is_in(one, other) for other in names)]
        if new:
            names = [one for one in names if not any(_is_in(one, other) for other in new)] + new
            sets.append(names)
    return sets[:_SETS]


def _recomputed_parts(parts: Sequence[_Part]) -> list[Candidate]:
    cheapest = sorted(parts, key=lambda part: part.seconds / part.bytes)
    return [Candidate(f"recompute {_words(names)}", dict.fromkeys(names, Recompute())) for names in _together(cheapest)]


def _kept_parts(parts: Sequence[_Part]) -> list[Candidate]:
    dearest = sorted(parts, key=lambda part: part.bytes / max(part.seconds, 1e-9))
    return [
        Candidate(f"recompute, keep {_words(names)}", {"": Recompute(), **dict.fromkeys(names, Save())})
        for names in _together(dearest)
    ]


def _kept_operators(operations: Sequence[Operation]) -> list[Candidate]:
    dearest = sorted(
        (one for one in operations if one.call >= 0 and one.bytes > 0),
        key=lambda one: one.bytes / max(one.seconds, 1e-9),
    )
    total = sum(one.seconds for one in operations)
    found: list[Candidate] = []
    chosen: list[Operation] = []
    saved = 0.0
    for operation in dearest:
        chosen.append(operation)
        saved += operation.seconds
        if saved >= total * (len(found) + 1) / (_SETS + 1):
            found.append(keeping(chosen))
            while saved >= total * (len(found) + 1) / (_SETS + 1) and len(found) < _SETS:
                found.append(found[-1])  # passed several marks at once; doubles are dropped later
        if len(found) >= _SETS:
            break
    return found


def keeping(operations: Iterable[Operation]) -> Candidate:
    """A region that keeps what some operators give."""
    calls: dict[Any, list[int]] = {}
    for one in operations:
        calls.setdefault(one.operator, []).append(one.call)
    table = {operator: ByCall(dict.fromkeys(sorted(numbers), _KEEP)) for operator, numbers in calls.items()}
    counts = [f"{len(numbers)} {operator_name(operator)}" for operator, numbers in calls.items()]
    return Candidate(f"recompute, keep {_words(counts)}", {"": Recompute(policy=keep_calls(table))})


def keep_calls(table: Mapping[Any, ByCall]) -> Operators:
    """A policy that decides operators call by call, with a name that says how to write it."""
    words = [f"recollect.save_ops({operator}, calls={sorted(one.calls)})" for operator, one in table.items()]
    return Operators(table, " | ".join(words))


def _words(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"

"""Ways to treat a block: which of its parts and operators to keep, and which to compute again.

One forward of the block is looked at operator by operator: what each takes, what it gives, which module runs it, and
what autograd saves. From that come sets of decisions, from "keep everything" to "recompute everything", in families:

- some parts of the block are regions, with or without outputs of operators that are kept all the same: those first
  whose memory costs the least time to win (activations and norms, then whole parts);
- the block is a region, and the outputs of some operators are kept, call by call: those that save the most time for
  their memory (attention, products);
- the block is a region, and some parts of it are kept as a whole, chosen the same way.

Within a region every operator that is not kept runs again, so times add up, and the best sets are close to those found
by taking what is best per byte first. What is proposed here is measured before anybody believes in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from recollect._calls import Memory, Sample, hooks_on
from recollect._engine.selective import kind_of
from recollect._inputs import find_tensors
from recollect._meters import Gpu, operator_seconds
from recollect._torch import OperatorMode, operator_name
from recollect.policy import ByCall, Decision, Operators, Recompute, Save, SaveOrCopy

# How many sets of each family are tried.
_SETS = 6
_VARIANTS = 3  # of a part as a region
_WORTH = 0.01  # of the time of a region: an operator that takes less is not worth a word
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
    can_be_kept: bool
    made: Mapping[int, int]  # the memory that it made, and bytes
    part: str  # the module within the block that ran it
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(self.made.values())


@dataclass
class Look:
    """What was seen in a forward of a block."""

    operations: list[Operation]
    saved: list[tuple[int, int, str]]  # memory, how many operators had run by then, and the module
    parts: dict[str, tuple[Any, ...]]  # the modules that were called, and what is equal for those that are alike


class _Trace(OperatorMode):
    def __init__(self, stamp: Callable[[], Any], gpu: Gpu | None) -> None:
        super().__init__()
        self.memory = Memory()
        self.operations: list[Operation] = []
        self.stamps: list[tuple[Any, Any]] = []
        self.open_parts: list[str] = [""]
        self._stamp = stamp
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in ("c10d", "fsdp"):  # what wrappers do to gather, and no work of the block
            return func(*args, **kwargs)
        kind = kind_of(func)
        given = set(map(self.memory, find_tensors(args, kwargs)[0]))
        before = self._stamp()
        result = func(*args, **kwargs)
        self.stamps.append((before, self._stamp()))
        sizes = {
            self.memory(tensor): tensor.numel() * tensor.element_size() for tensor in find_tensors((result,), {})[0]
        }
        made = {memory: size for memory, size in sizes.items() if memory not in given}
        can_be_kept = kind.is_kept and not kind.is_unwritten and not kind.is_passed_over(args, kwargs)
        seconds = 0.0 if self._gpu is None else operator_seconds(self._gpu, func, args, kwargs, result)
        self.operations.append(Operation(func, can_be_kept, made, self.open_parts[-1], seconds))
        return result


def look_at(sample: Sample, run: Callable[[], object], device: torch.device, gpu: Gpu | None) -> Look:
    """Run a forward of a block, by `run`, and look at it."""
    on_device = device.type not in ("cpu", "meta")

    def stamp() -> Any:
        if not on_device:
            return time.perf_counter()
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    mode = _Trace(stamp, gpu)
    names = {id(module): name for name, module in sample.module.named_modules()}
    look = Look(mode.operations, [], {})

    def before(module: Module, arguments: Any) -> None:
        name = names[id(module)]
        mode.open_parts.append(name)
        shapes = tuple(one.shape for one in (*find_tensors(*arguments)[0], *module.parameters()))
        look.parts[name] = (type(module), shapes)

    def after(module: Module, _: Any) -> None:
        while len(mode.open_parts) > 1 and mode.open_parts.pop() != names[id(module)]:
            pass

    def pack(tensor: Tensor) -> None:
        look.saved.append((mode.memory(tensor), len(mode.operations), mode.open_parts[-1]))
        # Nobody asks for it; an output that its own node held would stay for good.

    if on_device:
        _keep_busy(device)
    with hooks_on(sample.module.modules(), before, after), saved_tensors_hooks(pack, _never), mode:
        run()
    if on_device:
        torch.accelerator.synchronize(device)
    if gpu is None:
        for operation, (begin, end) in zip(mode.operations, mode.stamps, strict=True):
            operation.seconds = begin.elapsed_time(end) / 1e3 if on_device else end - begin
    return look


def _never(_: Any) -> Any:
    raise AssertionError("no backward runs here")


def _keep_busy(device: torch.device) -> None:
    """Give the device some work, so that it does not wait for the host between the operators that follow."""
    factor = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    for _ in range(100):
        torch.mm(factor, factor, out=product)


# --- Regions within a block ---


@dataclass(frozen=True)
class Region:
    """A part as a region that keeps what some of its operators give."""

    bytes: int  # that it lets go of
    seconds: float  # that running it again takes
    keep: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)  # operators and numbers of their calls

    def decision(self) -> Recompute:
        """As `apply` takes it."""
        if not self.keep:
            return Recompute()
        return Recompute(
            policy=keep_calls({op: ByCall(dict.fromkeys(calls, _KEEP)) for op, calls in self.keep.items()})
        )

    def __str__(self) -> str:
        counts = [f"{len(calls)} {operator_name(operator)}" for operator, calls in self.keep.items()]
        return f"but {_words(counts)}" if counts else ""


def regions_of(look: Look, part: str, marks: int) -> list[Region]:
    """A part as a region: that keeps nothing, and that keeps more and more of what takes long for its bytes."""
    inside = [number for number, one in enumerate(look.operations) if is_in(one.part, part)]
    saves = [(memory, ran) for memory, ran, where in look.saved if is_in(where, part)]
    made: dict[int, int] = {}
    for number in inside:
        made.update(look.operations[number].made)
    held = sum(made[memory] for memory in {memory for memory, _ in saves} if memory in made)
    if not held:
        return []
    last = max(ran for _, ran in saves)  # a replay ends there
    calls: dict[Any, int] = {}
    keepable: list[tuple[int, Operation]] = []
    total = 0.0
    for number in inside:
        one = look.operations[number]
        call = calls[one.operator] = calls.get(one.operator, -1) + one.can_be_kept
        if number < last:
            total += one.seconds
            if one.can_be_kept and one.bytes:
                keepable.append((call, one))
    worth = [(call, one) for call, one in keepable if one.seconds >= _WORTH * total]
    found = [Region(held, total)]
    keep: dict[Any, tuple[int, ...]] = {}
    kept, saved = 0, 0.0
    for call, one in sorted(worth, key=lambda pair: pair[1].bytes / max(pair[1].seconds, 1e-9)):
        kept, saved = kept + one.bytes, saved + one.seconds
        if kept >= held:
            break
        keep[one.operator] = tuple(sorted((*keep.get(one.operator, ()), call)))
        if saved >= total * len(found) / (marks + 1):
            found.append(Region(held - kept, total - saved, dict(keep)))
    return found[: marks + 1]


def keep_calls(table: Mapping[Any, ByCall]) -> Operators:
    """A policy that decides operators call by call, with a name that says how to write it."""
    words = [f"recollect.save_ops({operator}, calls={sorted(one.calls)})" for operator, one in table.items()]
    return Operators(table, " | ".join(words))


def is_in(inner: str, outer: str) -> bool:
    """Whether a module is another one or within it, by their names."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


# --- Sets of decisions ---


def candidates(look: Look) -> list[Candidate]:
    """Ways to treat a block. The first is to keep all of it."""
    alike: dict[Any, list[str]] = {}
    for name, what in look.parts.items():
        if name:
            alike.setdefault(what, []).append(name)
    groups = list(alike.values())
    whole = [_candidate("recompute", {"": region}) for region in regions_of(look, "", _SETS)]
    found = [Candidate("keep"), *whole[:1], *_regions(look, groups), *whole[1:], *_kept_parts(look, groups)]
    return list({repr(sorted(one.decisions.items())): one for one in found}.values())


def _candidate(what: str, regions: Mapping[str, Region]) -> Candidate:
    words = [f"{name} {region}".strip() for name, region in regions.items()]
    name = f"{what} {_words([word for word in words if word])}".strip()
    return Candidate(name, {part: region.decision() for part, region in regions.items()})


def _regions(look: Look, groups: Sequence[Sequence[str]]) -> Iterator[Candidate]:
    """Growing sets of regions, what wins the most bytes for its time first."""
    steps: list[tuple[float, Sequence[str], Region]] = []
    for names in groups:
        before: Region | None = None
        for region in sorted(regions_of(look, names[0], _VARIANTS), key=lambda one: one.seconds / one.bytes):
            if before is None or region.bytes > before.bytes:
                won = region.bytes - (before.bytes if before else 0)
                cost = region.seconds - (before.seconds if before else 0.0)
                steps.append((max(cost, 0.0) / won, names, region))
                before = region
    chosen: dict[str, Region] = {}
    count = 0
    for _, names, region in sorted(steps, key=lambda step: step[0]):
        new = [name for name in names if not any(name != other and is_in(name, other) for other in chosen)]
        if new and count < _SETS + 2:
            within = {other for other in chosen for name in new if other != name and is_in(other, name)}
            chosen = {name: one for name, one in chosen.items() if name not in within} | dict.fromkeys(new, region)
            count += 1
            yield _candidate("recompute", chosen)


def _kept_parts(look: Look, groups: Sequence[Sequence[str]]) -> Iterator[Candidate]:
    """The block as a region, in which more and more parts are kept, what saves the most time for its bytes first."""
    worth = []
    for names in groups:
        seconds = sum(one.seconds for one in look.operations if is_in(one.part, names[0]))
        found = regions_of(look, names[0], 0)
        if found and seconds:
            worth.append((found[0].bytes / seconds, names))
    kept: list[str] = []
    for _, names in sorted(worth, key=lambda one: one[0])[:_SETS]:
        new = [name for name in names if not any(is_in(name, other) for other in kept)]
        if new:
            kept = [name for name in kept if not any(is_in(name, other) for other in new)] + new
            yield Candidate(f"recompute, keep {_words(kept)}", {"": Recompute(), **dict.fromkeys(kept, Save())})


def _words(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"

"""Measure a training step: what its blocks cost in bytes and seconds, for each way to treat them.

Two kinds of measurements, and what ties them together:

- *By itself.* One block of each kind is run alone, forward and backward, on the arguments that the step gave it, under
  every way to treat it (`_candidates.py`): what it holds between forward and backward, the worst moments of both, and
  how long both take. A way that fails, or is no better than another one in any respect, is dropped.
- *In place.* A whole step is weighed from moment to moment (`_bench.py`), with all blocks kept or, if that does not
  fit, all recomputed. What is alive at a moment besides what the blocks hold is the difference of the two.

So everything that is not a block (embeddings, heads, losses, gradients, skips) is in the sums as it was measured, and
only the difference that a decision makes is predicted.

What this is not: it decides nothing (`plan.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from recollect import _errors
from recollect._ambient import undo_all
from recollect._bench import BACKWARD, FORWARD, Bench, Mark
from recollect._calls import Call, Sample, find_blocks, take_samples, watch_calls
from recollect._candidates import Candidate, candidates, look_at
from recollect._inputs import Arguments, find_tensors
from recollect._meters import link_of
from recollect._problem import Block, Choice, Link, Moment, Problem
from recollect._ranks import same, worst
from recollect._torch import is_fully_sharded, storage_key
from recollect.modules import apply, unapply
from recollect.policy import Decision, Offload, Recompute

Progress = Callable[[str, int, int], None]
KEEP, RECOMPUTE = 0, "recompute"
_TIMES = 3  # runs in a row that are timed together
_AT_MOST = 12  # ways to treat a block
_LEAST = 1e-6  # seconds for a decision
_NEVER = 2**60  # bytes: a way that does not work


@dataclass(frozen=True)
class Option:
    """A way to treat a block, measured.

    Attributes:
        name: In words.
        decisions: By names within the block, "" is the block itself.
        seconds: What a step takes more than if the block is kept.
        kept: Bytes that the block holds from its forward to its backward, its result apart.
        forward: Bytes at the worst moment of its forward, above what is there before.
        backward: The same of its backward, with the replay.
        out: Bytes that leave the device and come back.
    """

    name: str
    decisions: Mapping[str, Decision]
    seconds: float
    kept: int
    forward: int
    backward: int
    out: int = 0


@dataclass(frozen=True)
class Kind:
    """Blocks that cannot be told apart."""

    module: str
    options: tuple[Option, ...]  # the first is to keep all of it
    forward_seconds: float
    backward_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def recompute(self) -> int:
        """The option that recomputes all of it; if there is none, the one that keeps it."""
        return next((number for number, one in enumerate(self.options) if one.name == RECOMPUTE), KEEP)


@dataclass(frozen=True)
class Profile:
    """A step, measured.

    Attributes:
        blocks: The names of the modules that can be decided, in the order of their calls.
        kind_of: Of each block, which of `kinds` it is.
        kinds: With the ways to treat them.
        marks: The moments of a step.
        is_plain: Whether all blocks were kept in that step, or recomputed, because keeping them did not fit.
        seconds: How long that step takes.
        calls: The number of each block's call among those of its module in a step.
        tied: Blocks that are calls of the same module.
        link: Bytes per second to where blocks can be offloaded, and back; None if they cannot.
        device: Where.
        is_estimated: Whether nothing was run, and times are those of a GPU on paper.
    """

    blocks: tuple[str, ...]
    calls: tuple[int, ...]
    kind_of: tuple[int, ...]
    kinds: tuple[Kind, ...]
    marks: tuple[Mark, ...]
    is_plain: bool
    seconds: float
    tied: tuple[tuple[int, ...], ...]
    device: str
    is_estimated: bool
    link: tuple[float, float] | None = None

    def option(self, block: int, choice: int) -> Option:
        """A way to treat a block."""
        return self.kinds[self.kind_of[block]].options[choice]

    def options(self, block: int) -> tuple[Option, ...]:
        """All ways to treat a block."""
        return self.kinds[self.kind_of[block]].options

    @property
    def base(self) -> tuple[int, ...]:
        """How each block was treated in the step."""
        return tuple(KEEP if self.is_plain else self.kinds[kind].recompute for kind in self.kind_of)

    def without_recomputing(self) -> Profile:
        """The same with the options alone that compute nothing again."""
        if not self.is_plain:
            raise ValueError('allow must hold "recompute": without it the step does not fit on the device')
        kinds = [
            dataclasses.replace(
                kind, options=tuple(one for one in kind.options if not any(map(_recomputes, one.decisions.values())))
            )
            for kind in self.kinds
        ]
        return dataclasses.replace(self, kinds=tuple(kinds))

    def problem(self, *, offloading: bool = False, host_bytes: int | None = None) -> Problem:
        """What a solver needs to know. Options that offload come last, and are left out unless they are wanted."""
        chosen = [self.option(number, choice) for number, choice in enumerate(self.base)]
        held = [0]
        for option in chosen:
            held.append(held[-1] + option.kept)
        forward, backward = [0] * len(chosen), [0] * len(chosen)
        moments: list[Moment] = []
        through = 0
        for mark in self.marks[:-1]:
            number = mark.block
            if mark.what == FORWARD and number is not None:
                forward[number] = mark.peak - held[number] - chosen[number].forward
                through = max(through, number + 1)
            elif mark.what == BACKWARD and number is not None:
                backward[number] = mark.peak - held[number] - chosen[number].backward
            else:
                moments.append(Moment(mark.peak - held[through], through, self._words(mark)))
        return Problem(
            tuple(
                Block(
                    tuple(
                        Choice(one.seconds, one.kept, one.forward, one.backward, one.out)
                        for one in self.options(number)
                        if offloading or not one.out
                    ),
                    forward[number],
                    backward[number],
                    self.kinds[self.kind_of[number]].forward_seconds,
                    self.kinds[self.kind_of[number]].backward_seconds,
                    name,
                    self.kind_of[number],
                )
                for number, name in enumerate(self.blocks)
            ),
            tuple(moments),
            self.tied,
            Link(*self.link) if offloading and self.link is not None else None,
            host_bytes,
        )

    def _words(self, mark: Mark) -> str:
        where = "the beginning" if mark.block is None else f"after {self.blocks[mark.block]}"
        return {"start": "the beginning of the step", "loss": "the beginning of backward"}.get(mark.what, where)


# --- Measuring ---


def measure(
    bench: Bench, *, repeats: int = 3, offload: Offload | None = None, progress: Progress | None = None
) -> Profile:
    """Measure a step of a model, which is left as it was; `offload` says where blocks could be offloaded to."""
    tell = progress or (lambda what, done, of: None)
    with bench.leaving_nothing():
        tell("looking at the model", 0, 1)
        root, there = watch_calls(bench.model, bench.outside, bench.forward)
        blocks = find_blocks(root)
        if not blocks:
            raise _errors.nothing_to_decide(type(bench.model).__name__)
        kinds: dict[Any, list[int]] = {}
        uses = Counter(one for block in blocks for one in set(block.inputs))
        lives_on = [tuple(one in there or uses[one] > 1 for one in block.inputs) for block in blocks]
        for number, block in enumerate(blocks):
            kinds.setdefault((block.kind(), lives_on[number]), []).append(number)
        measured: list[Kind] = []
        settled: dict[int, tuple[Option, ...]] = {}  # by module
        samples = take_samples(bench.forward, blocks, lives_on, {numbers[0] for numbers in kinds.values()})
        for done, numbers in enumerate(kinds.values()):
            first = numbers[0]
            tell(f"measuring {blocks[first].name} ({len(numbers)} alike)", done, len(kinds))
            # Calls of one module share its decision, so they must have the same ways to be treated, in the same order.
            before = next((settled[id(blocks[n].module)] for n in numbers if id(blocks[n].module) in settled), None)
            measured.append(_measure_kind(bench, blocks[first], samples.pop(first), repeats, before))
            settled.update((id(blocks[number].module), measured[-1].options) for number in numbers)
        del samples
        gc.collect()
        tell("weighing a step", 0, 1)
        can_be = {
            block.name
            for kind, numbers in zip(measured, kinds.values(), strict=True)
            for block in (blocks[number] for number in numbers)
            if kind.recompute != KEEP
        }
        base, marks, seconds = _weigh_base(bench, blocks, can_be, repeats)
        tell("weighing a step", 1, 1)
    link = None
    if offload is not None:
        tell("measuring the link", 0, 1)
        link = _link(bench, offload)
        measured = [with_offloading(kind, offload) for kind in measured]
    kind_of = {number: index for index, numbers in enumerate(kinds.values()) for number in numbers}
    calls: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        calls.setdefault(id(block.module), []).append(number)
    return Profile(
        tuple(block.name for block in blocks),
        tuple(block.number for block in blocks),
        tuple(kind_of[number] for number in range(len(blocks))),
        tuple(measured),
        tuple(marks),
        base,
        seconds,
        tuple(tuple(numbers) for numbers in calls.values() if len(numbers) > 1),
        str(bench.device),
        bench.is_estimated,
        link,
    )


def _weigh_base(
    bench: Bench, blocks: Sequence[Call], can_be_recomputed: Iterable[str], repeats: int
) -> tuple[bool, list[Mark], float]:
    """A whole step with all blocks kept or, if the device has not enough memory for that, recomputed."""
    modules = [(block.module, block.number) for block in blocks]
    try:
        bench.train()
        marks = bench.weigh(modules)
    except torch.OutOfMemoryError:
        marks = []  # the traceback holds what was computed, until here
    bench.let_go()
    (does_not_fit,) = worst([not marks])
    if not does_not_fit:
        return True, marks, bench.seconds(repeats)
    with decided(bench.model, {name: {"": Recompute()} for name in can_be_recomputed}):
        bench.train()
        return False, bench.weigh(modules), bench.seconds(repeats)


class decided:  # noqa: N801
    """Have blocks treated for a while: decisions by names within the block, by the names of the blocks."""

    def __init__(self, model: Module, decisions: Mapping[str, Mapping[str, Decision]], check: str = "default") -> None:
        self._model = model
        self._decisions = full_names(decisions)
        self._check = check
        self._handle: Any = None

    def __enter__(self) -> None:
        if self._decisions:
            self._handle = apply(self._model, lambda name, _: self._decisions.get(name), determinism_check=self._check)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()


def full_names(decisions: Mapping[str, Mapping[str, Decision]]) -> dict[str, Decision]:
    """Decisions by names within the model, from those by names within its blocks."""
    return {
        f"{block}.{part}" if block and part else block or part: decision
        for block, own in decisions.items()
        for part, decision in own.items()
    }


@dataclass(frozen=True)
class _Weights:
    kept: int
    forward: int
    backward: int


class _Alone:
    """A block that is run by itself. What it has of parameters that are sharded with others is gathered before."""

    def __init__(self, bench: Bench, sample: Sample) -> None:
        self._bench = bench
        self._sample = sample
        self._is_sharded = any(map(is_fully_sharded, sample.module.modules()))
        self._around = bench.sharded_around(sample.module)

    def forward(self) -> list[Tensor]:
        """What the block gives that has a gradient."""
        return self.ready()()

    def ready(self) -> Callable[[], list[Tensor]]:
        """The same, with the arguments made already."""
        return functools.partial(self._call, self._sample.fresh())

    def _call(self, arguments: Arguments) -> list[Tensor]:
        args, kwargs = arguments
        del arguments
        self._gather()
        undo: list[Any] = []
        self._sample.around.restore(undo)
        try:
            result = self._sample.module(*args, **kwargs)
        finally:
            undo_all(undo)
        return [one for one in find_tensors((result,), {})[0] if one.requires_grad]

    def train(self) -> None:
        self._backward(self.forward())

    def _backward(self, outputs: list[Tensor]) -> None:
        gradients = [torch.ones_like(one) for one in outputs]
        if self._is_sharded:  # gradients are reduced where they are accumulated, and nowhere else
            torch.autograd.backward(outputs, gradients)
            for leaf in self._sample.leaves():
                leaf.grad = None
        else:
            torch.autograd.grad(outputs, self._sample.leaves(), gradients, allow_unused=True)

    def _gather(self) -> None:
        for unit in self._around:
            unit.unshard()

    def weigh(self) -> _Weights:
        meter = self._bench.meter
        self._bench.start_anew()
        with meter.watching():
            self._gather()
            before = meter.now()
            meter.reset()
            outputs = self.forward()
            forward = meter.peak() - before
            given = {storage_key(one): one.untyped_storage().nbytes() for one in outputs}
            kept = meter.now() - before - sum(given.values())
            meter.reset()
            self._backward(outputs)
            backward = meter.peak() - before
        return _Weights(max(kept, 0), forward, backward)


def _measure_kind(bench: Bench, block: Call, sample: Sample, repeats: int, settled: Sequence[Option] | None) -> Kind:
    """Measure the ways to treat a block: all that there are, or those that are `settled`."""
    alone = _Alone(bench, sample)
    failed = ""
    try:
        alone.train()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        failed = str(error).splitlines()[0] if str(error) else type(error).__name__
    (failed,) = worst([failed])  # on any of the ranks
    if failed:
        return _kept_for_good(block, settled, failed)
    bench.start_anew()
    if settled is None:
        proposed = same(candidates(look_at(sample, alone.ready(), bench.device, bench.gpu)))
    else:
        proposed = [Candidate(one.name, one.decisions) for one in settled]
    weights: dict[int, _Weights] = {}
    notes: list[str] = []
    for number, candidate in enumerate(proposed):
        failed = ""
        try:
            with decided(sample.module, {"": candidate.decisions}):
                alone.train()
                found = alone.weigh()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if number == KEEP:
                raise
            failed = f"{candidate.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
            unapply(sample.module)
        (failed,) = worst([failed])  # on any of the ranks
        if failed:
            notes.append(failed)
        else:
            weights[number] = _Weights(*worst(dataclasses.astuple(found)))
    times: dict[int, list[float]] = {number: [] for number in weights}
    forward_times: list[float] = []
    rounds = 1 if bench.is_estimated else repeats
    for _ in range(rounds):
        forward_times.append(bench.clock.seconds(alone.forward, _TIMES))
        for number, all_times in times.items():
            with decided(sample.module, {"": proposed[number].decisions}):
                if not bench.is_estimated:
                    alone.train()  # the first time after a change of decisions does not count
                all_times.append(bench.clock.seconds(alone.train, _TIMES))
    # What counts is how much longer a way takes than keeping everything, within a round: machines drift.
    added = [statistics.median(a - b for a, b in zip(each, times[KEEP], strict=True)) for each in times.values()]
    seconds = dict(zip(times, worst(added), strict=True))
    forward_seconds, whole_seconds = worst([statistics.median(forward_times), statistics.median(times[KEEP])])
    options = [_option(proposed[number], one, seconds[number]) for number, one in weights.items()]
    if settled is None:
        options = best_of(options)
    elif len(options) < len(settled):
        there = {one.name: one for one in options}
        options = [there.get(one.name, dataclasses.replace(one, kept=_NEVER)) for one in settled]
    return Kind(
        type(block.module).__name__,
        tuple(options),
        forward_seconds,
        max(whole_seconds - forward_seconds, 0.0),
        tuple(notes),
    )


def _kept_for_good(block: Call, settled: Sequence[Option] | None, failed: str) -> Kind:
    """A kind of blocks that cannot be run by themselves: nothing is decided about them."""
    note = f"{block.name or 'the model'} is kept, because it could not be run by itself: {failed}"
    keep = Option("keep", {}, 0.0, block.bytes(), 0, 0)
    others = [dataclasses.replace(one, kept=_NEVER) for one in (settled or ())[1:]]
    return Kind(type(block.module).__name__, (keep, *others), 0.0, 0.0, (note,))


def _option(candidate: Candidate, weights: _Weights, seconds: float) -> Option:
    # Times are noisy, but nothing is for nothing: what decides less is better, all else being equal.
    seconds = max(seconds, _LEAST * len(candidate.decisions))
    return Option(candidate.name, candidate.decisions, seconds, weights.kept, weights.forward, weights.backward)


# --- Offloading ---


def _link(bench: Bench, offload: Offload) -> tuple[float, float]:
    if bench.gpu is not None:
        return bench.gpu.link, bench.gpu.link
    directory = None if offload.directory is None else os.fspath(offload.directory)
    return link_of(bench.device, offload.to, directory)


def with_offloading(kind: Kind, offload: Offload) -> Kind:
    """A kind of blocks with ways to offload them.

    What these take is not measured alone, where there is nothing to hide copies behind, but told by the bytes and the
    link: see `_problem.py`.
    """
    recompute = kind.options[kind.recompute]
    ways = []
    for option in kind.options:
        whole = option.decisions.get("")
        if whole is None:  # what is left of it, after parts were made regions, waits elsewhere
            ways.append(
                dataclasses.replace(
                    option,
                    name="offload" if option.name == "keep" else f"offload, {option.name}",
                    decisions={"": offload, **option.decisions},
                    kept=0,
                    out=option.kept,
                )
            )
        elif isinstance(whole, Recompute) and recompute.kept <= option.kept:
            ways.append(
                dataclasses.replace(
                    option,
                    name=f"{option.name}, offload the input",
                    decisions={**option.decisions, "": dataclasses.replace(whole, inputs=offload)},
                    kept=option.kept - recompute.kept,
                    out=recompute.kept,
                )
            )
    return dataclasses.replace(kind, options=(*kind.options, *(one for one in ways if one.out)))


def best_of(options: Sequence[Option]) -> list[Option]:
    """Those that no other beats in every respect, keep and recompute among them, and not too many."""
    fixed = [one for number, one in enumerate(options) if number == KEEP or one.name == RECOMPUTE]
    rest = sorted((one for one in options if one not in fixed), key=lambda one: (one.kept, one.seconds))
    found = [one for one in rest if not any(_beats(other, one) for other in options if other is not one)]
    while len(found) > _AT_MOST - len(fixed):
        # Of the two closest neighbours, one can be spared.
        gaps = [later.kept - earlier.kept for earlier, later in itertools.pairwise(found)]
        del found[gaps.index(min(gaps))]
    return fixed + found


def _recomputes(decision: Decision) -> bool:
    return isinstance(decision, Recompute)


def _beats(one: Option, other: Option) -> bool:
    mine = (one.kept, one.seconds, one.backward, one.forward, one.out)
    others = (other.kept, other.seconds, other.backward, other.forward, other.out)
    return all(a <= b for a, b in zip(mine, others, strict=True)) and mine != others

"""A block by itself: run on the arguments that a step gave it, under every way to treat it, weighed and timed.

A way that fails is left out, and so is one that is no better than another in any respect. A block that cannot be run by
itself is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect._ambient import restore, undo_all
from recollect._bench import Bench
from recollect._calls import Call, Sample
from recollect._candidates import Candidate, candidates, look_at
from recollect._failures import ALONE, Failure, reason_of
from recollect._inputs import Arguments, find_tensors
from recollect._options import KEEP, Kind, Option, best_of
from recollect._ranks import same, worst
from recollect._replays import replay_seconds
from recollect._torch import is_fully_sharded, storage_key
from recollect._tried import decided
from recollect.modules import unapply
from recollect.policy import Recompute

_TIMES = 2  # runs in a row that are timed together
_WARM_UP = 0.5  # seconds
_LEAST = 1e-6  # seconds for a decision
_LEAST_OF_STEP = 0.25  # that a backward takes: three quarters are usual, and noise may say that it takes no time
_NOISE = 2  # times what two runs of the same differ by, of which several are taken


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
        restore([self._sample.modes], undo)
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


def measure_kind(
    bench: Bench,
    block: Call,
    sample: Sample,
    *,
    repeats: int,
    shared: Collection[str] = (),
    settled: Sequence[Option] | None = None,
) -> Kind:
    """Measure the ways to treat a block: all that there are, or those that are `settled`.

    Parts of the block that are `shared` with other blocks are not decided: that would hold there too.
    """
    alone = _Alone(bench, sample)
    failure = functools.partial(Failure, block.name, type(block.module).__name__, when=ALONE)
    failed = _failing(alone.train)
    if failed:
        return _kept_for_good(block, settled, failure(way="", reason=failed))
    bench.start_anew()
    if settled is None:
        look = look_at(sample, alone.ready(), bench.device, bench.gpu)
        look.parts = {name: what for name, what in look.parts.items() if name not in shared}
        proposed = same(candidates(look))
    else:
        proposed = [Candidate(one.name, one.decisions) for one in settled]
    weights: dict[int, _Weights] = {}
    failures: list[Failure] = []
    for number, candidate in enumerate(proposed):
        found: list[_Weights] = []

        def run(candidate: Candidate = candidate, found: list[_Weights] = found) -> None:
            with decided(sample.module, {"": candidate.decisions}):
                alone.train()
                found.append(alone.weigh())

        failed = _failing(run)
        if failed:
            unapply(sample.module)
            failures.append(failure(way=candidate.name, reason=failed))
        else:
            weights[number] = _Weights(*worst(dataclasses.astuple(found[0])))
    if KEEP not in weights:
        return _kept_for_good(block, settled, dataclasses.replace(failures[0], way=""))
    forward_seconds, whole_seconds, added = _times(bench, alone, sample, proposed, list(weights), repeats)
    options = [_option(proposed[number], one, added[number]) for number, one in weights.items()]
    if settled is None:
        options = best_of(options)
    elif len(options) < len(settled):
        there = {one.name: one for one in options}
        options = [there.get(one.name, dataclasses.replace(one, works=False)) for one in settled]
    return Kind(
        type(block.module).__name__,
        tuple(options),
        forward_seconds,
        max(whole_seconds - forward_seconds, whole_seconds * _LEAST_OF_STEP),
        tuple(failures),
    )


def _failing(run: Callable[[], None]) -> str:
    """Why something fails, on any of the ranks; "" if it does not."""
    reason = ""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = reason_of(error)
    return worst([reason])[0]


def _times(
    bench: Bench, alone: _Alone, sample: Sample, proposed: Sequence[Candidate], working: Sequence[int], repeats: int
) -> tuple[float, float, dict[int, float]]:
    """The seconds of a forward, of a step, and what each way adds to that.

    A device that is at work grows warmer and slower. So it is warmed up, and each way is compared with keeping
    everything right after it. What is left of noise then may be more than what a way adds: where the two cannot be
    told apart, a way adds what its replays take.
    """
    if not bench.is_estimated and bench.device.type != "cpu":
        once = bench.clock.seconds(alone.train, _TIMES)
        for _ in range(worst([math.ceil(_WARM_UP / once)])[0]):  # as often on all ranks, which wait for each other
            alone.train()
    forwards: list[float] = []
    whole: list[float] = []
    added: dict[int, list[float]] = {number: [] for number in working}
    replayed: dict[int, list[float | None]] = {number: [] for number in working}
    for _ in range(1 if bench.is_estimated else repeats):
        forwards.append(bench.clock.seconds(alone.forward, _TIMES))
        for number, differences in added.items():
            decisions = proposed[number].decisions
            with decided(sample.module, {"": decisions}):
                if not bench.is_estimated:  # the first time after a change of decisions counts for nothing else
                    again = [
                        sample.module.get_submodule(name)
                        for name, one in decisions.items()
                        if isinstance(one, Recompute)
                    ]
                    replayed[number].append(replay_seconds(bench.device, again, alone.train))
                way = bench.clock.seconds(alone.train, _TIMES)
            if number == KEEP:
                whole.append(way)
            elif not bench.is_estimated:
                alone.train()  # likewise
                whole.append(bench.clock.seconds(alone.train, _TIMES))
            differences.append(way - whole[-1])
    noise = _NOISE * statistics.median([abs(one - other) for one, other in itertools.pairwise(whole)] or [0.0])
    forward, step = worst([statistics.median(forwards), statistics.median(whole)])
    found = worst([_told_apart(added[number], replayed[number], noise) for number in added])
    return forward, step, dict(zip(added, found, strict=True))


def _told_apart(differences: Sequence[float], replayed: Sequence[float | None], noise: float) -> float:
    """What a way adds: the difference that it makes or, if noise may make as much of one, the time of its replays."""
    difference = statistics.median(differences)
    known = [one for one in replayed if one is not None]
    if known and abs(difference - statistics.median(known)) <= noise:
        return statistics.median(known)
    return difference


def _kept_for_good(block: Call, settled: Sequence[Option] | None, failure: Failure) -> Kind:
    """A kind of blocks that cannot be run by themselves: nothing is decided about them."""
    keep = Option("keep", {}, 0.0, block.bytes(), 0, 0)
    others = [dataclasses.replace(one, works=False) for one in (settled or ())[1:]]
    return Kind(type(block.module).__name__, (keep, *others), 0.0, 0.0, (failure,))


def _option(candidate: Candidate, weights: _Weights, seconds: float) -> Option:
    # Times are noisy, but nothing is for nothing: what decides less is better, all else being equal.
    seconds = max(seconds, _LEAST * len(candidate.decisions))
    return Option(candidate.name, candidate.decisions, seconds, weights.kept, weights.forward, weights.backward)

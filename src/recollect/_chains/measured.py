"""What steps take, in seconds and bytes: measured once for each function and kind of state, for a budget or for tiers.

A step is run with a graph and differentiated, on its own, to weigh it; then with a warm device, to time it. What
it changes is put back: random generators, buffers of modules. Side effects in Python happen each time;
`recollect.is_recomputing` says True then.

Counted are bytes that a step adds: a tensor that it hands on is not counted again, nor what it reads from outside. The
gradients of weights are the program's, as the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from recollect import _errors
from recollect._ambient import RandomState, undo_all
from recollect._chains.chain import SUMMED_IN_PLACE, Chain, Needs, tensors_that_need_grad
from recollect._chains.notes import stepping
from recollect._chains.outside import Looking, leads_to
from recollect._digest import copies, overwrite
from recollect._errors import Signature
from recollect._inputs import versions_of
from recollect._meters import Meter, RealClock, meter_of
from recollect._torch import (
    can_be_recorded,
    gradients,
    put_versions,
    sequence_number,
    set_grad_enabled,
    storage_key,
)
from recollect._verify import signature
from recollect._watcher import memory_of

Kind = tuple[tuple[Signature, ...], Needs]  # of a state
_TIMES = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One step."""

    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    gives: Kind


def measure(chain: Chain, length: int) -> list[Measured]:
    """All steps of a chain; of a chain of equal steps the first alone, which stands for all."""
    found: list[Measured] = []
    leaves = chain.start.leaves()
    kind = _kind_of(chain, chain.start.leaves(), chain.needs[0])
    behind: list[int] = []  # steps that are known, and that the state `leaves` has not been through
    with stepping(chain.notes, is_again=False) as steps:
        steps.replaying = True
        bench = _Bench(chain)
        try:
            for step in range(length):
                known = chain.meet(chain.function(step)).step.measured
                if kind not in known:
                    for each in behind:
                        bench.meet(each, leaves, tuple(False for _ in chain.places))
                        leaves = bench.advance(each, leaves)
                    behind.clear()
                    measured = bench.measure(step, leaves, kind[1])
                    # The chain itself would begin with what the measured steps have left.
                    if chain.start.is_changed():
                        raise (_errors.step_changes_state if step == 0 else _errors.kept_state_changed)(
                            chain.describe(step), 0
                        )
                    known[kind] = measured
                one: Measured = known[kind]
                found.append(one)
                if chain.sole is not None and one.gives == kind:
                    return found if step == 0 else [*found, *[one] * (length - step - 1)]
                kind = one.gives
                behind.append(step)
        finally:
            bench.put_back()
            chain.notes.entries.clear()
    return found


def _kind_of(chain: Chain, leaves: list[Any], needs: Needs) -> Kind:
    return tuple(signature(leaves[place]) for place in chain.places), needs


class _Bench:
    """Runs single steps of a chain."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        tensors = chain.tensors
        self._device = next((one.device for one in tensors if not one.is_cpu), torch.device("cpu"))
        self._clock = RealClock(self._device)
        self._random = RandomState.now(tensors)
        self._undo: list[Callable[[], object]] = []
        self._met: set[int] = set()

    def put_back(self) -> None:
        self._random.put()
        undo_all(self._undo)

    def meet(self, step: int, leaves: list[Any], needs: Needs) -> None:
        """Note what the function changes, to be put back."""
        chain, function = self._chain, self._chain.function(step)
        if id(function) in self._met:
            return
        self._met.add(id(function))
        known = chain.meet(function)
        changes = [tensor for tensor, _ in known.step.changed()]
        changes += [buffer for root in known.roots() for buffer in root.buffers()]
        self._put_back_later(changes, copies(changes))
        if (known.step.is_loose or not known.step.is_looked_at) and can_be_recorded():
            with Looking() as looking:
                chain.run_with_graph(step, leaves, needs)
            looking.changes(known.roots(), {storage_key(leaves[place]) for place in chain.places})
            matter = [write for write in looking.writes.values() if write.before is not None]
            self._put_back_later([write.alias for write in matter], [write.before for write in matter])

    def _put_back_later(self, tensors: list[Tensor], values: list[Tensor]) -> None:
        if tensors:
            self._undo.append(partial(_put, tensors, versions_of(tensors), values))

    def advance(self, step: int, leaves: list[Any]) -> list[Any]:
        """Run a step without a graph."""
        chain = self._chain
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            value, _ = chain.take_apart(step, chain.function(step)(chain.structure.build(leaves)))
        finally:
            set_grad_enabled(before)
        return chain.leaves_of(step, value)

    def measure(self, step: int, leaves: list[Any], needs: Needs) -> Measured:
        """Weigh a step, then time it."""
        self.meet(step, leaves, needs)
        chain = self._chain
        given = [leaves[place] for place in chain.places]
        meter = meter_of(self._device, given)
        with meter.watching():
            gives, weighed = self._weigh(step, leaves, needs, meter)
        backward = self._clock.seconds(lambda: self._differentiate(step, leaves, needs), _TIMES)
        forward = self._clock.seconds(lambda: self.advance(step, leaves), _TIMES)
        return Measured(forward, max(backward - forward, 0.0), *weighed, gives)

    def _weigh(
        self, step: int, leaves: list[Any], needs: Needs, meter: Meter
    ) -> tuple[Kind, tuple[int, int, int, int, int]]:
        chain = self._chain
        if self._device.type != "cpu":
            self._differentiate(step, leaves, needs)  # libraries take memory of their own when they are first used
        meter.reset()
        start = meter.now()
        after, own, _ = chain.run_with_graph(step, leaves, needs)
        held, forward_peak = meter.now(), meter.peak()
        results = [after[place] for place in chain.places]
        gives = _kind_of(chain, after, tensors_that_need_grad(after, chain.places))
        output = _bytes_of(results, {storage_key(leaves[place]) for place in chain.places})
        saved = max(held - start, output)
        gradient = sum(size_of(one) for one in results if one.requires_grad)
        del after, own, results
        on_top = max(self._on_top(step, leaves, needs, meter, weights=weights) for weights in (False, True))
        return gives, (output, saved, gradient, max(forward_peak - held, 0), on_top)

    def _on_top(self, step: int, leaves: list[Any], needs: Needs, meter: Meter, *, weights: bool) -> int:
        """What a backward takes besides the gradients that it is given, and besides what those of weights are.

        A function that is used in several steps adds to gradients that are there already, so that each of its own comes
        on top.
        """
        chain = self._chain
        first = sequence_number()
        after, own, _ = chain.run_with_graph(step, leaves, needs)
        asked = [one for place in chain.places if (one := after[place]).requires_grad]
        inputs: list[Any] = [leaf for leaf in own if leaf is not None]
        known = {id(leaf) for leaf in inputs}
        others: list[Any] = []
        if weights:
            outside, edges = leads_to(asked, first)
            others = [one for one in outside if id(one) not in known]
            others += [GradientEdge(*edge) for edge in edges]  # those that have a history
        grads = [torch.ones_like(one) for one in asked]
        meter.reset()
        before = meter.now()
        del after, own
        found = gradients(asked, grads, [*inputs, *others]) if asked and (inputs or others) else ()
        on_top = meter.peak() - before
        of_weights = _bytes_of([one for one in found[len(inputs) :] if one is not None], set())
        if not chain.is_repeated(chain.function(step)):
            on_top -= of_weights
        elif of_weights < SUMMED_IN_PLACE:
            on_top += of_weights  # the sum, beside what it is of
        return max(on_top, 0)

    def _differentiate(self, step: int, leaves: list[Any], needs: Needs) -> None:
        chain = self._chain
        first = sequence_number()
        after, own, _ = chain.run_with_graph(step, leaves, needs)
        asked = [one for place in chain.places if (one := after[place]).requires_grad]
        if asked:
            weights, _ = leads_to(asked, first)
            inputs = {id(leaf): leaf for leaf in (*own, *weights) if leaf is not None}
            gradients(asked, [torch.ones_like(one) for one in asked], list(inputs.values()))


def _put(tensors: list[Tensor], versions: list[int], values: list[Tensor]) -> None:
    overwrite(tensors, values)
    counted = [place for place, tensor in enumerate(tensors) if not tensor.is_inference()]
    put_versions([tensors[place] for place in counted], [versions[place] for place in counted])


def _bytes_of(tensors: Sequence[Tensor], others: set[int]) -> int:
    """Of the memory behind tensors, each piece once, without that of others."""
    sizes = {}
    for tensor in tensors:
        key = storage_key(tensor)
        if key not in others:
            try:
                sizes[key] = tensor.untyped_storage().nbytes()
            except (RuntimeError, NotImplementedError):
                sizes[key] = size_of(tensor)
    return sum(sizes.values())


def size_of(tensor: Tensor) -> int:
    """Its bytes; of a sparse one, those of what it consists of."""
    return tensor.nbytes if tensor.layout is torch.strided else sum(memory_of([tensor]).values())

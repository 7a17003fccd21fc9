"""A pass: the rest of a schedule, carried out when backward comes to the chain's node.

Everything that the first run found in force is in force again: generators, modes, the modes of modules, what steps
change from outside. When the pass ends, however it does, all is as it was around it.

Gradients. A step is differentiated by a backward of its own, from what it gave to what it was given and what it read
from outside. Sums over steps are formed in the order in which plain autograd forms them: what has been summed up so
far arrives first at the tensor from outside, and each use of it in the step adds to that. So gradients are equal to
those of the plain chain to the last bit, where nothing outside of the chain adds to them.

Hooks that the user has put on such a tensor are for the whole gradient, which autograd hands them afterwards: they
are out of the way while steps are differentiated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._chains.chain import SUMMED_IN_PLACE, Chain, Look, Ran, without_history
from recollect._chains.first import look_at
from recollect._chains.kept import Kept, Slots
from recollect._chains.notes import Stepping
from recollect._digest import difference, read
from recollect._guards import name_of
from recollect._inputs import find_tensors
from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore
from recollect._torch import (
    LEAF_NODE,
    gradients,
    is_needed,
    no_fast_paths,
    node_number,
    sequence_number,
    set_grad_enabled,
)
from recollect._verify import signature

Grads = list[Tensor | None]


class _SoFar(torch.autograd.Function):
    """Gives tensors what has been summed up for them: made after a step, it is the first to be differentiated."""

    @staticmethod
    def forward(ctx: Any, so_far: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.so_far = so_far
        return tensors[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        so_far = tuple(ctx.so_far)
        ctx.so_far.clear()
        return None, *so_far


class Pass:
    """The running state of a chain that is differentiated, and the gradients so far."""

    def __init__(self, chain: Chain, edges: Sequence[tuple[Any, int]], grads: Grads, output_grads: Grads) -> None:
        self.chain = chain
        self.leaves: list[Any] | None = None
        self.value: Any = None
        self._is_built = False  # whether `value` is the running state
        self.grads = grads  # of the tensors of the state behind the step that is differentiated next
        self._output_grads = output_grads  # of what steps gave besides, as far as they are not differentiated yet
        count = len(chain.outside.tensors)
        self.outside: Grads = [None] * count
        of_outside = edges[len(edges) - count :]
        self._edges = {edge: index for index, edge in enumerate(of_outside)}
        self._leaves_outside = {
            id(tensor): index for index, tensor in enumerate(chain.outside.tensors) if tensor.grad_fn is None
        }
        # A weight that was frozen since gets no gradient from autograd either.
        self._is_needed = [
            is_needed(node) and tensor.requires_grad
            for (node, _), tensor in zip(of_outside, chain.outside.tensors, strict=True)
        ]
        self.looks: dict[int, Look] = {}
        self.has_compared = False  # whether values were
        self._strangers: list[weakref.ref[Tensor]] = []
        self.steps: Stepping

    # --- Actions ---

    def begin(self, kept: Kept) -> None:
        """Begin with a state that is in no slot."""
        self.leaves = kept.leaves()
        self.chain.hidden.put(kept.hidden)

    def carry_out(self, actions: Iterator[Action], slots: Slots, held: dict[int, Ran]) -> None:
        chain = self.chain
        for action in actions:
            kind = type(action)
            if kind is Backward:
                step = action.step  # type: ignore[union-attr]
                ran = held.pop(step, None)
                if ran is None:
                    ran = self._run_with_graph(step, goes_on=False)
                self.leaves = self.value = None  # it is used up
                self._is_built = False
                self._differentiate(ran)
                del ran
                if self._strangers:
                    self._refuse_strangers(step)
            elif kind is Restore:
                kept = slots[action.tier, action.state]  # type: ignore[union-attr]
                if kept.is_changed():
                    raise _errors.kept_state_changed(chain.describe(action.state), action.state)  # type: ignore[union-attr]
                self.leaves, self._is_built = kept.leaves(), False
                chain.hidden.put(kept.hidden)
                del kept
            elif kind is Forward:
                if action.graph:  # type: ignore[union-attr]
                    step = action.start  # type: ignore[union-attr]
                    held[step] = self._run_with_graph(step, goes_on=True)
                else:
                    self._run_without(action.start, action.stop)  # type: ignore[union-attr]
            elif kind is Keep:
                slots.keep(action.state, action.tier, self._leaves(action.state - 1))  # type: ignore[union-attr]
                self._look(action.state)  # type: ignore[union-attr]
            elif kind is Drop:
                slots.drop(action.state, action.tier)  # type: ignore[union-attr]

    def _leaves(self, step: int) -> list[Any]:
        """Those of the running state, which `step` gave."""
        if self.leaves is None:
            self.leaves = self.chain.leaves_of(step, self.value)
        return self.leaves

    def _run_without(self, start: int, stop: int) -> None:
        chain = self.chain
        if not self._is_built:
            assert self.leaves is not None
            self.value = chain.structure.build(self.leaves)
            self._is_built = True
        self.leaves = None
        value, sole, has_outputs, steps = self.value, chain.sole, chain.options.outputs, self.steps
        self.value = None  # or the state before would be held while the first step runs
        step = start
        slowly = no_fast_paths if any(chain.needs[stop]) or has_outputs else None
        if slowly is not None:
            slowly.__enter__()
        try:
            for step in range(start, stop):
                function = chain.function(step) if sole is None else sole
                steps.step, steps.position = step, 0
                value = function(value)
                if has_outputs:
                    value = value[0]
                if chain.makes_graphs:
                    value = chain.structure.build(without_history(chain.leaves_of(step, value), chain.places))
        except Exception as error:
            _errors.add_step(error, chain.describe(step), again=True)
            raise
        finally:
            if slowly is not None:
                slowly.__exit__()
        self.value = value

    def _run_with_graph(self, step: int, *, goes_on: bool) -> Ran:
        chain = self.chain
        self.steps.step, self.steps.position = step, 0
        stand_ins = chain.stand_ins()
        first = sequence_number()
        try:
            leaves, given, output = chain.run_with_graph(step, self._leaves(step - 1), chain.needs[step], stand_ins)
        except Exception as error:
            _errors.add_step(error, chain.describe(step), again=True)
            raise
        results = [leaves[place] for place in chain.places]
        outputs = find_tensors((output,), {})[0] if chain.options.outputs else []
        self._check(step, leaves, results, outputs)
        self.leaves = without_history(leaves, chain.places) if goes_on else None
        self.value, self._is_built = None, False
        return Ran(step, given, results, outputs, {} if stand_ins is None else stand_ins.leaves, first)

    # --- Checks ---

    def _look(self, state: int) -> None:
        # By default the first run is compared, by the states that it kept. Those of steps that are run again are not.
        if self.chain.options.determinism_check == "values" and state and state not in self.looks:
            assert self.leaves is not None
            self.looks[state] = look_at(self.chain, self.leaves, closely=True)

    def _check(self, step: int, leaves: list[Any], results: list[Tensor], outputs: list[Tensor]) -> None:
        """Raise if a step gave something else than in the run before."""
        chain = self.chain
        for result, needed in zip(results, chain.needs[step + 1], strict=True):
            if result.requires_grad and not needed:
                raise _errors.needs_more(chain.describe(step))
        if chain.options.outputs:
            if len(outputs) != chain.output_count(step):
                raise _errors.other_outputs(chain.describe(step), chain.output_count(step), len(outputs))
            for output, is_needed in zip(outputs, chain.output_needs(step), strict=True):
                if output.requires_grad and not is_needed:
                    raise _errors.needs_more(chain.describe(step))
        then = self.looks.pop(step + 1, None)
        if then is not None:
            self._compare(step, then, leaves)

    def _compare(self, step: int, then: Look, leaves: list[Any]) -> None:
        chain = self.chain
        now = look_at(chain, without_history(leaves, chain.places), closely=then.digests is not None)
        if now.signatures != then.signatures:
            raise _errors.other_state(chain.describe(step), then.signatures, now.signatures)
        if then.digests is None or now.digests is None:
            return
        self.has_compared = True
        numbers = read([*then.digests, *now.digests])
        count = len(then.digests)
        for place, (before, after) in enumerate(zip(numbers[:count], numbers[count:], strict=True)):
            if before is not None and after is not None:
                apart = difference(before, after, then.signatures[place][1])
                if apart:
                    raise _errors.other_values(chain.describe(step), place, then.signatures[place], apart)

    # --- Gradients ---

    def _differentiate(self, ran: Ran) -> None:
        """One step: from the gradients of what it gave to those of what it was given, and of what it read."""
        chain, step = self.chain, ran.step
        tensors: list[Tensor] = []
        grads: list[Tensor] = []
        for result, grad in zip(ran.results, self.grads, strict=True):
            if grad is not None and result.requires_grad:
                tensors.append(result)
                grads.append(grad)
        if chain.options.outputs:
            count = chain.output_count(step)
            own = self._output_grads[len(self._output_grads) - count :] if count else []
            del self._output_grads[len(self._output_grads) - count :]
            for output, grad in zip(ran.outputs, own, strict=True):
                if grad is not None and output.requires_grad:
                    tensors.append(output)
                    grads.append(grad)
        given = ran.given
        if not tensors:
            self.grads = [None] * len(given)
            return
        own_leaves = [leaf for leaf in given if leaf is not None]
        of = chain.outside.tensors
        if ran.stand_ins:
            of = list(of)
            for index, leaf in ran.stand_ins.items():
                # The step may have returned the tensor as it is.
                tensors = [leaf if one is of[index] else one for one in tensors]
                of[index] = leaf
        read = self._reached(ran, tensors, own_leaves)
        outside = self.outside
        summed = [index for index in read if outside[index] is not None]
        if summed:
            self._put_first(tensors, grads, summed, of)
        inputs = [*own_leaves, *(of[index] for index in read)]
        found = iter(self._gradients(step, tensors, grads, inputs) if inputs else ())
        self.grads = [None if leaf is None else next(found) for leaf in given]
        for index, grad in zip(read, found, strict=True):
            outside[index] = grad

    def _put_first(self, tensors: list[Tensor], grads: list[Tensor], summed: list[int], of: list[Tensor]) -> None:
        """Let what has been summed up so far arrive first."""
        outside = self.outside
        so_far: list[Tensor] = [outside[index] for index in summed]  # type: ignore[misc]
        is_dense = all(one.layout is torch.strided for one in so_far)
        if (
            not is_dense
            or sum(one.nbytes for one in so_far) < SUMMED_IN_PLACE
            or len({one.device for one in (*so_far, *tensors)}) > 1
        ):
            tensors += [of[index] for index in summed]
            grads += so_far
            return
        # Nobody but autograd may hold it then, so that autograd adds to it in place.
        for index in summed:
            outside[index] = None
        before = torch.is_grad_enabled()
        set_grad_enabled(True)
        try:
            source = _SoFar.apply(so_far, *(of[index] for index in summed))
        finally:
            set_grad_enabled(before)
        tensors.append(source)
        grads.append(source.detach())

    def _gradients(
        self, step: int, tensors: list[Tensor], grads: list[Tensor], inputs: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        try:
            return gradients(tensors, grads, inputs)
        except RuntimeError:
            shapes = [tensor.shape for tensor in tensors], [grad.shape for grad in grads]
            if shapes[0] == shapes[1]:
                raise
            now, then = ([signature(one) for one in those] for those in (tensors, grads))
            raise _errors.other_state(self.chain.describe(step), then, now) from None

    def _reached(self, ran: Ran, tensors: Sequence[Tensor], own: Sequence[Tensor]) -> list[int]:
        """Which tensors from outside the graph of `tensors` leads to, of those that are needed."""
        edges, stand_ins, first = self._edges, ran.stand_ins, ran.first
        reached: set[int] = set()
        seen: set[Any] = set()
        waiting: list[Any] = []
        for tensor in tensors:
            node: Any = tensor.grad_fn
            if node is None:
                index = self._leaves_outside.get(id(tensor))
                if index is None:
                    index = next((index for index, leaf in stand_ins.items() if leaf is tensor), None)
                if index is not None:
                    reached.add(index)
            elif (index := edges.get((node, tensor.output_nr))) is not None:
                reached.add(index)
            elif node not in seen:
                if node_number(node) < first:
                    raise _errors.unknown_history(self.chain.describe(ran.step), node)
                seen.add(node)
                waiting.append(node)
        found = edges.get
        while waiting:
            for edge in waiting.pop().next_functions:
                node = edge[0]
                if node is None:
                    continue
                index = found(edge)
                if index is not None:
                    if index in stand_ins:
                        raise _errors.not_cut(self.chain.describe(ran.step), node)
                    reached.add(index)
                elif node not in seen:
                    seen.add(node)
                    if node.__class__ is LEAF_NODE:
                        leaf = node.variable
                        for index, one in stand_ins.items():
                            if leaf is one:
                                reached.add(index)
                                break
                        else:
                            if not any(leaf is one for one in own):
                                self._strangers.append(weakref.ref(leaf))
                    elif node_number(node) < first:  # made before the step, and not found by the first run
                        raise _errors.unknown_history(self.chain.describe(ran.step), node)
                    else:
                        waiting.append(node)
        is_needed = self._is_needed
        return [index for index in reached if is_needed[index]]

    def _refuse_strangers(self, step: int) -> None:
        """Raise if a step has led to a leaf that it did not make for itself, and that no first run has come by."""
        strangers, self._strangers = self._strangers, []
        for reference in strangers:
            leaf = reference()
            if leaf is not None:
                chain = self.chain
                roots = [root for known in chain.known.values() for root in known.roots()]
                raise _errors.unknown_leaf(chain.describe(step), name_of(leaf, roots))

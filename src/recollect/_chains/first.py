"""The first run of a chain: the actions of a schedule up to the last state, which is the result.

Steps run without a graph, except those whose graph is held, and those that show what their function depends on: each
function where it is met first with the needs that its state has there, and as long as it is seen to have tensors that
no step has read yet. After that nothing is asked any more, and a step costs its call and a look at the structure of
its result.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._chains.chain import (
    Chain,
    Look,
    Needs,
    Pending,
    Ran,
    changed_in_place,
    tensors_that_need_grad,
    without_history,
)
from recollect._chains.cuts import find_cuts
from recollect._chains.kept import Kept, Slots
from recollect._chains.notes import Stepping
from recollect._chains.outside import Edge, Looking, Search, StepOf, edge_of, leads_to, reachable
from recollect._chains.structure import Mismatch, Structure
from recollect._digest import copies, digest
from recollect._inputs import versions_of
from recollect._schedules.actions import Action, Backward, Drop, Forward, Keep, Restore
from recollect._schedules.online import Online
from recollect._torch import (
    can_be_recorded,
    no_fast_paths,
    own_tensors,
    sequence_number,
    set_grad_enabled,
    storage_key,
)
from recollect._verify import signature


class FirstRun:
    """The running state of a chain that runs for the first time, and what it has given so far."""

    def __init__(self, chain: Chain, steps: Stepping, *, keeps: bool) -> None:
        self.chain = chain
        self._steps = steps
        self._keeps = keeps  # states, and graphs
        self.state = 0
        self.leaves = chain.start.leaves()
        self.value: Any = chain.structure.build(self.leaves)
        self.needs = chain.needs[0]
        self.slots = Slots(chain.places, chain.hidden, chain.stores, chain.start)
        self.held: dict[int, Ran] = {}
        self.looks: dict[int, Look] = {}
        self.outputs: list[tuple[Structure, list[Any], Needs]] = []
        self._output: Structure | None = None
        # By function and the needs of what it is given: the needs of what it gives, and of what it gives besides.
        self._shown: dict[tuple[int, Needs], tuple[Needs, Structure | None, Needs]] = {}
        self._unread: dict[int, dict[Any, Tensor]] = {}  # by function: tensors that it has and that nothing has read
        self._kept: Kept | None = None  # the running state, if it is kept
        self._met: set[int] = set()
        self._search = Search()
        # By identity, functions of which it is not known yet what they change: looked at whenever they have a graph.
        self._new: dict[int, StepOf] = {}
        # By function: memory of buffers that nothing has read or changed. Batch norm's changes show in no version.
        self._unseen: dict[int, set[int]] = {}
        self._other_versions: dict[int, int] = {}  # of what steps have, when they were met

    # --- Actions ---

    def carry_out(self, actions: Iterator[Action], length: int) -> None:
        """Carry out the actions up to the last state, and leave the rest to the first pass."""
        for action in actions:
            if type(action) is Forward and action.stop == length and action.graph and self._keeps:
                self._look(action.start, self.leaves)  # the first state that a pass comes to again
            self.do(action)
            if self.state == length:
                break
        if self._keeps and length - 1 not in self.held:
            self._look(length, self.leaves)
        self._end_looking()
        is_cut_anew = self._set_cuts()
        if self._keeps and not (is_cut_anew and self.held):  # else a graph is held that should have been cut
            self.chain.pending = Pending(actions, self.slots, self.held, self.looks)

    def _set_cuts(self) -> bool:
        """Find what steps are to be cut off from, now that all is known; whether that is something new."""
        chain, before = self.chain, self.chain.cuts
        chain.cuts = find_cuts(chain.outside.tensors)
        return chain.cuts != before

    def carry_out_until(self, cond: Callable[[Any], Any], online: Online) -> int:
        """Run steps for as long as `cond` says so; gives their number.

        Whether a state is kept is decided after the step that starts from it. So the state before the running one is at
        hand, and at the end the first pass begins with it.
        """
        chain, number, before = self.chain, 0, self.chain.start
        while self._goes_on(cond, number):
            if self._keeps:
                for action in online.decide(number):
                    if isinstance(action, Keep):
                        self.slots.put(action.state, action.tier, before)
                        self._look(action.state, before.leaves())
                    else:
                        self.do(action)
                if number:
                    before = Kept(self.leaves, chain.places, chain.hidden.now(), None)
                    self.slots.last = before
                self._kept = before
            self.forward(number, number + 1)
            number += 1
        self.slots.last = None
        self._end_looking()
        if self._keeps and number:
            self._look(number - 1, before.leaves())
            self._look(number, self.leaves)
            self._set_cuts()
            chain.pending = Pending(online.rest(number), self.slots, self.held, self.looks, before)
        return number

    def _goes_on(self, cond: Callable[[Any], Any], number: int) -> bool:
        grad = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            return bool(cond(self.value))
        except Exception as error:
            _errors.add_step(error, f"cond, which was asked about state {number}")
            raise
        finally:
            set_grad_enabled(grad)

    def do(self, action: Action) -> None:
        kind = type(action)
        if kind is Forward:
            self.forward(action.start, action.stop, hold=action.graph and self._keeps)  # type: ignore[union-attr]
        elif not self._keeps:
            return
        elif kind is Keep:
            self.keep(action.state, action.tier)  # type: ignore[union-attr]
        elif kind is Drop:
            self.slots.drop(action.state, action.tier)  # type: ignore[union-attr]
            self._kept = None
        elif kind is Restore or kind is Backward:
            raise AssertionError(f"{action} before the last state was reached")

    def keep(self, state: int, tier: int) -> None:
        self._kept = self.slots.keep(state, tier, self.leaves)
        self._look(state, self.leaves)

    def _look(self, state: int, leaves: list[Any]) -> None:
        if state and self.chain.options.determinism_check != "none" and state not in self.looks:
            self.looks[state] = look_at(self.chain, leaves, closely=self.chain.compares_values())

    def forward(self, start: int, stop: int, *, hold: bool = False) -> None:
        """Run steps from the running state."""
        step = start
        while step < stop:
            function = self.chain.function(step)
            shown = self._shown.get((id(function), self.needs))
            is_new = self._unread.get(id(function)) or self._unseen.get(id(function))
            # As long as nothing needs grad, there is nothing to hold either, and no pass that would notice more.
            if hold or shown is None or is_new or not any(self.needs):
                self._run_with_graph(step, function, hold=hold)
                step += 1
            else:
                step = self._run_without(step, stop, function, shown)

    # --- Without a graph ---

    def _run_without(
        self, step: int, stop: int, function: Callable[[Any], Any], shown: tuple[Needs, Structure | None, Needs]
    ) -> int:
        """Run one step, or all up to `stop` if they are known to be alike; gives the number of the next."""
        chain = self.chain
        needs, output_structure, output_needs = shown
        last = stop if chain.sole is not None and needs == self.needs else step + 1
        take_apart, leaves_of, has_outputs = chain.take_apart, chain.structure.leaves, chain.options.outputs
        value, leaves, first, steps, places = self.value, self.leaves, step, self._steps, chain.places
        output: Any
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        slowly = no_fast_paths if any(needs) or has_outputs else None
        if slowly is not None:
            slowly.__enter__()
        try:
            for step in range(first, last):
                steps.step, steps.position = step, 0
                value = function(value)
                if has_outputs:
                    value, output = take_apart(step, value)
                    self._note_output(output, output_structure, output_needs)
                leaves = leaves_of(value)
                if any(leaves[place].grad_fn is not None for place in places):  # or it would grow from step to step
                    chain.makes_graphs = True
                    leaves = without_history(leaves, places)
                    value = chain.structure.build(leaves)
                if step == first and self._kept is not None:
                    changed_in_place(chain, self._kept, step)
        except Mismatch as mismatch:
            raise _errors.other_structure(
                chain.describe(step), mismatch.path, mismatch.expected, mismatch.got
            ) from None
        except Exception as error:
            _errors.add_step(error, chain.describe(step))
            raise
        finally:
            set_grad_enabled(before)
            if slowly is not None:
                slowly.__exit__()
        self.value, self.leaves = value, leaves
        self._arrive(last, needs)
        return last

    def _arrive(self, state: int, needs: Needs) -> None:
        self.state = state
        self.needs = needs
        self.chain.needs.note(state, needs)
        self._kept = None

    # --- With a graph ---

    def _run_with_graph(self, step: int, function: Callable[[Any], Any], *, hold: bool) -> None:
        chain = self.chain
        known = self._meet(function)
        looking = Looking() if known.has_history or id(function) in self._new else None
        if looking is not None and not can_be_recorded():
            looking = None
        if looking is not None:  # else what it shows would pass for what was there from the start
            self._find_late_changes()
        self._steps.step, self._steps.position = step, 0
        stand_ins = None
        if hold:
            chain.cuts = find_cuts(chain.outside.tensors)
            stand_ins = chain.stand_ins()
        first = sequence_number()
        try:
            with looking or contextlib.nullcontext():
                leaves, given, output = chain.run_with_graph(step, self.leaves, self.needs, stand_ins)
        except Exception as error:
            _errors.add_step(error, chain.describe(step))
            raise
        if self._kept is not None:
            changed_in_place(chain, self._kept, step)
        structure, outputs = self._take_output(output)
        results = [leaves[place] for place in chain.places]
        needs = tensors_that_need_grad(leaves, chain.places)
        output_tensors = [outputs[place] for place in structure.tensors] if structure is not None else []
        output_needs = tuple(tensor.requires_grad for tensor in output_tensors)
        own = {id(leaf) for leaf in given}
        if stand_ins is not None:
            own.update(map(id, stand_ins.leaves.values()))
        unsettled = self._find_outside(step, function, known, [*results, *output_tensors], own, first, looking)
        self._shown[id(function), self.needs] = needs, structure, output_needs
        if looking is not None:
            self._learn(function, known, looking)
        self.leaves = without_history(leaves, chain.places)
        if structure is not None:
            self.outputs.append((structure, without_history(outputs, structure.tensors), output_needs))
        if hold:
            inner = {} if stand_ins is None else stand_ins.leaves
            self.held[step] = Ran(step, given, results, output_tensors, inner, first)
        del leaves, stand_ins, results, output_tensors, outputs, output, given
        # A leaf that the step has made for itself is gone with its graph.
        for reference in unsettled:
            leaf = reference()
            if leaf is not None:
                self._found(leaf)
        self.value = chain.structure.build(self.leaves)
        self._arrive(step + 1, needs)

    def _meet(self, function: Callable[[Any], Any]) -> StepOf:
        step: StepOf = self.chain.meet(function).step
        if id(function) not in self._met:
            self._met.add(id(function))
            if step.is_loose or not step.is_looked_at:
                self._new[id(function)] = step
            self.slots.learn((tensor, copies([tensor])[0] if is_read else None) for tensor, is_read in step.changed())
            self._look_around(function)
        return step

    def _look_around(self, function: Callable[[Any], Any]) -> None:
        """Note what a function has, and may read in another step than the one that is looked at."""
        chain = self.chain
        is_repeated = chain.is_repeated(function)
        if not is_repeated and isinstance(function, torch.nn.Module):
            modules = chain.meet(function).modules()
            if len(modules) == 1:  # it has no others inside, or very many
                self._note_others(function.buffers())
            for module in modules if len(modules) > 1 else ():  # faster than `buffers()`
                self._note_others(buffer for buffer in own_tensors(module)[1].values() if buffer is not None)
            return
        found = reachable(function) if is_repeated else self._search.new_in(function)
        self._note_others(tensor for tensor in found if not tensor.requires_grad)
        if is_repeated:
            of_function = chain.known[id(function)]
            if not of_function.step.is_looked_at and can_be_recorded():
                self._unseen[id(function)] = {
                    storage_key(buffer) for root in of_function.roots() for buffer in root.buffers()
                }
            self._unread[id(function)] = {
                edge: tensor
                for tensor in found
                if tensor.requires_grad and (edge := edge_of(tensor)) not in chain.outside
            }

    def _note_others(self, tensors: Iterable[Tensor]) -> None:
        others = {id(tensor): tensor for tensor in tensors if id(tensor) not in self._other_versions}
        self._other_versions.update(zip(others, versions_of(list(others.values())), strict=True))
        self.chain.others.update(others)

    def _end_looking(self) -> None:
        """All steps have been run: note what was not seen to change, and did."""
        for step in self._new.values():
            step.is_looked_at |= can_be_recorded()
        self._find_late_changes()

    def _find_late_changes(self) -> None:
        chain = self.chain
        now = versions_of(list(chain.others.values()))
        for (place, tensor), version in zip(chain.others.items(), now, strict=True):
            if version != self._other_versions[place] and chain.hidden.add(tensor, is_read=False):
                chain.late[place] = tensor

    def _find_outside(
        self,
        step: int,
        function: Callable[[Any], Any],
        known: StepOf,
        tensors: list[Tensor],
        own: set[int],
        first: int,
        looking: Looking | None,
    ) -> list[weakref.ref[Tensor]]:
        """Note the tensors from outside that lead to these; gives the leaves of which it is not known yet."""
        leaves, edges = leads_to([tensor for tensor in tensors if tensor.requires_grad], first)
        unsettled = []
        for leaf in leaves:
            if id(leaf) in self.chain.outside or id(leaf) in own:
                continue
            if isinstance(leaf, torch.nn.Parameter):
                self._found(leaf)
            else:
                unsettled.append(weakref.ref(leaf))
        for edge in edges:
            if edge not in self.chain.outside:
                known.has_history = True
                self._found(self._tensor_at(step, function, edge, looking))
        return unsettled

    def _found(self, tensor: Tensor) -> None:
        self.chain.outside.add(tensor)
        edge = edge_of(tensor)
        for unread in self._unread.values():
            unread.pop(edge, None)

    def _tensor_at(self, step: int, function: Callable[[Any], Any], edge: Edge, looking: Looking | None) -> Tensor:
        """The tensor from outside that an edge belongs to."""
        tensor = None if looking is None else looking.edges.get(edge)
        if tensor is None:
            tensor = self._unread.get(id(function), {}).get(edge)
        if tensor is None:
            having = (one for one in reachable(function) if one.requires_grad)
            tensor = next((one for one in having if edge_of(one) == edge), None)
        if tensor is None:
            raise _errors.unknown_history(self.chain.describe(step), edge[0])
        return tensor

    def _learn(self, function: Callable[[Any], Any], known: StepOf, looking: Looking) -> None:
        """Note what a step has been seen to change in place."""
        chain = self.chain
        own = {storage_key(self.leaves[place]) for place in chain.places}
        of_function = chain.known[id(function)]
        changes = looking.changes(of_function.roots(), own)
        unseen = self._unseen.get(id(function))
        if unseen:
            unseen -= {read.memory for read in looking.reads.values()} | looking.writes.keys()
        known.learn(of_function, changes)
        for tensor, is_read in changes:
            if (
                is_read and self.state and chain.hidden.is_only_written(tensor)
            ):  # by a step before, from what is not known
                self._note_others([tensor])
                chain.late[id(tensor)] = tensor
        self.slots.learn(
            (write.alias, write.before if write.is_read and write.matters else None)
            for write in looking.writes.values()
        )

    # --- What steps give besides ---

    def _take_output(self, output: Any) -> tuple[Structure | None, list[Any]]:
        if not self.chain.options.outputs:
            return None, []
        structure = self._output
        if structure is not None:
            try:
                return structure, structure.leaves(output)
            except Mismatch:
                pass
        structure = self._output = Structure(output)
        return structure, structure.leaves(output)

    def _note_output(self, output: Any, shown: Structure | None, needs: Needs) -> None:
        structure, leaves = self._take_output(output)
        assert structure is not None
        if structure is not shown:  # it is another one from step to step
            needs = tuple(can_need_grad(leaves[place]) for place in structure.tensors)
        self.outputs.append((structure, without_history(leaves, structure.tensors), needs))


def can_need_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def look_at(chain: Chain, leaves: list[Any], *, closely: bool) -> Look:
    """What is compared when the state is reached again; `closely` with its values."""
    tensors = [leaves[place] for place in chain.places]
    digests = tuple(map(digest, tensors)) if closely and can_be_recorded() else None
    return Look(tuple(map(signature, tensors)), digests)

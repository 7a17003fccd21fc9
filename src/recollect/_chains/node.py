"""The node of autograd's graph that a chain is, and how a chain is run from its first state to its results.

Hooks around a chain (a region that it is in, `save_on_cpu`) own what it keeps: its first state goes to them before a
step is run, as a region's inputs do, nothing else is kept, and a pass begins with the first state again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import Undo, restore, undo_all
from recollect._chains.chain import Chain
from recollect._chains.first import FirstRun
from recollect._chains.kept import Kept, Slots
from recollect._chains.later import Pass
from recollect._chains.notes import stepping
from recollect._chains.outside import ReadingValues
from recollect._engine.replay import set_modes
from recollect._guards import Reading, name_of
from recollect._inputs import versions_of
from recollect._optimizers import Steps, stepped_since
from recollect._schedules.actions import Action
from recollect._torch import (
    graph_is_kept,
    hooks_on,
    never_look_into,
    pop_hooks,
    push_hooks,
    set_grad_enabled,
    top_hooks,
)

Actions = Callable[[], Iterable[Action]]


def run(chain: Chain, first: Callable[[FirstRun], None], actions: Actions) -> Any:
    """Run a chain for the first time, as `first` says; passes that begin anew carry out `actions`."""
    hooks = top_hooks()
    if hooks is not None:
        chain.hand_over(hooks)
        push_hooks(_detach, _identity)  # what a step saves while it is looked at is none of theirs
    try:
        with stepping(chain.notes, is_again=False) as steps:
            run = FirstRun(chain, steps, keeps=hooks is None)
            first(run)
    finally:
        if hooks is not None:
            pop_hooks()
        chain.forget_casts()  # what comes after the chain shall not find them
    chain.first_run_ended()
    results = _results(chain, run, actions)
    if hooks is not None:
        chain.start = Kept([], (), chain.start.hidden, None)
    return results


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _results(chain: Chain, run: FirstRun, actions: Actions) -> Any:
    """What the chain gives, as results of its node, if anything needs grad."""
    values: list[Tensor] = []
    needs: list[bool] = []
    of: dict[int, int] = {}
    leaves = list(run.leaves)

    def add(tensor: Tensor, needed: bool) -> int:
        # Another tensor over the same memory: the node, which is to be its history, holds the one that is kept.
        values.append(tensor.detach())
        needs.append(needed)
        return len(values) - 1

    for place, needed in zip(chain.places, run.needs, strict=True):
        tensor = leaves[place]
        if id(tensor) not in of:
            of[id(tensor)] = add(tensor, needed)
    output_needs = [those for _, _, those in run.outputs]
    outputs = [
        (structure, each, [add(each[place], needed) for place, needed in zip(structure.tensors, those, strict=True)])
        for structure, each, those in run.outputs
    ]
    places = [of[id(leaves[place])] for place in chain.places]
    run.outputs = []
    if any(needs):
        chain.note_outputs(output_needs)
        first = chain.needs[0]
        inputs = [tensor for tensor, needed in zip(chain.tensors, first, strict=True) if needed]
        inputs += chain.outside.tensors
        if inputs:
            values = list(_Node.apply(chain, actions, places, values, needs, *inputs))
    for place, index in zip(chain.places, places, strict=True):
        leaves[place] = values[index]
    state = chain.structure.build(leaves)
    if not chain.options.outputs:
        return state
    given = []
    for structure, each, indices in outputs:
        for place, index in zip(structure.tensors, indices, strict=True):
            each[place] = values[index]
        given.append(structure.build(each))
    return state, given


class _Node(torch.autograd.Function):
    @staticmethod
    @never_look_into
    def forward(
        ctx: Any, chain: Chain, actions: Actions, places: list[int], values: list[Tensor], needs: list[bool], *_: Tensor
    ) -> Any:
        ctx.chain = chain
        ctx.actions = actions
        ctx.places = places
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value, needed in zip(values, needs, strict=True) if not needed))
        if chain.inputs is None:
            # So that a graph that is freed stays so, with autograd's own error.
            ctx.save_for_backward(
                *([one for one in chain.tensors if not one.is_inference()] or chain.outside.tensors[:1])
            )
        return tuple(values)

    @staticmethod
    @never_look_into
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        chain: Chain = ctx.chain
        if torch.is_grad_enabled():
            raise _errors.chain_differentiated_twice()
        if chain.inputs is None and not chain.is_released:
            _ = ctx.saved_tensors
        if chain.is_released:
            raise _errors.chain_freed()
        return None, None, None, None, None, *_run_pass(chain, ctx.next_functions, ctx.actions, ctx.places, grads)


def _run_pass(
    chain: Chain, edges: Any, actions: Actions, places: list[int], grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    if all(grad is None for grad in grads):
        return [None] * len(edges)
    _check_outside(chain)
    count = max(places, default=-1) + 1
    # A tensor that stands in two places of the last state has its gradient in the first.
    of_state = [None if place in places[:index] else grads[place] for index, place in enumerate(places)]
    run = Pass(chain, edges, of_state, list(grads[count:]))
    pending = chain.take_pending()
    undo: list[Undo] = []
    try:
        set_modes(undo)
        set_grad_enabled(False)
        _put_hooks_aside(chain, undo)
        chain.ambient.restore(undo)
        buffers = chain.hidden.restore()
        if buffers is not None:
            undo.append(buffers)
        restore(chain.state, undo)
        changed = chain.changed_others()
        reading = Reading(changed) if changed else None
        late = ReadingValues(chain.late.values()) if chain.late else None
        with (
            reading or contextlib.nullcontext(),
            late or contextlib.nullcontext(),
            stepping(chain.notes, is_again=True) as run.steps,
        ):
            if pending is not None:
                run.looks = pending.looks
                if pending.running is not None:
                    run.begin(pending.running)
                    pending.running = None
                run.carry_out(pending.actions, pending.slots, pending.held)
            else:
                slots = Slots(chain.places, chain.hidden, chain.stores, chain.start)
                run.begin(chain.first_state())
                run.carry_out(iter(actions()), slots, {})
    finally:
        chain.forget_casts()
        undo_all(undo)
    if reading is not None and reading.found is not None:
        raise _changed(chain, reading.found, _errors.weight_changed)
    if late is not None and late.found is not None:
        raise _errors.late_change(chain.describe(0), _name_of(chain, late.found))
    found = [grad for grad, needed in zip(run.grads, chain.needs[0], strict=True) if needed]
    if run.has_compared and chain.compares_values():
        for known in chain.known.values():
            known.step.is_verified = True
    result = [*found, *run.outside]
    if not graph_is_kept():
        chain.release()
    return result


def _check_outside(chain: Chain) -> None:
    """Raise if something that steps read from outside was changed since the first run."""
    tensors = chain.outside.tensors
    changed = None
    if versions_of(tensors) != chain.outside_versions:
        pairs = zip(tensors, versions_of(tensors), chain.outside_versions, strict=True)
        changed = next(tensor for tensor, now, then in pairs if now != then)
        error = _errors.weight_changed
    elif Steps.count != chain.steps_then:
        stepped = stepped_since(chain.steps_then)
        changed = next((tensor for tensor in tensors if id(tensor) in stepped), None)
        error = _errors.weight_stepped
    if changed is not None:
        raise _changed(chain, changed, error)


def _changed(chain: Chain, tensor: Tensor, error: Callable[[str, str], Exception]) -> Exception:
    return error(f"that is {chain.describe(0)}", _name_of(chain, tensor))


def _name_of(chain: Chain, tensor: Tensor) -> str:
    return name_of(tensor, [root for known in chain.known.values() for root in known.roots()])


def _put_hooks_aside(chain: Chain, undo: list[Undo]) -> None:
    """Let hooks on tensors from outside not see the gradients of single steps."""
    for tensor in chain.outside.tensors:
        hooks = hooks_on(tensor)
        if hooks is not None:
            undo.append(partial(hooks.update, dict(hooks)))
            hooks.clear()

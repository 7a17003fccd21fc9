"""One replay: run a region's function again and put what it saves into the slots of its frame.

Theory. Autograd asks a function's operators to save tensors in a fixed order; the frame numbered its slots in that
order. A replay runs the function under hooks that count the same way: the i-th tensor packed belongs to slot i. So
nothing is looked up, and a slot that has died in the meantime is passed over.

The stop (rule 5). Once the last slot that is still alive has its tensor, nothing further is of use, and `Stop` is
raised from the pack hook, through whatever the function is doing. Which kind of exception? One derived from
Exception would end in the `except Exception` of user code and set off its fallback; one that is not derived from it
makes `Module.__call__` leave out its always_call hooks. Here it is a BaseException, and those hooks are run from
its traceback. The exception that arrives is not believed (TorchScript replaces it, user code may wrap it):
the state of the replay is set before it is raised, and that alone tells.

Stopping exactly. An operator packs its inputs before its kernel runs, so the stop saves that kernel. One operator
also packs memory that its kernel has yet to write: rrelu its noise, before its input, and of the same shape. If that is
what the last two tensors look like, and the node that asks for them does not say otherwise, the stop waits until this
operator has ended. Outputs are packed when they have been computed, and last.

What this is not: it does not decide when to replay or who gets the result (frame.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from torch import (
    Tensor,
    inference_mode,
    is_anomaly_check_nan_enabled,
    is_anomaly_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    set_anomaly_enabled,
)

from recollect import _errors
from recollect._ambient import Undo, restore, undo_all
from recollect._digest import copies
from recollect._engine.calls import ModuleFunction, call_for_replay, take_off
from recollect._engine.scope import Scope, here
from recollect._engine.selective import let_go, replay_mode
from recollect._errors import Signature
from recollect._inputs import Arguments, by_hand
from recollect._kept import Slot
from recollect._torch import (
    current_group,
    current_node,
    graph_is_kept,
    may_be_unfilled,
    packs_what_is_written,
    push_hooks,
    run_cut_short_hooks,
    sequence_number,
    set_current_group,
    set_grad_enabled,
    storage_key,
    version_of,
)
from recollect._verify import OperatorTrace, first_difference, signatures_of, traces_start_here

if TYPE_CHECKING:
    from recollect._engine.frame import Frame
    from recollect._guards import Reading


def find_alive(slots: list[Slot]) -> list[bool]:
    """For each slot whether somebody holds it besides the list."""
    return [count > _ONLY_IN_THE_LIST for count in map(getrefcount, slots)]


_ONLY_IN_THE_LIST = next(map(getrefcount, [Slot(0)]))


class Stop(BaseException):
    """Everything that is still needed has been recovered. A new object each time: its traceback holds frames."""


class Replay:
    """What one replay recovered, for one pass. A tensor is None once handed over, and where its slot was dead."""

    __slots__ = ("grouped", "stopped", "tensors", "trace", "versions")

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self.versions: dict[int, int] = {}  # of each tensor when it was saved, where it was not 0
        self.trace: OperatorTrace | None = None
        self.stopped = False  # before the function had come to its end
        self.grouped = False  # for the pass of a group rather than of one backward


_RUNNING, _STOP_IS_DUE, _COMPLETE = range(3)


def run_replay(frame: Frame, arguments: Arguments, only: Slot | None = None) -> Replay:
    """Run the function on `arguments` and recover the tensors of the slots that are alive, or of `only` that one."""
    replay = Replay()
    tensors, versions = replay.tensors, replay.versions
    slots, signatures, options = frame.slots, frame.signatures, frame.options
    known = len(slots)
    alive = find_alive(slots) if only is None else [slot == only for slot in slots]
    last = known - 1 - alive[::-1].index(True)  # the slot that is asked for is alive
    # Rule 6: inside an unfinished forward the number of slots is not final, and what lies beyond them is none of this
    # replay's concern.
    finished = frame.finished
    early_stop = options.early_stop or only is not None or not finished

    trace = replay.trace = OperatorTrace() if frame.trace is not None else None
    verification = frame.verification if finished else None
    recorder = reading = leaves = probe = None
    guarded: Container[int] = ()
    put_back: Container[int] = ()
    strangers: list[tuple[int, weakref.ref[Tensor]]] = []  # what stands where the forward saved another leaf
    if verification is not None:
        verification.check(frame.region)
        leaves = verification.leaves
        guarded = leaves.by_slot
        reading = verification.suspects()
        put_back = verification.memory_put_back()
        probe = verification.probe()
        if only is None:
            recorder = verification.new_record()
    state = _RUNNING
    stop: Stop | None = None
    surplus = 0
    unfilled = -1  # the last tensor that may be unfilled memory
    operator = -1  # autograd's number for the operator that packed it, or that the stop is waiting for

    def pack(tensor: Tensor) -> Tensor:
        nonlocal unfilled, operator
        index = len(tensors)
        if index in guarded and leaves is not None and leaves.is_another(index, tensor):
            strangers.append((index, weakref.ref(tensor if tensor._base is None else tensor._base)))
        if tensor.requires_grad:
            # The graph of the replay must not outlive it.
            kept = tensor.detach()
        else:
            kept = tensor
            if index >= last - 1 and state == _RUNNING and may_be_unfilled(tensor):
                unfilled, operator = index, sequence_number()
        if index <= last:
            try:
                if kept._version:
                    versions[index] = kept._version
            except RuntimeError:
                pass
            tensors.append(kept if alive[index] else None)
            if index < last:
                return kept
            if reading is not None:
                reading.paused = True  # what is computed from here on is of no use
        end_if_complete(index)
        return kept

    def end_if_complete(index: int) -> None:
        nonlocal state, stop, surplus
        if not early_stop:
            surplus += index > last
        elif state != _COMPLETE:
            # What is packed by hand is packed by no operator: an inner region's inputs, written long ago.
            runs_on = operator == sequence_number() and not by_hand.packing
            if runs_on and (state == _STOP_IS_DUE or is_unfilled(index)):
                state = _STOP_IS_DUE
            else:
                state, stop = _COMPLETE, Stop()
                raise stop

    def is_unfilled(index: int) -> bool:
        if unfilled == index:  # nothing after it can tell; it is looked at more closely only if it alone is asked for
            return only is not None
        if unfilled != index - 1 or signatures[index] != signatures[unfilled]:
            return False
        return not packs_what_is_written(current_node(), slots[index])

    undo: list[Undo] = []
    try:
        _set_modes(undo)
        restore(frame.ambient, undo)
        if verification is not None:
            restore(verification.state(), undo)
        hook: Callable[[Tensor], Tensor] = pack if trace is None else trace.without(pack)
        if recorder is not None:
            hook = recorder.saving(hook)
        around = here.scope
        by_hooks = type(frame.function) is ModuleFunction
        if not by_hooks:
            undo.append(partial(take_off, hook))
            push_hooks(hook, _identity)
        undo.append(partial(setattr, here, "scope", around))
        if around is not None:
            undo.append(partial(_resume, around.pause()))
        scope = here.scope = Scope(frame, hook, lambda: len(tensors) + surplus, around, replaying=True)
        scope.recorder, scope.trace = recorder, trace
        if by_hooks:
            call_for_replay(scope, arguments, partial(_contexts, scope, reading))
        else:
            _call(scope, arguments, reading)
    except BaseException as error:
        # Neither an error of the function nor Ctrl-C while the stop was on its way may be lost.
        if state != _COMPLETE or not isinstance(error, (Stop, Exception)):
            if verification is not None and recorder is not None and isinstance(error, Exception):
                _errors.add_note(error, frame.region(), verification.explain(recorder, stopped=True))
            raise
    finally:
        try:
            if stop is not None:
                run_cut_short_hooks(stop.__traceback__)
        finally:
            if stop is not None:
                # Both hold the frames that hold it: the context is an exception in whose handler it was raised.
                stop.__traceback__ = stop.__context__ = None
            if put_back:
                _copy_what_changes_again(replay, put_back)
            undo_all(undo)
    if recorder is not None:
        recorder.ended()
    if verification is not None and probe is not None and (moved := probe.moved()):
        verification.has_drawn(frame.region(), moved)
    if verification is not None and reading is not None and reading.found is not None:
        raise verification.reads_what_changed(frame.region(), reading.found)

    count = len(tensors) + surplus
    mismatches: list[tuple[int, Signature, Signature]] = []
    if options.determinism_check != "none":
        found = signatures_of(tensors)
        if found != signatures[: len(found)]:
            pairs = enumerate(zip(signatures, found, strict=False))
            mismatches = [(i, then, now) for i, (then, now) in pairs if now is not None and now != then]
    replay.stopped = state == _COMPLETE
    if finished and not (frame.kept_outputs is None is frame.kept_regions) and not graph_is_kept():
        let_go(frame)
    if frame.kept_regions is not None:
        missed = frame.kept_regions.replay_ended(len(tensors))
        if missed is not None and finished:
            raise _errors.other_regions(frame.region(), missed)
    ended = state == _RUNNING  # by itself, before the last slot or because early stop is off
    fewer = ended and (count <= last or (finished and count < known))
    more = ended and finished and count > known
    if fewer or more or mismatches:
        details = describe_difference(frame, replay)
        slot = mismatches[0][0] if mismatches else min(count, known)
        finding = None if verification is None else verification.explain(recorder, slot, stopped=replay.stopped)
        count = count if fewer or more else known
        raise _errors.different_replay(frame.region(), known, count, mismatches, details, finding, frame.place())
    if verification is not None:
        if strangers:
            verification.another_leaf(frame.region(), strangers)
        verification.leaves.note_versions()  # what the function itself changes is its own affair
        if recorder is not None and (
            unequal := verification.replay_ended(recorder, alive, [then[1] for then in signatures])
        ):
            details = describe_difference(frame, replay)
            finding = verification.explain(recorder, unequal.slot, stopped=replay.stopped)
            then = signatures[unequal.slot]
            raise _errors.different_values(frame.region(), known, unequal, then, details, finding, frame.place())
    return replay


def describe_difference(frame: Frame, replay: Replay) -> str:
    """What `debug=True` adds to an error: the operators of both passes and where they part."""
    if frame.trace is None or replay.trace is None:
        return ""
    return first_difference(frame.trace.operators, replay.trace.operators, stopped=replay.stopped)


def _copy_what_changes_again(replay: Replay, memory: Container[int]) -> None:
    """Recover a buffer that is put back when the replay has ended as a copy, unless the function has changed it."""
    for index, tensor in enumerate(replay.tensors):
        if tensor is not None and storage_key(tensor) in memory:
            if version_of(tensor) == replay.versions.pop(index, 0):
                (replay.tensors[index],) = copies([tensor])
            else:
                replay.versions[index] = -1  # so that it is refused


def _identity(packed: Tensor) -> Tensor:
    return packed


def _set_modes(undo: list[Undo]) -> None:
    """Grad mode is on in a replay, whatever it is around it, and inference mode, which would override it, off."""
    if is_inference_mode_enabled():
        normal = inference_mode(False)
        normal.__enter__()
        undo.append(lambda: normal.__exit__(None, None, None))
    if not is_grad_enabled():
        undo.append(_grad_mode_off)
        set_grad_enabled(True)
    group = current_group()
    if group is not None:  # a group around this backward is none of the function's concern
        undo.append(partial(set_current_group, group))
        set_current_group(None)
    if is_anomaly_enabled():
        # Under it every node holds the node that runs when it is made: the replay's graph would hold the forward's.
        undo.append(partial(set_anomaly_enabled, True, is_anomaly_check_nan_enabled()))
        set_anomaly_enabled(False)


def _resume(modes: list[Any]) -> None:
    for mode in modes:
        mode.paused = False


def _grad_mode_off() -> None:
    set_grad_enabled(False)


@traces_start_here
def _call(scope: Scope, arguments: Arguments, reading: Reading | None) -> None:
    frame = scope.frame
    args, kwargs = arguments
    if all(one is None for one in (frame.replay_context, scope.trace, frame.kept_outputs, scope.recorder, reading)):
        frame.function(*args, **kwargs)
        return
    with _contexts(scope, reading):
        frame.function(*args, **kwargs)


def _contexts(scope: Scope, reading: Reading | None) -> contextlib.ExitStack:
    """What is around a function in its replay, entered."""
    frame = scope.frame
    with contextlib.ExitStack() as stack:  # leaves those already entered if one fails to enter
        if frame.replay_context is not None:
            stack.enter_context(frame.replay_context)
        for mode in (replay_mode(frame.options.policy, scope), scope.trace, reading, scope.recorder):
            if mode is not None:
                stack.enter_context(mode)
        return stack.pop_all()


def or_nothing(context: contextlib.AbstractContextManager[Any] | None) -> contextlib.AbstractContextManager[Any]:
    """`context` where there is one."""
    return contextlib.nullcontext() if context is None else context

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
from collections.abc import Callable, Container, Sequence
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

from recollect import _errors, _faults
from recollect._ambient import Undo, restore, undo_all
from recollect._digest import copies
from recollect._engine.calls import ModuleFunction, call_for_replay, take_off
from recollect._engine.scope import Scope, here
from recollect._engine.selective import let_go, replay_mode
from recollect._inputs import Arguments, by_hand
from recollect._kept import FIRST_SLOT
from recollect._torch import (
    current_group,
    current_node,
    dispatch_mode_count,
    graph_is_kept,
    may_be_unfilled,
    packs_what_is_written,
    process_groups,
    push_hooks,
    run_cut_short_hooks,
    sequence_number,
    set_current_group,
    set_grad_enabled,
    storage_key,
    unseen,
    version_of,
)
from recollect._verify import Mismatch, OperatorTrace, find_mismatches, first_difference, traces_start_here

if TYPE_CHECKING:
    from recollect._engine.frame import Frame
    from recollect._engine.groups import Shared
    from recollect._guards import Reading
    from recollect._record import Recorder
    from recollect._verification import Inspection


def find_alive(slots: list[int]) -> bytes:
    """For each slot whether somebody holds it besides the list."""
    return bytes(map(_is_held, map(getrefcount, slots)))


_is_held: Callable[[int], bool] = next(map(getrefcount, [FIRST_SLOT + len("a")])).__lt__


class Stop(BaseException):
    """Everything that is still needed has been recovered. A new object each time: its traceback holds frames."""


_RUNNING, _STOP_IS_DUE, _COMPLETE = range(3)


class Replay:
    """One replay, for one pass: how far its run has come, and what it recovered."""

    # Defaults on the class: most of them are never set.
    trace: OperatorTrace | None = None
    shared: Shared | None = None  # by the calls of a group, if it is for such a pass
    state = _RUNNING
    stop: Stop | None = None
    surplus = 0  # how many tensors were packed after the last that is needed
    unfilled = -1  # the last tensor that may be unfilled memory
    operator = -1  # autograd's number for the operator that packed it, or that the stop is waiting for
    reading: Reading | None = None
    # What stands where the forward saved another leaf.
    strangers: tuple[tuple[int, weakref.ref[Tensor]], ...] = ()

    def __init__(self, frame: Frame, only: int | None) -> None:
        self.tensors: list[Tensor | None] = []  # None once handed over, and where the slot was dead
        self.versions: dict[int, int] = {}  # of each tensor when it was saved, where it was not 0
        self.slots = slots = frame.slots
        self.signatures = frame.signatures
        self.only = only
        self.alive = alive = find_alive(slots) if only is None else bytes(index == only for index in range(len(slots)))
        self.last = last = alive.rindex(1)  # the slot that is asked for is alive
        # Rule 6: inside an unfinished forward the number of slots is not final, and what lies beyond them is none of
        # this replay's concern.
        self.stops_early = frame.options.early_stop or only is not None or not frame.finished
        self.special = {last - 1, last, last + 1}  # the numbers of the tensors for which there is more to do
        if 0 in alive:
            self.special.update(index for index, one in enumerate(alive) if not one)

    def __call__(self) -> None:
        """The pass has ended: drop what nobody took. Who owns the pass may live on."""
        self.tensors.clear()

    @property
    def stopped(self) -> bool:
        """Before the function had come to its end."""
        return self.state == _COMPLETE

    def packed(self) -> int:
        """How many tensors the function has packed so far."""
        return len(self.tensors) + self.surplus

    def met(self, index: int, tensor: Tensor) -> None:
        """Take note of another leaf than the forward saved, or of a view of one."""
        if index <= self.last:  # what comes later is not counted, and has no number of its own
            self.strangers += ((index, weakref.ref(tensor if tensor._base is None else tensor._base)),)

    def pack(self, index: int, tensor: Tensor) -> Tensor:
        """Do all that may have to be done when a tensor is packed."""
        last = self.last
        if tensor.requires_grad:
            # The graph of the replay must not outlive it.
            kept = tensor.detach()
        else:
            kept = tensor
            if index >= last - 1 and self.state == _RUNNING and may_be_unfilled(tensor):
                self.unfilled, self.operator = index, sequence_number()
        if index <= last:
            if version := version_of(kept):
                self.versions[index] = version
            self.tensors.append(kept if self.alive[index] else None)
            if index < last:
                return kept
            if self.reading is not None:
                self.reading.paused = True  # what is computed from here on is of no use
        if not self.stops_early:
            self.surplus += index > last
        elif self.state != _COMPLETE:
            if self.operator >= 0 and self._waits(index):
                self.state = _STOP_IS_DUE
            else:
                self.state, self.stop = _COMPLETE, Stop()
                raise self.stop
        return kept

    def _waits(self, index: int) -> bool:
        # What is packed by hand is packed by no operator: an inner region's inputs, written long ago.
        runs_on = self.operator == sequence_number() and not by_hand.packing
        return runs_on and (self.state == _STOP_IS_DUE or self._is_unfilled(index))

    def _is_unfilled(self, index: int) -> bool:
        unfilled, signatures = self.unfilled, self.signatures
        if unfilled == index:  # nothing after it can tell; it is looked at more closely only if it alone is asked for
            return self.only is not None
        if unfilled != index - 1 or signatures[index] != signatures[unfilled]:
            return False
        return not packs_what_is_written(current_node(), self.slots[index])


def run_replay(frame: Frame, arguments: Arguments, only: int | None = None) -> Replay:
    """Run the function on `arguments` and recover the tensors of the slots that are alive, or of `only` that one."""
    if process_groups:
        _faults.replaying(frame.function, frame.options.name)
    replay = Replay(frame, only)
    tensors, versions, special = replay.tensors, replay.versions, replay.special
    verification = frame.verification if frame.finished else None
    inspection = None
    if verification is not None:
        inspection = verification.inspection(frame.region, arguments, compares=only is None)
    leaves = None if verification is None else verification.leaves
    leaf_at = {} if leaves is None else leaves.by_slot
    add = tensors.append

    def pack(tensor: Tensor) -> Tensor:
        index = len(tensors)
        if index in leaf_at and leaf_at[index]() is not tensor and leaves.is_another(index, tensor):  # type: ignore[union-attr]
            replay.met(index, tensor)
        if index in special:
            return replay.pack(index, tensor)
        kept = tensor.detach() if tensor.requires_grad else tensor
        try:
            if kept._version:
                versions[index] = kept._version
        except RuntimeError:
            pass
        add(kept)
        return kept

    hook: Callable[[Tensor], Tensor] = pack
    function, around = frame.function, here.scope
    by_hooks = type(function) is ModuleFunction
    undo: list[Undo] = []
    try:
        set_modes(undo)
        frame.ambient.restore(undo)
        if verification is not None and verification.state:
            restore(verification.state, undo)
        if around is not None:
            undo.append(partial(_resume, around.pause()))
        if is_bare(frame) and inspection is None and not by_hooks:
            here.scope = Scope(frame, hook, replay.packed, around, True)
            push_hooks(hook, _identity)
            args, kwargs = arguments
            function(*args, **kwargs)
        else:
            hook = _looking(pack, frame, replay, inspection)
            here.scope = scope = Scope(frame, hook, replay.packed, around, True)
            scope.trace = replay.trace
            scope.recorder = None if inspection is None else inspection.recorder
            _call(scope, arguments, replay.reading)
    except BaseException as error:
        # Neither an error of the function nor Ctrl-C while the stop was on its way may be lost.
        if replay.state != _COMPLETE or not isinstance(error, (Stop, Exception)):
            if verification is not None and inspection is not None and isinstance(error, Exception):
                _errors.add_note(error, frame.region(), verification.explain(inspection.recorder, stopped=True))
            raise
    finally:
        try:
            if replay.stop is not None:
                run_cut_short_hooks(replay.stop.__traceback__)
        finally:
            if replay.stop is not None:
                # Both hold the frames that hold it: the context is an exception in whose handler it was raised.
                replay.stop.__traceback__ = replay.stop.__context__ = None
            if inspection is not None and verification is not None:
                if memory := inspection.memory_that_changes_again():
                    _copy_what_changes_again(replay, memory)
                undo.append(partial(verification.put_back, inspection))
            try:
                take_off(hook)
                here.scope = around
            finally:
                undo_all(undo)
    if verification is not None and inspection is not None:
        verification.inspected(frame.region, inspection)
    if not (frame.kept_outputs is None is frame.kept_regions):
        _let_go_of_kept(frame, replay)
    # Rule 8.
    mismatches = find_mismatches(tensors, frame.signatures) if frame.options.determinism_check != "none" else ()
    recorder = None if inspection is None else inspection.recorder
    if mismatches or replay.state == _RUNNING:
        _compare(frame, replay, mismatches, recorder)
    if leaves is not None and verification is not None:
        if replay.strangers:
            verification.another_leaf(frame.region(), replay.strangers)
        leaves.replay_ended()
    if recorder is not None:
        _compare_values(frame, replay, recorder)
    return replay


def is_bare(frame: Frame) -> bool:
    """Whether nothing is to be entered around the function of a replay, nor around a part of it."""
    return frame.kept_outputs is None is frame.replay_context and frame.trace is None


def _looking(
    pack: Callable[[Tensor], Tensor], frame: Frame, replay: Replay, inspection: Inspection | None
) -> Callable[[Tensor], Tensor]:
    """The hook of a replay that is looked at more closely."""
    # Whether a run is compared shall make no difference to a mode that the function enters itself.
    compares = inspection is not None
    if not (compares or is_bare(frame) or dispatch_mode_count()) and _passes_over_detach(frame.replay_context):
        pack = unseen(pack)  # the modes to come are ours
    if frame.trace is not None:
        replay.trace = OperatorTrace()
        pack = replay.trace.without(pack)
    if inspection is not None:
        replay.reading = inspection.reading
        if inspection.recorder is not None:
            pack = inspection.recorder.saving(pack)
    return pack


def _passes_over_detach(context: object) -> bool:
    """Whether a user's context is none, or one that has no eye for what a hook does; its subclasses may have one."""
    return context is None or "passes_over_detach" in vars(type(context))


def _compare(frame: Frame, replay: Replay, mismatches: Sequence[Mismatch], recorder: Recorder | None) -> None:
    """Raise if the replay saved fewer or more tensors than the forward, or others."""
    count, known, finished = replay.packed(), len(frame.slots), frame.finished
    ended = replay.state == _RUNNING  # by itself, before the last slot or because early stop is off
    fewer = ended and (count <= replay.last or (finished and count < known))
    more = ended and finished and count > known
    if fewer or more or mismatches:
        slot = mismatches[0][0] if mismatches else min(count, known)
        verification = frame.verification if finished else None
        finding = None if verification is None else verification.explain(recorder, slot, stopped=replay.stopped)
        count = count if fewer or more else known
        details = describe_difference(frame, replay)
        raise _errors.different_replay(frame.region(), known, count, mismatches, details, finding, frame.place())


def _compare_values(frame: Frame, replay: Replay, recorder: Recorder) -> None:
    """Raise if a recovered tensor has other values than the forward saved."""
    verification, signatures = frame.verification, frame.signatures
    assert verification is not None  # it gave the recorder
    unequal = verification.replay_ended(recorder, replay.alive, [then[1] for then in signatures])
    if unequal is not None:
        details = describe_difference(frame, replay)
        finding = verification.explain(recorder, unequal.slot, stopped=replay.stopped)
        then, known = signatures[unequal.slot], len(frame.slots)
        raise _errors.different_values(frame.region(), known, unequal, then, details, finding, frame.place())


def _let_go_of_kept(frame: Frame, replay: Replay) -> None:
    """Drop what was kept and is not needed again; raise if the replay came by other named regions."""
    if frame.finished and not graph_is_kept():
        let_go(frame)
    if frame.kept_regions is not None:
        missed = frame.kept_regions.replay_ended(len(replay.tensors))
        if missed is not None and frame.finished:
            raise _errors.other_regions(frame.region(), missed)


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


def set_modes(undo: list[Undo]) -> None:
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


_grad_mode_off = partial(set_grad_enabled, False)


def _resume(modes: list[Any]) -> None:
    for mode in modes:
        mode.paused = False


@traces_start_here
def _call(scope: Scope, arguments: Arguments, reading: Reading | None) -> None:
    frame, (args, kwargs) = scope.frame, arguments
    if type(frame.function) is ModuleFunction:
        call_for_replay(scope, arguments, partial(_contexts, scope, reading))
        return
    push_hooks(scope.pack, _identity)
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

"""What a frame keeps to see, in a replay, that nothing has changed since its forward.

Guards are cheap and always there: weights, the modes of modules, the state that the function changes. A record is
costly, and there under `"values"` always, under `"first"` until a replay of the function has been compared and found
equal.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import Part
from recollect._differences import Finding, Unequal, explain, first_unequal
from recollect._generators import Probe
from recollect._guards import Gathers, Leaves, Reading, name_of
from recollect._inputs import Arguments, find_tensors, versions_of
from recollect._known import Known, known_of
from recollect._optimizers import Steps, stepped_among, stepped_since
from recollect._record import Recorder
from recollect._restored import Bindings, Buffers, Swapped, Training, lasting, put_back, swapping
from recollect._shards import is_gathered
from recollect._torch import can_be_recorded, level_of_user_code, storage_key, without_any_torch_function


class Inspection(NamedTuple):
    """What a replay is watched for."""

    recorder: Recorder | None  # if it is to be compared
    reading: Reading | None  # of what was changed since the forward, if anything was
    probe: Probe | None  # if it matters whether it draws random numbers
    put_back: set[int]  # the memory of the buffers that are changed again when it has ended
    learns: bool  # what it changes besides, which is put back too

    def memory_that_changes_again(self) -> set[int]:
        """The memory of all that is put back when the replay has ended."""
        return self.put_back.union(self.recorder.writes) if self.learns and self.recorder is not None else self.put_back


class Verification:
    """The guards of one frame, and its record."""

    # Defaults on the class: of most functions there is nothing of it to keep.
    leaves: Leaves | None = None
    record: Recorder | None = None
    state: tuple[Part, ...] = ()  # what is to be put back for a replay
    probe: Probe | None = None
    _drawn: Sequence[str] = ()
    _is_swapped = False
    _restores_buffers = False
    _flags: Sequence[bool] = ()  # the mode of the function's modules
    _bindings: Bindings | None = None  # of the buffers of those modules, until the forward has ended
    _quiet: Sequence[Tensor] = ()  # what the function is not known to change, until the forward has ended
    _versions: Sequence[int] = ()  # of that
    # Whether the forward did what no recorded one has done: its replay shows what that changes.
    _is_new = False
    _new_leaves: Sequence[weakref.ref[Tensor]] = ()
    # Whether the forward made buffers and changed them: the next one may do other things.
    _made_buffers = False

    def __init__(self, function: Callable[..., Any], known: Known, tensors: Sequence[Tensor], options: Any) -> None:
        self._function = function
        self._known = known
        self._options = options
        # Have a guard of their own, and may come back through hooks as other tensors.
        self._arguments = tensors
        self._steps = Steps.count
        if known.tree:
            modules = known.modules()
            training = Training(modules)
            self._flags = training.flags
            known.look_at_mode(training.flags)
            self.state = (training,)
            self._is_swapped = known.is_swapped(modules, putting=swapping.replays > 0)
            if self._is_swapped:
                self.state += (Swapped(modules),)
        if not known.gathers_are_known:
            self.state += (Gathers(known, partial(_errors.describe_function, function, options.name)),)

    def restore(self, buffers: Buffers | None) -> None:
        """Put buffers back for a replay."""
        if buffers is not None:
            self.state += (buffers,)
            self._restores_buffers = True

    def saved(self, slot: int, leaf: Tensor) -> None:
        """Take note of a leaf that needs grad and that the forward saved, itself or as a view."""
        leaves = self.leaves
        if leaves is None:
            leaves = self.leaves = Leaves(self._known)
        leaves.by_slot[slot] = weakref.ref(leaf)

    def forward_ended(self) -> None:
        """Take note of what the forward has shown."""
        arguments, self._arguments = self._arguments, ()  # not this guard's to keep
        record = self.record
        if self._quiet:
            now = versions_of(self._quiet)
            self._is_new = now != self._versions
            if self._is_new:
                pairs = zip(self._quiet, self._versions, now, strict=True)
                changed = [(tensor, True) for tensor, before, after in pairs if before != after]
                self._known.learn_changes(changed, [], [])
            self._quiet = ()
        if record is None and self.probe is None and self.leaves is None and not self._known.reads:
            return
        if self.leaves is None:
            self.leaves = Leaves(self._known)
        with without_any_torch_function():
            if self.probe is not None:
                self._look_at_generators(self.probe)
                self.probe = None
            if record is not None and record.results:
                self._learn(record, self.leaves, arguments)
            else:
                self._look_at_leaves(self.leaves.forward_ended(arguments, None))
        if record is not None:
            record.ended()

    def _learn(self, record: Recorder, leaves: Leaves, arguments: Sequence[Tensor]) -> None:
        known = self._known
        is_first = not known.is_recorded
        known.saves(leaves.forward_ended(arguments, record).values())
        read = leaves.read()
        known.saves(one for one in read if one.requires_grad)
        made = record.made_and_changed()
        record.ended()
        known.learn(read, self._changes(record), record.called())
        if self._bindings is not None:
            known.rebound = self._bindings.changed()
            self._restore_bindings(self._bindings)
        modules = known.modules()
        self._flags = [module.training for module in modules]
        known.look_at_mode(self._flags)
        self.restore(Buffers.recorded(record))
        buffers = [one for module in modules for one in module.buffers(recurse=False) if storage_key(one) in made]
        if buffers and is_first:
            self._made_buffers = True
            self.restore(Buffers([weakref.ref(one) for one in buffers], [None] * len(buffers)))

    def _changes(self, record: Recorder) -> list[tuple[Tensor, bool]]:
        return [(tensor, write.is_read) for tensor, write in lasting(record, self._known.roots())]

    def bind(self, modules: Sequence[torch.nn.Module]) -> None:
        """Notice which buffers the forward puts in the place of others, or restore those that it is known to."""
        bindings = Bindings(modules)
        if self.record is not None and self.record.results:
            self._bindings = bindings
        else:
            self._restore_bindings(bindings)

    def _restore_bindings(self, bindings: Bindings) -> None:
        part = bindings.of(self._known.rebound)
        if part is not None:
            self.state += (part,)

    def watch(self, quiet: Sequence[Tensor]) -> None:
        """Notice if the forward changes one of these."""
        self._quiet, self._versions = quiet, versions_of(quiet)

    def _look_at_leaves(self, leaves: Mapping[int, Tensor]) -> None:
        known = self._known
        if known.is_recorded and self._options.determinism_check != "default" and known.takes_a_new_way(leaves):
            new = [leaf for place, leaf in leaves.items() if place not in known.familiar]
            # What is gathered from shards may be another tensor each time.
            self._new_leaves = [weakref.ref(leaf) for leaf in new if not is_gathered(leaf)]
            self._is_new = self._is_new or bool(self._new_leaves)

    def _look_at_generators(self, probe: Probe) -> None:
        moved, preserved = probe.moved(), self._options.preserve_rng_state
        if preserved is not False:
            moved = [name for name in moved if not probe.is_preserved(name, preserved)]
        self._drawn = moved

    # --- In a replay ---

    def inspection(self, region: Callable[[], str], arguments: Arguments, *, compares: bool) -> Inspection | None:
        """What a replay on `arguments` is to be watched for; nearly always nothing.

        Raises if a weight that the forward saved was changed or replaced since.
        """
        leaves = self.leaves
        stepped = self._stepped(arguments) if Steps.count != self._steps else ()
        if (
            self.record is None
            and not self._is_new
            and not self._drawn
            and not self._restores_buffers
            and not stepped
            and (leaves is None or leaves.are_as_they_were())
        ):
            return None
        if leaves is not None:
            self._check(leaves, region)
        record = self.record if compares else None
        recorder = None
        if self._is_new:
            recorder = Recorder(results=True, keeps_all=True)
        elif record is not None:
            recorder = Recorder(results=record.results, ignored=record.ignored)
        return Inspection(
            recorder,
            self._suspects(stepped),
            self._probe_for_replay(),
            self._memory_put_back(),
            self._is_new,
        )

    def _check(self, leaves: Leaves, region: Callable[[], str]) -> None:
        changed = leaves.find_change()
        if changed is not None:
            raise self._guarded(_errors.weight_changed(region(), name_of(changed, self._known.roots())))
        replaced = None if self._is_swapped else leaves.replaced()
        if replaced is not None:
            then, now = (None if one is None else name_of(one, self._known.roots()) for one in replaced)
            raise self._guarded(_errors.weight_replaced(region(), str(then), now))

    def _stepped(self, arguments: Arguments) -> Collection[Tensor]:
        """What was stepped since the forward and may be read by the replay.

        Optimizers that step within backward, as gradients come, have stepped most of a model when its first layers are
        replayed: of a function of which more is known, only what it may read counts.
        """
        may_read = self._known.may_read()
        if may_read is None:
            return stepped_since(self._steps).values()
        saved = [] if self.leaves is None else self.leaves.saved()
        return stepped_among(chain(may_read, saved, find_tensors(*arguments)[0]), self._steps)

    def _suspects(self, stepped: Iterable[Tensor]) -> Reading | None:
        """What looks for tensors that were changed since the forward, if there are any, and are read by the replay."""
        # Where values are compared, they say more than that something was changed.
        changed = [] if self.leaves is None else self.leaves.changed(others=self.record is None)
        changed += stepped
        return Reading(changed) if changed else None

    def _probe_for_replay(self) -> Probe | None:
        """What tells whether a replay draws random numbers anew that the forward drew, if that matters."""
        options, known = self._options, self._known
        matters = self._drawn and options.preserve_rng_state is False
        matters = matters and (options.determinism_check == "values" or not known.warned)
        return Probe(everything=self.record is not None) if matters else None

    def _memory_put_back(self) -> set[int]:
        buffers = [part for part in self.state if isinstance(part, Buffers)]
        with without_any_torch_function():
            return {key for part in buffers for key in part.memory()}

    def put_back(self, inspection: Inspection) -> None:
        """Put back what a replay has changed and nobody knew that it would."""
        recorder = inspection.recorder
        if recorder is not None and inspection.learns:
            with without_any_torch_function():
                put_back([one for memory, one in recorder.writes.items() if memory not in inspection.put_back])

    def _take_over(self, region: Callable[[], str], recorder: Recorder, known_before: Container[int]) -> None:
        """Learn from a replay what its forward changed; raise if it has read what was changed."""
        known, self._is_new = self._known, False
        read = set(map(id, recorder.read()))
        new = [leaf for one in self._new_leaves if (leaf := one()) is not None]
        known.saves(new, made_here=bool(new) and read.isdisjoint(map(id, new)))
        changes = self._changes(recorder)
        known.learn_changes(changes, recorder.called(), recorder.read())
        if changes:
            self.restore(Buffers([weakref.ref(tensor) for tensor, _ in changes], [None] * len(changes)))
        for memory, write in recorder.writes.items():
            if write.is_read and write.matters and memory not in known_before:
                known.verify_again()
                owner = write.tensor()
                what = name_of(write.alias if owner is None else owner, known.roots())
                step = recorder.steps[write.step]
                raise _errors.began_to_change(region(), what, str(step.operator), step.where)

    def inspected(self, region: Callable[[], str], inspection: Inspection) -> None:
        """Raise, or warn, about what was found in a replay that has ended."""
        if inspection.recorder is not None:
            inspection.recorder.ended()
            if inspection.learns:
                self._take_over(region, inspection.recorder, inspection.put_back)
        if inspection.probe is not None and (moved := inspection.probe.moved()):
            self._has_drawn(region(), moved)
        if inspection.reading is not None and inspection.reading.found is not None:
            raise self._reads_what_changed(region(), inspection.reading.found)

    def _has_drawn(self, region: str, moved: Sequence[str]) -> None:
        """The replay drew too: warn, once per function, or raise."""
        if self._options.determinism_check == "values":
            raise self._guarded(_errors.random_numbers_not_preserved(region, moved))
        self._known.warned = True
        warnings.warn(
            f"the checkpointed region {region} draws random numbers ({', '.join(moved)}) and was told "
            "preserve_rng_state=False: its replay draws others, and the gradients do not belong to the "
            "outputs. Leave the option out, or draw outside of the region",
            stacklevel=level_of_user_code(),
        )

    def _reads_what_changed(self, region: str, tensor: Tensor) -> _errors.CheckpointError:
        """The error for what `reading` found."""
        name = name_of(tensor, self._known.roots())
        stepped = Steps.count != self._steps and id(tensor) in stepped_since(self._steps)
        return self._guarded((_errors.weight_stepped if stepped else _errors.weight_changed)(region, name))

    def another_leaf(self, region: str, strangers: Sequence[tuple[int, weakref.ref[Tensor]]]) -> None:
        """Raise if a replay saved a leaf in place of another that is still there now that the replay has ended.

        What a function makes itself, and makes anew in every run, is gone by then.
        """
        leaves = self.leaves
        for slot, reference in strangers if leaves is not None else ():
            now = reference()
            if now is not None and leaves is not None:
                leaf = leaves.by_slot[slot]()
                then = "a leaf that is gone" if leaf is None else name_of(leaf, self._known.roots())
                raise self._guarded(_errors.another_leaf(region, slot, then, _errors.describe_tensor(now)))

    def _guarded(self, error: _errors.CheckpointError) -> _errors.CheckpointError:
        error.where = _errors.place_of(self._function)
        return error

    def replay_ended(self, record: Recorder, alive: Sequence[int], dtypes: Sequence[torch.dtype]) -> Unequal | None:
        """The first saved tensor whose values differ. If there is none, the function counts as verified."""
        if self.record is None:
            return None
        unequal = first_unequal(self.record, record, alive, dtypes)
        if unequal is None and not self._made_buffers:
            self._known.verify(self._flags)
        return unequal

    def explain(self, record: Recorder | None, slot: int | None = None, *, stopped: bool = False) -> Finding | None:
        """Where the forward and a replay part, if both were recorded; `slot` is the first that differs."""
        if self.record is None or record is None:
            return None
        return explain(
            self.record,
            record,
            slot,
            modules=self._known.roots(),
            drawn=self._drawn,
            preserves_all=self._options.preserve_rng_state == "all",
            stopped=stopped,
        )


# How often it is looked whether a function draws random numbers that are not preserved: that takes a while.
_LOOKS = 3


def begin(
    function: Callable[..., Any],
    arguments: Arguments,
    tensors: Sequence[Tensor],
    options: Any,
    following: bool,
) -> Verification | None:
    """Guards and a record for a forward that is about to begin; None if the user wants no checks."""
    check = options.determinism_check
    if check == "none":
        return None
    known = known_of(function, arguments, options.name)
    verification = Verification(function, known, tensors, options)
    if not options.is_plain:
        _look_closer(verification, known, arguments, options, following=following)
    learns = verification.record is not None and verification.record.results
    if (known.writes or known.unseen) and not learns:
        verification.restore(Buffers.of(known))
    if known.rebound or learns:
        verification.bind(known.modules())
    if known.quiet and not learns and check != "default":
        verification.watch([tensor for one in known.quiet if (tensor := one()) is not None])
    return verification


def _look_closer(
    verification: Verification, known: Known, arguments: Arguments, options: Any, *, following: bool
) -> None:
    """Have a forward recorded that is to be compared, and looked at where it may draw what is not preserved."""
    check = options.determinism_check
    compares = check == "values" or (check == "first" and not known.verified)
    looks = options.preserve_rng_state is False and (check == "values" or known.looked < _LOOKS)
    # What runs within a replay of a region around it has been recorded before, or is about to be forgotten.
    if following or not (compares or looks) or not can_be_recorded():
        return
    with without_any_torch_function():
        closely = compares and not known.verified
        if compares:
            verification.record = Recorder(results=closely, ignored=frozenset() if closely else known.only_written())
        if closely or looks:
            known.looked += 1
            verification.probe = Probe(everything=closely, arguments=arguments)

"""What a frame keeps to see, in a replay, that nothing has changed since its forward.

Guards are cheap and always there: weights, the modes of modules, the state that the function changes. A record is
costly, and there under `"values"` always, under `"first"` until a replay of the function has been compared and found
equal.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import Part
from recollect._differences import Finding, Unequal, explain, first_unequal
from recollect._generators import Probe
from recollect._guards import Buffers, Leaves, Reading, Swapped, Training, lasting, name_of, swapping
from recollect._inputs import Arguments
from recollect._known import Known, known_of
from recollect._optimizers import Steps, stepped_since
from recollect._record import Recorder
from recollect._torch import can_be_recorded, level_of_user_code, without_any_torch_function


class Verification:
    """The guards of one frame, and its record."""

    # Defaults on the class: of most functions there is nothing of it to keep.
    _drawn: Sequence[str] = ()
    _is_swapped = False
    _restores_buffers = False

    def __init__(
        self,
        function: Callable[..., Any],
        known: Known,
        tensors: Sequence[Tensor],
        check: str,
        preserved: bool | str,
        probe: Probe | None,
        record: Recorder | None,
    ) -> None:
        self._function = function
        self._known = known
        self._check = check
        self._preserved = preserved
        self._probe = probe
        self._steps = Steps.count
        self.leaves = Leaves(tensors, known)
        self.record = record
        self.state: list[Part] = []  # what is to be put back for a replay
        modules = known.modules()
        if modules:
            self.state.append(Training(modules))
            self._is_swapped = known.is_swapped(modules, putting=swapping.replays > 0)
            if self._is_swapped:
                self.state.append(Swapped(modules))
        if known.writes and (record is None or not record.results):
            self._put_back(Buffers.of(known))

    def _put_back(self, buffers: Buffers | None) -> None:
        if buffers is not None:
            self.state.append(buffers)
            self._restores_buffers = True

    def forward_ended(self) -> None:
        """Take note of what the forward has shown."""
        record = self.record
        if record is None and self._probe is None and not self.leaves.by_slot and not self._known.reads:
            self.leaves.forget_arguments()
            return
        with without_any_torch_function():
            if self._probe is not None:
                self._look_at_generators(self._probe)
                self._probe = None
            if record is not None and record.results:
                self._learn(record)
            else:
                self.leaves.forward_ended(None)
        if record is not None:
            record.ended()

    def _learn(self, record: Recorder) -> None:
        known = self._known
        self.leaves.forward_ended(record)
        record.ended()
        known.learn(
            self.leaves.read(),
            lasting(record, known.roots()),
            [module for reference, _ in record.training.values() if (module := reference()) is not None],
        )
        self._put_back(Buffers.recorded(record))

    def _look_at_generators(self, probe: Probe) -> None:
        moved = probe.moved()
        if self._preserved is not False:
            self._drawn = [name for name in moved if not probe.is_preserved(name, self._preserved)]
            return
        self._drawn = moved

    # --- In a replay ---

    def nothing_happened(self) -> bool:
        """Whether a replay has nothing to look at, before it and after: so it is nearly always."""
        return (
            self.record is None
            and not self._drawn
            and not self._restores_buffers
            and Steps.count == self._steps
            and self.leaves.are_as_they_were()
        )

    def check(self, region: Callable[[], str]) -> None:
        """Raise if a weight that the forward saved was changed or replaced since."""
        changed = self.leaves.find_change()
        if changed is not None:
            raise self._guarded(_errors.weight_changed(region(), name_of(changed, self._known.roots())))
        replaced = None if self._is_swapped else self.leaves.replaced()
        if replaced is not None:
            then, now = (None if one is None else name_of(one, self._known.roots()) for one in replaced)
            raise self._guarded(_errors.weight_replaced(region(), str(then), now))

    def probe(self) -> Probe | None:
        """What tells whether a replay draws random numbers anew that the forward drew, if that matters."""
        matters = self._drawn and self._preserved is False and (self._check == "values" or not self._known.warned)
        return Probe(everything=self.record is not None) if matters else None

    def has_drawn(self, region: str, moved: Sequence[str]) -> None:
        """The replay drew too: warn, once per function, or raise."""
        if self._check == "values":
            raise self._guarded(_errors.random_numbers_not_preserved(region, moved))
        self._known.warned = True
        warnings.warn(
            f"the checkpointed region {region} draws random numbers ({', '.join(moved)}) and was told "
            "preserve_rng_state=False: its replay draws others, and the gradients do not belong to the "
            "outputs. Leave the option out, or draw outside of the region",
            stacklevel=level_of_user_code(),
        )

    def memory_put_back(self) -> set[int]:
        """The memory of the buffers that are changed again when a replay has ended."""
        buffers = [part for part in self.state if isinstance(part, Buffers)]
        with without_any_torch_function():
            return {key for part in buffers for key in part.memory()}

    def new_record(self) -> Recorder | None:
        """A recorder for a replay, if it is to be compared."""
        record = self.record
        return None if record is None else Recorder(results=record.results, ignored=record.ignored)

    def suspects(self) -> Reading | None:
        """What looks for tensors that were changed since the forward, if there are any, and are read by the replay."""
        # Where values are compared, they say more than that something was changed.
        changed = self.leaves.changed(others=self.record is None)
        if Steps.count != self._steps:
            changed |= stepped_since(self._steps)
        return Reading(changed) if changed else None

    def reads_what_changed(self, region: str, tensor: Tensor) -> _errors.CheckpointError:
        """The error for what `suspects` found."""
        name = name_of(tensor, self._known.roots())
        stepped = Steps.count != self._steps and id(tensor) in stepped_since(self._steps)
        return self._guarded((_errors.weight_stepped if stepped else _errors.weight_changed)(region, name))

    def another_leaf(self, region: str, strangers: Sequence[tuple[int, weakref.ref[Tensor]]]) -> None:
        """Raise if a replay saved a leaf in place of another that is still there now that the replay has ended.

        What a function makes itself, and makes anew in every run, is gone by then.
        """
        for slot, reference in strangers:
            now = reference()
            if now is not None:
                then = name_of(self.leaves.by_slot[slot], self._known.roots())
                raise self._guarded(_errors.another_leaf(region, slot, then, _errors.describe_tensor(now)))

    def _guarded(self, error: _errors.CheckpointError) -> _errors.CheckpointError:
        error.where = _errors.place_of(self._function)
        return error

    def replay_ended(self, record: Recorder, alive: Sequence[bool], dtypes: Sequence[torch.dtype]) -> Unequal | None:
        """The first saved tensor whose values differ. If there is none, the function counts as verified."""
        if self.record is None:
            return None
        unequal = first_unequal(self.record, record, alive, dtypes)
        if unequal is None:
            self._known.verified = True
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
            preserves_all=self._preserved == "all",
            stopped=stopped,
        )


# How often it is looked whether a function draws random numbers that are not preserved: that takes a while.
_LOOKS = 3


def begin(
    function: Callable[..., Any],
    arguments: Arguments,
    tensors: Sequence[Tensor],
    options: Any,
    *,
    following: bool,
) -> Verification | None:
    """Guards and a record for a forward that is about to begin; None if the user wants no checks."""
    check = options.determinism_check
    if check == "none":
        return None
    known = known_of(function, arguments, options.name)
    record, probe = None, None
    compares = check == "values" or (check == "first" and not known.verified)
    looks = options.preserve_rng_state is False and (check == "values" or known.looked < _LOOKS)
    # What runs within a replay of a region around it has been recorded before, or is about to be forgotten.
    if (compares or looks) and not following and can_be_recorded():
        with without_any_torch_function():
            closely = compares and not known.verified
            if compares:
                record = Recorder(results=closely, ignored=frozenset() if closely else known.only_written())
            if closely or looks:
                known.looked += 1
                probe = Probe(everything=closely, arguments=arguments)
    return Verification(function, known, tensors, check, options.preserve_rng_state, probe, record)

"""What a frame keeps to see, in a replay, that nothing has changed since its forward.

Guards are cheap and always there: weights, the modes of modules, the state that the function changes. A record is
costly, and there under `"values"` always, under `"first"` until a replay of the function has been compared and found
equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._ambient import Part
from recollect._differences import Finding, Unequal, explain, first_unequal
from recollect._generators import Probe
from recollect._guards import Buffers, Leaves, Stepped, Training, name_of
from recollect._inputs import Arguments
from recollect._known import Known, known_of
from recollect._optimizers import Steps, stepped_since
from recollect._record import Recorder
from recollect._torch import can_be_recorded, level_of_user_code


class Verification:
    """The guards of one frame, and its record."""

    __slots__ = (
        "_check",
        "_drawn",
        "_function",
        "_known",
        "_preserved",
        "_probe",
        "_state",
        "_steps",
        "leaves",
        "record",
    )

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
        self._drawn: list[str] = []
        self.leaves = Leaves(tensors, known)
        self.record = record
        modules = known.modules()
        self._state: list[Part] = [Training(modules)] if modules else []
        if record is None and known.writes:
            buffers = Buffers.of(known)
            if buffers is not None:
                self._state.append(buffers)

    def forward_ended(self) -> None:
        """Take note of what the forward has shown."""
        known, record = self._known, self.record
        self.leaves.forward_ended(record)
        if self._probe is not None:
            self._look_at_generators(self._probe)
            self._probe = None
        if record is None:
            return
        record.ended()
        known.learn(
            self.leaves.watched,
            [(tensor, one.is_read) for one in record.writes.values() if (tensor := one.tensor()) is not None],
            makes_leaves=record.makes_leaves,
        )
        buffers = Buffers.recorded(record)
        if buffers is not None:
            self._state.append(buffers)

    def _look_at_generators(self, probe: Probe) -> None:
        moved = probe.moved()
        if self._preserved is not False:
            self._drawn = [name for name in moved if not probe.is_preserved(name, self._preserved)]
            return
        self._drawn = moved

    # --- In a replay ---

    def check(self, region: Callable[[], str]) -> None:
        """Raise if a weight was changed since the forward."""
        changed = self.leaves.find_change()
        if changed is not None:
            raise self._guarded(_errors.weight_changed(region(), name_of(changed, self._known.modules())))

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

    def state(self) -> Sequence[Part]:
        """What is to be put back for a replay."""
        return self._state

    def new_record(self) -> Recorder | None:
        """A recorder for a replay, if it is to be compared."""
        record = self.record
        return None if record is None else Recorder(results=record.results)

    def stepped(self) -> Stepped | None:
        """What looks for parameters that were stepped since the forward, if there are any."""
        if Steps.count == self._steps:
            return None
        suspects = stepped_since(self._steps)
        return Stepped(suspects) if suspects else None

    def parameter_stepped(self, region: str, parameter: Tensor) -> _errors.CheckpointError:
        """The error for what `stepped` found."""
        return self._guarded(_errors.weight_stepped(region, name_of(parameter, self._known.modules())))

    def another_leaf(self, region: str, slot: int, now: Tensor) -> _errors.CheckpointError:
        """The error for a replay that saves another leaf than the forward did."""
        then = name_of(self.leaves.by_slot[slot], self._known.modules())
        return self._guarded(_errors.another_leaf(region, slot, then, _errors.describe_tensor(now)))

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

    def explain(
        self, record: Recorder | None, unequal: Unequal | None = None, *, stopped: bool = False
    ) -> Finding | None:
        """Where the forward and a replay part, if both were recorded."""
        if self.record is None or record is None:
            return None
        return explain(self.record, record, unequal, modules=self._known.modules(), drawn=self._drawn, stopped=stopped)


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
    known = known_of(function, arguments[0], options.name)
    record, probe = None, None
    # What runs within a replay of a region around it has been recorded before, or is about to be forgotten.
    if not following:
        if (check == "values" or (check == "first" and not known.verified)) and can_be_recorded():
            record = Recorder(results=check == "first")
        if record is not None:
            probe = Probe(everything=True, arguments=arguments)
        elif options.preserve_rng_state is False and known.looked < _LOOKS:
            known.looked += 1
            probe = Probe(everything=False)
    return Verification(function, known, tensors, check, options.preserve_rng_state, probe, record)

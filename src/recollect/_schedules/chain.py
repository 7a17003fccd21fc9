"""`Chain`: what the steps of a chain take, in time and bytes. Numbers only; measuring them is for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import isfinite

from recollect._schedules.actions import ScheduleError


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The times and sizes of a chain's steps, one number per step.

    Attributes:
        forward_times: What a forward takes, in any unit.
        backward_times: What a backward takes, without the forward before it.
        output_bytes: The state that the step makes.
        saved_bytes: What is held from a forward with a graph until its backward: everything that autograd saved, with
            the step's output and without its input. So never less than the output.
        gradient_bytes: The gradient of the step's output; as large as the output where it is not given.
        forward_temporary_bytes: What a forward needs on top, while it runs.
        backward_temporary_bytes: What a backward needs on top, the gradient of the step's input included.
        input_bytes: The state that the first step takes.

    Example:
        >>> chain = Chain(
        ...     forward_times=[1, 2], backward_times=[2, 4], output_bytes=[10, 10], saved_bytes=[30, 50], input_bytes=10
        ... )
        >>> chain.length, chain.gradient_bytes
        (2, (10, 10))
    """

    forward_times: Sequence[float]
    backward_times: Sequence[float]
    output_bytes: Sequence[int]
    saved_bytes: Sequence[int]
    gradient_bytes: Sequence[int] = ()
    forward_temporary_bytes: Sequence[int] = ()
    backward_temporary_bytes: Sequence[int] = ()
    input_bytes: int = 0

    def __post_init__(self) -> None:
        _check_amount("input_bytes", self.input_bytes, whole=True)
        names = [field.name for field in fields(self) if field.name != "input_bytes"]
        for name in names:
            given = getattr(self, name)
            if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
                raise TypeError(f"{name} must be a sequence of numbers, one per step, got {given!r}")
            numbers = tuple(given)
            for step, number in enumerate(numbers):
                _check_amount(f"{name}[{step}]", number, whole=name.endswith("_bytes"))
            object.__setattr__(self, name, numbers)
        if not self.forward_times:
            raise ScheduleError("forward_times must have a number for at least one step, got none")
        for name in ("gradient_bytes", "forward_temporary_bytes", "backward_temporary_bytes"):
            if not getattr(self, name):
                default = self.output_bytes if name == "gradient_bytes" else (0,) * self.length
                object.__setattr__(self, name, default)
        for name in names:
            if len(getattr(self, name)) != self.length:
                raise ScheduleError(
                    f"{name} must have one number per step, {self.length} as forward_times has, "
                    f"got {len(getattr(self, name))}"
                )
        for step, (saved, output) in enumerate(zip(self.saved_bytes, self.output_bytes, strict=True)):
            if saved < output:
                raise ScheduleError(
                    f"saved_bytes[{step}] must include the step's output of {output} bytes, which the next step starts "
                    f"from, got {saved}"
                )

    @property
    def length(self) -> int:
        """How many steps there are."""
        return len(self.forward_times)


def _check_amount(name: str, value: object, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{name} must be {'an int' if whole else 'a number'}, got {value!r}")
    if not isfinite(value) or value < 0:
        raise ScheduleError(f"{name} must be finite and not negative, got {value!r}")

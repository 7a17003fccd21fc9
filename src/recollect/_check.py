"""Is a planned step the same as a plain one? Loss, gradients and buffers bit for bit, then bytes and time.

Both start from the same weights, gradients, buffers and random numbers. They are compared under deterministic
algorithms, because some kernels add up in an order that changes from run to run, and measured without them. Where an
operator has none, the others use theirs all the same, as far as they do without being told that they must. Where the
steps differ, the plain one is run once more: so a step that does not repeat itself can be told from a wrong replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect._bench import Bench
from recollect._bench import Step as StepFunction
from recollect.plan import Plan, Step
from recollect.profile import Progress


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
        loss: Of the plain and of the planned step.
        compared: How many tensors.
        different: The names of those that are not equal, bit for bit; "loss" among them.
        repeats_itself: Whether a plain step equals another one; None if that was not asked, because all is equal.
        plain: Bytes at the peak of the plain step, and its time.
        planned: The same of the planned one.
        budget: Of the plan.
    """

    loss: tuple[float, float]
    compared: int
    different: tuple[str, ...]
    repeats_itself: bool | None
    plain: Step
    planned: Step
    budget: int | None

    @property
    def is_within_budget(self) -> bool:
        """Whether the peak of the planned step is what the plan promises."""
        return self.budget is None or self.planned.peak <= self.budget

    @property
    def is_passed(self) -> bool:
        """Whether all is as it should be."""
        return not self.different and self.is_within_budget

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers, fit for JSON."""
        data = dataclasses.asdict(self)
        return {"passed": self.is_passed, "equal": not self.different, "within_budget": self.is_within_budget, **data}


def check(
    model: torch.nn.Module,
    batch: Any,
    plan: Plan,
    *,
    step: StepFunction | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Comparison:
    """Run a step plainly and under a plan, and compare. The model is left as it was.

    Raises:
        CheckpointError: If a replay is seen to differ from its forward.
        torch.OutOfMemoryError: If the device has not enough memory for one of the steps.
    """
    tell = progress or (lambda what, done, of: None)
    bench = Bench(model, batch, step, None)
    if bench.is_estimated:
        raise ValueError("check runs the model, got one on the meta device: build it on the device where it is trained")
    with _deterministic() as mode:
        tell("comparing: the plain step", 0, 4)
        before: Mapping[str, Tensor | None] = {}
        try:
            before = _results(bench)
        except RuntimeError as error:  # it holds what was computed, until here
            if "deterministic" not in str(error):
                raise
        if not before:
            mode("warn")
            bench.let_go()
            before = _results(bench)
        tell("comparing: the planned step", 1, 4)
        with plan.apply(model):
            after = _results(bench)
        different = [name for name, one in before.items() if not _are_equal(one, after[name])]
        repeats_itself = None
        if different:
            again = _results(bench)
            repeats_itself = all(_are_equal(one, again[name]) for name, one in before.items())
    tell("measuring: the plain step", 2, 4)
    plain = _measured(bench, repeats)
    tell("measuring: the planned step", 3, 4)
    with plan.apply(model):
        planned = _measured(bench, repeats)
    tell("measuring: the planned step", 4, 4)
    losses = (_number(before["loss"]), _number(after["loss"]))
    return Comparison(losses, len(before), tuple(different), repeats_itself, plain, planned, plan.budget)


def _measured(bench: Bench, repeats: int) -> Step:
    with bench.leaving_nothing():
        bench.train()
        return Step(max(mark.peak for mark in bench.weigh(())), bench.seconds(repeats))


def _results(bench: Bench) -> Mapping[str, Tensor | None]:
    """What a step makes, on the host, where it takes none of the device's memory."""
    inputs = [one for one in bench.outside if one.requires_grad and one.is_leaf]
    with bench.leaving_nothing():
        loss = bench.forward()
        loss.backward()
        found = {
            "loss": loss,
            **{f"the gradient of {name}": one.grad for name, one in bench.model.named_parameters()},
            **{f"the gradient of input {number}": one.grad for number, one in enumerate(inputs)},
            **{f"the buffer {name}": one for name, one in bench.model.named_buffers()},
        }
        return {name: None if one is None else _on_host(one) for name, one in found.items()}


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).to("cpu", copy=True)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # What is no number is not equal to itself, and yet the same.
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _number(loss: Tensor | None) -> float:
    assert loss is not None
    return float(loss.item())


@contextlib.contextmanager
def _deterministic() -> Iterator[Callable[[str], None]]:
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    # Some operators have such a kernel and use it only if everything else is an error.
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False  # it would choose kernels by their speed
    try:
        yield torch.set_deterministic_debug_mode
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark

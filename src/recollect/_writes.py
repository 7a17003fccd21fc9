"""Sees to it that a step changes neither the model's parameters nor its batch: measuring runs it over and over.

The first forward and the first backward are watched operator by operator, and an operator that is about to write to one
of them is stopped before it does, with an error that says what it is. An exception are parameters that a module changes
within its own call (`max_norm` of an embedding, weights that are kept normalised): those are set aside and put back.

What this is not: later steps are not watched so closely. What they change in parameters is found when all is over, by
their versions, and is an error too.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import Module

from recollect import _errors
from recollect._aside import Values
from recollect._inputs import find_tensors, versions_of, walk
from recollect._optimizers import Steps, stepped_since
from recollect._torch import (
    OperatorMode,
    changes_arguments,
    modules_being_called,
    operator_name,
    storage_key,
    written_arguments,
)
from recollect._verify import call_site

# By their schemas these write to a tensor, and leave its values as they are.
_HARMLESS = frozenset(("aten.detach_", "aten.record_stream", "aten.requires_grad_"))


class Writes:
    """Watches what steps write to."""

    def __init__(self, model: Module, batch: Any) -> None:
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._versions = versions_of(list(self._parameters.values()))
        self._steps = Steps.count
        self._by_memory = {storage_key(one): name for name, one in self._parameters.items()}
        self._batch = {storage_key(tensor): f"batch{_way(path)}" for path, tensor in walk(batch)}
        self._aside: dict[str, Values] = {}

    def watching(self) -> Watch:
        """Around a step, or a part of it: raises before anything is written that must not be."""
        return Watch(self)

    def about_to_write(self, tensor: Tensor, operator: Any) -> None:
        """An operator will change a tensor."""
        memory = storage_key(tensor)
        if memory in self._batch:
            raise _batch_changes(self._batch[memory], tensor, operator)
        name = self._by_memory.get(memory)
        if name is None or name in self._aside:
            return
        if next(modules_being_called(sys._getframe(1)), None) is None:
            raise _parameter_changes(name, self._parameters[name], operator)
        self._aside[name] = Values(self._parameters[name])

    def put_back(self) -> None:
        """Undo what modules have changed in their parameters."""
        for values in self._aside.values():
            values.put_back()

    def check(self) -> None:
        """Raise if parameters have changed that were not put back."""
        stepped, now = stepped_since(self._steps), versions_of(list(self._parameters.values()))
        changed = [
            name
            for (name, one), before, after in zip(self._parameters.items(), self._versions, now, strict=True)
            if name not in self._aside and (before != after or id(one) in stepped)
        ]
        if changed:
            raise _parameters_changed(changed)


class Watch(OperatorMode):
    """Tells of every tensor that an operator is about to write to."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Collectives may write to any of their arguments, and do not say to which.
        if (
            changes_arguments(func)
            and getattr(func, "namespace", "") != "c10d"
            and operator_name(func) not in _HARMLESS
        ):
            for position, name in written_arguments(func):
                value = args[position] if position < len(args) else kwargs.get(name)
                for tensor in find_tensors((value,), {})[0]:
                    self._writes.about_to_write(tensor, func)
        return func(*args, **kwargs)


def _way(path: Any) -> str:
    return "".join(f".{key}" if kind == "field" else f"[{key!r}]" for kind, key in path)


def _where() -> str:
    line = call_site(sys._getframe(1))
    return f", at {line}" if line else ""


def _batch_changes(name: str, tensor: Tensor, operator: Any) -> ValueError:
    return ValueError(
        f"the step changes its batch: {operator_name(operator)} is about to write to {name} "
        f"({_errors.describe_tensor(tensor)}){_where()}. A step is measured many times on the same batch. Use the "
        "operator that is not in place, or have step work on a clone. The batch is as it was"
    )


def _parameter_changes(name: str, parameter: Tensor, operator: Any) -> ValueError:
    return ValueError(
        f"the step changes the model's parameters: {operator_name(operator)} is about to write to {name} "
        f"({_errors.describe_tensor(parameter)}){_where()}. step returns the loss and does no more: leave optimizers, "
        "weight decay and averages of weights to the loop around it, and take off hooks that do such things in "
        "backward for as long as the plan is made. The model is as it was"
    )


def _parameters_changed(names: list[str]) -> ValueError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ValueError(
        f"the step has changed the model's parameters, though not the first time that it ran: {', '.join(names[:4])}"
        f"{more}. They are not as they were: load them anew. step returns the loss and does no more: leave optimizers, "
        "weight decay and averages of weights to the loop around it"
    )

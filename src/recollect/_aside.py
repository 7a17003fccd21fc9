"""What a step changes in a model, set aside before it and put back after it.

- The attributes of modules, and what the lists, dicts, sets and deques among them hold, at any depth: a cached tensor,
  a counter, a buffer that is made late, a hook. Classes too: trying decisions derives from them.
- The values of tensors that are no parameters: buffers, and tensors that are attributes.
- Gradients: the same tensor objects come back, with the same values. On an accelerator they wait on the host, because
  a step starts without them; one that is a part of other memory stays where it is.

Copies are on the host, where they take none of the memory that is measured.

What this is not: other objects that modules hold are not looked into, and the values of parameters are not copied.
`_writes.py` sees to those.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from recollect._torch import own_tensors, put_versions, version_of

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host; for a tensor on the meta device, where there is nothing to copy, another one there."""
    return tensor.detach().clone() if tensor.device.type in ("cpu", "meta") else tensor.detach().to("cpu")


class Values:
    """The values of a tensor, and how often it had been changed in place by then."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._values = on_host(tensor)
        self._version = version_of(tensor)

    def put_back(self) -> None:
        """Leave the tensor as it was, for autograd too: what was saved with these values is right again."""
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # what cannot be written to has not changed
            self._tensor.data.copy_(self._values)
            put_versions([self._tensor], [self._version])


class Aside:
    """The state of a model but for its parameters' values and gradients."""

    def __init__(self, model: Module) -> None:
        modules = list(model.modules())
        self._classes = [(module, type(module)) for module in modules]
        self._needs_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._containers: list[tuple[Any, Any]] = []
        self._scripted: list[tuple[ScriptModule, bool]] = []
        self._tensors: dict[int, Tensor] = {}
        held: list[Any] = []
        for module in modules:
            if isinstance(module, ScriptModule):  # its attributes are not Python's
                self._scripted.append((module, module.training))
                held += dict(own_tensors(module)[1]).values()
            else:
                held.append(vars(module))
        self._look_into(held)
        self._values = list(map(Values, self._tensors.values()))

    def _look_into(self, held: list[Any]) -> None:
        """Note the containers and tensors in a list, which is used up."""
        seen: set[int] = set()
        while held:
            value = held.pop()
            if isinstance(value, Tensor):
                if not isinstance(value, Parameter):
                    self._tensors[id(value)] = value
                continue
            is_container = type(value) in _CONTAINERS
            if not (is_container or isinstance(value, tuple)) or id(value) in seen:
                continue
            seen.add(id(value))
            if is_container:
                self._containers.append((value, copy.copy(value)))
            held += value.values() if isinstance(value, dict) else value

    def leaves(self) -> list[Tensor]:
        """The tensors besides parameters that a backward gives gradients to."""
        return [tensor for tensor in self._tensors.values() if tensor.requires_grad and tensor.is_leaf]

    def put_back(self) -> None:
        """Leave the model as it was."""
        for module, kind in self._classes:
            if type(module) is not kind:
                object.__setattr__(module, "__class__", kind)
        for container, before in self._containers:
            if not _holds(container, before):
                _refill(container, before)
        for scripted, flag in self._scripted:
            scripted.training = flag
        for parameter, flag in self._needs_grad:
            parameter.requires_grad_(flag)
        for values in self._values:
            values.put_back()


def _holds(container: Any, before: Any) -> bool:
    """Whether it holds the same objects: values of tensors are not compared here."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(map(_is, container, before)) and all(map(_is, container.values(), before.values()))
    return container == before if isinstance(container, set) else all(map(_is, container, before))


def _is(one: object, other: object) -> bool:
    return one is other


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


class Gradient:
    """The gradient of a leaf, out of the way until it is put back."""

    def __init__(self, leaf: Tensor, *, to_host: bool) -> None:
        self._leaf = leaf
        self._grad = grad = leaf.grad
        self._values: Tensor | None = None
        self._device = leaf.device
        if grad is not None and to_host and _has_its_own_memory(grad):
            self._device = grad.device
            self._values = on_host(grad)
            grad.data = torch.empty(0, dtype=grad.dtype, device=grad.device)
        leaf.grad = None

    def put_back(self) -> None:
        """Whatever the leaf has got meanwhile goes."""
        self._leaf.grad = None
        if self._grad is not None and self._values is not None:
            self._grad.data = self._values.to(self._device)
        self._leaf.grad = self._grad


def _has_its_own_memory(grad: Tensor) -> bool:
    """Whether nothing but the gradient is in its memory, which can be let go of."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad or grad._base is not None:
        return False
    return grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()


def set_aside(leaves: Iterable[Tensor], *, to_host: bool) -> list[Gradient]:
    """The gradients of leaves, which have none then."""
    taken: list[Gradient] = []
    try:
        for leaf in leaves:
            taken.append(Gradient(leaf, to_host=to_host))
    except BaseException:
        for one in taken:
            one.put_back()
        raise
    return taken

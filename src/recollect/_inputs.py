"""The arguments of a region: find their tensors, keep them until a replay, notice if they changed.

Rules (numbers as in the contract's replay rules):
- 2: under saved-tensor hooks (a region around this one, `save_on_cpu`) the tensors are handed to those hooks and come
  back through them, so that a parent owns what its inner regions take. Without hooks the tensors are simply held.
- 9: a tensor that was changed in place since the forward began makes a replay impossible: an error that names it.

Tensors are found in lists, tuples, dicts and dataclasses at any depth. A container is rebuilt for each replay as it
was when the forward began, so a function that appends to a list it was given does so once. Other objects pass
through as they are.

This is not a general tree library: it knows the containers that arguments are made of, and leaves others alone.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._torch import Hooks, reading

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def named_tensors(value: Any, path: str, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `value` with the expression that leads to it, `args[0]['mask']`."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{position}]", part) for position, part in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [
            (f"{path}.{field.name}", getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        ]
    else:
        return
    if id(value) not in seen:  # a container may hold itself
        for name, part in parts:
            yield from named_tensors(part, name, seen | {id(value)})


_ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))


def find_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """The tensors of a call in a fixed order, and whether the call holds no container that could change."""
    tensors: list[Tensor] = []
    flat = True
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _ATOMS:
            tensors += [tensor for _, tensor in named_tensors(value, "")]
            flat = flat and not isinstance(value, (list, tuple, dict)) and not dataclasses.is_dataclass(value)
    return tensors, flat


def rebuild(value: Any, leaf: type, replace: Callable[[Any], Any], seen: frozenset[int] = frozenset()) -> Any:
    """`value` with every `leaf` in it replaced. Containers around a leaf are new, all else is the same object."""
    if isinstance(value, leaf):
        return replace(value)
    kind = type(value)
    if id(value) in seen:
        return value
    seen = seen | {id(value)}
    if kind is list or kind is tuple:
        return kind([rebuild(part, leaf, replace, seen) for part in value])
    if kind is dict or kind is OrderedDict:
        return kind((key, rebuild(part, leaf, replace, seen)) for key, part in value.items())
    if isinstance(value, tuple):
        parts = [rebuild(part, leaf, replace, seen) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        # A named tuple has _make; torch's own result tuples (torch.return_types) take a sequence.
        return value._make(parts) if hasattr(value, "_make") else kind(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, list, dict)):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        new_parts = {name: rebuild(getattr(value, name), leaf, replace, seen) for name in fields}
        changed = {name: part for name, part in new_parts.items() if part is not getattr(value, name)}
        if not changed:
            return value
        twin = copy.copy(value)
        for name, part in changed.items():
            object.__setattr__(twin, name, part)  # also for frozen ones
        return twin
    return value


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place; a tensor made in inference mode does not count."""
    with reading(tensors):
        try:
            return [tensor._version for tensor in tensors]
        except RuntimeError:
            return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Place:
    """Stands in kept arguments where a tensor stood in the call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Inputs:
    """The arguments of one region call, from its forward to its replays."""

    __slots__ = ("_args", "_as_they_are", "_changed", "_hooked", "_kwargs", "_tensors", "_versions")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], flat: bool, hooks: Hooks | None
    ) -> None:
        self._versions = versions_of(tensors)
        self._changed: str | None = None
        self._hooked: list[_Hooked] | None = None
        self._tensors = tensors
        self._args, self._kwargs = args, kwargs
        self._as_they_are = flat and hooks is None
        if hooks is not None:
            self._tensors = []
            self._hooked = self._hand_to(hooks)
        elif not flat:
            # Every tensor is a place of its own: no need to tell equal ones apart, their objects are kept.
            self._replace_by_places({id(tensor): index for index, tensor in enumerate(tensors)})

    def _replace_by_places(self, index_of: dict[int, int]) -> None:
        def place(tensor: Tensor) -> Any:
            return _Place(index_of[id(tensor)])

        self._args = rebuild(self._args, Tensor, place)
        self._kwargs = rebuild(self._kwargs, Tensor, place)

    def _hand_to(self, hooks: Hooks) -> list[_Hooked]:
        """Pack the tensors as autograd would, each object once. What only user objects can reach stays in them."""
        reached: dict[int, Tensor] = {}

        def collect(tensor: Tensor) -> Tensor:
            reached.setdefault(id(tensor), tensor)
            return tensor

        rebuild(self._args, Tensor, collect)
        rebuild(self._kwargs, Tensor, collect)
        self._replace_by_places({key: index for index, key in enumerate(reached)})
        with torch.no_grad():  # as around autograd's own calls of a pack hook
            return [_Hooked(tensor, hooks) for tensor in reached.values()]

    def forward_ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Look whether the region changed what it was given: then let go of it, for no replay can use it.

        Letting go matters: an input that the region changed in place holds the region's graph, which holds this.
        """
        if versions_of(tensors) != self._versions:
            self._changed = self._first_changed(args, kwargs, tensors)
            self._args, self._kwargs, self._tensors, self._hooked = (), {}, [], None

    def _first_changed(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> str:
        versions = versions_of(tensors)
        index = next(i for i, version in enumerate(versions) if version != self._versions[i])
        names = [name for name, _ in named_tensors(args, "args")]
        names += [name for key, value in kwargs.items() for name, _ in named_tensors(value, key)]
        now, then = versions[index], self._versions[index]
        # The containers may have been changed too: then the name is not to be had.
        name = names[index] if len(names) == len(tensors) else f"tensor {index} of the arguments"
        return f"{name} ({_errors.describe_tensor(tensors[index])}), at version {now} instead of {then}"

    def restore(self, region: Callable[[], str]) -> Arguments:
        """The arguments as the forward got them; raises where that is no longer possible (rule 9)."""
        if self._changed is not None:
            raise _errors.input_changed(region(), self._changed, by_region=True)
        if self._hooked is not None:
            with torch.no_grad():
                return self._rebuilt([hooked.get(region) for hooked in self._hooked])
        tensors = self._tensors
        if versions_of(tensors) != self._versions:
            args, kwargs = self._rebuilt(tensors)
            raise _errors.input_changed(region(), self._first_changed(args, kwargs, tensors), by_region=False)
        return (self._args, self._kwargs) if self._as_they_are else self._rebuilt(tensors)

    def _rebuilt(self, tensors: list[Tensor]) -> Arguments:
        def fill(place: _Place) -> Tensor:
            return tensors[place.index]

        return rebuild(self._args, _Place, fill), rebuild(self._kwargs, _Place, fill)


class _Hooked:
    """A tensor in the care of saved-tensor hooks, and what they do not keep: its version and its place in autograd."""

    __slots__ = ("_original", "_packed", "_requires_grad", "_unpack", "_version")

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self._version = versions_of((tensor,))
        self._original = weakref.ref(tensor)
        with reading((tensor,)):
            self._requires_grad = tensor.requires_grad
        self._packed = pack(tensor)

    def get(self, region: Callable[[], str]) -> Tensor:
        tensor = self._unpack(self._packed)
        original = self._original()
        if original is not None:
            if versions_of((original,)) != self._version:
                what = _errors.describe_tensor(original)
                raise _errors.input_changed(region(), what, by_region=False)
            if original.requires_grad and original.is_leaf:
                return original  # leaves are looked for by identity: by `.grad`, by the optimizer
        if self._requires_grad and not tensor.requires_grad:
            # What was recovered is cut off from its graph; the replay must still see that it needs grad.
            return tensor.detach().requires_grad_()
        return tensor

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
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._torch import Hooks, are_plain, without_torch_function

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


def rebuild(value: Any, leaf: type, replace: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """`value` with every `leaf` in it replaced. Lists and dicts are new, and one that stood in two places still does.

    Objects of other kinds stay what they are, unless they are a named tuple or a dataclass with something new inside.
    """
    if isinstance(value, leaf):
        return replace(value)
    kind = type(value)
    if kind in _ATOMS:
        return value
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    if kind is list:
        parts = made[id(value)] = []  # before its parts: it may hold itself
        parts.extend(rebuild(part, leaf, replace, made) for part in value)
        return parts
    if kind is dict or kind is OrderedDict:
        entries = made[id(value)] = kind()
        entries.update((key, rebuild(part, leaf, replace, made)) for key, part in value.items())
        return entries
    if kind is tuple or _is_named_tuple(value):
        items = [rebuild(part, leaf, replace, made) for part in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            value = tuple(items) if kind is tuple else value._make(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, list, dict, tuple)):
        value = _rebuild_dataclass(value, leaf, replace, made)
    return value


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make") and hasattr(value, "_fields")


def _rebuild_dataclass(value: Any, leaf: type, replace: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    twin = made[id(value)] = copy.copy(value)
    changed = False
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            old = getattr(value, field.name)
            new = rebuild(old, leaf, replace, made)
            if new is not old and new is not twin:
                changed = True
            object.__setattr__(twin, field.name, new)  # also if it is frozen
    if not changed:
        made[id(value)] = value
    return made[id(value)]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place; a tensor made in inference mode does not count."""
    if not are_plain(tensors):
        with without_torch_function():
            return [_version_of(tensor) for tensor in tensors]
    try:
        return list(map(_counted_version, tensors))
    except RuntimeError:
        return [_version_of(tensor) for tensor in tensors]


_counted_version: Callable[[Tensor], int] = attrgetter("_version")


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Place:
    """Stands in kept arguments where a tensor stood in the call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Inputs:
    """The arguments of one region call, from its forward to its replays."""

    __slots__ = ("_arguments", "_as_they_are", "_changed", "_hooked", "_tensors", "_versions", "_watched")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], flat: bool, hooks: Hooks | None
    ) -> None:
        self._arguments: Arguments = (args, kwargs)
        self._tensors = tensors
        self._watched = tensors if hooks is None else []  # hooks may let go of theirs, and watch for themselves
        self._versions = versions_of(tensors)
        self._as_they_are = flat and hooks is None
        self._changed: str | None = None
        self._hooked: list[_Hooked] | None = None
        if not self._as_they_are:
            self._replace_by_places()
            if hooks is not None:
                with torch.no_grad():  # as around autograd's own calls of a pack hook
                    self._hooked = [_Hooked(tensor, hooks) for tensor in self._tensors]
                self._tensors = []

    def _replace_by_places(self) -> None:
        """Take the tensors out of the arguments, each object once; what only user objects can reach stays in them."""
        places: dict[int, _Place] = {}
        reached: list[Tensor] = []

        def place(tensor: Tensor) -> _Place:
            if id(tensor) not in places:
                places[id(tensor)] = _Place(len(reached))
                reached.append(tensor)
            return places[id(tensor)]

        self._arguments = rebuild(self._arguments, Tensor, place)
        self._tensors = reached

    def forward_ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Look whether the region changed what it was given: then let go of it, for no replay can use it.

        Letting go matters: an input that the region changed in place holds the region's graph, which holds this.
        """
        versions = versions_of(tensors)
        if versions != self._versions:
            self._changed = _first_changed((args, kwargs), tensors, versions, self._versions)
            self._arguments, self._tensors, self._watched, self._hooked = ((), {}), [], [], None

    def restore(self, region: Callable[[], str]) -> Arguments:
        """The arguments as the forward got them; raises where that is no longer possible (rule 9)."""
        if self._changed is not None:
            raise _errors.input_changed(region(), self._changed, by_region=True)
        if self._hooked is not None:
            with torch.no_grad():
                return self._filled([hooked.get(region) for hooked in self._hooked])
        arguments = self._arguments if self._as_they_are else self._filled(self._tensors)
        versions = versions_of(self._watched)
        if versions != self._versions:
            what = _first_changed(arguments, self._watched, versions, self._versions)
            raise _errors.input_changed(region(), what, by_region=False)
        return arguments

    def _filled(self, tensors: list[Tensor]) -> Arguments:
        def fill(place: _Place) -> Tensor:
            return tensors[place.index]

        arguments: Arguments = rebuild(self._arguments, _Place, fill)
        return arguments


def _first_changed(arguments: Arguments, tensors: list[Tensor], now: list[int], then: list[int]) -> str:
    args, kwargs = arguments
    index = next(i for i, (new, old) in enumerate(zip(now, then, strict=True)) if new != old)
    names = [name for name, _ in named_tensors(args, "args")]
    names += [name for key, value in kwargs.items() for name, _ in named_tensors(value, key)]
    # A container may hold other tensors than before: then the name is not to be had.
    name = names[index] if len(names) == len(tensors) else f"tensor {index} of the arguments"
    return f"{name} ({_errors.describe_tensor(tensors[index])}), at version {now[index]} instead of {then[index]}"


class _Hooked:
    """A tensor in the care of saved-tensor hooks, and what they do not keep: its version and its place in autograd."""

    __slots__ = ("_original", "_packed", "_requires_grad", "_unpack", "_version")

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self._version = versions_of((tensor,))
        self._original = weakref.ref(tensor)
        with without_torch_function():
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

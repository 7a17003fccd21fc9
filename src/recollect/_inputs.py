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
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._torch import PLAIN_TYPES, Hooks, PlaceInGraph, is_same_memory, version_of, without_torch_function

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


Path = tuple[tuple[str, Any], ...]


def walk(value: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in `value` and the way that leads to it; a container that stands in two places is entered once."""
    if isinstance(value, Tensor):
        yield path, value
        return
    parts: Iterable[tuple[tuple[str, Any], Any]]
    if isinstance(value, dict):
        parts = ((("item", key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, deque)):
        parts = ((("item", position), part) for position, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = ((("field", name), getattr(value, name)) for name in names)
    else:
        return
    seen = set() if seen is None else seen
    if id(value) not in seen:
        seen.add(id(value))
        for step, part in parts:
            yield from walk(part, (*path, step), seen)


def _name_of(path: Path) -> str:
    """`args[0]['mask']`, `scale`: a way through (args, kwargs) as a reader would write it. Only errors need it."""
    (_, which), *rest = path
    if which == 0:
        name = "args"
    else:
        (_, name), *rest = rest
    return name + "".join(f".{key}" if kind == "field" else f"[{key!r}]" for kind, key in rest)


def name_of_tensor(arguments: Arguments, tensor: Tensor) -> str:
    """How a reader would write where a tensor stands in the arguments."""
    return next((_name_of(path) for path, one in walk(arguments) if one is tensor), "a tensor of the arguments")


_ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))


def find_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """The tensors of a call in a fixed order, and whether the call holds no container that could change."""
    if not kwargs and PLAIN_TYPES.issuperset(map(type, args)):
        return list(args), True
    tensors: list[Tensor] = []
    flat = True
    seen: set[int] = set()
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _ATOMS:
            tensors += [tensor for _, tensor in walk(value, (), seen)]
            flat = flat and not isinstance(value, (list, tuple, dict, deque)) and not dataclasses.is_dataclass(value)
    return tensors, flat


def is_transparent(value: Any, seen: set[int] | None = None) -> bool:
    """Whether everything in `value` is a tensor, a plain value, or a container that `rebuild` makes anew."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, (Tensor, type, Enum)):
        return True
    seen = set() if seen is None else seen
    if id(value) in seen:
        return True
    seen.add(id(value))
    if kind is dict or kind is OrderedDict:
        return all(is_transparent(part, seen) for part in (*value.keys(), *value.values()))
    if kind in (list, deque, tuple) or (is_named_tuple(value) and not getattr(value, "__dict__", None)):
        return all(is_transparent(part, seen) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (list, dict, tuple)):
        names = {field.name for field in dataclasses.fields(value)}
        return set(getattr(value, "__dict__", names)) <= names and all(
            is_transparent(getattr(value, name), seen) for name in names if hasattr(value, name)
        )
    return False


def rebuild(value: Any, leaf: Any, replace: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
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
    if kind is list or kind is deque:
        parts = made[id(value)] = [] if kind is list else deque(maxlen=value.maxlen)  # first: it may hold itself
        parts.extend(rebuild(part, leaf, replace, made) for part in value)
        return parts
    if kind is dict or kind is OrderedDict:
        entries = made[id(value)] = kind()
        entries.update((key, rebuild(part, leaf, replace, made)) for key, part in value.items())
        return entries
    if kind is tuple or is_named_tuple(value):
        items = [rebuild(part, leaf, replace, made) for part in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            value = value._make(items) if hasattr(kind, "_make") else kind(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, list, dict, tuple)):
        value = _rebuild_dataclass(value, leaf, replace, made)
    return value


def is_named_tuple(value: Any) -> bool:
    """Whether it is one of `namedtuple`, or of those that `torch.topk` and others return."""
    if not isinstance(value, tuple):
        return False
    return (hasattr(value, "_make") and hasattr(value, "_fields")) or hasattr(value, "n_sequence_fields")


def _rebuild_dataclass(value: Any, leaf: Any, replace: Callable[[Any], Any], made: dict[int, Any]) -> Any:
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
    if PLAIN_TYPES.issuperset(map(type, tensors)):
        return _plain_versions(tensors)
    with without_torch_function():
        return list(map(version_of, tensors))


def _plain_versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_counted_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


_counted_version: Callable[[Tensor], int] = attrgetter("_version")


class _Place:
    """Stands in kept arguments where a tensor stood in the call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Inputs:
    """The arguments of one region call, from its forward to its replays."""

    # Defaults on the class: most calls have tensors and plain values, and no hooks around them.
    _tensors: list[Tensor] | None = None  # those that stand in the arguments' places, if they were taken out of there
    _changed: str | None = None  # the first that was, in words: no replay can use any of them
    _changed_by_region = False
    _hooked: list[_Hooked] | None = None

    def __init__(self, arguments: Arguments, tensors: list[Tensor], flat: bool, hooks: Hooks | None) -> None:
        self._arguments = arguments
        self._originals: Sequence[Any] = tensors  # all of them, watched for changes
        # Of tensors of plain types, versions are read without asking again what they are.
        self._read = read = _plain_versions if PLAIN_TYPES.issuperset(map(type, tensors)) else versions_of
        self._versions = read(tensors)
        if not flat or hooks is not None:
            self._tensors = self._replace_by_places()
        if hooks is not None:
            with torch.no_grad():  # as around autograd's own calls of a pack hook
                self._hooked = [_Hooked(tensor, hooks) for tensor in self._tensors or ()]
            self._tensors = None
            self._originals = list(map(weakref.ref, tensors))

    def _replace_by_places(self) -> list[Tensor]:
        """Take the tensors out of the arguments, each object once; what only user objects can reach stays in them."""
        places: dict[int, _Place] = {}
        reached: list[Tensor] = []

        def place(tensor: Tensor) -> _Place:
            if id(tensor) not in places:
                places[id(tensor)] = _Place(len(reached))
                reached.append(tensor)
            return places[id(tensor)]

        self._arguments = rebuild(self._arguments, Tensor, place)
        return reached

    def forward_ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Look whether the region changed what it was given."""
        if self._read(tensors) != self._versions:
            change = _find_change((args, kwargs), tensors, self._versions)
            if change is not None:
                self._changed_by_region = True
                self._let_go(change)

    def _let_go(self, change: str) -> None:
        """It matters: an input that was changed in place by what the region gave holds its graph, which holds this."""
        self._changed = change
        self._arguments, self._tensors, self._originals, self._hooked = ((), {}), None, [], None

    def let_go_of_what_was_changed(self) -> None:
        """Look whether anybody changed an input since."""
        if self._changed is None and self._hooked is None:
            _, change = self._arguments_and_change()
            if change is not None:
                self._let_go(change)

    def restore(self, region: Callable[[], str]) -> Arguments:
        """The arguments as the forward got them; raises where that is no longer possible (rule 9)."""
        if self._changed is None:
            arguments, change = self._arguments_and_change()
            if change is None:
                return arguments
            self._let_go(change)
            del arguments  # or the error's traceback holds them
        assert self._changed is not None
        raise _errors.input_changed(region(), self._changed, by_region=self._changed_by_region)

    def _arguments_and_change(self) -> tuple[Arguments, str | None]:
        change = None
        if self._hooked is not None:
            with torch.no_grad():
                arguments = self._filled([hooked.get() for hooked in self._hooked])
            change = _find_change(arguments, [reference() for reference in self._originals], self._versions)
        else:
            arguments = self._arguments if self._tensors is None else self._filled(self._tensors)
            if self._read(self._originals) != self._versions:
                change = _find_change(arguments, self._originals, self._versions)
        return arguments, change

    def _filled(self, tensors: list[Tensor]) -> Arguments:
        def fill(place: _Place) -> Tensor:
            return tensors[place.index]

        arguments: Arguments = rebuild(self._arguments, _Place, fill)
        return arguments


def _find_change(arguments: Arguments, tensors: Sequence[Tensor | None], versions: list[int]) -> str | None:
    """The first tensor at another version, in words. One that is gone can no longer be asked."""
    for index, (tensor, then) in enumerate(zip(tensors, versions, strict=True)):
        if tensor is None:
            continue
        (now,) = versions_of((tensor,))
        if now != then:
            names = [_name_of(path) for path, _ in walk(arguments)]
            # A container may hold other tensors than before: then the name is not to be had.
            name = names[index] if len(names) == len(tensors) else f"tensor {index} of the arguments"
            return f"{name} ({_errors.describe_tensor(tensor)}), at version {now} instead of {then}"
    return None


class _ByHand(threading.local):
    """Whether this thread calls a pack hook by hand: a hook that watches for operators must know there is none."""

    packing = False


by_hand = _ByHand()


class _Hooked:
    """A tensor in the care of saved-tensor hooks, and what they do not keep: its place in autograd's graph."""

    __slots__ = ("_original", "_packed", "_place", "_stride", "_unpack")

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self._original = weakref.ref(tensor)
        with without_torch_function():
            self._place = PlaceInGraph(tensor) if tensor.requires_grad else None
        dense = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
        self._stride = tensor.stride() if dense else None
        # Called by hand, not by autograd: what the hook raises, a stop above all, comes out as it is.
        by_hand.packing = True
        try:
            self._packed = pack(tensor)
        finally:
            by_hand.packing = False

    def get(self) -> Tensor:
        tensor = self._unpack(self._packed)
        if self._stride is not None and tensor.stride() != self._stride:
            # Hooks may give back the values in another order; random operators draw in the order of memory.
            tensor = with_stride(tensor, self._stride)
        if self._place is None:
            return tensor
        original = self._original()
        # Leaves are looked for by identity: where the hooks gave back the same memory, it is the leaf itself.
        if original is not None and original.is_leaf and is_same_memory(tensor, original):
            return original
        return self._place.put(tensor)


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a leaf that needs grad, or a parameter that is frozen, or a view of one: alive anyway."""
    owner = tensor if tensor._base is None else tensor._base
    return isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in memory of the same order, so that what is computed from it is the same to the last bit."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.clone()
    copied = tensor.clone()
    return copied if copied.stride() == tensor.stride() else with_stride(copied, tensor.stride())


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values in memory of another order, where memory can be laid out so."""
    try:
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    except RuntimeError:  # an expanded tensor has places that share memory
        return tensor

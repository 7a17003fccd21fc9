"""What steps read from outside of their state: weights, tensors of a closure, buffers that they change.

Gradients. A chain is one node of autograd's graph, and its inputs are the tensors that its steps read and that need
grad. They are found where nothing can be missed: in the graph of a step that was run with one. Leaves are found in it
as they are. Of others, which have a history, only the edge is found that leads out of the step; which tensor that is
shows where operators are given it (`Looking`), or where the function has it (`reachable`).

State. What a step changes in place from outside (running statistics, the vectors of `spectral_norm`) is noted by
`Looking` too, so that it can be put back when the step is run again.

`Looking` is a dispatch mode and costs more than a step may, so what it has shown of a function is remembered.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from recollect._guards import Reading
from recollect._known import Known
from recollect._record import Recorder
from recollect._restored import lasting
from recollect._torch import (
    LEAF_NODE,
    METADATA_OPERATORS,
    gives_views,
    node_number,
    own_tensors,
    running_statistics,
    storage_key,
    without_any_torch_function,
    written_arguments,
)

# A way into a part of autograd's graph: a node, and which of its results.
Edge = tuple[Any, int]


class Outside:
    """The tensors from outside that need grad, in the order in which they were found, each once."""

    __slots__ = ("_places", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._places: set[Any] = set()

    def add(self, tensor: Tensor) -> None:
        place = edge_of(tensor)
        if place not in self._places:
            self._places.add(place)
            self.tensors.append(tensor)

    def __contains__(self, edge: Any) -> bool:
        return edge in self._places


def edge_of(tensor: Tensor) -> Any:
    """What stands for a tensor that needs grad in autograd's graph: its edge; a leaf's own identity."""
    return id(tensor) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def leads_to(tensors: Iterable[Tensor], first: int) -> tuple[list[Tensor], list[Edge]]:
    """The leaves that the graph of `tensors` leads to, and the edges where it goes on to what was there before.

    Nodes below the number `first` were made before, if by this thread. Those of another thread are looked through, to
    the leaves that they lead to.
    """
    leaves: dict[int, Tensor] = {}
    edges: dict[Edge, None] = {}
    waiting: list[Any] = []
    seen: set[Any] = set()
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is None:
            leaves[id(tensor)] = tensor
        elif node_number(node) < first:
            edges[node, tensor.output_nr] = None
        elif node not in seen:
            seen.add(node)
            waiting.append(node)
    while waiting:
        for edge in waiting.pop().next_functions:
            node = edge[0]
            if node is None or node in seen:
                continue
            if node.__class__ is LEAF_NODE:
                seen.add(node)
                leaf = node.variable
                leaves[id(leaf)] = leaf
            elif node_number(node) < first:
                edges[edge] = None
            else:
                seen.add(node)
                waiting.append(node)
    return list(leaves.values()), list(edges)


# --- Where operators are given what they read ---


class Looking(Recorder):
    """Sees what a step reads and changes from outside, without a look at values."""

    changes_of_weights = False

    def __init__(self) -> None:
        super().__init__(results=False)
        self.edges: dict[Edge, Tensor] = {}  # those with a history

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or self._is_within or func in METADATA_OPERATORS:
            return func(*args, **kwargs)
        with without_any_torch_function():
            given = self._before(func, args, kwargs)
            for tensor in _tensors((*args, *kwargs.values())):
                self._note(tensor)
        result = self._run(func, args, kwargs)
        with without_any_torch_function():
            self._made.update(key for key in map(storage_key, _tensors((result,))) if key not in given)
        return result

    def _note(self, tensor: Tensor) -> None:
        for one in (tensor, tensor._base):
            if one is not None and one.grad_fn is not None:
                self.edges.setdefault((one.grad_fn, one.output_nr), one)

    def changes(self, modules: Sequence[Module], own: set[int]) -> list[tuple[Tensor, bool]]:
        """What the step changed in place, but for the memory of its `own` state; with it, whether it reads that too."""
        with without_any_torch_function():
            self.ended()
            for memory in own:
                self.writes.pop(memory, None)
            return [(tensor, write.is_read and write.matters) for tensor, write in lasting(self, modules)]


class ReadingValues(Reading):
    """Looks for operators that read the values of some tensors, which is not: write to them, or give a view of them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is None and not self.paused and not gives_views(func):
            places = (*written_arguments(func), *running_statistics(func, args, kwargs))
            written = {at for at, _ in places}, {name for _, name in places}
            self._look([one for at, one in enumerate(args) if at not in written[0]])
            self._look([one for name, one in kwargs.items() if name not in written[1]])
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class StepOf:
    """What is known of a function as a step, from one chain to the next."""

    __slots__ = ("changes", "has_history", "is_looked_at", "is_loose", "is_verified", "measured")

    def __init__(self) -> None:
        # What it changes in place, wherever that is then, and whether it reads that too.
        self.changes: dict[Any, tuple[Callable[[], Tensor | None], bool]] = {}
        self.has_history = False  # whether it has read something with a history that it was not given
        self.is_looked_at = False  # whether it is known what it changes
        self.is_loose = False  # whether it changes tensors of no module: a closure made anew has others
        self.is_verified = False  # whether its states were compared by value when it was run again

        self.measured: dict[Any, Any] = {}  # by kind of state: see measured.py

    def learn(self, known: Known, changes: Iterable[tuple[Tensor, bool]]) -> None:
        homes = {
            id(buffer): (module, name)
            for root in known.roots()
            for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        for tensor, is_read in changes:
            home = homes.get(id(tensor))
            if home is None:
                self.is_loose = True
                is_read |= self._is_read(id(tensor))
                self.changes[id(tensor)] = weakref.ref(tensor), is_read
            else:  # by its name: another tensor may be put in its place
                get = functools.partial(_attribute, weakref.ref(home[0]), home[1])
                is_read |= self._is_read((id(home[0]), home[1]))
                self.changes[id(home[0]), home[1]] = get, is_read

    def _is_read(self, place: Any) -> bool:
        return place in self.changes and self.changes[place][1]

    def changed(self) -> list[tuple[Tensor, bool]]:
        """What it changes, as far as that is still there."""
        there = {place: tensor for place, (get, _) in list(self.changes.items()) if (tensor := get()) is not None}
        self.changes = {place: self.changes[place] for place in there}
        return [(tensor, self.changes[place][1]) for place, tensor in there.items()]


def _attribute(module: weakref.ref[Module], name: str) -> Tensor | None:
    owner = module()
    tensor: Tensor | None = None if owner is None else getattr(owner, name, None)
    return tensor


# --- Where a function has what it may read ---

_DEPTH = 3  # of containers and objects in one another
_MANY = 20_000  # values, after which it is enough


def reachable(function: Callable[..., Any]) -> list[Tensor]:
    """The tensors that a function can be seen to have: in its closure, its owner, its globals.

    More than it reads, perhaps; and what it has in other ways, deeper down or in C, is not found.
    """
    return Search().new_in(function)


class Search:
    """Looks for tensors in one function after the other, and into everything once."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._seen: dict[int, Any] = {}  # the values too: one that is gone could make room for another
        self._methods: set[tuple[int, int]] = set()  # of which owner, which functions

    def new_in(self, function: Callable[..., Any]) -> list[Tensor]:
        """Those that a function has, and that were not found before."""
        self._found = []
        self._look_into(function, _DEPTH)
        return self._found

    def _look_into(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN or depth < 0 or id(value) in self._seen or len(self._seen) > _MANY:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._found.append(value)
        elif isinstance(value, Module):
            self._look_into_module(value, depth)
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            for one in value:
                self._look_into(one, depth - 1)
        elif isinstance(value, dict):
            for one in value.values():
                self._look_into(one, depth - 1)
        elif kind is FunctionType:
            self._look_into_function(value, depth)
        elif kind is MethodType:
            self._look_into_method(value.__self__, value.__func__, depth)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._look_into(one, depth)
        elif not isinstance(value, type):
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is not None:
                self._look_into(wrapped, depth)
            for one in list(_attributes(value).values()):
                self._look_into(one, depth - 1)
            call = getattr(type(value), "__call__", None)  # noqa: B004 - not whether, but which
            if type(call) is FunctionType:
                self._look_into_method(value, call, depth)

    def _look_into_module(self, module: Module, depth: int) -> None:
        for one in module.modules():
            self._seen[id(one)] = one
            for tensors in own_tensors(one):
                for tensor in tensors.values():
                    self._look_into(tensor, 0)
            for name, value in vars(one).items():
                if name not in _OF_MODULES:
                    self._look_into(value, min(depth, 1))

    def _look_into_function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                self._look_into(cell.cell_contents, depth)
            except ValueError:  # nothing in it yet
                continue
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look_into(value, depth)
        around = function.__globals__
        for name in _names(function.__code__):
            if name in around:
                self._look_into(around[name], depth - 1)

    def _look_into_method(self, owner: Any, function: Any, depth: int) -> None:
        if type(function) is not FunctionType:
            self._look_into(owner, depth)
        elif (id(owner), id(function)) not in self._methods:
            self._methods.add((id(owner), id(function)))
            self._look_into_function(function, depth)
            # Of its owner, which may be a whole model, what the code names.
            own = _attributes(owner)
            for name in _names(function.__code__):
                if name in own:
                    self._look_into(own[name], depth - 1)
                elif type(method := getattr(type(owner), name, None)) is FunctionType:
                    self._look_into_method(owner, method, depth)


def _attributes(owner: Any) -> dict[str, Any]:
    """What an object has under names of its own; nothing that is computed when it is asked for."""
    found = dict(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            slot = vars(kind).get(name)  # of a private name another one; then it is not found
            if isinstance(slot, MemberDescriptorType) and hasattr(owner, name):
                found[name] = getattr(owner, name)
    if isinstance(owner, Module):
        for tensors in own_tensors(owner):
            found.update(tensors)
        found.update(owner.named_children())
    return found


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a code names, with the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_PLAIN = frozenset(
    (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type(torch))
)
_OF_MODULES = frozenset(vars(Module()))

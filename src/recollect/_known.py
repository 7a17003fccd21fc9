"""What is known about a function from one call of it to the next.

A function is known by its code, by the modules that it belongs to (itself, the owner of a method, what a closure, a
partial or an argument brings along), and by the name of its region: a lambda is made anew in each step, and the
layers of a model share their code. Nothing is kept alive by what is known of it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import is_not, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from recollect._inputs import Arguments
from recollect._torch import (
    identities_of_own_tensors,
    in_functional_call,
    keeps_running_statistics,
    own_tensors,
    parameters_at,
    process_groups,
    storage_key,
)

Key = tuple[Any, ...]
# What a reference refers to. (Python 3.10 has no `operator.call`.)
_there: Callable[[weakref.ref[Any]], Any] = getattr(operator, "call", methodcaller("__call__"))
_FEW = 100
# How often leaves are looked for that a function may make itself, anew in every run.
_FEW_LOOKS = 3


class Known:
    """What earlier calls have shown."""

    __slots__ = (
        "__weakref__",
        "_identities",
        "_is_large",
        "_is_swapped",
        "_references",
        "_roots",
        "_seen",
        "_strange",
        "_verified_in",
        "familiar",
        "flags",
        "gathers_are_known",
        "homes",
        "is_recorded",
        "looked",
        "quiet",
        "reads",
        "rebound",
        "step",
        "tree",
        "unseen",
        "verified",
        "warned",
        "writes",
    )

    def __init__(self, references: list[weakref.ref[Any]], modules: list[Module]) -> None:
        self._references = references
        self._roots = [weakref.ref(module) for module in modules]
        tree = {id(one): one for module in modules for one in module.modules()}
        # A method of a whole model says little about what one of its layers calls: then what is called is learnt.
        self._is_large = len(tree) > _FEW
        self.tree = [weakref.ref(one) for one in (modules if self._is_large else tree.values())]
        self.verified = False  # whether a replay was compared by value and found equal, with modules in this mode
        self.flags: list[bool] = []  # that mode: which of the modules are in training
        self._verified_in: set[tuple[bool, ...]] = set()
        self.looked = 0  # how often it was looked whether it draws random numbers which are not preserved
        self.warned = False  # that it draws random numbers which are not preserved
        self.gathers_are_known = not process_groups  # whether modules in it gather their parameters for a replay alone
        self.is_recorded = False
        # What it reads from outside and does not change, in every call that was recorded.
        self.reads: list[weakref.ref[Tensor]] = []
        # Buffers of its modules that it was not seen to change.
        self.quiet: list[weakref.ref[Tensor]] = []
        # Buffers of those that no recorded run has called: what becomes of them is not known.
        self.unseen: list[weakref.ref[Tensor]] = []
        self._seen: set[Any] = set()  # the modules that were called, and where they have buffers that were read
        # Where it puts buffers in the place of others.
        self.rebound: set[tuple[int, str]] = set()
        # Leaves that it was seen to save, by identity: who saves another one takes a way that was not recorded.
        self.familiar: dict[int, weakref.ref[Tensor]] = {}
        self._strange = 0  # how often one that it saved was made by itself
        # What it changes in place, from outside; with it, whether what that held must be put back.
        self.writes: dict[Any, tuple[Callable[[], Tensor | None], bool]] = {}
        self._identities: list[int] = []  # of its parameters and buffers in the call before
        self._is_swapped = False  # whether those were there only for the time of that call
        self.step: Any = None  # what is known of it as a step of a chain: see _chains/outside.py
        # Where its modules have the parameters among that.
        self.homes: list[tuple[weakref.ref[Module], str]] = []

    def modules(self) -> list[Module]:
        """The modules whose mode counts: those that belong to the function, or those that it was seen to call."""
        modules: list[Any] = list(map(_there, self.tree))
        if all(map(is_not, modules, repeat(None))):
            return modules
        return [module for module in modules if module is not None]

    def at_home(self) -> list[Tensor | None]:
        """The parameters that its modules have now where they had those that it is known to read."""
        return parameters_at(self.homes)

    def is_swapped(self, modules: list[Module], *, putting: bool) -> bool:
        """Whether a module has other tensors than its own now, by `functional_call` or, `putting`, by a replay.

        That is looked up only if they are others than in the call before: it takes a while.
        """
        if self._is_large:
            return putting or in_functional_call()
        identities = identities_of_own_tensors(modules)
        if identities != self._identities:
            self._identities = identities
            self._is_swapped = putting or in_functional_call()
        return self._is_swapped

    def may_read(self) -> Iterable[Tensor | None] | None:
        """The parameters that it may read, as far as its modules and recorded calls tell; None if they tell nothing."""
        if not self.is_recorded and (self._is_large or not self.tree):
            return None
        own = (one for module in self.modules() for one in own_tensors(module)[0].values())
        return chain(own, (reference() for reference in self.reads))

    def roots(self) -> list[Module]:
        """The modules that the function belongs to."""
        return [module for reference in self._roots if (module := reference()) is not None]

    def look_at_mode(self, flags: list[bool]) -> None:
        """Take note of the mode of its modules: in another one it may do, and change, other things."""
        if flags != self.flags:
            self.flags = flags
            self.verified = tuple(flags) in self._verified_in

    def verify(self, flags: Iterable[bool]) -> None:
        """A replay was found equal, of a forward with the modules in this mode."""
        self._verified_in.add(tuple(flags))
        self.verified = tuple(self.flags) in self._verified_in

    def verify_again(self) -> None:
        """Let it be compared by value again, the next time that it is run again."""
        self.verified = False
        self._verified_in.clear()
        if self.step is not None:
            self.step.is_verified = False

    def only_written(self) -> frozenset[int]:
        """The memory that it changes, and on which nothing depends that it gives."""
        tensors = [get() for get, is_read in self.writes.values() if not is_read]
        return frozenset(storage_key(tensor) for tensor in tensors if tensor is not None)

    def takes_a_new_way(self, leaves: Mapping[int, Tensor]) -> bool:
        """Whether these leaves, which a forward has saved, show that it did not do what was recorded.

        Parameters of modules do: what has buffers mostly has them. Other leaves may be new in every step.
        """
        if leaves.keys() <= self.familiar.keys() or self._strange >= _FEW_LOOKS:
            return False
        return any(isinstance(leaf, Parameter) for place, leaf in leaves.items() if place not in self.familiar)

    def saves(self, leaves: Iterable[Tensor], *, made_here: bool = False) -> None:
        """Take note of leaves that it saves; `made_here` if no replay could find them again."""
        self._strange += made_here
        for leaf in leaves:
            place = id(leaf)
            if place not in self.familiar:
                self.familiar[place] = weakref.ref(leaf, functools.partial(_forget_leaf, weakref.ref(self), place))

    def learn(self, reads: list[Tensor], writes: list[tuple[Tensor, bool]], called: list[Module]) -> None:
        """Take over what a recorded forward has shown."""
        self.learn_changes(writes, called, reads)
        if self.is_recorded:
            common = {id(tensor) for tensor in reads}
            self.reads = [one for one in self.reads if id(one()) in common]
        else:
            self.reads = [weakref.ref(tensor) for tensor in reads]
        self.is_recorded = True
        common = {id(one()) for one in self.reads}
        self.homes = [
            (weakref.ref(module), name)
            for module in self.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in common
        ]

    def learn_changes(self, writes: list[tuple[Tensor, bool]], called: list[Module], reads: list[Tensor]) -> None:
        """Take over which modules a run has called, and what it has changed and read."""
        before = {id(one) for one in self.modules()}
        self.tree += [weakref.ref(module) for module in called if id(module) not in before]
        buffers = {
            id(buffer): (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        # A batch norm that counts changes its statistics too: it shows in no version, and a replay may stop before.
        norms = {buffers[id(tensor)][0] for tensor, _ in writes if id(tensor) in buffers}
        norms = {one for one in norms if keeps_running_statistics(one)}
        statistics = [(buffer, one.momentum is None) for one in norms for buffer in one.buffers(recurse=False)]
        for tensor, is_read in chain(writes, statistics):
            home = buffers.get(id(tensor))
            # A buffer is known by its name: `model.to(...)` and others put another tensor in its place.
            place: Any = id(tensor) if home is None else (id(home[0]), home[1])
            is_read |= place in self.writes and self.writes[place][1]
            # What was not read this time may be, later on. Batch norm's statistics: in another mode, and not changed.
            is_read |= home is None or not keeps_running_statistics(home[0])
            if home is None:
                get: Any = weakref.ref(tensor, functools.partial(_forget, weakref.ref(self), place))
            else:
                get = functools.partial(_attribute, weakref.ref(home[0]), home[1])
            self.writes[place] = (get, is_read)
        written = {id(get()) for get, _ in self.writes.values()}
        quiet = [one for place, one in buffers.items() if place not in written]
        self.quiet = [weakref.ref(buffer) for _, _, buffer in quiet]
        read = set(map(id, reads))
        self._seen.update(map(id, called))
        self._seen.update((id(module), name) for module, name, buffer in quiet if id(buffer) in read)
        self.unseen = [
            weakref.ref(buffer)
            for module, name, buffer in quiet
            if self._seen.isdisjoint((id(module), (id(module), name)))
        ]


def _attribute(module: weakref.ref[Module], name: str) -> Tensor | None:
    owner = module()
    tensor: Tensor | None = None if owner is None else getattr(owner, name, None)
    return tensor


def _forget_leaf(known: weakref.ref[Known], place: int, _: object) -> None:
    there = known()
    if there is not None:
        there.familiar.pop(place, None)


def _forget(known: weakref.ref[Known], place: int, _: object) -> None:
    there = known()
    if there is not None:
        there.writes.pop(place, None)


_everything: dict[Key, Known] = {}


def known_of(function: Callable[..., Any], arguments: Arguments, name: str | None) -> Known:
    """What is known of a function that is called with these arguments."""
    owners: list[Any] = []
    code = _code_of(function, owners)
    args, kwargs = arguments
    if kwargs or not _plain.issuperset(map(type, args)):
        for value in (*args, *kwargs.values()):
            _find_modules(value, owners, _DEPTH)
    key: Key
    if owners:
        # In training it may do other things than in evaluation.
        training = owners[0].training if isinstance(owners[0], Module) else None
        key = (id(code), name, training, *map(id, owners))
    else:
        key = (id(code), name)
    known = _everything.get(key)
    return _make(key, code, owners) if known is None else known


_OF_C = (BuiltinFunctionType, MethodWrapperType, type(str.join))
# How far modules are looked for in containers and objects.
_DEPTH = 2
# Kinds of values in which there are none.
_plain: set[type] = {bool, int, float, str, bytes, type(None), Tensor, torch.dtype, torch.device, torch.Size}


def _code_of(function: Any, owners: list[Any]) -> Any:
    """What stands for the code of a function; the modules and the object that it belongs to are added to `owners`."""
    kind = type(function)
    if kind is FunctionType:
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
            _find_in_function(function, owners, _DEPTH)
        return function.__code__
    if kind is MethodType:
        owner = function.__self__
        owners.append(owner)
        if not isinstance(owner, Module):
            _find_modules(owner, owners, _DEPTH)
        return getattr(function.__func__, "__code__", function.__func__)
    if isinstance(function, Module):
        owners.append(function)
        return kind
    if isinstance(function, functools.partial):
        for value in (*function.args, *function.keywords.values()):
            _find_modules(value, owners, _DEPTH)
        return _code_of(function.func, owners)
    if isinstance(function, type) or kind in _OF_C:
        return function
    wrapped = getattr(function, "__wrapped__", None)
    if callable(wrapped):
        return _code_of(wrapped, owners)
    owners.append(function)  # another object that can be called
    _find_modules(function, owners, _DEPTH)
    return kind


def _find_in_function(function: FunctionType, owners: list[Any], depth: int) -> None:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # nothing in it yet
            continue
        _find_modules(value, owners, depth)
    for value in function.__defaults__ or ():
        _find_modules(value, owners, depth)
    if function.__kwdefaults__:
        for value in function.__kwdefaults__.values():
            _find_modules(value, owners, depth)


def _find_modules(value: Any, owners: list[Any], depth: int) -> None:
    kind = type(value)
    if kind in _plain:
        return
    if isinstance(value, Module):
        owners.append(value)
    elif not depth:
        return
    elif kind is list or kind is tuple:
        for part in value:
            _find_modules(part, owners, depth - 1)
    elif kind is dict:
        for part in value.values():
            _find_modules(part, owners, depth - 1)
    elif kind is FunctionType:
        _find_in_function(value, owners, depth - 1)
    elif kind is MethodType:
        _find_modules(value.__self__, owners, depth - 1)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _find_modules(part, owners, depth - 1)
    else:
        before = len(owners)
        for part in getattr(value, "__dict__", {}).values():
            _find_modules(part, owners, depth - 1)
        if len(owners) == before:  # nor will there be any in the next of its kind
            _plain.add(kind)


def _make(key: Key, code: Any, owners: list[Any]) -> Known:
    def drop(_: object) -> None:
        _everything.pop(key, None)

    references = []
    for one in (code, *owners):
        try:
            references.append(weakref.ref(one, drop))
        except TypeError:  # what cannot be referred to weakly could make room for another with its identity
            return Known([], [one for one in owners if isinstance(one, Module)])
    known = _everything[key] = Known(references, [one for one in owners if isinstance(one, Module)])
    return known


def verify_modules_again(modules: Iterable[Module]) -> None:
    """Let the next replays of all functions that have to do with some modules be compared by value again."""
    changed = set(map(id, modules))
    for known in all_known():
        if not changed.isdisjoint(map(id, known.modules())):
            known.verify_again()


def all_known(function: Callable[..., Any] | None = None) -> Iterator[Known]:
    """Everything that is known, or what is known of one function."""
    code = None if function is None else id(_code_of(function, []))
    # A copy made at once: `list(items())` allocates, so that a collection may run, and take entries out meanwhile.
    return iter([known for key, known in _everything.copy().items() if code is None or key[0] == code])

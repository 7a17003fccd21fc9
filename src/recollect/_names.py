"""Names in modules that are not ours: serve another object for them, and put them back.

There are two kinds of holders, and each is treated in its own way.

- The module that defines a name keeps it. Its functions go on finding each other as globals, so the originals work
  as ever, for whoever got hold of them before. Only who asks the module from outside is handed the other object: the
  module gets a class in which the name is a data descriptor, which Python looks at before the module's dict.
  (`Serving`.)
- A module that imported the name has it bound to the other object, also where an attribute of a class, or a
  `staticmethod` there, holds it. (`Rebound`.)

Nothing is ever asked of a foreign object but its dict, which is read below any `__getattr__`, `__getattribute__` or
`__class__` of its own: a scan loads no lazy module and provokes no warning. Partials, closures, default arguments,
containers and instances are not looked into.

Knows nothing of torch or of checkpointing.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_MODULE_DICT: Any = vars(types.ModuleType)["__dict__"]
_CLASS_DICT: Any = vars(type)["__dict__"]
_QUALNAME: Any = vars(type)["__qualname__"]


# --- Where a name is defined ---


class _Served:
    """A name of a module whose class was changed."""

    def __init__(self, serving: Serving, name: str, original: Any, other: Any) -> None:
        self.serving, self.name, self.original, self.other = serving, name, original, other

    def __get__(self, module: Any, kind: type) -> Any:
        if module is None:
            return self
        try:
            value = module.__dict__[self.name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {self.name!r}") from None
        if value is not self.original or not self.serving.is_on:
            return value
        asking = sys._getframe().f_back  # None where it is asked from C alone
        is_exempt = asking is not None and self.serving.is_exempt(asking.f_globals.get("__name__"))
        return self.original if is_exempt else self.other

    # What is written goes to the dict, where it holds for everybody. That ours is put back by somebody who had put
    # his own in between means that he is done.
    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = self.original if value is self.other else value

    def __delete__(self, module: Any) -> None:
        if module.__dict__.pop(self.name, self) is self:
            raise AttributeError(self.name)


SERVE = _Served.__get__


def _reduce_module(module: types.ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (module.__name__,)


class Serving:
    """A module that hands out `others` instead of what it has under these names, until `stop`.

    Not to modules for whose name `is_exempt` is true: those get the originals.
    """

    def __init__(self, module: types.ModuleType, others: Mapping[str, Any], is_exempt: Callable[[Any], bool]) -> None:
        self.module, self.is_exempt, self.is_on = module, is_exempt, True
        present = vars(module)
        self.originals = {name: present[name] for name in others if name in present}
        names: dict[str, Any]
        names = {name: _Served(self, name, value, others[name]) for name, value in self.originals.items()}
        self._class_before = type(module)
        # Those who pickle modules, as cloudpickle does, know them by their exact class.
        self._class = type("module", (self._class_before,), names | {"__reduce__": _reduce_module})
        module.__class__ = self._class

    def stop(self) -> list[str]:
        """Serve no longer; returns the names that somebody else has bound meanwhile, which stay as they are."""
        self.is_on = False
        if type(self.module) is self._class:  # else somebody has a class of his own on top of this one
            self.module.__class__ = self._class_before
        present = vars(self.module)
        return [
            f"{self.module.__name__}.{name}"
            for name, value in self.originals.items()
            if present.get(name, value) is not value
        ]


# --- Where it was imported ---


class Place(NamedTuple):
    """A name and who has it: the dict of a module, or a class."""

    where: str
    owner: Any
    name: str
    value: Any

    @property
    def held(self) -> Any:
        in_static = type(self.value) is staticmethod and type(self.owner) is not dict
        return self.value.__func__ if in_static else self.value

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def __str__(self) -> str:
        return f"{self.where}.{self.name}"


class Rebound:
    """Every name that is bound to the first of one of the `pairs` is bound to the second, from `start` to `stop`.

    Not in modules, nor classes of modules, for whose name `is_exempt` is true, nor in the modules `apart`.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Any, Any]],
        is_exempt: Callable[[Any], bool],
        apart: Iterable[types.ModuleType] = (),
    ) -> None:
        self._pairs, self._is_exempt, self._apart = list(pairs), is_exempt, list(apart)
        self._own: dict[tuple[int, str], Place] = {}
        self._places: list[tuple[Place, Any]] = []

    def start(self) -> None:
        others = {id(other) for _, other in self._pairs}
        for place in self._find([one for pair in self._pairs for one in pair]):
            if id(place.held) in others:
                # Who has the other object already has it not through us. Held, so that no identity is used twice.
                self._own[place.key] = place
            else:
                self._places.append((place, _bind_other(place, self._pairs)))

    def stop(self) -> list[str]:
        """Put all back; returns the names that somebody else has bound meanwhile, which stay as they are."""
        theirs, others = [], {id(other) for _, other in self._pairs}
        for place, other in self._places:
            now = place._replace(value=_dict_of(place.owner).get(place.name, place.value))
            if now.value is other:
                _bind(place.owner, place.name, place.value)
            elif now.value is not place.value and id(now.held) not in others:
                theirs.append(str(place))
        # Those that were bound while this was in force, as in modules that were imported meanwhile.
        backwards = [(other, one) for one, other in self._pairs]
        for place in self._find([other for other, _ in backwards]):
            if place.key not in self._own:
                _bind_other(place, backwards)
        return theirs

    def _find(self, objects: Iterable[Any]) -> list[Place]:
        return _find(objects, self._is_exempt, {id(vars(module)) for module in self._apart})


def _bind_other(place: Place, pairs: list[tuple[Any, Any]]) -> Any:
    """Bind the name to what its value, or the function in its `staticmethod`, is first paired with."""
    other = next(other for one, other in pairs if one is place.held)
    other = staticmethod(other) if place.held is not place.value else other
    _bind(place.owner, place.name, other)
    return other


def _find(objects: Iterable[Any], is_exempt: Callable[[Any], bool], seen: set[int]) -> list[Place]:
    """Every place where one of these objects is bound, except in dicts and classes that were `seen`."""
    wanted = frozenset(map(id, objects))
    places = []
    for module_name, module in list(sys.modules.items()):
        if module is None or is_exempt(module_name):
            continue
        waiting: list[Any] = [module if issubclass(type(module), type) else _dict_below(module)]
        while waiting:
            owner = waiting.pop()
            if owner is None or id(owner) in seen:
                continue
            seen.add(id(owner))
            values = _dict_of(owner)
            held = list(values.values())
            # There are many, and most are of no interest: what can be told of all of them in C is told there. Not by
            # isinstance, which asks a proxy for its __class__, nor by hashing classes, which may not like it.
            kinds = dict(zip(map(id, map(type, held)), map(type, held), strict=True))
            classes = {key for key, kind in kinds.items() if issubclass(kind, type)}
            if classes:
                waiting += [
                    value
                    for value in held
                    if id(type(value)) in classes and not is_exempt(_CLASS_DICT.__get__(value).get("__module__"))
                ]
            in_class = owner is not values
            may_be_static = in_class and id(staticmethod) in kinds
            if may_be_static or not wanted.isdisjoint(map(id, held)):
                where = _name_of(owner) if in_class else module_name
                places += [
                    Place(where, owner, name, value)
                    for name, value in list(values.items())
                    if id(value.__func__ if in_class and type(value) is staticmethod else value) in wanted
                ]
    return places


def _dict_below(module: Any) -> dict[str, Any] | None:
    """The dict of what stands in `sys.modules`, without asking it."""
    try:
        if issubclass(type(module), types.ModuleType):
            found = _MODULE_DICT.__get__(module)
        else:
            found = object.__getattribute__(module, "__dict__")
    except Exception:  # it has none, or does not say
        return None
    return found if type(found) is dict else None


def _name_of(owner: type) -> str:
    return f"{_CLASS_DICT.__get__(owner).get('__module__')}.{_QUALNAME.__get__(owner)}"


def _dict_of(owner: Any) -> Any:
    return owner if type(owner) is dict else _CLASS_DICT.__get__(owner)


def _bind(owner: Any, name: str, value: Any) -> None:
    if type(owner) is dict:
        owner[name] = value
    else:
        type.__setattr__(owner, name, value)

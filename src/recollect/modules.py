"""`apply`: decisions for the modules of a model, by name. Nothing is renamed, and all of it can be taken off again.

This file finds the modules and checks what was asked for; what a decision does to a module is in `_decided.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch.jit import ScriptModule
from torch.nn import Module, Sequential
from torch.utils.hooks import RemovableHandle

from recollect import _errors, _progress
from recollect._checkpoint import checked_options
from recollect._decided import (
    Decided,
    Entry,
    decided_of,
    install,
    is_decided_by,
    is_lazy,
    look_at_places,
    own_class,
    take_off,
    why_not,
)
from recollect._known import verify_modules_again
from recollect._patterns import ModulePattern, close_names
from recollect._progress import is_offloaded
from recollect.policy import DECISIONS, Decision, Recompute, checked_decision

Decisions = Mapping[str | type[Module], Decision] | Callable[[str, Module], Decision | None]


# --- Finding the modules ---


class _Found:
    """A module of the model, and all the names that lead to it."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.names: list[str] = []
        self.entry: Entry | None = None  # what decides for it

    def is_called(self) -> bool:
        """Whether calling it means something: a ModuleList and its kind have no forward."""
        if isinstance(self.module, ScriptModule) or "forward" in vars(self.module):
            return True
        kind = own_class(type(self.module))
        return kind.forward is not Module.forward or kind.__call__ is not Module.__call__

    def __str__(self) -> str:
        return f"{self.names[0]} ({type(self.module).__name__})"


def _find(model: Module) -> list[_Found]:
    found: dict[int, _Found] = {}  # by identity: modules may be equal to others
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), _Found(module)).names.append(name)
    return list(found.values())


def _by_name(pattern: str) -> Callable[[_Found], bool]:
    matches = ModulePattern(pattern).matches
    return lambda one: any(map(matches, one.names))


def _by_class(kind: type[Module]) -> Callable[[_Found], bool]:
    return lambda one: isinstance(one.module, kind)


def _entries(decisions: Mapping[Any, Any]) -> Iterator[tuple[Any, Callable[[_Found], bool], Entry]]:
    if not decisions:
        raise ValueError("decisions must hold at least one pattern, got an empty dict")
    for key, decision in decisions.items():
        if not isinstance(decision, DECISIONS):
            raise TypeError(
                f"decisions takes recollect.Save(), Recompute() or Offload() for {key!r}, "
                f"got {_errors.describe_value(decision)}"
            )
        if isinstance(key, str):
            yield key, _by_name(key), Entry(repr(key), decision)
        elif isinstance(key, type) and issubclass(key, Module):
            yield key, _by_class(own_class(key)), Entry(key.__name__, decision)
        else:
            raise TypeError(
                f"decisions takes patterns over module names (strings) or subclasses of torch.nn.Module as keys, got "
                f"{_errors.describe_value(key)}"
            )


def _decide_by_entries(model: Module, found: list[_Found], decisions: Mapping[Any, Any]) -> None:
    entries = []
    for key, matches, entry in _entries(decisions):
        entries.append(entry)
        matched = [one for one in found if matches(one)]
        called = [one for one in matched if one.is_called()]
        if not called:
            there = [name for one in found for name in one.names]
            if not isinstance(key, str):
                key, there = key.__name__, [type(one.module).__name__ for one in found]
            close = close_names(key, there)
            raise _errors.no_such_modules(entry.label, type(model).__name__, list(map(str, matched)), close)
        for one in called:
            if one.entry is not None and type(one.entry.decision) is not type(entry.decision):
                entry.overrides()
            one.entry = entry
    deciding = {id(one.entry) for one in found}
    for entry in entries:
        if id(entry) not in deciding:
            entry.was_of_no_use(None, "later entries decide for all the modules that it matches")


def _decide_by_asking(model: Module, found: list[_Found], decide: Callable[[str, Module], Decision | None]) -> None:
    label = _errors.describe_function(decide)
    entries: dict[Decision, Entry] = {}
    for one in found:
        if one.is_called():
            decision = checked_decision(decide(one.names[0], one.module), f"decisions, asked about {one.names[0]!r},")
            if decision is not None:
                one.entry = entries.setdefault(decision, Entry(label, decision))
    if not entries:
        raise ValueError(f"decisions ({label}) gave None for every module of {type(model).__name__}")


def _beside_offloaded(found: list[_Found]) -> list[_Found]:
    """The modules that are called before or after one that is offloaded, at every level around it.

    Of containers what is in them: they take long, or are not called themselves.
    """
    by_name = {name: one for one in found for name in one.names}
    children: dict[str, list[str]] = {}
    for name in by_name:
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)
    offloaded = {one for one in found if one.entry is not None and is_offloaded(one.entry.decision)}
    around = {above for one in offloaded for name in one.names for above in _names_above(name)}
    beside: dict[int, _Found] = {}
    waiting = [name for above in around for name in children[above]]
    for name in waiting:
        one = by_name[name]
        if name in around or one in offloaded:
            continue
        if isinstance(one.module, ScriptModule):
            continue  # it takes no such hooks
        if own_class(type(one.module)) is Sequential or not one.is_called():
            waiting += children.get(name, [])
        else:
            beside[id(one)] = one
    return list(beside.values())


def _names_above(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


# --- Under other decisions ---

# The decisions that each model has had so far, as hashes: a search over decisions comes to have many.
_had: weakref.WeakKeyDictionary[Module, set[int]] = weakref.WeakKeyDictionary()


def _decisions_changed(model: Module) -> None:
    """Let replays be compared by value again if a model has not had these decisions before: they do other work."""
    all_decided = [(name, decided) for name, one in model.named_modules() if (decided := decided_of(one)) is not None]
    words = {id(decided.entry): repr(decided.entry.decision) for _, decided in all_decided}
    now = hash(tuple((name, words[id(decided.entry)]) for name, decided in all_decided))
    had = _had.setdefault(model, set())
    if now not in had:
        had.add(now)
        verify_modules_again(model.modules())


# --- The interface ---


class Handle:
    """What `apply` did: `remove()` takes it off again; as a context manager it does so at the end."""

    def __init__(self, model: Module, modules: list[Module], decided: list[Decided]) -> None:
        self._model = weakref.ref(model)
        self._modules = list(map(weakref.ref, modules))
        self._decided = decided
        self._marks: list[RemovableHandle] = []

    def remove(self) -> None:
        """Leave the model as it was. What was decided elsewhere, and for copies, stays."""
        for reference, decided in zip(self._modules, self._decided, strict=True):
            module = reference()
            if module is not None and is_decided_by(module, decided):
                take_off(module)
        for mark in self._marks:
            mark.remove()
        self._modules, self._decided, self._marks = [], [], []
        model = self._model()
        if model is not None:
            _decisions_changed(model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def summary(self) -> None:
        """Print the tree of modules with their decisions."""
        sys.stdout.write(f"{self}\n")

    def __str__(self) -> str:
        model = self._model()
        return "the model is gone" if model is None else "\n".join(_tree(model))

    def __repr__(self) -> str:
        model = self._model()
        what = "a model that is gone" if model is None else type(model).__name__
        return f"<decisions for {len(self._modules)} modules of {what}; print() shows them>"


def _tree(model: Module) -> Iterator[str]:
    seen: dict[int, str] = {}
    inside = None  # of a module that was shown before
    for path, module in model.named_modules(remove_duplicate=False):
        if inside is not None and path.startswith(inside):
            continue
        *above, name = path.split(".")
        kind = type(module).__name__
        label = f"{'  ' * (len(above) + 1)}{name}: {kind}" if path else kind
        first = seen.setdefault(id(module), path)
        inside = None if first == path else f"{path}."
        same = "" if first == path else f" (the same as {first or 'the model'})"
        decided = decided_of(module)
        decision = f"  <- {decided.entry.decision!r} by {decided.entry.label}" if decided is not None else ""
        yield f"{label}{same}{decision}"


def apply(
    model: Module,
    decisions: Decisions,
    *,
    determinism_check: str = "first",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
) -> Handle:
    """Decide for the modules of a model what to keep, recompute or offload.

    Args:
        model: Any module. It is changed in place, so that nothing shows but in what it keeps: parameters, buffers,
            `state_dict`, names, hooks and signatures stay as they are.
        decisions: A dict from patterns over module names to decisions, where later entries win: `"layers.*"` is
            every layer (`*` stands for one part of a name, or within one), `"**.attn"` every `attn` at any depth, `""`
            the model itself. A class stands for all modules of it. Or a function `(name, module) -> decision | None`.
        determinism_check: For the regions that are recomputed, as for `checkpoint`.
        debug: As for `checkpoint`.
        early_stop: As for `checkpoint`.
        preserve_rng_state: As for `checkpoint`.

    Returns:
        A handle with `remove()` and `summary()`, which is also a context manager.

    Example:
        >>> import torch, recollect
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)]
        >>> model = torch.nn.Sequential(*layers)
        >>> handle = recollect.apply(model, {"*": recollect.Recompute(), "*.0": recollect.Save()})
        >>> model(torch.ones(2, 4)).sum().backward()  # runs GELU again, and not the product
        >>> handle.remove()
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_errors.describe_value(model)}")
    found = _find(model)
    if isinstance(decisions, Mapping):
        _decide_by_entries(model, found, decisions)
    elif callable(decisions) and not isinstance(decisions, type):
        _decide_by_asking(model, found, decisions)
    else:
        raise TypeError(
            "decisions must be a dict from patterns or classes to decisions, or a function (name, module) -> decision, "
            f"got {_errors.describe_value(decisions)}"
        )
    may_be_lazy = any(is_lazy(one.module) for one in found)
    modules, made = [], []
    for one in found:
        entry, module, name = one.entry, one.module, one.names[0]
        if entry is None:
            continue
        before, reason = decided_of(module), why_not(module, may_be_lazy=may_be_lazy)
        if before is not None:
            raise _errors.decided_twice(
                name, before.entry.label, repr(before.entry.decision), entry.label, repr(entry.decision)
            )
        if reason is not None:
            raise _errors.cannot_be_decided(name, reason)
        policy, inputs = None, None
        if isinstance(entry.decision, Recompute):
            policy, inputs = entry.decision.policy, entry.decision.inputs
        options = checked_options(
            determinism_check, debug, early_stop, preserve_rng_state, name or None, policy, inputs
        )
        modules.append(module)
        made.append(Decided(name or type(model).__name__, entry, options))
        entry.decides(module)
    handle = Handle(model, modules, made)
    try:
        for module, decided in zip(modules, made, strict=True):
            install(module, decided)
        look_at_places(model)
        for one in _beside_offloaded(found):
            handle._marks.append(_progress.watch(one.names[0], one.module))
        _decisions_changed(model)
    except BaseException:
        handle.remove()
        raise
    return handle


def unapply(model: Module) -> None:
    """Take every decision of `apply` off a model: for copies and loaded models, of which there is no handle.

    Example:
        >>> import copy, torch, recollect
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> handle = recollect.apply(model, {"0": recollect.Recompute()})
        >>> twin = copy.deepcopy(model)
        >>> recollect.unapply(twin)
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_errors.describe_value(model)}")
    for module in model.modules():
        decided = decided_of(module)
        if decided is None or decided.hooked is None:
            take_off(module)
    _progress.stop_watching(model.modules())
    _decisions_changed(model)

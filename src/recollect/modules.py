"""`apply`: decisions for the modules of a model, by name. Nothing is renamed, and all of it can be taken off again.

This file finds the modules and checks what was asked for; what a decision does to a module is in `_decided.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch.nn import Module

from recollect import _errors
from recollect._checkpoint import checked_options
from recollect._decided import Decided, DecidedModule, Entry, decided_of, install, take_off
from recollect._patterns import ModulePattern, close_names
from recollect.policy import DECISIONS, Decision, Recompute, checked_decision

Decisions = Mapping[str | type[Module], Decision] | Callable[[str, Module], Decision | None]


# --- Finding the modules ---


def _is_called(module: Module) -> bool:
    """Whether calling it means something: a ModuleList and its kind have no forward."""
    return type(module).forward is not Module.forward or "forward" in vars(module)


def _names_of(model: Module) -> dict[Module, list[str]]:
    """The modules of a model, each with all the names that lead to it."""
    names: dict[Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _entries(decisions: Mapping[Any, Any]) -> list[tuple[Callable[[str, Module], bool], Entry]]:
    if not decisions:
        raise ValueError("decisions must hold at least one pattern, got an empty dict")
    entries: list[tuple[Callable[[str, Module], bool], Entry]] = []
    for key, decision in decisions.items():
        if not isinstance(decision, DECISIONS):
            raise TypeError(
                f"decisions takes recollect.Save(), Recompute() or Offload() for {key!r}, "
                f"got {_errors.describe_value(decision)}"
            )
        if isinstance(key, str):
            pattern = ModulePattern(key)
            entries.append((lambda name, _, pattern=pattern: pattern.matches(name), Entry(repr(key), decision)))  # type: ignore[misc]
        elif isinstance(key, type) and issubclass(key, Module):
            entries.append((lambda _, module, kind=key: isinstance(module, kind), Entry(key.__name__, decision)))  # type: ignore[misc]
        else:
            raise TypeError(
                f"decisions takes patterns over module names (strings) or subclasses of torch.nn.Module as keys, got "
                f"{_errors.describe_value(key)}"
            )
    return entries


def _find_by_entries(model: Module, decisions: Mapping[Any, Any]) -> dict[Module, Entry]:
    names = _names_of(model)
    found: dict[Module, Entry] = {}
    for matches, entry in _entries(decisions):
        matched = [module for module, its in names.items() if any(matches(name, module) for name in its)]
        called = [module for module in matched if _is_called(module)]
        if not called:
            raise _errors.no_such_modules(
                entry.label,
                type(model).__name__,
                [f"{names[module][0]} ({type(module).__name__})" for module in matched],
                close_names(entry.label.strip("'"), [name for its in names.values() for name in its]),
            )
        for module in called:
            if module in found and type(found[module].decision) is not type(entry.decision):
                entry.overrides()
            found[module] = entry
    return found


def _find_by_asking(model: Module, decide: Callable[[str, Module], Decision | None]) -> dict[Module, Entry]:
    label = _errors.describe_function(decide)
    entries: dict[Decision, Entry] = {}
    found = {}
    for module, (name, *_) in _names_of(model).items():
        if _is_called(module):
            decision = checked_decision(decide(name, module), f"decisions, asked about {name!r},")
            if decision is not None:
                found[module] = entries.setdefault(decision, Entry(label, decision))
    if not found:
        raise ValueError(f"decisions ({label}) gave None for every module of {type(model).__name__}")
    return found


# --- The interface ---


class Handle:
    """What `apply` did: `remove()` takes it off again; as a context manager it does so at the end."""

    def __init__(self, model: Module, modules: list[tuple[str, Module]]) -> None:
        self._model = weakref.ref(model)
        self._modules = [(name, weakref.ref(module)) for name, module in modules]
        self._decided = [decided_of(module) for _, module in modules]

    def remove(self) -> None:
        """Leave the model as it was. What was decided elsewhere, and for copies, stays."""
        for (_, reference), decided in zip(self._modules, self._decided, strict=True):
            module = reference()
            if module is not None and decided_of(module) is decided:
                take_off(module)
        self._modules, self._decided = [], []

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
        return "the model is gone" if model is None else "\n".join(_tree(model, "", "", set()))

    def __repr__(self) -> str:
        model = self._model()
        what = "a model that is gone" if model is None else type(model).__name__
        return f"<decisions for {len(self._modules)} modules of {what}; print() shows them>"


def _tree(module: Module, name: str, indent: str, seen: set[int]) -> list[str]:
    decided = decided_of(module)
    label = f"{name}: {type(module).__name__}" if name else type(module).__name__
    shared = " (as above)" if id(module) in seen else ""
    decision = f"  <- {decided.entry.decision!r} by {decided.entry.label}" if decided is not None else ""
    lines = [f"{indent}{label}{shared}{decision}"]
    if not shared:
        seen.add(id(module))
        for child_name, child in module.named_children():
            lines += _tree(child, child_name, indent + "  ", seen)
    return lines


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
    if isinstance(decisions, Mapping):
        found = _find_by_entries(model, decisions)
    elif callable(decisions) and not isinstance(decisions, type):
        found = _find_by_asking(model, decisions)
    else:
        raise TypeError(
            "decisions must be a dict from patterns or classes to decisions, or a function (name, module) -> decision, "
            f"got {_errors.describe_value(decisions)}"
        )
    names = _names_of(model)
    made = []
    for module, entry in found.items():
        name = names[module][0]
        before = decided_of(module)
        if before is not None:
            raise _errors.decided_twice(
                name, before.entry.label, repr(before.entry.decision), entry.label, repr(entry.decision)
            )
        policy = entry.decision.policy if isinstance(entry.decision, Recompute) else None
        options = checked_options(determinism_check, debug, early_stop, preserve_rng_state, name or None, policy)
        made.append((name, module, Decided(name, entry, options)))
        entry.decides(module)
    done: list[tuple[str, Module]] = []
    try:
        for name, module, decided in made:
            install(module, decided)
            done.append((name, module))
    except BaseException:
        for _, module in done:
            take_off(module)
        raise
    return Handle(model, done)


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
        if isinstance(module, DecidedModule):
            take_off(module)

"""What a patched torch serves: the drop-in, with defaults that the patch gave.

The functions here are the same for all patches and read the defaults when they are called, so that names which hold
them need not be bound anew when patches are stacked. Without a patch, after the last one was undone, they hand over to
torch's own: a partial that was made under a patch is then as if it had been made without.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from recollect import _checkpoint, composable, dropin
from recollect._checkpoint import PolicyLike, gives_contexts
from recollect._torch import composable_module, is_traced_by_autograd, never_begin

_NAMES = frozenset(("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"))


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What holds where a caller says nothing."""

    determinism_check: str
    debug: bool
    early_stop: bool
    preserve_rng_state: bool | str
    policy: PolicyLike | None
    replace_reentrant: bool

    def variant(self, use_reentrant: bool | None) -> bool | None:
        """What a request for a variant gets; None where it is left open."""
        is_request = use_reentrant is None or isinstance(use_reentrant, int)  # else it is a mistake, told of later
        return False if self.replace_reentrant and is_request else use_reentrant

    def with_asked(self, asked: dict[str, Any]) -> dict[str, Any]:
        """All options of a request. What the caller says wins, and his `context_fn` wins over a policy."""
        variant = asked["use_reentrant"] = self.variant(asked.get("use_reentrant"))
        if variant is None or variant:  # to which the others mean nothing, and which refuses some
            return {"preserve_rng_state": self.preserve_rng_state, **asked}
        options = {**self._of_regions, **asked}
        if "context_fn" in asked and gives_contexts(asked["context_fn"] or dropin.noop_context_fn):
            options["policy"] = None
        return options

    @functools.cached_property
    def _of_regions(self) -> dict[str, Any]:
        names = ("determinism_check", "debug", "early_stop", "preserve_rng_state", "policy")
        return {name: getattr(self, name) for name in names}


class _Now:
    defaults: Defaults | None = None


def set_defaults(defaults: Defaults | None) -> None:
    """What holds from now on, for all threads; None means that no patch is in force."""
    _Now.defaults = defaults


# --- torch.utils.checkpoint ---

# Torch's own, whatever somebody has put in their place by the time of a call.
_ORIGINALS: dict[str, Any] = {name: vars(torchs)[name] for name in dropin.__all__}
_torchs_checkpoint, _torchs_sequential, _torchs_contexts, _torchs_policy = (
    _ORIGINALS[name]
    for name in ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts", "CheckpointPolicy")
)


_signature = inspect.signature(_torchs_checkpoint)
# Torch 2.15 has an option more, and may be called without a function, as a decorator. The drop-in has neither.
_newer = frozenset(_signature.parameters) - frozenset(inspect.signature(dropin.checkpoint).parameters)


@never_begin
def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`recollect.dropin.checkpoint` with the defaults of the patch. A call that it has no form for is torch's own."""
    defaults = _Now.defaults
    if defaults is None or function is None or not _newer.isdisjoint(kwargs):
        return _torchs_checkpoint(function, *args, **kwargs)
    asked = {name: kwargs.pop(name) for name in _NAMES.intersection(kwargs)}
    return _checkpoint.run(function, args, kwargs, **defaults.with_asked(asked))


checkpoint.__signature__ = _signature  # type: ignore[attr-defined]  # for those who ask what it takes


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`recollect.dropin.checkpoint_sequential` with the defaults of the patch."""
    defaults = _Now.defaults
    if defaults is None:
        return _torchs_sequential(functions, segments, input, use_reentrant, **kwargs)
    use_reentrant = defaults.variant(use_reentrant)
    return dropin.run_chain(checkpoint, functions, segments, input, use_reentrant, kwargs, stacklevel=3)


def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
    """`recollect.dropin.create_selective_checkpoint_contexts`; while the compiler traces, torch's own.

    The compiler reads the verdicts as members of torch's own enum, from torch's own modes.
    """
    if _Now.defaults is None or is_traced_by_autograd():
        policy = _in_torchs_words(policy_fn_or_list) if callable(policy_fn_or_list) else policy_fn_or_list
        return _torchs_contexts(policy, allow_cache_entry_mutation)
    return dropin.create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation)


def _in_torchs_words(policy: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        verdict = policy(*args, **kwargs)
        return _torchs_policy[verdict.name] if isinstance(verdict, dropin.CheckpointPolicy) else verdict

    return asked


# --- The module API ---


@functools.cache
def _composable(module: ModuleType) -> Any:
    """`recollect.composable.checkpoint` with the defaults of the patch; `module` is where torch has its own."""
    torchs_own: Any = vars(module)["checkpoint"]

    @functools.wraps(composable.checkpoint)
    def checkpoint(module: torch.nn.Module, **asked: Any) -> Any:
        defaults = _Now.defaults
        if defaults is None:
            return torchs_own(module, **asked)
        return composable.checkpoint(module, **defaults.with_asked({"use_reentrant": False, **asked}))

    return checkpoint


Names = dict[str, Any]


def served() -> list[tuple[ModuleType, Names, Names]]:
    """The modules that serve ours, under which names, and torch's own."""
    own = ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts")
    names = {name: globals()[name] if name in own else getattr(dropin, name) for name in dropin.__all__}
    modules = [(torchs, names, _ORIGINALS)]
    module = composable_module()
    if module is not None:
        modules.append((module, {"checkpoint": _composable(module)}, {}))
    return modules

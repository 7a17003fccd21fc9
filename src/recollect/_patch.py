"""`patch_torch`: everybody who checkpoints through torch is served by recollect, without a change to his code.

Process-wide, all threads. Patches stack: the one that was made last and not undone gives the defaults, the first
installs, the last one undone takes away, in whatever order.
"""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import Any

from recollect import _errors
from recollect._checkpoint import PolicyLike, checked_options
from recollect._names import SERVE, Rebound, Serving
from recollect._served import Defaults, served, set_defaults
from recollect._torch import level_of_user_code, never_begin

# The packages of the compiler that know torch's own modes and verdicts by identity: they get the originals. Not
# torch._dynamo, which traces user code and has to see the names that user code sees.
_COMPILERS = ("torch._functorch.", "torch._higher_order_ops.", "torch._inductor.")
# It looks at the frame that asks, which must be the one that Python has.
never_begin(SERVE)

_OPTION_NAMES = ("reentrant", "determinism_check", "debug", "early_stop", "preserve_rng_state", "policy")


def _is_of_compiler(name: Any) -> bool:
    """Whether a module of this name gets the originals."""
    return type(name) is str and f"{name}.".startswith(_COMPILERS)


class _Installed:
    """Ours in the place of torch's, everywhere, until `take_away`."""

    def __init__(self) -> None:
        self._parts: list[Serving | Rebound] = []
        pairs: list[tuple[Any, Any]] = []
        modules = served()
        try:
            # Before the search: a module that another thread imports now gets ours from here, or is found there.
            for module, names, originals in modules:
                serving = Serving(module, names, _is_of_compiler)
                self._parts.append(serving)
                # Where somebody has put his own in the place of torch's, there are two that may be held.
                for name, original in [*serving.originals.items(), *originals.items()]:
                    if original is not names[name]:
                        pairs.append((original, names[name]))
            left_alone = ("recollect.", *_COMPILERS, *(f"{module.__name__}." for module, _, _ in modules))
            rebound = Rebound(
                pairs,
                lambda name: type(name) is str and f"{name}.".startswith(left_alone),
                apart=[module for module, _, _ in modules],
            )
            self._parts.append(rebound)
            rebound.start()
        except BaseException:
            self.take_away()
            raise

    def take_away(self) -> list[str]:
        """Returns the names that somebody else has bound meanwhile."""
        return [name for part in self._parts for name in part.stop()]


class _State:
    lock = threading.RLock()
    patches: tuple[Patch, ...] = ()
    installed: _Installed | None = None


class Patch:
    """A patch of torch that is in force until `undo`, or until the end of a `with` block."""

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        with _State.lock:
            if not _State.patches:
                _State.installed = _Installed()
            _State.patches += (self,)
            set_defaults(defaults)

    def undo(self) -> None:
        """End it. What other patches that are in force serve, stays; a second call does nothing.

        A name that somebody else has bound to something of his own meanwhile is left to him, with a warning.
        """
        theirs: list[str] = []
        with _State.lock:
            if self not in _State.patches:
                return
            _State.patches = tuple(patch for patch in _State.patches if patch is not self)
            set_defaults(_State.patches[-1]._defaults if _State.patches else None)
            if not _State.patches and _State.installed is not None:
                theirs = _State.installed.take_away()
                _State.installed = None
        if theirs:
            warnings.warn(
                "patch_torch was undone, but some names were bound to something else while it was in force, and stay "
                f"as they are: {', '.join(sorted(theirs))}",
                UserWarning,
                stacklevel=level_of_user_code(),
            )

    def __enter__(self) -> Patch:
        if self not in _State.patches:
            raise RuntimeError("this patch was undone and cannot be entered: call recollect.patch_torch() again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<recollect.patch_torch: {'in force' if self in _State.patches else 'undone'}, {self._defaults}>"


def patch_torch(
    *,
    reentrant: str = "keep",
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    policy: PolicyLike | None = None,
    **unknown: Any,
) -> Patch:
    """Let `torch.utils.checkpoint` serve recollect, in the whole process, for code that cannot be changed.

    All names of `recollect.dropin` are served by `torch.utils.checkpoint`, also to modules that have imported them
    already, where a module or a class there has such a name. Partials, closures, default arguments and objects that
    got hold of torch's own before are out of reach: patch first, then build the model. `torch.compile` makes regions
    of its own of the calls, as without the patch.

    The options are defaults: a caller who gives one himself gets what he asked for.

    Args:
        reentrant: What becomes of requests for the reentrant variant, `use_reentrant=True` or not given: "keep" serves
            them with it, "replace" with the non-reentrant one, which also computes gradients where no input needs any,
            and takes keywords.
        determinism_check: As for `recollect.checkpoint`, but by default as in PyTorch.
        debug: As for `recollect.checkpoint`.
        early_stop: As for `recollect.checkpoint`.
        preserve_rng_state: As for `recollect.checkpoint`.
        policy: As for `recollect.checkpoint`. It does not hold for callers with a `context_fn` of their own, for the
            reentrant variant, nor under `torch.compile`.
        **unknown: Refused.

    Returns:
        A handle with a method `undo`, and a context manager. It need not be kept.

    Example:
        >>> import torch, recollect
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(3, requires_grad=True)
        >>> with recollect.patch_torch(determinism_check="first"):
        ...     torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        >>> torch.utils.checkpoint.checkpoint is checkpoint
        True
    """
    for option in unknown:
        raise _errors.unknown_option("patch_torch", option, _OPTION_NAMES)
    if reentrant not in ("keep", "replace"):
        raise _errors.not_one_of("reentrant", reentrant, ("keep", "replace"))
    checked_options(determinism_check, debug, early_stop, preserve_rng_state, None, policy)
    return Patch(
        Defaults(
            determinism_check, debug, early_stop, preserve_rng_state, policy, replace_reentrant=reentrant == "replace"
        )
    )

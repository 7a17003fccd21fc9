"""What the callbacks for both packages of Lightning have in common: when a module is decided, and when no longer.

Lightning builds a model in steps: the callbacks' `setup`, the module's own `setup`, its `configure_model`; then a
checkpoint is loaded, and the strategy moves and wraps the model (DDP, FSDP, DeepSpeed). Decisions belong between the
last two: all modules exist by then, under the names that their author gave them, and what shards them goes around the
regions. Lightning has no hook there, so something stands in for the strategy's `setup` until that is called.

They are taken off when the fit ends, however it ends: evaluation and the next fit find the module as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.nn import Module

from recollect import _errors
from recollect._checkpoint import checked_options
from recollect.modules import Decisions, apply


class Plan(Protocol):
    """Decisions that know how to apply themselves."""

    def apply(self, model: Module, /) -> Any:
        """Decide for the modules of a model; gives a handle with `remove()`."""


class _StandIn:
    """What a strategy's `setup` is until it is called: it lets the callbacks have their turn first."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.turns: list[Callable[[], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        take_away(self.strategy)
        for turn in self.turns:
            turn()
        return self.strategy.setup(*args, **kwargs)


def stand_in(strategy: Any) -> _StandIn:
    """The one that stands in for `strategy.setup` now, also for the callbacks that came before."""
    standing = vars(strategy).get("setup")
    if not isinstance(standing, _StandIn):
        standing = strategy.setup = _StandIn(strategy)
    return standing


def take_away(strategy: Any) -> None:
    """Let the strategy have its own `setup` again."""
    if isinstance(vars(strategy).get("setup"), _StandIn):
        del strategy.setup


class DecidesInFit:
    """The hooks. It is no callback by itself: each package has a base class of its own for those."""

    def __init__(
        self,
        decisions: Decisions | Plan,
        *,
        within: str = "",
        determinism_check: str = "first",
        debug: bool = False,
        early_stop: bool = True,
        preserve_rng_state: bool | str = True,
    ) -> None:
        if not (isinstance(decisions, Mapping) or callable(decisions) or hasattr(decisions, "apply")):
            raise TypeError(
                "decisions must be what recollect.apply takes, or a plan with a method apply(model), got "
                f"{_errors.describe_value(decisions)}"
            )
        if isinstance(decisions, Mapping) and not decisions:
            raise ValueError("decisions must hold at least one pattern, got an empty dict")
        if not isinstance(within, str):
            raise TypeError(f"within must be the name of a module, got {_errors.describe_value(within)}")
        checked_options(determinism_check, debug, early_stop, preserve_rng_state, None, None)
        self.decisions = decisions
        self.within = within
        self.options: dict[str, Any] = {
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "preserve_rng_state": preserve_rng_state,
        }
        self._handle: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the module decided right before the strategy takes it."""
        if stage == "fit":
            self._remove()  # of a fit whose end another callback kept from us by an error of its own
            stand_in(trainer.strategy).turns.append(lambda: self._apply(pl_module))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the decisions off."""
        self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the decisions off: there will be no teardown."""
        self._end(trainer)

    def _apply(self, pl_module: Module) -> None:
        try:
            model = pl_module.get_submodule(self.within)
        except AttributeError as error:
            raise ValueError(f"within: {type(pl_module).__name__} has no module {self.within!r} ({error})") from error
        if isinstance(self.decisions, Mapping) or not hasattr(self.decisions, "apply"):
            self._handle = apply(model, self.decisions, **self.options)
        else:
            self._handle = self.decisions.apply(model)

    def _end(self, trainer: Any) -> None:
        take_away(trainer.strategy)
        self._remove()

    def _remove(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

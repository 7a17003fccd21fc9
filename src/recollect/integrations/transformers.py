"""Hugging Face transformers: recollect as the function that the layers of a model call for checkpointing.

The models' own mechanism stays in charge: it knows which layers there are and switches caches off. So
`model.gradient_checkpointing_disable()` and `model.is_gradient_checkpointing` mean what they say, and whoever calls
`model.gradient_checkpointing_enable()` later, as a `Trainer` with `gradient_checkpointing=True` does, puts torch's
function back: `recollect.patch_torch()` is for those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from recollect import _errors
from recollect._checkpoint import PolicyLike, checked_options, run
from recollect.modules import Decisions, apply

# What transformers calls them: the function that a layer calls, and whether it does.
_FUNCTION = "_gradient_checkpointing_func"
_FLAG = "gradient_checkpointing"
_MISSING = object()


def _call(function: Callable[..., Any], *args: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    return run(function, args, kwargs, use_reentrant=False, **options)


class Handle:
    """What `enable` did: `remove()` undoes it; as a context manager it does so at the end."""

    def __init__(self, before: list[tuple[Module, dict[str, Any]]], decided: Any) -> None:
        self._before = before
        self._decided = decided

    def remove(self) -> None:
        """Leave the model as it was before `enable`."""
        for module, attributes in self._before:
            for name, value in attributes.items():
                if value is _MISSING:
                    vars(module).pop(name, None)
                else:
                    setattr(module, name, value)
        self._before = []
        if self._decided is not None:
            self._decided.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def enable(
    model: PreTrainedModel,
    *,
    policy: PolicyLike | None = None,
    plan: Any = None,
    every_n_layers: int = 1,
    determinism_check: str = "first",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
) -> Handle:
    """Recompute the layers of a transformers model in backward.

    Args:
        model: A model that supports gradient checkpointing.
        policy: What to keep all the same in every layer, as for `recollect.checkpoint`.
        plan: What `recollect.apply` takes as decisions, for modules inside the layers, such as
            `{"**.self_attn": recollect.Save()}`; or an object with a method `apply(model)`.
        every_n_layers: Recompute the first of every `n` layers, and keep the others.
        determinism_check: As for `recollect.checkpoint`.
        debug: As for `recollect.checkpoint`.
        early_stop: As for `recollect.checkpoint`.
        preserve_rng_state: As for `recollect.checkpoint`.

    Returns:
        A handle with `remove()`, which is also a context manager. `model.gradient_checkpointing_disable()` works too.

    Example:
        >>> import recollect
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from recollect.integrations.transformers import enable
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
        >>> handle = enable(model, policy=recollect.policies.save_attention)
        >>> handle.remove()
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {_errors.describe_value(model)}")
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} does not support gradient checkpointing in transformers. Decide for its layers "
            'with recollect.apply(model, {"...layers.*": recollect.Recompute()})'
        )
    if isinstance(every_n_layers, bool) or not isinstance(every_n_layers, int) or every_n_layers < 1:
        raise ValueError(f"every_n_layers must be a whole number from 1, got {_errors.describe_value(every_n_layers)}")
    checked_options(determinism_check, debug, early_stop, preserve_rng_state, None, policy)
    modules = [module for module in model.modules() if hasattr(module, _FLAG)]
    if not modules:
        raise ValueError(f"none of the modules of {type(model).__name__} has the attribute {_FLAG!r} of transformers")
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    if every_n_layers > 1 and not layers:
        raise ValueError(f"every_n_layers: the layers of {type(model).__name__} cannot be chosen one by one")
    decided = None if plan is None else _apply_plan(model, plan)
    options = {
        "policy": policy,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        "preserve_rng_state": preserve_rng_state,
    }
    before = [(module, {name: vars(module).get(name, _MISSING) for name in (_FUNCTION, _FLAG)}) for module in modules]
    function = functools.partial(_call, options=options)
    # Not by `gradient_checkpointing_enable`: that also makes every embedding need grad, for the reentrant variant.
    for module in modules:
        setattr(module, _FUNCTION, function)
        setattr(module, _FLAG, True)
    for position, layer in enumerate(layers):
        setattr(layer, _FLAG, position % every_n_layers == 0)
    return Handle(before, decided)


def _apply_plan(model: PreTrainedModel, plan: Any) -> Any:
    if hasattr(plan, "apply"):
        return plan.apply(model)
    decisions: Decisions = plan
    return apply(model, decisions)

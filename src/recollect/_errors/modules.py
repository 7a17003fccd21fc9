"""Modules that are decided by name, or checkpointed in place."""

from __future__ import annotations

from collections.abc import Sequence

from recollect._errors.words import describe_value


def no_such_modules(label: str, model: str, never_called: Sequence[str], close: Sequence[str]) -> ValueError:
    """`never_called` matched, and are containers without a forward."""
    if never_called:
        what = f"matches {', '.join(never_called[:3])} only, which is never called"
        hint = f"decide for what is inside: {label[:-1]}.*'" if label.endswith("'") else "decide for what is inside"
        return ValueError(f"{label} {what} in {model}; {hint}")
    hint = f"; close to it: {', '.join(close)}" if close else ""
    return ValueError(f"{label} matches no module of {model}{hint}")


def cannot_be_decided(name: str, why: str) -> TypeError:
    return TypeError(f"{name or 'the model itself'} cannot be decided by recollect.apply: {why}")


def decided_twice(name: str, before: str, decision_before: str, now: str, decision: str) -> ValueError:
    return ValueError(
        f"{name or 'the model itself'} is decided already, by {before}: {decision_before}, and now by {now}: "
        f"{decision}. "
        "Remove the first (handle.remove(), or recollect.unapply(model)), or put both in one dict, where the later "
        "entry wins"
    )


def not_a_module(what: str, value: object, *, lists: bool) -> TypeError:
    allowed = "a torch.nn.Module or a list of them" if lists else "a torch.nn.Module"
    return TypeError(f"{what} must be {allowed}, got {describe_value(value)}")


def takes_no_hooks(module: object) -> TypeError:
    return TypeError(
        f"module must be one that takes hooks, got a scripted module ({type(module).__name__}): apply it to a module "
        "that calls this one, or use recollect.checkpoint"
    )


def not_in_composable() -> NotImplementedError:
    return NotImplementedError(
        "use_reentrant=True is not supported in composable checkpoint. Please use torch.utils.checkpoint.checkpoint "
        "instead. (recollect.dropin.checkpoint has it too.)"
    )


def applied_twice(name: str, module: object) -> AssertionError:
    return AssertionError(
        "Each distinct composable distributed API can only be applied to a module once. "
        f"{name} has already been applied to the following module:\n{module}"
    )


def not_applied(name: str, module: object) -> ValueError:
    return ValueError(f"module must be one that {name} was applied to; it has not been applied to this one:\n{module}")


def other_number_of_modules(name: str, given: int, returned: int) -> AssertionError:
    return AssertionError(
        f"{name} must return as many modules as it was given (or None, which means these): it was given {given} and "
        f"returned {returned}. A module inside of another one in the list is not counted"
    )


def names_changed(kind: str, before: Sequence[str], after: Sequence[str]) -> RuntimeError:
    lines = [f"Checking {kind}: Composable distributed API implementations cannot modify FQNs."]
    missing = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    if missing:
        lines.append(f"What is missing: {', '.join(map(repr, missing))}")
    if new:
        lines.append(f"What is new: {', '.join(map(repr, new))}")
    then, now = ([name for name in one if name in before and name in after] for one in (before, after))
    if then != now:
        moved = [name for name, other in zip(then, now, strict=True) if name != other]
        lines.append(
            f"What changed its order: {', '.join(map(repr, moved))}. (They cannot modify the order of FQNs either.)"
        )
    return RuntimeError("\n".join(lines))

"""What a caller gave that cannot be: refused at the door, with the argument, what it got and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from recollect._errors.kinds import InfeasibleError
from recollect._errors.words import describe_amount, describe_function, describe_tensor, describe_value


def infeasible(budget: int, smallest: int, where: str) -> InfeasibleError:
    error = InfeasibleError(
        f"nothing fits into {describe_amount(budget, up=False)}: a step takes at least "
        f"{describe_amount(smallest, up=True)}; the {where} sets it. Give more, or make the batch smaller"
    )
    error.smallest, error.where = smallest, where
    return error


def not_callable(argument: str, value: object) -> TypeError:
    return TypeError(f"{argument} must be callable (a function, a method, a module), got {describe_value(value)}")


def not_one_of(argument: str, value: object, allowed: Sequence[str]) -> ValueError:
    return ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def not_a_size(argument: str, value: object) -> Exception:
    kind = ValueError if isinstance(value, (int, str)) and not isinstance(value, bool) else TypeError
    return kind(f'{argument} must be a number of bytes, such as 2**30 or "1 GiB", got {describe_value(value)}')


def not_with(argument: str, value: object, other: str) -> ValueError:
    return ValueError(f"{argument} has no meaning with {other}, got {value!r}")


def not_a_bool(argument: str, value: object, or_else: str | None = None) -> TypeError:
    allowed = "True or False" if or_else is None else f"True, False or {or_else!r}"
    return TypeError(f"{argument} must be {allowed}, got {describe_value(value)}")


def not_a_loss(value: object) -> TypeError:
    return TypeError(
        "step must return the loss: a tensor with one element that requires grad, "
        f"got {describe_tensor(value) if isinstance(value, Tensor) else describe_value(value)}"
    )


def nothing_to_decide(model: str) -> ValueError:
    return ValueError(
        f"there is nothing to plan for in {model}: autograd saves nothing in its modules that could be let go of. Is "
        "it in training, with parameters that require grad, and called by the step?"
    )


def step_changes(module: str) -> ValueError:
    return ValueError(
        f"the step is not the same from one time to the next: {module or 'the model'} is called another number of "
        "times, or with tensors of other shapes. A plan is for one shape of batch: plan for the largest, with a step "
        "that does the same every time"
    )


def plan_of_another_model(model: str, differences: Sequence[str]) -> ValueError:
    shown = "".join(f"\n  {one}" for one in differences[:12])
    more = f"\n  and {len(differences) - 12} more" if len(differences) > 12 else ""
    return ValueError(f"the plan was made for another model than this one ({model} then). This one{shown}{more}")


def unexpected_keywords(names: Sequence[str], allowed: Sequence[str] = ()) -> ValueError:
    instead = f". What is taken: {', '.join(allowed)}" if allowed else ""
    return ValueError("Unexpected keyword arguments: " + ",".join(names) + instead)


def unknown_option(function: str, name: str, allowed: Sequence[str]) -> TypeError:
    return TypeError(f"{function} has no option {name!r}; it takes {', '.join(allowed)}")


def only_non_reentrant(options: Sequence[str]) -> ValueError:
    return ValueError(
        f"{' and '.join(options)} {'is' if len(options) == 1 else 'are'} only supported when use_reentrant=False, got "
        "use_reentrant=True: the reentrant variant runs the function as a whole and looks at nothing inside"
    )


def bad_contexts(got: object) -> TypeError:
    return TypeError(
        "context_fn must return two context managers, one for the forward and one for the replay, "
        f"got {describe_value(got)}"
    )


def not_dispatch_modes(got: object) -> AssertionError:
    return AssertionError(
        "under torch.compile a context_fn must generate a tuple of two `TorchDispatchMode`s, such as those of "
        f"create_selective_checkpoint_contexts, got {describe_value(got)}"
    )


def policy_and_contexts(mode: object) -> TypeError:
    return TypeError(
        "under torch.compile a policy goes together with a context_fn that gives the modes of "
        f"create_selective_checkpoint_contexts, and with no other, got {describe_value(mode)}: pass one of the two"
    )


def runs_later(function: Callable[..., Any], kind: str) -> TypeError:
    return TypeError(
        f"function must compute its result when it is called, got {describe_function(function)}, which gives "
        f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}: it would do its work after its region has ended, and nothing "
        "of it could be recomputed"
    )


def budget_too_small(budget: int, minimum: int) -> InfeasibleError:
    error = InfeasibleError(
        f"a budget of {describe_amount(budget, up=False)} is too small for the chain: one step, its state and its "
        f"gradient take {describe_amount(minimum, up=True)} ({minimum} bytes) with a single state kept. Give that much"
    )
    error.smallest, error.where = minimum, "the step that takes most"
    return error


def only_tuples(value: object) -> RuntimeError:
    return RuntimeError(f"Only tuple of tensors is supported. Got {type(value).__name__}")


def missing_extra(what: str, package: str, extra: str) -> ImportError:
    return ImportError(
        f"{what} needs {package}, which is not installed: pip install 'recollect[{extra}]'", name=package
    )


def cannot_write_report(path: str, why: str) -> OSError:
    return OSError(f"the report cannot be written to {path}: {why}. Give the path of a file in a directory that exists")

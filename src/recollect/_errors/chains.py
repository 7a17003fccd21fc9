"""Long chains: steps that are not what a schedule takes them for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from recollect._errors.kinds import CheckpointError, Signature
from recollect._errors.words import describe_node, describe_signature, describe_value, note


def add_step(error: Exception, step: str, *, again: bool = False) -> None:
    """Say on an error of the user's step which one it was."""
    if not isinstance(error, CheckpointError):
        note(error, f"It was raised in {step}{', which was run again for backward' if again else ''}.")


def opaque_state(path: str, value: object) -> TypeError:
    return TypeError(
        "a state is made of tensors and plain values (numbers, strings, None) in tuples, lists, dicts, deques, named "
        f"tuples and dataclasses, got {describe_value(value)} at state{path}. A tensor inside of it would be left "
        "without its gradient: take it apart, or let the step read it from outside if it stays the same"
    )


def other_structure(step: str, path: str, expected: str, got: str) -> TypeError:
    return TypeError(
        f"{step} changes the structure of the state: at state{path} it was given {expected} and returned {got}. All "
        "states of a chain are alike; tensors may change their shapes, and plain values may change"
    )


def no_output(step: str, got: object) -> TypeError:
    return TypeError(
        f"with outputs=True every step returns a tuple of two, the next state and its output; {step} returned "
        f"{describe_value(got)}"
    )


def step_changes_state(step: str, number: int) -> CheckpointError:
    error = CheckpointError(
        f"{step} changes the state that it is given in place, and state {number} is kept, to be run from again. "
        "(One of the variables needed for gradient computation has been modified by an inplace operation.) Use "
        "out-of-place operators in the step, or let it begin with a clone"
    )
    error.cause = f"step {number} changes its state in place"
    return error


def kept_state_changed(step: str, number: int) -> CheckpointError:
    error = CheckpointError(
        f"state {number} of the chain, which {step} takes, was kept and has been changed in place since, by a step "
        "that was handed on a tensor of it or by the program. (One of the variables needed for gradient computation "
        "has been modified by an inplace operation.) Use out-of-place operators, or change a clone"
    )
    error.cause = f"state {number} was changed in place"
    return error


def first_state_changed(step: str) -> CheckpointError:
    error = CheckpointError(
        f"the first state of the chain, which {step} takes, has been modified by an inplace operation since: it cannot "
        "be run from again. Use the out-of-place operator, or pass a clone"
    )
    error.cause = "the first state was changed in place"
    return error


def unknown_history(step: str, node: object) -> CheckpointError:
    error = CheckpointError(
        f"{step} reads a tensor that it was not given and that has a history (it is a result of "
        f"{describe_node(node)}), and it cannot be told which tensor that is, so its gradient would be missing. "
        "Make it a part of the state, which the step returns unchanged"
    )
    error.cause = "a tensor from outside, with a history, that cannot be found"
    return error


def unknown_leaf(step: str, what: str) -> CheckpointError:
    error = CheckpointError(
        f"{step} reads {what}, which no step has read when the chain was run first: its gradient would be missing. "
        "Let steps read the same tensors from outside whenever they are run, give the functions as a list, one for "
        "each step, or make it a part of the state"
    )
    error.cause = f"{what} is read only when the step is run again"
    return error


def not_cut(step: str, node: object) -> CheckpointError:
    error = CheckpointError(
        f"{step} reads a tensor that it was not given (a result of {describe_node(node)}), and also something which "
        "that was computed from, and hands it to an autograd Function or to C: its gradient cannot be told from that "
        "of the other. Make it a part of the state, which the step returns unchanged"
    )
    error.cause = "a tensor from outside, with a history that the step reads too"
    return error


def needs_more(step: str) -> CheckpointError:
    error = CheckpointError(
        f"what {step} gives needs grad now, and did not where the same function was run first on a state with the same "
        "needs: a gradient would be missing. The step does not do the same every time; give the functions as a list, "
        "one for each step, or let a tensor of the first state require grad"
    )
    error.cause = "a step does not always give results that need grad"
    return error


def other_outputs(step: str, then: int, now: int) -> CheckpointError:
    error = CheckpointError(
        f"{step} gave an output of {then} tensors and gives one of {now} when it is run again: it did not take the "
        "same path twice"
    )
    error.cause = "another branch was taken"
    return error


def other_state(step: str, then: Sequence[Signature], now: Sequence[Signature]) -> CheckpointError:
    place = next(place for place, (one, other) in enumerate(zip(then, now, strict=True)) if one != other)
    error = CheckpointError(
        f"tensor {place} of the state that {step} gives is {describe_signature(now[place])} when the step is run "
        f"again, and was {describe_signature(then[place])}: the steps did not do the same twice"
    )
    error.cause = "steps that are not the same twice"
    return error


def other_values(step: str, place: int, signature: Signature, apart: float) -> CheckpointError:
    error = CheckpointError(
        f"Recomputed values differ from those of the forward: tensor {place} of the state that {step} gives "
        f"({describe_signature(signature)}) is another one when steps are run again, by {apart:.1e} of its norm. "
        "Somewhere between the kept state before it and this one, a step depends on something that is neither in the "
        'state nor preserved: a global, a counter, another random generator (preserve_rng_state="all"), the time'
    )
    error.cause = "steps that are not the same twice"
    return error


@functools.cache
def once_needs_no_grad(function: str) -> str:
    return (
        f"a gradient reaches {function}, which runs once in a step of a chain: what it gave has no history when the "
        "step is run again. Use recollect.pin, or call it outside of recollect.once"
    )


def noted_elsewhere(step: int, function: str) -> CheckpointError:
    error = CheckpointError(
        f"step {step} of the chain came to {function}, which is pinned or to run once, where it did something else "
        "when it was run first: it did not take the same path twice before it got there"
    )
    error.cause = "another branch was taken"
    return error


def chain_differentiated_twice() -> RuntimeError:
    return RuntimeError(
        "a chain cannot be differentiated twice (create_graph=True): the graph of its backward would hold every step, "
        "which is what its slots are there to avoid. Pass slots of at least its length, with which every step is a "
        "region of its own and can be, or give fewer steps to the chain"
    )


def chain_in_dual_level() -> RuntimeError:
    return RuntimeError(
        "a chain has no forward-mode derivative, and it runs within torch.autograd.forward_ad: its tangents would be "
        "lost. Run it under torch.no_grad(), where it is a plain loop, or pass slots of at least its length, with "
        "which every step is a region of its own"
    )


def late_change(chain: str, what: str) -> CheckpointError:
    error = CheckpointError(
        f"steps of the chain that begins with {chain} read {what} and change it in place, not from the first one on "
        "but later, and what it held where they are run again from is not known. Make it a part of the state, or give "
        "the functions as a list, one for each step"
    )
    error.cause = f"{what} is changed in place by a later step"
    return error


def chain_freed() -> RuntimeError:
    return RuntimeError(
        "Trying to backward through the graph a second time: what the chain had kept was freed by the first backward. "
        "Pass retain_graph=True to that one"
    )

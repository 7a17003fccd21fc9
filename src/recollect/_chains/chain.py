"""A chain: what one call of `recollect.sequential` or `while_loop` owns, and how a step of it is run with a graph.

Theory. The whole chain is one node of autograd's graph. Its inputs are the tensors of the first state and those that
steps read from outside; its results are the tensors of the last state, and what steps give besides. To autograd it is a
node as any other, so whatever differentiates works: `torch.autograd.grad`, `backward(inputs=...)`, hooks, gradients
that are gathered when a leaf is done. Nothing is accumulated into `.grad` here.

The first run (`first.py`) carries out the part of the schedule up to the last state; a pass (`later.py`) the rest,
when backward comes to the node. The first pass goes on with what the first run has kept; another one, under
`retain_graph`, begins with the first state again.

Needs. Which tensors of a state need grad is found as autograd finds it, by running a step with a graph; for the same
function and the same needs it is the same again. A step whose graph shows more when it is run for backward is an
error: a gradient would be missing.

A chain refers to no result of its own, so it dies with the graph, without the garbage collector.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, clear_autocast_cache

from recollect import _errors
from recollect._ambient import Ambient, access_to
from recollect._chains.cuts import StandIns
from recollect._chains.kept import Hidden, Kept, Slots
from recollect._chains.notes import Notes
from recollect._chains.outside import Outside, StepOf
from recollect._chains.structure import Mismatch, Structure
from recollect._digest import Digest
from recollect._errors import Signature
from recollect._inputs import Arguments, Inputs, versions_of
from recollect._known import Known, known_of
from recollect._optimizers import Steps
from recollect._restored import Swapped, Training, swapping
from recollect._schedules.actions import Action
from recollect._stores.store import Store
from recollect._torch import Hooks, set_grad_enabled

Needs = tuple[bool, ...]  # of the tensors of a state, in order
SUMMED_IN_PLACE = 2**20  # bytes: gradients from outside that are as large are added to in place


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose, besides the schedule."""

    determinism_check: str = "first"
    preserve_rng_state: bool | str = True
    outputs: bool = False


class Ran:
    """A step that was run with a graph: what it was given, and what it gave."""

    __slots__ = ("first", "given", "outputs", "results", "stand_ins", "step")

    def __init__(
        self,
        step: int,
        given: list[Tensor | None],
        results: list[Any],
        outputs: list[Tensor],
        stand_ins: dict[int, Tensor],
        first: int,
    ) -> None:
        self.step = step
        self.first = first  # autograd's number of its first node
        self.stand_ins = stand_ins  # for tensors from outside, by their places: see cuts.py
        self.given = given  # for each tensor of the state the leaf that stood for it, None where it needs no grad
        self.results = results  # the tensors of the next state
        self.outputs = outputs  # the tensors of what it gave besides


class NeedsByStep:
    """The needs of every state, as far as the first run has come: noted where they change."""

    __slots__ = ("_needs", "_starts")

    def __init__(self, first: Needs) -> None:
        self._starts = [0]
        self._needs = [first]

    def note(self, state: int, needs: Needs) -> None:
        if needs != self._needs[-1]:
            self._starts.append(state)
            self._needs.append(needs)

    def __getitem__(self, state: int) -> Needs:
        return self._needs[bisect_right(self._starts, state) - 1]


@dataclass(slots=True)
class Pending:
    """What the first run has left for the first pass."""

    actions: Iterator[Action]
    slots: Slots
    held: dict[int, Ran]
    looks: dict[int, Look]
    running: Kept | None = None  # what the next action starts from, if that is not a kept state


@dataclass(frozen=True, slots=True)
class Look:
    """What a state looked like, to be compared when it is reached again."""

    signatures: tuple[Signature, ...]
    digests: tuple[Digest, ...] | None


class Chain:
    """One call."""

    def __init__(
        self,
        functions: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
        value: Any,
        options: Options,
        stores: Sequence[Store | None] = (None,),
    ) -> None:
        self._functions = functions
        self.sole: Callable[[Any], Any] | None = functions if callable(functions) else None  # the only function
        self.counts: dict[int, int] = {} if callable(functions) else _count(functions)  # of each function
        self.options = options
        self.structure = Structure(value)
        self.places = self.structure.tensors
        leaves = self.structure.leaves(value)
        tensors = [leaves[place] for place in self.places]
        self.inputs: Inputs | None = None  # the first state, in the care of hooks around the chain
        self.is_released = False
        self.needs = NeedsByStep(tuple(tensor.requires_grad for tensor in tensors))
        self.ambient = Ambient(tensors, options.preserve_rng_state, ((value,), {}))
        access = access_to(self.ambient) if options.preserve_rng_state else None
        self.hidden = Hidden(access)
        self.notes = Notes(access)
        self.start = Kept(leaves, self.places, self.hidden.now(), None)
        self.stores = stores
        self.clears_casts = _casts_are_cached()
        self.outside = Outside()
        self.outside_versions: list[int] = []
        self.others: dict[int, Tensor] = {}  # that steps have, may read, and that need no grad
        self._other_versions: list[int] = []
        self.late: dict[int, Tensor] = {}  # by identity, those of them that steps were not seen to change, and did
        self.makes_graphs = False  # whether steps turn grad mode on themselves
        self.cuts: list[int] = []  # places of tensors from outside for which leaves stand
        self.steps_then = 0
        self._output_needs = b""
        self._output_starts: list[int] = []  # how many tensors all steps before a step gave besides
        self.pending: Pending | None = None
        self._lock = threading.Lock()
        self.known: dict[int, Known] = {}
        self.state: tuple[Any, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the first state."""
        leaves = self.start.leaves()
        return [leaves[place] for place in self.places]

    def is_repeated(self, function: Callable[[Any], Any]) -> bool:
        """Whether several steps are calls of it."""
        return self.sole is not None or self.counts[id(function)] > 1

    def function(self, step: int) -> Callable[[Any], Any]:
        return self._functions[step] if self.sole is None else self.sole  # type: ignore[index]

    def describe(self, step: int) -> str:
        """How messages name a step."""
        return f"step {step} of the chain ({_errors.describe_function(self.function(step))})"

    # --- What is known of the functions ---

    def meet(self, function: Callable[[Any], Any]) -> Known:
        """What is known of a function."""
        known = self.known.get(id(function))
        if known is None:
            known = self.known[id(function)] = known_of(function, ((), {}), None)
            if known.step is None:
                known.step = StepOf()
        return known

    def first_run_ended(self) -> None:
        """Note what must be the same in a pass."""
        self.ambient.forward_ended()
        self.outside_versions = versions_of(self.outside.tensors)
        self._other_versions = versions_of(list(self.others.values()))
        self.steps_then = Steps.count
        modules = list({id(one): one for known in self.known.values() for one in known.modules()}.values())
        if modules:
            self.state = (Training(modules),)
            if any(known.is_swapped(known.modules(), putting=swapping.replays > 0) for known in self.known.values()):
                self.state += (Swapped(modules),)

    def changed_others(self) -> list[Tensor]:
        """Tensors without grad that were changed in place since the first run."""
        others = list(self.others.values())
        pairs = zip(others, versions_of(others), self._other_versions, strict=True)
        return [tensor for tensor, now, then in pairs if now != then and not self.hidden.has(tensor)]

    def compares_values(self) -> bool:
        """Whether states are compared by value when they are reached again."""
        check = self.options.determinism_check
        return check == "values" or (
            check == "first" and not all(known.step.is_verified for known in self.known.values())
        )

    def stand_ins(self) -> StandIns | None:
        """What keeps the graph of a step apart from what was there before, where that is needed."""
        return StandIns(self.outside.tensors, self.cuts) if self.cuts else None

    # --- What steps give besides ---

    def note_outputs(self, needs: Sequence[Needs]) -> None:
        """Note how many tensors each step gave, and which of them need grad."""
        self._output_starts = list(accumulate(map(len, needs), initial=0))
        self._output_needs = bytes(chain.from_iterable(needs))

    def output_count(self, step: int) -> int:
        starts = self._output_starts
        return starts[step + 1] - starts[step]

    def output_needs(self, step: int) -> bytes:
        starts = self._output_starts
        return self._output_needs[starts[step] : starts[step + 1]]

    # --- From the first run to the passes ---

    def take_pending(self) -> Pending | None:
        """What the first run has left, for who comes first."""
        with self._lock:
            pending, self.pending = self.pending, None
        return pending

    def release(self) -> None:
        """Let go of everything: the graph has been freed."""
        self.start = Kept([], (), (None, {}), None)
        self.inputs = None
        self.is_released = True
        self.pending = None
        self.outside = Outside()
        self.others = {}
        self._other_versions = []
        self.late = {}
        self._functions = ()
        self.sole = None

    def first_state(self) -> Kept:
        """The first state, as the first run got it; raises where that is no longer possible."""
        if self.inputs is None:
            if self.start.is_changed():
                raise _errors.first_state_changed(self.describe(0))
            return self.start
        (value,), _ = self.inputs.restore(lambda: self.describe(0))
        return Kept(self.structure.leaves(value), self.places, self.start.hidden, None)

    def hand_over(self, hooks: Hooks) -> None:
        """Leave the first state to hooks around the chain: a region that the chain is in, an offload."""
        arguments: Arguments = (self.structure.build(self.start.leaves()),), {}
        self.inputs = Inputs(arguments, self.tensors, False, hooks)

    # --- Steps ---

    def forget_casts(self) -> None:
        """Let weights be cast anew: one that was cast without a graph would be left without its gradient."""
        if self.clears_casts:
            clear_autocast_cache()

    def take_apart(self, step: int, result: Any) -> tuple[Any, Any]:
        """What a step gave: the next state, and what it gave besides."""
        if not self.options.outputs:
            return result, None
        if type(result) is not tuple or len(result) != 2:
            raise _errors.no_output(self.describe(step), result)
        return result

    def leaves_of(self, step: int, value: Any) -> list[Any]:
        """The leaves of the state that a step gave."""
        try:
            return self.structure.leaves(value)
        except Mismatch as mismatch:
            raise _errors.other_structure(self.describe(step), mismatch.path, mismatch.expected, mismatch.got) from None

    def run_with_graph(
        self, step: int, leaves: list[Any], needs: Needs, stand_ins: StandIns | None = None
    ) -> tuple[list[Any], list[Tensor | None], Any]:
        """Run a step on leaves of autograd: the leaves of what it gives, what it was given, what it gives besides."""
        given: list[Tensor | None] = []
        made: dict[int, Tensor] = {}
        inner = list(leaves)
        for place, needed in zip(self.places, needs, strict=True):
            if needed:
                tensor = leaves[place]
                leaf = made.get(id(tensor))
                if leaf is None:
                    leaf = made[id(tensor)] = tensor.detach().requires_grad_()
                    given.append(leaf)
                else:  # it stands in two places, and gets its gradient in the first
                    given.append(None)
                inner[place] = leaf
            else:
                given.append(None)
        function = self.function(step)
        self.forget_casts()
        before = torch.is_grad_enabled()
        set_grad_enabled(True)
        try:
            if stand_ins is None:
                result = function(self.structure.build(inner))
            else:
                with stand_ins:
                    result = function(self.structure.build(inner))
        finally:
            set_grad_enabled(before)
        value, output = self.take_apart(step, result)
        return self.leaves_of(step, value), given, output


def _casts_are_cached() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return torch.is_autocast_cache_enabled() and any(
        torch.is_autocast_enabled(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
    )


def _count(functions: Iterable[Any]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for function in functions:
        counts[id(function)] = counts.get(id(function), 0) + 1
    return counts


def tensors_that_need_grad(leaves: list[Any], places: Sequence[int]) -> Needs:
    return tuple(leaves[place].requires_grad for place in places)


def without_history(leaves: list[Any], places: Sequence[int]) -> list[Any]:
    """The leaves of a state without the graph that they are results of."""
    made: dict[int, Tensor] = {}
    free = list(leaves)
    for place in places:
        tensor = leaves[place]
        if tensor.requires_grad:
            free[place] = made.setdefault(id(tensor), tensor.detach())
    return free


def changed_in_place(chain: Chain, kept: Kept, step: int) -> None:
    """Raise if a kept state was changed by the step that was run from it."""
    if kept.is_changed():
        raise _errors.step_changes_state(chain.describe(step), step)

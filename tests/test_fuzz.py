"""Programs at random: what they compute equals plain autograd's to the last bit, and they leave nothing behind.

A program is data: statements over numbered values, some with a body of their own, then backward passes. `check` runs it
plainly and with regions, and looks at these properties:

- Every value and gradient is the same; or both refuse, for the same reason. Where plain autograd refuses because a
  saved tensor was changed in place, a region may know better: then its gradients are those of the tensors as they were
  saved. A region may also refuse where docs/limits.md says so, and only there.
- The random numbers drawn are the same: the generator stands where it stands in the plain run, after the forward and
  after each pass.
- What is to happen once happens once, and state outside of the program's functions ends up as after one run of them.
- With the garbage collector off, every tensor and every function that was made is gone at the end.
- The hook stack and all other state around the program is as it was before.

`make fuzz` runs this file as a script, over many programs, and says how many it ran. A failure prints its program as an
expression: `check(<that expression>)` runs it again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import operator
import os
import random
import sys
import textwrap
import threading
import time
import traceback
import types
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import recollect
import recollect.dropin
from recollect import CheckpointError, Offload, Recompute, Save, by_name, offload_ops, save_ops
from tools import FREED, IN_PLACE, ambient_state, leaf

COUNT = int(os.environ.get("RECOLLECT_FUZZ", "300"))

# --- What a program is made of ---


class Written:
    """Prints itself as the expression that makes it, without defaults and one statement per line."""

    def __repr__(self):
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                parts.append(written(value))
            elif value != field.default:
                parts.append(f"{field.name}={written(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


def written(value):
    if isinstance(value, tuple) and any(isinstance(part, Written) for part in value):
        return "(\n" + textwrap.indent("".join(f"{part!r},\n" for part in value), "    ") + ")"
    return repr(value)


def part_of_a_program(cls):
    return dataclasses.dataclass(frozen=True, repr=False)(cls)


@part_of_a_program
class Do(Written):
    """An operator; `a` and `b` say how far back its operands stand."""

    op: str
    a: int = 0
    b: int = 0


@part_of_a_program
class Change(Written):
    """An operator in place: on something made in this function, or on `anything`, arguments among it."""

    op: str
    a: int = 0
    b: int = 0
    anything: bool = False


@part_of_a_program
class Grad(Written):
    """A backward in the middle of the forward, whose result is a value like others."""

    of: int = 0
    to: int = 1
    create_graph: bool = False


@part_of_a_program
class Fail(Written):
    """Raise an exception: "plain"; with a value that "escapes" that way; or in something that happens "once"."""

    how: str = "plain"


@part_of_a_program
class Under(Written):
    """Statements in a context, or in a `try` with a fallback."""

    context: str
    body: tuple


@part_of_a_program
class Named(Written):
    name: str
    body: tuple
    takes: tuple = (0,)
    gives: tuple = (0,)
    in_a_dict: bool = False  # how arguments and results are passed


@part_of_a_program
class Region(Written):
    body: tuple
    takes: tuple = (0,)
    gives: tuple = (0,)
    in_a_dict: bool = False
    sees: bool = False  # a tensor that it is not given
    api: str = "checkpoint"
    policy: tuple = ()
    early_stop: bool = True
    determinism_check: str = "default"
    debug: bool = False
    preserve_rng_state: bool | str = True  # False only where there is nothing random inside


@part_of_a_program
class Names(Written):
    """A policy by name."""

    decisions: tuple


@part_of_a_program
class Operators(Written):
    """A policy by operator."""

    operators: tuple
    decision: str = "save"


@part_of_a_program
class Ready(Written):
    """One of `recollect.policies`."""

    name: str


@part_of_a_program
class Asked(Written):
    """A function as a policy: gives these decisions in turn, about names only or about operators too."""

    decisions: tuple
    operators: bool = False


@part_of_a_program
class Pass(Written):
    """A backward: of some outputs, to some leaves (bits; 0 for all)."""

    how: str = "grad"
    of: int = 0
    to: int = 0
    retain_graph: bool = False
    autocast: bool = False


@part_of_a_program
class Program(Written):
    body: tuple
    passes: tuple = (Pass(),)
    steps: int = 1
    overlap: bool = False  # all forwards first, then the passes of the last
    stepped: bool = False  # an optimizer steps the weights between forward and backward
    threads: bool = False  # two at once, each over a graph of its own


# --- Operators ---


class Oops(Exception):  # noqa: N818
    """Raised by programs."""

    def __init__(self, value=None):
        super().__init__("oops")
        self.value = value


def raise_oops():
    raise Oops


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 * 0.1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x**2 * 0.3


class SinCos(torch.autograd.Function):
    """Saves outputs and something in between, and has an output without gradient."""

    @staticmethod
    def forward(ctx, x):
        sin, cos = x.sin(), x.cos()
        positive = sin > 0
        ctx.save_for_backward(sin, cos, positive)
        ctx.mark_non_differentiable(positive)
        return sin, cos, positive

    @staticmethod
    def backward(ctx, grad_sin, grad_cos, _):
        sin, cos, positive = ctx.saved_tensors
        return grad_sin * cos - torch.where(positive, grad_cos * sin, grad_cos * sin)


class Halved(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class BackwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.save_for_backward(x)
        ctx.call = call
        return x.sin().tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(ctx.call(lambda x: x.sin().tanh(), x), x, grad)[0], None


class NoisyBackward(torch.autograd.Function):
    """Draws in backward, where replays must not have moved the generator."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * x.sin() * torch.rand(4, 4)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Oops


def attention(a, b):
    q, k = a[None, None], b.to(a.dtype)[None, None]
    return F.scaled_dot_product_attention(q, k, q)[0, 0]


# Values stay small in all of them: what is compared to the last bit should not be infinite.
OPERATORS = {
    "sin": lambda a, b: a.sin(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "exp": lambda a, b: a.tanh().exp(),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a.tanh() * b,
    "mm": lambda a, b: a @ b.to(a.dtype) / 4,
    "softmax": lambda a, b: a.softmax(-1),
    "gelu": lambda a, b: F.gelu(a),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,)),
    "batch_norm": lambda a, b: F.batch_norm(a, None, None, training=True),
    "attention": attention,
    "sort": lambda a, b: a.sort(-1).values - b.amax(-1, keepdim=True),
    "positive": lambda a, b: a > b,
    "order": lambda a, b: a.argsort(-1, stable=True),
    "clone": lambda a, b: a.clone(),
    "detach": lambda a, b: a.detach(),
    "transpose": lambda a, b: a.t(),
    "alias": lambda a, b: a[:],
    "view": lambda a, b: a.reshape(2, 8).view(4, 4),
    "row": lambda a, b: a + b[1],
    "split": lambda a, b: torch.cat(a.split([1, 3])[::-1]),
    "unbind": lambda a, b: torch.stack(a.unbind(1)[::-1]),
    "two views": lambda a, b: a.repeat(2, 1).chunk(2),
    "index": lambda a, b: a[[3, 1, 1, 0]],
    "float": lambda a, b: a.float(),
    "cube": lambda a, b: Cube.apply(a),
    "sin and cos": lambda a, b: SinCos.apply(a),
}
# These are handled by the machine: they need weights, a mask or indices, or the run's own state.
SPECIAL = ("linear", "frozen linear", "where", "gather", "statistics", "counter", "backward in backward")
FAILING = "fails in backward"
OWN_BACKWARD = "a backward of its own"
ONCE = ("once", "pin", "pin tensors") if hasattr(recollect, "once") and hasattr(recollect, "pin") else ()
RANDOM = {
    "dropout": lambda a, b: F.dropout(a, 0.5),
    "native dropout": lambda a, b: torch.native_dropout(a, 0.5, True)[0],
    "noise": lambda a, b: a + torch.rand(4, 4),
    "rrelu": lambda a, b: F.rrelu(a, training=True),
    "noisy backward": lambda a, b: NoisyBackward.apply(a),
}
SPECIAL_RANDOM = ("python's", *(["pinned noise"] if ONCE else []))


def without_grad(a, b):
    with torch.no_grad():
        a.mul_(0.5)


def set_a_row(a, b):
    a[1] = b[0]


CHANGES = {
    "mul_": lambda a, b: a.mul_(0.5),
    "add_": lambda a, b: a.add_(b),
    "mul_ by another": lambda a, b: a.mul_(b),
    "sigmoid_": lambda a, b: a.sigmoid_(),
    "relu_": lambda a, b: a.relu_(),
    "copy_": lambda a, b: a.copy_(b),
    "zero_": lambda a, b: a.zero_(),
    "set a row": set_a_row,
    "column of a view": lambda a, b: a.t()[1].mul_(0.5),
    "without grad": without_grad,
    "custom": lambda a, b: Halved.apply(a),
}
RANDOM_CHANGES = {"dropout_": lambda a, b: F.dropout(a, 0.5, inplace=True)}
# Besides the changes above: torch's own code for them changes what it has just made.
CHANGES_INSIDE = ("dropout", "rrelu")

DECISIONS = {
    "save": Save(),
    "copy": Save(on_mutation="copy"),
    "offload": Offload(),
    "recompute": Recompute(),
    "no opinion": None,
}
KEPT = ("mm", "addmm", "sigmoid", "sin", "mul", "add", "native_dropout", "bernoulli", "rand", "sort", "gt", "clone")


def accepted(option, *values):
    """Those that this version knows."""
    known = []
    for value in values:
        with contextlib.suppress(ValueError, TypeError):
            recollect.checkpoint(torch.sin, leaf(1), **{option: value})
            known.append(value)
    return known


CHECKS = accepted("determinism_check", "default", "none", "first", "values")
GUARDS = "first" in CHECKS  # weights are watched since then
RANDOM_STATES = accepted("preserve_rng_state", True, False, "all")


def statements_in(body):
    for statement in body:
        yield statement
        yield from statements_in(getattr(statement, "body", ()))


def draws(body):
    random = (*RANDOM, *SPECIAL_RANDOM, *RANDOM_CHANGES)
    return any(getattr(statement, "op", None) in random for statement in statements_in(body))


# --- Running it ---


@dataclasses.dataclass
class Error:
    """What a part of a program raised. Never the exception itself, which would hold the program."""

    kind: str
    text: str = dataclasses.field(compare=False, default="")

    @classmethod
    def of(cls, error):
        text = str(error)
        for kind, sign in SIGNS.items():
            if sign in text:
                return cls(kind, text)
        return cls(f"{type(error).__name__}: {text}", text)


# A change in place of what was saved, of what the policy keeps; a limit of named regions.
REFUSALS = {
    "changed in place": IN_PLACE,
    "kept output changed": "that the policy keeps has been mutated",
    "no history": "kept output of that region, which has no history",
    "one of several views": "is a view and its base or another view of its base has been modified inplace",
    "weight stepped": "an optimizer stepped",
}
SIGNS = {**REFUSALS, "freed": FREED}


class Held:
    """A saved tensor, as an object that can be watched."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()

    def get(self):
        return self.tensor


class Values:
    """The values of a function at work: those it was given, then those it made."""

    def __init__(self, given):
        self.all = list(given)
        self.given = len(self.all)

    def any(self, place):
        return self.all[-1 - place % len(self.all)]

    def float(self, place, *, made_here=False):
        floats = [value for value in self.all[self.given if made_here else 0 :] if value.is_floating_point()]
        return floats[-1 - place % len(floats)] if floats else None

    def of_type(self, dtype):
        return next((value for value in reversed(self.all) if value.dtype is dtype), None)


class Machine:
    """Runs a program, with regions or plainly.

    `hooks` says what becomes of the saved-tensor hooks in a plain run: "as written"; "none", so that autograd looks
    for changes everywhere; "copies" around all of it, so that gradients are those of the tensors as they were saved; or
    "watched", around what would be regions, so that it shows whether torch lets go of what was saved there.
    """

    def __init__(self, program, *, regions, hooks="as written"):
        self.program, self.regions, self.hooks = program, regions, hooks
        self.leaves = [*(leaf(4, 4, seed=place) for place in range(4)), leaf(4, seed=4)]
        self.frozen = torch.nn.Parameter(leaf(4, 4, seed=5).detach(), requires_grad=False)
        self.policies = {}
        self.codes = {}
        self.events = []  # what was seen, in order: a label and a value
        self.given = []  # to would-be regions, with versions
        self.inputs_changed = False
        self.effects = 0
        self.ticks = itertools.count()
        self.watched = []
        inside = list(statements_in(program.body))
        self.has_changes = any(isinstance(one, Change) for one in inside)
        contexts = {one.context for one in inside if isinstance(one, Under)}
        self.has_copies = self.has_changes or "copying hooks" in contexts
        regions_inside = [one for one in inside if isinstance(one, Region)]
        self.preserves_all = all(one.preserve_rng_state == "all" for one in regions_inside)
        self.is_guarded = all(one.determinism_check != "none" for one in regions_inside)
        # Only these two put back what the function changes outside of itself; a backward inside it changes that again.
        self.may_change_state = all(one.determinism_check in ("first", "values") for one in regions_inside)
        self.may_change_state &= OWN_BACKWARD not in contexts and not any(isinstance(one, Grad) for one in inside)
        # A named region that is kept does not happen again, and what it changed is then what it changed in the forward.
        self.may_read_state = not any(isinstance(one, Named) for one in inside)
        self.mean, self.var, self.count = torch.zeros(4), torch.ones(4), torch.zeros(())

    # --- What is looked at ---

    def note(self, label, value):
        self.events.append((label, snapshot(value)))

    def watch(self, what, value):
        self.watched.append((what, weakref.ref(value)))
        return value

    def left(self):
        """What is still alive and should not be."""
        return [what for what, reference in self.watched if reference() is not None]

    def is_over(self):
        return any(isinstance(value, Error) and value.kind in REFUSALS for _, value in self.events)

    # --- Steps and passes ---

    def run(self):
        before = ambient_state()
        early = torch.ones((), requires_grad=True) * 1
        with copying_hooks() if self.hooks == "copies" else contextlib.nullcontext():
            steps = range(self.program.steps)
            if self.program.overlap:
                forwards = [self.forward() for _ in steps]
                while forwards:
                    self.backward(forwards.pop())
            else:
                for _ in steps:
                    self.backward(self.forward())
                    self.look_at_inputs()
                    with torch.no_grad():
                        for parameter in self.leaves:
                            parameter.sub_(0.1)
            self.look_at_inputs()
        early.backward()  # a backward that fails leaves nodes in autograd's queue; one over older nodes takes them out
        assert ambient_state() == before
        if hasattr(recollect, "is_recomputing"):
            assert not recollect.is_recomputing()
        return self

    def forward(self):
        values = Values(self.leaves[:2])
        if self.is_over():
            return values
        try:
            self.execute(self.program.body, values)
        except Oops as error:
            error.value = None
            self.note("forward", "raises")
        except Exception as error:
            self.note("forward", Error.of(error))
        self.note("values", values.all)
        self.note_state("after the forward")
        return values

    def note_state(self, when):
        self.note(f"random state {when}", [torch.get_rng_state(), hash(random.getstate())])
        self.note(f"side effects {when}", [self.effects, self.mean, self.var, self.count])

    def backward(self, values):
        outputs = [value for value in values.all[2:] if value.requires_grad]
        if self.program.stepped and self.is_guarded:
            self.step()
        for number, one in enumerate(self.program.passes):
            if self.is_over():
                break
            try:
                with torch.autocast("cpu", torch.bfloat16) if one.autocast else contextlib.nullcontext():
                    got = self.differentiate(one, outputs)
            except Exception as error:
                got = Error.of(error)
            self.note(f"pass {number}", got)
            self.note_state(f"after pass {number}")
        self.note("grad", [parameter.grad for parameter in self.leaves])

    def step(self):
        for weight in self.leaves[2:]:
            weight.grad = torch.ones_like(weight)
        torch.optim.SGD(self.leaves[2:], lr=0.1).step()

    def look_at_inputs(self):
        self.inputs_changed |= any(tensor._version != version for tensor, version in self.given)
        self.given.clear()

    def differentiate(self, one, outputs):
        chosen = chosen_of(outputs, one.of)
        wanted = chosen_of(self.leaves, one.to)
        loss = loss_of(chosen)
        if one.how == "backward":
            loss.backward(retain_graph=one.retain_graph, inputs=wanted if one.to else None)
            return None
        if one.how == "grad":
            return torch.autograd.grad(loss, wanted, retain_graph=one.retain_graph, allow_unused=True)
        grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        second = loss_of([grad.sin() for grad in grads if grad is not None and grad.requires_grad])
        if not second.requires_grad:
            return grads
        return grads + torch.autograd.grad(second, wanted, retain_graph=one.retain_graph, allow_unused=True)

    # --- Statements ---

    def execute(self, body, values):
        for statement in body:
            kind = type(statement)
            if kind is Do:
                made = self.operate(statement, values)
            elif kind is Change:
                made = self.change(statement, values)
            elif kind is Grad:
                made = self.grad(statement, values)
            elif kind is Fail:
                self.fail(statement, values)
            elif kind is Under:
                made = self.run_under(statement, values)
            else:
                made = self.call(statement, values)
            for value in made if isinstance(made, (tuple, list)) else [made]:
                values.all.append(self.watch(statement, value))

    def operate(self, do, values):
        a, b = values.float(do.a), values.float(do.b)
        if do.op in OPERATORS:
            return OPERATORS[do.op](a, b)
        if do.op in RANDOM:
            # Autograd saves the noise of rrelu before it is drawn: hooks that copy get memory that nobody has written.
            return RANDOM["dropout" if do.op == "rrelu" and self.has_copies else do.op](a, b)
        if do.op == "linear":
            return F.linear(a, like(self.leaves[2 + do.b % 2], a), like(self.leaves[4], a)) / 4
        if do.op == "frozen linear":
            return a @ like(self.frozen, a) / 4
        if do.op == "where":
            mask = values.of_type(torch.bool)
            return torch.where(a > 0 if mask is None else mask, a, b)
        if do.op == "gather":
            order = values.of_type(torch.int64)
            return a.gather(1, a.argsort(-1, stable=True) if order is None else order)
        if do.op == "statistics":
            state = (self.mean, self.var) if self.may_change_state else (None, None)
            return F.batch_norm(a, *state, training=True)
        if do.op == "counter":
            if self.may_change_state and self.may_read_state:
                self.count.add_(1)
            return a * self.count.cos()
        if do.op == "once":
            return a * self.once(self.effect)
        if do.op == "pin":
            return a * self.pin(lambda: 1 + next(self.ticks) % 3)()
        if do.op == "pin tensors":
            return self.pin(lambda a, b: (a.sin() * (1 + next(self.ticks) % 3), a > 0, b))(a, b)[:2]
        if do.op == "pinned noise":
            return a * self.pin(torch.rand)(4, 4)
        if do.op == "python's":
            return a * (random.random() if self.preserves_all else torch.rand(()))
        if do.op == FAILING:
            return FailsInBackward.apply(a)
        assert do.op == "backward in backward"
        return BackwardInBackward.apply(a, recollect.checkpoint if self.regions else call_plainly)

    def effect(self):
        self.effects += 1
        return 0.5 + self.effects % 2

    def once(self, function):
        return recollect.once(function) if self.regions else function()

    def pin(self, function):
        return recollect.pin(function) if self.regions else function

    def change(self, change, values):
        made = []
        a = values.float(change.a, made_here=not change.anything)
        if a is None:
            made = [a := values.float(change.a).clone()]
        (CHANGES.get(change.op) or RANDOM_CHANGES[change.op])(a, values.float(change.b))
        return made

    def fail(self, fail, values):
        if fail.how == "once":
            self.once(raise_oops)
        raise Oops(values.float(0) if fail.how == "escapes" else None)

    def grad(self, grad, values):
        of, to = values.float(grad.of), values.float(grad.to)
        if not of.requires_grad or not to.requires_grad:
            return []
        loss = loss_of([of])
        (got,) = torch.autograd.grad(loss, to, retain_graph=True, create_graph=grad.create_graph, allow_unused=True)
        return [] if got is None else [got]

    def run_under(self, under, values):
        if under.context == "try":
            return self.run_in_try(under, values)
        if under.context == OWN_BACKWARD:
            inner = Values([values.float(0).detach().requires_grad_()])
            self.execute(under.body, inner)
            outputs = [value for value in inner.all[1:] if value.requires_grad]
            grads = torch.autograd.grad(loss_of(outputs), inner.all[:1], allow_unused=True) if outputs else ()
            return [grad for grad in grads if grad is not None]
        with self.context(under.context):
            self.execute(under.body, values)
        return []

    def run_in_try(self, under, values):
        try:
            self.execute(under.body, values)
        except Oops as error:
            value, error.value = error.value, None
            return [] if value is None else [value.sigmoid()]  # with something to save in the handler
        except Exception as error:
            if isinstance(error, CheckpointError) or Error.of(error).kind in SIGNS:
                raise  # a refusal ends the program, wherever it shows
            return [values.float(0).sigmoid()]
        return []

    def context(self, name):
        if name == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        if name == "no_grad":
            return torch.no_grad()
        if self.hooks != "as written":
            return contextlib.nullcontext()
        # On the CPU `save_on_cpu` holds the very tensor and sees no change: with changes even plain autograd is wrong.
        return save_on_cpu() if name == "save_on_cpu" and not self.has_changes else copying_hooks()

    # --- Functions ---

    def call(self, call, values):
        given = [values.float(call.takes[0]), *map(values.any, call.takes[1:])]
        seen = values.float(1).cos() if isinstance(call, Region) and call.sees else None

        def function(*args):
            inner = Values(tensors_of(args))
            if seen is not None:
                inner.all.append(self.watch(call, inner.float(0) * seen))
            self.execute(call.body, inner)
            return structure([inner.any(place) for place in call.gives], call.in_a_dict)

        # Libraries remember things by code from step to step, and here all functions would share one.
        code = self.codes.get(id(call)) or self.codes.setdefault(id(call), function.__code__.replace())
        function = self.watch(call, types.FunctionType(code, globals(), "function", None, function.__closure__))
        args = [{"first": given[0], "rest": given[1:]}] if call.in_a_dict else given
        if isinstance(call, Named):
            if self.regions:
                function = recollect.region(call.name, function)
            return tensors_of(function(*args))
        self.given += [(tensor, tensor._version) for tensor in given if not self.regions]
        if self.hooks == "watched":
            with saved_tensors_hooks(lambda tensor: self.watch(call, Held(tensor)), Held.get):
                return tensors_of(function(*args))
        return tensors_of(self.checkpoint(call, function, args) if self.regions else function(*args))

    def checkpoint(self, region, function, args):
        options = {
            "early_stop": region.early_stop,
            "determinism_check": region.determinism_check,
            "debug": region.debug,
            "preserve_rng_state": region.preserve_rng_state or draws(region.body),
        }
        if region.api == "drop-in" and not region.policy:
            return recollect.dropin.checkpoint(function, *args, use_reentrant=False, **options)
        if region.policy:
            if region.policy not in self.policies:
                self.policies[region.policy] = make_policy(region.policy)
            options["policy"] = self.policies[region.policy]
        if region.api == "remat":
            return recollect.remat(function, **options)(*args)
        return recollect.checkpoint(function, *args, **options)


def call_plainly(function, *args):
    return function(*args)


def like(weight, a):
    """Autocast casts weights itself."""
    return weight if torch.is_autocast_enabled("cpu") else weight.to(a.dtype)


def make_policy(parts):
    first, *rest = map(policy_of, parts)
    return functools.reduce(operator.or_, rest, recollect.policies.save_nothing | first) if rest else first


def policy_of(part):
    if isinstance(part, Names):
        return by_name({pattern: DECISIONS[decision] for pattern, decision in part.decisions})
    if isinstance(part, Ready):
        return getattr(recollect.policies, part.name)
    if isinstance(part, Operators):
        operators = [getattr(torch.ops.aten, name) for name in part.operators]
        if part.decision == "offload":
            return offload_ops(*operators)
        return save_ops(*operators, on_mutation="copy" if part.decision == "copy" else "error")
    turns = itertools.cycle(part.decisions)

    def ask(what, ctx):
        return DECISIONS[next(turns)] if part.operators or isinstance(what, str) else None

    return ask


def structure(tensors, in_a_dict):
    if in_a_dict:
        return {"all": tensors, "count": len(tensors), "nothing": None}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def chosen_of(options, bits):
    return [option for place, option in enumerate(options) if bits >> place % 5 & 1] or options


RAMP = torch.linspace(-1, 2, 16).view(4, 4)


def loss_of(outputs):
    """A number that depends on each output in its own way."""
    total = torch.zeros(())
    for place, value in enumerate(outputs):
        rows = value.float().reshape(-1, 4)
        total = total + (rows * RAMP[: len(rows)]).sum() * (1 + place)
    return total


def copying_hooks():
    return saved_tensors_hooks(copied, lambda tensor: tensor)


def copied(tensor):
    """In memory of the same order: kernels may sum in another one otherwise."""
    tensor = tensor.detach()
    if 0 in tensor.stride():
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def snapshot(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [snapshot(part) for part in value]
    return value


# --- The properties ---

ran = collections.Counter()  # programs, by what became of them


def run(program, **how):
    """What one run saw, whether a region's input was changed, and what it left behind."""
    torch.manual_seed(0)
    random.seed(0)
    if not program.threads:
        machines = [Machine(program, **how).run()]
    else:
        machines = [Machine(program, **how) for _ in range(2)]
        if not machines[0].may_change_state:
            machines[1].codes = machines[0].codes  # one function in two threads
        run_at_once(machines)
    left = [what for machine in machines for what in machine.left()]
    return [machine.events for machine in machines], any(machine.inputs_changed for machine in machines), left


def run_at_once(machines):
    start, errors = threading.Barrier(len(machines)), []

    def work(machine):
        try:
            start.wait(timeout=60)
            machine.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(machine,), daemon=True) for machine in machines]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that a race has a chance to show
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    if errors:
        raise errors[0]


def check(program):
    """Assert all properties of a program."""
    ran[look_at(program)] += 1


def look_at(program):
    """Run a program plainly and with regions, and assert all properties; say in a word what became of it."""
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the policy .* (matched|kept) nothing", UserWarning)
            expected, inputs_changed, _ = run(program, regions=False)
            got, _, left = run(program, regions=True)
            fate = compare(program, got, expected, inputs_changed)
            if left and not inputs_changed and not makes_cycles(program):
                raise AssertionError(f"{len(left)} objects outlive the program, made by {left[0]!r}")
    finally:
        gc.enable()
    return fate


def makes_cycles(program):
    """Whether torch alone leaves something behind: a tensor whose graph has saved that tensor.

    On the CPU `save_on_cpu` does that with every saved output, and changes in place do it without hooks too. So does a
    region whose input is changed in place later, by something computed from its output.
    """
    if any(isinstance(one, Under) and one.context == "save_on_cpu" for one in statements_in(program.body)):
        return True
    return bool(run(program, regions=False, hooks="watched")[2])


def compare(program, got, expected, inputs_changed):
    """Raise if `got` is not what it should be; say in a word what became of the program."""
    if are_same(got, expected):
        errors = {value.kind for events in got for _, value in events if isinstance(value, Error)}
        return "the same error" if errors & set(SIGNS) else "equal"
    if kinds_in(expected) & {"changed in place"}:
        # What plain autograd refuses, a region may refuse or do right.
        expected, _, _ = run(program, regions=False, hooks="copies")
        may_refuse = True
    else:
        may_refuse = inputs_changed
        if not may_refuse and "changed in place" in kinds_in(got):
            # Under hooks autograd does not look for changes, and regions do.
            bare, _, _ = run(program, regions=False, hooks="none")
            may_refuse = "changed in place" in kinds_in(bare)
    allowed = {"changed in place"} if may_refuse else set()
    allowed |= limits_of(program)
    for one, other in zip(got, expected, strict=True):
        compare_events(one, other, allowed)
    return "refused" if kinds_in(got) & set(REFUSALS) else "better than plain autograd"


def kinds_in(runs):
    return {value.kind for events in runs for _, value in events if isinstance(value, Error)}


def limits_of(program):
    """The refusals that docs/limits.md announces for what is in the program."""
    inside = list(statements_in(program.body))
    kinds = {type(statement) for statement in inside}
    policies = [part for statement in inside if isinstance(statement, Region) for part in statement.policy]
    limits = set()
    changes = Change in kinds or any(
        getattr(one, "op", None) in CHANGES_INSIDE or getattr(one, "context", None) == "copying hooks" for one in inside
    )
    if changes and any(isinstance(part, (Operators, Ready, Asked)) for part in policies):
        limits.add("kept output changed")
    pinned = any(isinstance(one, Do) and one.op in ONCE for one in inside)
    if Grad in kinds and (pinned or (Named in kinds and policies)):
        limits.add("no history")
    if changes:
        limits.add("one of several views")  # autograd raises it at the first look at one, and regions look at arguments
    if program.stepped:
        limits |= {"weight stepped", "changed in place"}
    return limits


def compare_events(got, expected, allowed):
    for (label, one), (other_label, other) in zip(got, expected, strict=False):
        if isinstance(one, Error) and one.kind in allowed:
            return  # the run ended here
        assert label == other_label
        assert are_same(one, other), f"{label}:\n{one}\nis not\n{other}"
    assert len(got) == len(expected)


def are_same(one, other):
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype is not other.dtype or one.shape != other.shape:
            return False
        if one.is_floating_point() and not torch.equal(one, other):  # or they hold something that equals nothing
            return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(are_same, one, other))
    return one == other


# --- Programs that were wrong once ---


def in_a_region(*body, **options):
    return Program((Do("sin"), Region(body, **options), Do("sin")))


FOUND = {
    "the stop is due after rrelu, and an inner region begins": in_a_region(
        Do("rrelu"), Region((Do("mm"),)), gives=(1,), policy=(Operators(("mm",)),)
    ),
    "a view without grad, of something that needs it, given to a region in a region": in_a_region(
        Under("no_grad", (Do("alias"),)), Region((Do("mul", 0, 1), Do("sin")), takes=(0, 1))
    ),
    "a change through a view, saved, in a double backward": dataclasses.replace(
        in_a_region(Do("sin"), Do("alias"), Change("sigmoid_"), gives=(1,)), passes=(Pass("double"),)
    ),
    "the stop in the handler of an exception": in_a_region(Do("sin"), Under("try", (Fail("escapes"),))),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong_once(name):
    check(FOUND[name])


# --- Drawing a program ---
#
# A draw is slow, so statements are drawn from tables. The simplest stand first: a failing program shrinks to them.

PATTERNS = ("*", "a", "b", "a/*", "*/a", "*b", "*/*", "a/b")
CONTEXTS = ("try", "autocast", "no_grad", "save_on_cpu", "copying hooks", OWN_BACKWARD)
OPERANDS = list(itertools.product((0, 0, 1, 2), (0, 1, 2)))
PLACES = ((0,), (0,), (1,), (0, 1), (0, 0), (1, 0), (2, 0), (0, 1, 2))
RESULTS = (*PLACES, *PLACES, ())
OPTIONS = list(
    itertools.product(
        ("checkpoint", "checkpoint", "remat", "drop-in"),  # api
        (False, False, False, False, True),  # in_a_dict
        (False, False, False, False, True),  # sees
        (True, True, False),  # early_stop
        CHECKS,
        (False, False, False, False, False, True),  # debug
        (True, *RANDOM_STATES),
    )
)
PASSES = [
    Pass(how, of, to, retain_graph, autocast)
    for autocast, how, of, to, retain_graph in itertools.product(
        (False, False, False, False, True),
        ("grad", "grad", "backward", "double"),
        (0, 0, 1, 2, 6),
        (0, 0, 1, 4, 10),
        (True, True, False),
    )
]
POLICIES = {
    "names": [
        Names(((pattern, decision),))
        for pattern, decision in itertools.product(PATTERNS, ("save", "save", "recompute", "offload"))
    ],
    "operators": [
        Operators(operators, decision)
        for size, decision in itertools.product((1, 2, 3), ("copy", "save", "offload"))
        for operators in itertools.combinations(KEPT, size)
    ],
    "ready": [Ready(name) for name in recollect.policies.__all__],
    "asked": [
        Asked(decisions, operators)
        for size, operators in itertools.product((1, 2, 3), (False, False, True))
        for decisions in itertools.product(DECISIONS, repeat=size)
    ],
}


def table_of(kind, names):
    return [kind(name, a, b) for name in names for a, b in OPERANDS[: 1 if name == FAILING else None]]


TABLES = {
    False: (table_of(Do, (*OPERATORS, *SPECIAL, *ONCE, FAILING)), table_of(Change, CHANGES)),
    True: (
        table_of(Do, (*OPERATORS, *SPECIAL, *ONCE, *RANDOM, *SPECIAL_RANDOM, *RANDOM, FAILING)),
        table_of(Change, (*CHANGES, *RANDOM_CHANGES)),
    ),
}
SIMPLE = ("do",) * 8 + ("change",)
BLOCKS = ("region",) * 7 + ("named",) * 5 + ("under",) * 3 + ("grad",)


def among(options):
    return st.sampled_from(options)


class Drawing:
    """Draws a program; `random` says whether it may draw random numbers itself."""

    def __init__(self, draw, random):
        self.draw, self.random = draw, random

    def body(self, depth, in_a_try=False):
        """Statements, with blocks among them that are up to `depth` deep."""
        kinds = SIMPLE + BLOCKS * (depth > 0) + ("fail",) * in_a_try
        return tuple(
            getattr(self, self.draw(among(kinds)))(depth - 1, in_a_try)
            for _ in range(self.draw(among((1, 2, 2, 3, 4) if depth else (1, 2, 3))))
        )

    def do(self, depth, in_a_try):
        return self.draw(among(TABLES[self.random][0]))

    def change(self, depth, in_a_try):
        change = self.draw(among(TABLES[self.random][1]))
        return dataclasses.replace(change, anything=True) if self.seldom(8) else change

    def grad(self, depth, in_a_try):
        of, to = self.draw(among(OPERANDS))
        return Grad(of, to, self.draw(st.booleans()))

    def fail(self, depth, in_a_try):
        return Fail(self.draw(among(("plain", "escapes", "once")[: 3 if ONCE else 2])))

    def under(self, depth, in_a_try):
        context = self.draw(among(CONTEXTS))
        return Under(context, self.body(depth, in_a_try or context == "try"))

    def named(self, depth, in_a_try):
        name, takes, gives = self.draw(among("aabc")), self.draw(among(PLACES)), self.draw(among(RESULTS))
        return Named(name, self.body(depth, in_a_try), takes, gives, in_a_dict=self.seldom(6))

    def region(self, depth, in_a_try):
        takes, gives = self.draw(among(PLACES)), self.draw(among(RESULTS))
        api, in_a_dict, sees, *options = self.draw(among(OPTIONS))
        policy = tuple(
            self.draw(among(POLICIES[self.draw(among(list(POLICIES)))])) for _ in range(self.draw(among((0, 1, 1, 2))))
        )
        return Region(self.body(depth, in_a_try), takes, gives, in_a_dict, sees, api, policy, *options)

    def seldom(self, often):
        return self.draw(among((False,) * (often - 1) + (True,)))


@st.composite
def programs(draw):
    threads = draw(among((False,) * 11 + (True,)))
    drawing = Drawing(draw, random=not threads)
    depth = draw(among((0, 1, 2, 3)))
    return Program(
        (*drawing.body(0), drawing.region(depth, False), *drawing.body(depth)),
        passes=tuple(draw(among(PASSES)) for _ in range(draw(among((1, 2, 3))))),
        steps=draw(among((1, 1, 1, 2, 3))),
        overlap=drawing.seldom(5),
        stepped=GUARDS and drawing.seldom(12),
        threads=threads,
    )


usual = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def use_everything_once():
    """Torch imports much at the first use of a dispatch mode, and is then in cycles with what runs."""
    recollect.checkpoint(torch.sin, leaf(3), debug=True).sum().backward()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _only_look_at_programs():
    use_everything_once()
    yield
    gc.unfreeze()


@settings(usual, max_examples=COUNT, derandomize=True)
@given(programs())
def test_programs_equal_plain_autograd_and_leave_nothing_behind(program):
    check(program)


# --- Many of them: `make fuzz` ---


def fuzz(count, number):
    """Run so many programs; gives how many there were, by what became of them, and a description of a failure."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    use_everything_once()
    ran.clear()
    failure = ""
    try:
        seed(number)(settings(usual, max_examples=count)(given(programs())(check)))()
    except Exception:
        failure = traceback.format_exc()
    return ran, failure


def main():
    number = int(os.environ.get("RECOLLECT_FUZZ_SEED", time.time_ns() % 2**32))
    started = time.monotonic()
    print(f"{COUNT} programs in two processes, RECOLLECT_FUZZ_SEED={number}", flush=True)
    with ProcessPoolExecutor(2) as pool:
        results = list(pool.map(fuzz, [COUNT - COUNT // 2, COUNT // 2], [number, number + 1]))
    total = sum((counts for counts, _ in results), collections.Counter())
    print(f"{total.total()} programs ran in {time.monotonic() - started:.0f} s")
    for fate, count in total.most_common():
        print(f"{count:8} {fate}")
    failures = [failure for _, failure in results if failure]
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()

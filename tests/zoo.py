"""The zoo: programs that activation checkpointing gets wrong, as data that several implementations can run.

A case is a function `program(run)`. It builds a small model, calls `run(function, *args)` where a user would call
`checkpoint`, goes backward, and gives the gradients and the state that a user would look at. `Plain` runs the same
program without regions: that is what is right. `judge` says what an implementation made of a case.

Three conventions:

- Where plain autograd refuses the mistake itself (a weight stepped before backward, say), the program leaves it out
  when `run.plain`: right are then the gradients of the forward that was run.
- The line that an error has to name carries the comment `# guilty`. There are several where two lines meet, and for a
  change from outside, where no line inside is to blame, it is where the region begins and where it reads the value.
- What is to be done once, such as counting a call, or a product that is to be kept, is counted under "effects".
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as stock
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import recollect
from recollect import dropin
from tools import CountOperators, assert_equal, leaf

MM = torch.ops.aten.mm

# --- Ways to run a program ---


class UnsupportedError(Exception):
    """The implementation has nothing of the kind, and does not claim to."""


class Run:
    """How a program's regions are run. `steps` is how many training steps it takes; mistakes happen in the last."""

    name = ""
    plain = False

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps

    def __call__(self, function, *args, rng=True, debug=False, **kwargs):
        """One call as a region. `rng` is what `preserve_rng_state` is in recollect."""
        raise NotImplementedError

    def keeping(self, operators, function, *args, debug=False, on_mutation="error", offload=False):
        """One call as a region that keeps the results of `operators`, or moves them to the host."""
        raise UnsupportedError

    def pin(self, function):
        """`function`, whose result is kept in the forward and handed back in the replay."""
        raise UnsupportedError

    def once(self, function, *args):
        """Call `function` in the forward only."""
        raise UnsupportedError

    def recomputing(self) -> bool:
        raise UnsupportedError

    def skip_on_replay(self, hook):
        """`hook`, which does nothing in a replay."""
        raise UnsupportedError

    def register(self, generator) -> None:
        """Let `rng="all"` cover this generator."""
        raise UnsupportedError


class Plain(Run):
    """Without regions."""

    name = "plain autograd"
    plain = True

    def __call__(self, function, *args, rng=True, debug=False, **kwargs):
        return function(*args, **kwargs)

    def keeping(self, operators, function, *args, debug=False, on_mutation="error", offload=False):
        return function(*args)

    def pin(self, function):
        return function

    def once(self, function, *args):
        return function(*args)

    def recomputing(self):
        return False

    def skip_on_replay(self, hook):
        return hook

    def register(self, generator):
        pass


class WithFeatures(Run):
    """What recollect offers inside of a region, whichever way the region is made."""

    def pin(self, function):
        return recollect.pin(function)

    def once(self, function, *args):
        return recollect.once(function, *args)

    def recomputing(self):
        return recollect.is_recomputing()

    def skip_on_replay(self, hook):
        return recollect.skip_on_replay(hook)

    def register(self, generator):
        recollect.register_generator(generator)


class Recollect(WithFeatures):
    """`recollect.checkpoint` with its defaults, or with another `determinism_check`."""

    name = "recollect"

    def __init__(self, steps: int = 1, check: str | None = None) -> None:
        super().__init__(steps)
        self.options = {} if check is None else {"determinism_check": check}
        recollect.verify_again()  # or a case would find the functions of another one verified

    def __call__(self, function, *args, rng=True, debug=False, **kwargs):
        return recollect.checkpoint(function, *args, preserve_rng_state=rng, debug=debug, **self.options, **kwargs)

    def keeping(self, operators, function, *args, debug=False, on_mutation="error", offload=False):
        if offload:
            policy = recollect.offload_ops(*operators)
        elif on_mutation == "copy":

            def policy(operator, question):
                return recollect.Save(on_mutation="copy") if operator in operators else None
        else:
            policy = recollect.save_ops(*operators)
        return recollect.checkpoint(function, *args, policy=policy, debug=debug, **self.options)


class LikeStock(Run):
    """What is called as `torch.utils.checkpoint` is."""

    module: Any = None

    def __call__(self, function, *args, rng=True, debug=False, **kwargs):
        if rng == "all" and self.module is stock:
            raise UnsupportedError
        return self.module.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=rng, debug=debug, **kwargs
        )

    def keeping(self, operators, function, *args, debug=False, on_mutation="error", offload=False):
        if on_mutation == "copy":
            raise UnsupportedError
        policy: Any = operators
        if offload:
            offloaded = self.module.CheckpointPolicy.MUST_CPU_OFFLOAD
            recomputed = self.module.CheckpointPolicy.PREFER_RECOMPUTE

            def policy(ctx, operator, *args, **kwargs):
                return offloaded if operator in operators else recomputed

        contexts = functools.partial(self.module.create_selective_checkpoint_contexts, policy)
        return self.module.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, debug=debug)


class Stock(LikeStock):
    """`torch.utils.checkpoint` itself."""

    name = "PyTorch"
    module = stock


class DropIn(WithFeatures, LikeStock):
    """`recollect.dropin`: the same program with another import, and the checks that cost nothing."""

    name = "recollect.dropin"
    module = dropin

    def __init__(self, steps: int = 1) -> None:
        super().__init__(steps)
        recollect.verify_again()


class TorchRemat(Run):
    """`torch_remat`, asked to compare metadata as PyTorch does, and given a hook for every generator it should know.

    It takes no policy over operators. What it keeps is marked by `torch_remat.region`, which stands for `pin` here.
    """

    name = "torch_remat"

    def __init__(self, steps: int = 1) -> None:
        super().__init__(steps)
        import torch_remat

        self.module = torch_remat
        self.registered: list[Any] = []

    def __call__(self, function, *args, rng=True, debug=False, **kwargs):
        states: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = []
        if rng:
            states.append((torch.get_rng_state, torch.set_rng_state))
        if rng == "all":
            found = [*self.registered, *(arg for arg in args if isinstance(arg, torch.Generator))]
            states += [(one.get_state, one.set_state) for one in found]
            states += [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]
        hooks = tuple(StateHook(get, put) for get, put in states)
        region = self.module.checkpoint(determinism_check="default", recompute_state_hooks=hooks)
        return region(function)(*args, **kwargs)

    def pin(self, function):
        def pinned(*args):
            result = self.module.region(gives_a_tensor(function), "pinned", recompute=False)(*args)
            self.module.recompute_needs_tensor(result)
            return result

        return pinned

    def once(self, function, *args):
        # It says whether a replay is running, which is enough for a side effect; a result it does not keep.
        if not self.module.is_recomputing() and function(*args) is not None:
            raise UnsupportedError

    def recomputing(self):
        return self.module.is_recomputing()

    def register(self, generator):
        self.registered.append(generator)


def gives_a_tensor(function):
    """`function`, for what keeps tensors alone and says so."""

    def checked(*args):
        result = function(*args)
        if not isinstance(result, torch.Tensor):
            raise UnsupportedError
        return result

    return checked


@dataclass
class StateHook:
    """What torch_remat asks for the state of something, and gives it back to."""

    snapshot: Callable[[], Any]
    restore: Callable[[Any], Any]


# --- Cases, and what is made of them ---

RIGHT = "right"
NAMED = "error that names the line"
ELSEWHERE = "error elsewhere"
WRONG = "silently wrong"
WARNED = "wrong, with a warning that names the line"
TWICE = "gradients right, but done twice"
NOTHING = "no such feature"


@dataclass
class Case:
    """A program and what recollect is to make of it.

    Args:
        name: What the table calls it.
        program: `program(run)` gives a dict of what is to be compared.
        verdict: What recollect makes of it.
        cause: A pattern that the error's `cause` contains.
        operator: A pattern for the error's `operator`, where it has one.
        shows: A pattern that the error's message contains.
        guard: Found by what is always on: without a trace, in any step, and by the drop-in.
        dropin: The drop-in makes the same of it although no guard is in play.
        warns: recollect says something before it comes to the error.
        later: recollect makes the same of it in a later step, when nothing is traced any more.
    """

    name: str
    program: Callable[[Run], dict[str, Any]]
    verdict: str
    cause: str = ""
    operator: str = ""
    shows: str = ""
    guard: bool = False
    dropin: bool = False
    warns: bool = False
    later: bool = False

    @property
    def guilty(self) -> list[int]:
        """The numbers of the lines that are marked."""
        lines, start = inspect.getsourcelines(self.program)
        return [start + i for i, line in enumerate(lines) if "# guilty" in line]


ZOO: dict[str, Case] = {}
LIMITS: dict[str, Case] = {}  # what recollect's defaults do not see: shown, so that nobody is surprised


def case(name, verdict, *, into=ZOO, **about):
    """Put a program into the zoo."""

    def add(program):
        into[name] = Case(name, program, verdict, **about)
        return program

    return add


def seeded(program: Callable[[Run], dict[str, Any]], run: Run) -> dict[str, Any]:
    """Run a program from the same random numbers each time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return program(run)


def same(got: Any, expected: Any) -> bool:
    try:
        assert_equal(got, expected)
    except AssertionError:
        return False
    return True


def names_the_line(case: Case, error: BaseException) -> bool:
    """Whether the message shows a guilty line, or the innermost frame of the program in the traceback is one."""
    if mentions(case, str(error)):
        return True
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return bool(frames) and frames[-1].lineno in case.guilty


def mentions(case: Case, text: str) -> bool:
    return any(re.search(rf"zoo\.py:{line}\b", text) for line in case.guilty)


def judge(case: Case, run: Run, expected: dict[str, Any]) -> str:
    """What `run` makes of the case: one of the verdicts above. `expected` is what `Plain` gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = seeded(case.program, run)
        except (UnsupportedError, NotImplementedError):
            return NOTHING
        except Exception as error:
            return NAMED if names_the_line(case, error) else ELSEWHERE
    if same(got, expected):
        return RIGHT
    if any(mentions(case, str(one.message)) or (one.filename, one.lineno) in places(case) for one in caught):
        return WARNED
    if "effects" in got and same({**got, "effects": 0}, {**expected, "effects": 0}):
        return TWICE
    return WRONG


def places(case: Case) -> list[tuple[str, int]]:
    return [(__file__, line) for line in case.guilty]


def gradients(model: nn.Module, **leaves: torch.Tensor) -> dict[str, Any]:
    """Those of a model's parameters and of the leaves, and the model's buffers."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    found |= {name: tensor.grad for name, tensor in leaves.items()}
    return found | {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def step_with(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer step on gradients of ones, which leaves none behind."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


# --- Another path ---

SMOOTH = True


@case("branch on a global, same shapes", NAMED, cause="branch|global", operator="sin|cos")
def branch_on_a_global(run):
    global SMOOTH
    SMOOTH = True

    def region(x):
        y = x.exp()
        z = y.sin() if SMOOTH else y.cos()  # guilty
        return z.exp()

    x = leaf(3)
    y = run(region, x)
    SMOOTH = False
    y.sum().backward()
    return {"x": x.grad}


@case("branch on a global, another number of tensors", NAMED, cause="branch|global|path", operator="tanh|exp")
def branch_on_a_global_with_another_number(run):
    global SMOOTH
    SMOOTH = True

    def region(x):
        y = x.sin()
        if SMOOTH:
            y = y.tanh()  # guilty
        return y.exp()  # guilty

    x = leaf(3)
    y = run(region, x)
    SMOOTH = False
    y.sum().backward()
    return {"x": x.grad}


class Experts(nn.Module):
    """Each row goes to the expert with the best score, with a bias that balances their load."""

    def __init__(self, route):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("balance", torch.zeros(3))
        self.route = route

    def forward(self, x):
        scores = self.gate(x)
        chosen = self.route(self, scores)
        weights = scores.softmax(-1).gather(1, chosen[:, None])
        return (torch.bmm(x[:, None], self.experts[chosen])[:, 0] * weights).tanh()


def rebalanced(run, route, region=None):
    """A model whose balance is changed between forward and backward, so that other experts are chosen."""
    model, x = Experts(route), leaf(6, 4)
    y = run(model if region is None else functools.partial(region, model), x)
    with torch.no_grad():
        model.balance.copy_(torch.tensor([50.0, 0.0, -50.0]))
    y.sum().backward()
    return gradients(model, x=x)


@case("routing that flips", NAMED, cause="in place|changed", operator="add|argmax")
def routing_that_flips(run):
    def route(model, scores):
        return (scores.detach() + model.balance).argmax(-1)  # guilty

    return rebalanced(run, route)


@case("routing that flips, with pin", RIGHT, later=True, dropin=True)
def routing_that_flips_with_pin(run):
    def route(model, scores):
        return run.pin(lambda scores: (scores.detach() + model.balance).argmax(-1))(scores)

    return rebalanced(run, route)


@case("routing that flips, in a nested region", NAMED, cause="in place|changed", operator="add|argmax")
def routing_that_flips_in_a_nested_region(run):
    def route(model, scores):
        return (scores.detach() + model.balance).argmax(-1)  # guilty

    return rebalanced(run, route, lambda model, x: run(model, x.sin()).exp())


@case("pin in a nested region", RIGHT, dropin=True)
def pin_in_a_nested_region(run):
    def route(model, scores):
        return run.pin(lambda scores: (scores.detach() + model.balance).argmax(-1))(scores)

    return rebalanced(run, route, lambda model, x: run(model, x.sin()).exp())


@case("a decision in Python, with pin", RIGHT, dropin=True)
def decision_in_python_with_pin(run):
    """The split sizes come from a tensor that changes between forward and backward."""
    sizes = torch.tensor([1, 3])

    def region(x):
        left, right = x.split(run.pin(sizes.tolist)())
        return torch.cat((left.sin(), right.exp()))

    x = leaf(4)
    y = run(region, x)
    sizes.copy_(torch.tensor([2, 2]))
    y.sum().backward()
    return {"x": x.grad}


class Mixture(nn.Module):
    """Top-1 routing by score and load; each expert takes so many rows, and what is beyond is dropped."""

    def __init__(self, capacity=3):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.capacity = capacity
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        noise = torch.rand_like(scores) * 0.1
        chosen = (scores.detach() + noise - self.load).argmax(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0][: self.capacity]
            result = result.index_add(0, rows, expert(x[rows]).tanh() * scores[rows, i, None])
        # The next batch avoids the experts that were full, and so would a replay.
        self.load.lerp_(torch.bincount(chosen, minlength=3) / len(x), 0.5)
        return result


@case("mixture of experts with capacity", RIGHT, later=True)
def mixture_of_experts(run):
    model, x = Mixture(), leaf(8, 4)
    for _ in range(run.steps):
        run(model, x).square().sum().backward()
    return gradients(model, x=x)


@case("a data-dependent loop", RIGHT, later=True, dropin=True)
def data_dependent_loop(run):
    def region(x):
        while x.norm() > 0.5:
            x = x.sin() * 0.8
        return x

    x = leaf(4)
    for _ in range(run.steps):
        run(region, x).sum().backward()
    return {"x": x.grad}


@case("a data-dependent loop whose bound was changed", NAMED, cause="branch|global|closure|path")
def data_dependent_loop_with_another_bound(run):
    bound = 0.5

    def region(x):
        while x.norm() > bound:  # guilty
            x = x.sin() * 0.8  # guilty
        return x

    x = leaf(4)
    y = run(region, x)
    bound = 1.0
    y.sum().backward()
    return {"x": x.grad}


@case("a cached property computed in the forward only", RIGHT, later=True, dropin=True)
def cached_property(run):
    """A table without gradients, as rotary embeddings have: the replay finds it made, and gets the same values."""

    class Rotary(nn.Module):
        @functools.cached_property
        def table(self):
            return torch.arange(4.0).cos()

        def forward(self, x):
            return (x.sin() * self.table).exp()

    model, x = Rotary(), leaf(2, 4)
    for _ in range(run.steps):
        run(model, x).sum().backward()
    return gradients(model, x=x)


@case("a cached property with gradients", NAMED, cause="branch|path|first call|cach", operator="exp|mul")
def cached_property_with_gradients(run):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        @functools.cached_property
        def scale(self):
            return self.weight.exp()  # guilty

        def forward(self, x):
            return (x.sin() * self.scale).exp()  # guilty

    model, x = Scaled(), leaf(2, 4)
    run(model, x).sum().backward()
    return gradients(model, x=x)


# --- Other values ---


@case("values that drift", NAMED, operator="mul")
def values_that_drift(run):
    warmup = itertools.count(1)

    def region(x):
        y = x.sin() * (0.1 * next(warmup))  # guilty
        return y.exp()

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad}


def now() -> float:
    return time.perf_counter() % 1 + 1


def at_the_time_of_the_forward(run, model):
    """Two runs never see the same time, so a program with a clock is compared with what its own forward saw."""
    x, z = leaf(3), leaf(3)
    run(model, x).sum().backward()
    (z * model.moments[0]).sin().sum().backward()
    return {"gradient of the time of the forward": torch.equal(x.grad, z.grad)}


@case("a module whose forward reads the time", NAMED, operator="mul")
def reads_the_time(run):
    class Clocked(nn.Module):
        def __init__(self):
            super().__init__()
            self.moments = []

        def forward(self, x):
            self.moments.append(now())
            return (x * self.moments[-1]).sin()  # guilty

    return at_the_time_of_the_forward(run, Clocked())


@case("a module whose forward reads the time, with once", RIGHT, dropin=True)
def reads_the_time_with_once(run):
    class Clocked(nn.Module):
        def __init__(self):
            super().__init__()
            self.moments = []

        def forward(self, x):
            self.moments.append(run.once(now))
            return (x * self.moments[-1]).sin()

    return at_the_time_of_the_forward(run, Clocked())


@case("default dtype changed", RIGHT, later=True, dropin=True)
def default_dtype_changed(run):
    def region(x):
        return (x * torch.linspace(0.0, 1.0, 3)).sin()

    x = leaf(3)
    before = torch.get_default_dtype()
    try:
        for _ in range(run.steps):
            torch.set_default_dtype(torch.float64)
            y = run(region, x)
            torch.set_default_dtype(torch.float32)
            y.sum().backward()
    finally:
        torch.set_default_dtype(before)
    return {"x": x.grad}


@case("attention kernel chosen around the forward", RIGHT, later=True, dropin=True)
def attention_kernel_chosen(run):
    def region(x):
        return F.scaled_dot_product_attention(x, x, x).sin()

    x = leaf(1, 2, 4, 8)
    for _ in range(run.steps):
        with sdpa_kernel(SDPBackend.MATH):
            y = run(region, x)
        y.sum().backward()
    return {"x": x.grad}


@case("default device changed", RIGHT, later=True, dropin=True)
def default_device_changed(run):
    def region(x):
        return (x * torch.linspace(0.0, 1.0, 3)).sin()

    x = leaf(3)
    for _ in range(run.steps):
        y = run(region, x)
        with torch.device("meta"):
            y.backward(torch.ones(3, device="cpu"))
    return {"x": x.grad}


@case("eval between", RIGHT, later=True, dropin=True)
def eval_between(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    x = leaf(8, 4)
    for _ in range(run.steps):
        model.train()
        y = run(model, x)
        model.eval()
        y.sum().backward()
    return gradients(model, x=x) | {"training": [module.training for module in model.modules()]}


@case("eval between, model in a closure", RIGHT, later=True, dropin=True)
def eval_between_in_a_closure(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    x = leaf(8, 4)
    for _ in range(run.steps):
        model.train()
        y = run(lambda x: model(x).exp(), x)
        model.eval()
        y.sum().backward()
    return gradients(model, x=x) | {"training": [module.training for module in model.modules()]}


@case("autocast around the forward only, weight shared", RIGHT, later=True, dropin=True)
def shared_weight_under_autocast(run):
    """Autocast casts a weight once and remembers that: in the replay it has to be cast anew."""
    weight, x = nn.Parameter(torch.randn(4, 4)), leaf(8, 4)

    def region(x):
        return F.linear(F.linear(x, weight).tanh(), weight).tanh()

    for _ in range(run.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(region, run(region, F.linear(x, weight)))
            y = F.linear(y, weight)
        y.float().sum().backward()
    return {"weight": weight.grad, "x": x.grad}


@case("a weight tied across two regions", RIGHT, later=True, dropin=True)
def weight_tied_across_two_regions(run):
    weight = nn.Parameter(torch.randn(5, 4))
    words = torch.tensor([0, 3, 3, 1])

    def embed(words):
        return F.embedding(words, weight).sin()

    def score(x):
        return F.linear(x.exp(), weight).log_softmax(-1)

    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(run.steps):
        F.nll_loss(run(score, run(embed, words)), words).backward()
        optimizer.step()
    return {"weight": weight.grad, "value": weight.detach()}


@case("values that are not numbers, and memory that nobody wrote", RIGHT, later=True, dropin=True)
def not_numbers(run):
    """Nothing to complain about: NaN is NaN again, and what was never written is never read."""

    def region(x):
        room = torch.empty(2, 6)
        room[0] = x.detach()
        y = x.log() * room[0] / 0.0
        empty = x[:0].exp().sum()
        return (y.exp() + empty).double().to(torch.complex64).abs()

    x = leaf(6)
    for _ in range(run.steps):
        run(region, x).nansum().backward()
    return {"x": x.grad.nan_to_num(7.0, 8.0, 9.0)}


# --- Random numbers ---


@case("NumPy's generator", NAMED, cause="NumPy|numpy", operator="mul|lift_fresh")
def numpy_generator(run):
    def region(x):
        return (x.exp() * torch.from_numpy(np.random.rand(3))).sin()  # guilty

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad}


@case('NumPy\'s generator, with preserve_rng_state="all"', RIGHT, later=True, dropin=True)
def numpy_generator_with_all(run):
    def region(x):
        return (x.exp() * torch.from_numpy(np.random.rand(3))).sin()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x, rng="all").sum().backward()
    return {"x": x.grad, "next": np.random.rand()}


@case("Python's generator", NAMED, cause="Python|random", operator="mul")
def python_generator(run):
    def region(x):
        return (x.exp() * random.random()).sin()  # guilty

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad}


@case('Python\'s generator, with preserve_rng_state="all"', RIGHT, later=True, dropin=True)
def python_generator_with_all(run):
    def region(x):
        return (x.exp() * random.random()).sin()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x, rng="all").sum().backward()
    return {"x": x.grad, "next": random.random()}


@case("a generator of the user's", NAMED, cause="[Gg]enerator", operator="rand")
def user_generator(run):
    generator = torch.Generator().manual_seed(0)

    def region(x):
        noise = torch.rand(3, generator=generator)  # guilty
        return (x.exp() * noise).sin()

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad}


@case('a generator of the user\'s, an argument, with preserve_rng_state="all"', RIGHT, later=True, dropin=True)
def user_generator_as_argument(run):
    generator = torch.Generator().manual_seed(0)

    def region(x, generator):
        return (x.exp() * torch.rand(3, generator=generator)).sin()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x, generator, rng="all").sum().backward()
    return {"x": x.grad, "next": torch.rand(1, generator=generator)}


@case('a generator of the user\'s, registered, with preserve_rng_state="all"', RIGHT, later=True, dropin=True)
def user_generator_registered(run):
    generator, other = torch.Generator().manual_seed(0), np.random.RandomState(0)
    run.register(generator)
    run.register(other)

    def region(x):
        return (x.exp() * torch.rand(3, generator=generator) * other.rand()).sin()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x, rng="all").sum().backward()
    return {"x": x.grad, "next": torch.rand(1, generator=generator), "other": other.rand()}


@case("random numbers not preserved", NAMED, cause="preserve|generator", operator="dropout|bernoulli|mul", warns=True)
def random_numbers_not_preserved(run):
    def region(x):  # guilty
        return F.dropout(x.exp(), 0.5).sin()  # guilty

    x = leaf(64)
    run(region, x, rng=False).sum().backward()
    return {"x": x.grad}


@case("dropout", RIGHT, later=True, dropin=True)
def dropout(run):
    def region(x):
        return F.dropout(x.exp(), 0.5).sin()

    x = leaf(64)
    for _ in range(run.steps):
        run(region, x).sum().backward()
    return {"x": x.grad, "next": torch.rand(1)}


@case("RReLU", RIGHT, later=True, dropin=True)
def rrelu(run):
    def region(x):
        return F.rrelu(x.sin(), training=True)

    x = leaf(500)
    for _ in range(run.steps):
        y = run(region, x)
        # Other tensors come and go in between, or the replay might find the old noise where the forward left it.
        for _ in [torch.full((500,), 7.0) for _ in range(20)]:
            pass
        y.sum().backward()
    return {"x": x.grad}


# --- Parameters and inputs that change in between ---


@case("optimizer step between", NAMED, cause="optimizer|step|in place|changed", shows=r"\[3, 3\]", guard=True)
def optimizer_step_between(run):
    model, x = nn.Linear(3, 3), leaf(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def region(x):  # guilty
        return model(x.sin()).tanh()  # guilty

    for step in range(run.steps):
        y = run(region, x)
        if step == run.steps - 1 and not run.plain:
            step_with(optimizer)
        y.sum().backward()
    return gradients(model, x=x)


@case("bias stepped", NAMED, cause="optimizer|step|in place|changed", shows=r"\[3\]", guard=True)
def bias_stepped(run):
    """Plain autograd has no use for a bias in backward, so it does not mind; a replay computes with it."""
    model, x = nn.Linear(3, 3), leaf(2, 3)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)

    def region(x):  # guilty
        return model(x.sin()).tanh()  # guilty

    for step in range(run.steps):
        y = run(region, x)
        if step == run.steps - 1:
            step_with(optimizer)
        y.sum().backward()
    return {"x": x.grad, "weight": model.weight.grad}


@case("weight stepped under autocast", NAMED, cause="optimizer|step|in place|changed", shows=r"\[3, 3\]", guard=True)
def weight_stepped_under_autocast(run):
    """Autograd saves the cast weight, not the parameter, so plain autograd does not mind."""
    model, x = nn.Linear(3, 3, bias=False), leaf(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def region(x):  # guilty
        return model(x.sin()).tanh()  # guilty

    for step in range(run.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(region, x)
        if step == run.steps - 1:
            step_with(optimizer)
        y.float().sum().backward()
    return {"x": x.grad}


@case("fused optimizer step", NAMED, cause="optimizer|step", shows=r"\[3, 3\]|\[3\]", guard=True)
def fused_optimizer_step(run):
    """A fused step changes the weights without their version counters; not even plain autograd notices."""
    model, x = nn.Linear(3, 3), leaf(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def region(x):  # guilty
        return model(x.sin()).tanh()  # guilty

    for step in range(run.steps):
        y = run(region, x)
        if step == run.steps - 1 and not run.plain:
            step_with(optimizer)
        y.sum().backward()
    return gradients(model, x=x)


@case("weight changed through .data", NAMED, cause="changed|in place|parameter", operator="mm|t|mul")
def weight_changed_through_data(run):
    weight, x = nn.Parameter(torch.randn(3, 3)), leaf(2, 3)

    def region(x):  # guilty
        return (x.sin() @ weight).tanh()  # guilty

    y = run(region, x)
    if not run.plain:
        weight.data.mul_(2.0)
    y.sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("weight replaced", NAMED, cause="another|replaced|rebound|not the", shows=r"\[3, 3\]", guard=True)
def weight_replaced(run):
    model, x = nn.Linear(3, 3, bias=False), leaf(2, 3)

    def region(x):  # guilty
        return model(x.sin()).tanh()  # guilty

    weight = model.weight
    for step in range(run.steps):
        y = run(region, x)
        if step == run.steps - 1:
            model.weight = nn.Parameter(torch.randn(3, 3))
        y.sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("late-binding closure in a loop over layers", NAMED, cause="another|rebound|closure|not the", guard=True)
def late_binding_closure(run):
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    x = leaf(2, 3)
    for _ in range(run.steps):
        h = x
        for layer in layers:
            h = run(lambda h: layer(h).tanh(), h)  # noqa: B023 # guilty
        h.sum().backward()
    return gradients(layers, x=x)


@case("input mutated", NAMED, cause="in place|input", shows=r"args\[0\]", guard=True)
def input_mutated(run):
    x = leaf(3)

    def region(h):  # guilty
        return h.sin().exp()  # guilty

    for step in range(run.steps):
        h = x * 2
        y = run(region, h)
        if step == run.steps - 1 and not run.plain:
            with torch.no_grad():
                h.mul_(2)
        y.sum().backward()
    return {"x": x.grad}


@case("input in a dict mutated", NAMED, cause="in place|input", shows=r"args\[1\]\['mask'\]", guard=True)
def input_in_a_dict_mutated(run):
    """Plain autograd does not save what is compared, so the mask may be used again at once."""
    x, mask = leaf(6), torch.zeros(6)

    def region(x, options):  # guilty
        return x.sin().where(options["mask"] > 0, x.exp()).tanh()  # guilty

    for step in range(run.steps):
        y = run(region, x, {"mask": mask})
        if step == run.steps - 1:
            mask.fill_(1.0)
        y.sum().backward()
    return {"x": x.grad}


@case("in-place after save", NAMED, cause="in place|inplace|changed", operator="mul|exp|sin")
def in_place_after_save(run):
    def region(x):
        y = x.exp()
        z = y.sin()
        if not run.plain:
            y.mul_(2.0)  # guilty
        return z.exp()

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad}


@case("an optimizer that runs in backward", RIGHT, later=True, dropin=True)
def optimizer_in_backward(run):
    """Each weight is stepped as soon as its gradient is there, while other regions have yet to be replayed."""
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(3))),
        leaf(2, 3),
    )
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(run.steps):
        h = x
        for layer in model:
            h = run(layer, h)
        h.square().sum().backward()
    return {"x": x.grad} | {name: parameter.detach() for name, parameter in model.named_parameters()}


@case("an optimizer that runs the model", RIGHT, later=True, dropin=True)
def optimizer_that_runs_the_model(run):
    """Forward and backward happen inside of a step, which changes the weights between two of them."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), leaf(5, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = run(model, x).square().sum()
        loss.backward()
        return loss

    for _ in range(run.steps):
        optimizer.step(closure)
    return {"x": x.grad} | {name: parameter.detach() for name, parameter in model.named_parameters()}


# --- State and side effects ---


@case("BatchNorm", RIGHT, later=True)
def batch_norm(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, momentum=None))
    x = leaf(8, 4)
    for _ in range(run.steps):
        run(model, x).square().sum().backward()
    return gradients(model, x=x)


@case("BatchNorm in a closure", RIGHT, later=True)
def batch_norm_in_a_closure(run):
    mean, var, x = torch.zeros(4), torch.ones(4), leaf(8, 4)
    for _ in range(run.steps):
        run(lambda x: F.batch_norm(x.sin(), mean, var, training=True).exp(), x).sum().backward()
    return {"x": x.grad, "mean": mean, "var": var}


@case("a counter in a buffer", RIGHT, later=True)
def counter_in_a_buffer(run):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return (x * self.calls).sin()

    model, x = Counting(), leaf(3)
    for _ in range(run.steps):
        run(model, x).sum().backward()
    return gradients(model, x=x)


@case("spectral_norm", RIGHT, later=True)
def spectral_norm(run):
    """Each forward in training takes a step of power iteration, so another one sees another weight."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
    x = leaf(8, 4)
    for _ in range(run.steps):
        run(model, x).square().sum().backward()
    return gradients(model, x=x)


def scripted_module():
    """Of a class of its own, because TorchScript remembers how often the code of a class has run."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).tanh()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still in use
        return torch.jit.script(Part())


@case("state written by two forwards before a backward", RIGHT, later=True)
def two_forwards_before_a_backward(run):
    """As in the training of a GAN: each replay needs what its own forward read, not what is there now."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Tanh())
    x, z = leaf(8, 4), leaf(8, 4, seed=1)
    for _ in range(run.steps):
        real, fake = run(model, x), run(model, z)
        (real.square().sum() - fake.exp().sum()).backward()
    return gradients(model, x=x, z=z)


@case("initialised by the data of the first call", RIGHT, later=True)
def initialised_by_the_first_call(run):
    """The replay of the first call finds it done, and must compute with the same scale."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.ready = False

        def forward(self, x):
            if not self.ready:
                with torch.no_grad():
                    self.scale.copy_(1 / x.std(0))
                self.ready = True
            return (x * self.scale).sin().exp()

    model, x = Scaled(), leaf(8, 4)
    for _ in range(run.steps):
        run(model, x).sum().backward()
    return gradients(model, x=x) | {"scale": model.scale.detach()}


@case("a scripted submodule", RIGHT, later=True, dropin=True)
def scripted_submodule(run):
    model, x = nn.Sequential(nn.Linear(4, 4), scripted_module()), leaf(8, 4)
    for _ in range(2):  # TorchScript watches the first run and optimises at the second: from then on it is steady
        model(x).sum().backward()
    for _ in range(run.steps):
        run(model, x).square().sum().backward()
    return gradients(model, x=x)


@case("a scripted submodule that never ran before", NAMED)
def scripted_submodule_that_never_ran(run):
    """The first run is that of the forward and the second that of the replay: they save different tensors."""
    scripted, x = scripted_module(), leaf(8, 4)

    def region(x):
        return scripted(x.sin())  # guilty

    run(region, x).square().sum().backward()
    return gradients(scripted, x=x)


@case("`except Exception` around an operator", RIGHT, later=True, dropin=True)
def except_around_an_operator(run):
    """A replay that is stopped by an exception must not set off the fallback."""
    fallbacks = []

    def region(x):
        y = x.exp()
        try:
            return y.sin()
        except Exception:
            fallbacks.append(1)
            return y.tanh()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x).sum().backward()
    return {"x": x.grad, "effects": len(fallbacks)}


@case("saved tensors read twice", NAMED, cause="twice|once", guard=True)
def saved_tensors_read_twice(run):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x * ctx.saved_tensors[0]  # guilty

    x = leaf(3)
    run(lambda x: Cube.apply(x.sin()).exp(), x).sum().backward()
    return {"x": x.grad}


@case("side effect counted", TWICE)
def side_effect_counted(run):
    """No tensor depends on the list, so nothing that is compared can differ."""
    calls = []

    def region(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad, "effects": len(calls)}


@case("side effect counted, with once", RIGHT, later=True, dropin=True)
def side_effect_counted_with_once(run):
    calls = []

    def region(x):
        run.once(calls.append, 1)
        return x.sin().exp()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x).sum().backward()
    return {"x": x.grad, "effects": len(calls)}


@case("side effect counted, with is_recomputing", RIGHT, later=True, dropin=True)
def side_effect_counted_with_is_recomputing(run):
    calls = []

    def region(x):
        if not run.recomputing():
            calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    for _ in range(run.steps):
        run(region, x).sum().backward()
    return {"x": x.grad, "effects": len(calls)}


def counted_by_a_hook(run, wrap):
    model, x, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), leaf(2, 4), []
    model[0].register_forward_hook(wrap(lambda module, args, result: calls.append(result.shape)))
    for _ in range(run.steps):
        run(model, x).sum().backward()
    return gradients(model, x=x) | {"effects": len(calls)}


@case("a forward hook that counts", TWICE)
def forward_hook(run):
    return counted_by_a_hook(run, lambda hook: hook)


@case("a forward hook that counts, with skip_on_replay", RIGHT, later=True, dropin=True)
def forward_hook_with_skip_on_replay(run):
    return counted_by_a_hook(run, run.skip_on_replay)


# --- Policies ---


def products_in_backward(backward):
    """How many matrix products `backward` runs: a kept one is not computed again."""
    with CountOperators() as operators:
        backward()
    return operators.counts["mm"]


@case("policy with a packet", RIGHT)
def policy_with_a_packet(run):
    """`aten.mm` means all its overloads; the product is kept."""
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)
    y = run.keeping([MM], lambda x: (x.sin() @ weight).exp(), x)
    products = products_in_backward(y.sum().backward)
    return {"x": x.grad, "weight": weight.grad, "effects": products}


@case("offload verdict", RIGHT)
def offload_verdict(run):
    """The product is kept on the host: it is not computed again."""
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)
    y = run.keeping([MM.default], lambda x: (x.sin() @ weight).exp(), x, offload=True)
    products = products_in_backward(y.sum().backward)
    return {"x": x.grad, "weight": weight.grad, "effects": products}


@case("kept output mutated", NAMED, cause="mutated|in place", operator="mm|mul")
def kept_output_mutated(run):
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)

    def region(x):
        y = x.sin() @ weight
        y.mul_(2.0)  # guilty
        return y.sin()

    run.keeping([MM.default], region, x).sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("kept output mutated through a view", NAMED, cause="mutated|in place", operator="mm|mul")
def kept_output_mutated_through_a_view(run):
    """What `F.linear` gives for a batch of matrices is a view of the product."""
    weight, x = leaf(4, 4), leaf(2, 3, 4, seed=1)

    def region(x):
        y = F.linear(x.sin(), weight)
        y.mul_(2.0)  # guilty
        return y.sin()

    run.keeping([MM.default], region, x).sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case('kept output mutated, with Save(on_mutation="copy")', RIGHT)
def kept_output_mutated_with_copy(run):
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)

    def region(x):
        y = x.sin() @ weight
        y.mul_(2.0)
        return y.sin()

    run.keeping([MM.default], region, x, on_mutation="copy").sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("two backward passes under a policy", RIGHT)
def two_backward_passes_under_a_policy(run):
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)
    y = run.keeping([MM.default], lambda x: (x.sin() @ weight).exp(), x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("debug with a policy", RIGHT)
def debug_with_a_policy(run):
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)
    y = run.keeping([MM.default], lambda x: (x.sin() @ weight).exp(), x, debug=True)
    y.sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("debug with a policy, and another branch", NAMED, cause="branch|global", operator="sin|cos")
def debug_with_a_policy_and_another_branch(run):
    global SMOOTH
    SMOOTH = True
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)

    def region(x):
        y = x.exp() @ weight
        z = y.sin() if SMOOTH else y.cos()  # guilty
        return z.exp()

    y = run.keeping([MM.default], region, x, debug=True)
    SMOOTH = False
    y.sum().backward()
    return {"x": x.grad, "weight": weight.grad}


# --- What the defaults do not see ---


@case("a tensor without gradients changed in the second step", NAMED)
def tensor_without_gradients_changed_later(run):
    """A mask, or a frozen weight: what the first replay has read from outside is guarded in every step."""
    mask, x = torch.tensor([1.0, 0.0, 1.0]), leaf(3)

    def region(x):  # guilty
        return (x.sin() * mask).exp()  # guilty

    run(region, x).sum().backward()
    y = run(region, x)
    if not run.plain:
        mask.fill_(1.0)
    y.sum().backward()
    return {"x": x.grad}


@case("values that drift from the second step on", WRONG, into=LIMITS, operator="mul")
def values_that_drift_later(run):
    """The first step is verified; with "first", later ones go by metadata."""
    factors = iter([1.0, 1.0, 1.0, 2.0])

    def region(x):
        y = x.sin() * next(factors)  # guilty
        return y.exp()

    x = leaf(3)
    for _ in range(2):
        run(region, x).sum().backward()
        if run.plain:
            next(factors)  # a step without regions calls the function once
    return {"x": x.grad}


@case("a global rebound in the second step", WRONG, into=LIMITS, operator="sin|cos")
def global_rebound_later(run):
    global SMOOTH
    SMOOTH = True

    def region(x):
        y = x.exp()
        z = y.sin() if SMOOTH else y.cos()  # guilty
        return z.exp()

    x = leaf(3)
    run(region, x).sum().backward()
    y = run(region, x)
    SMOOTH = False
    y.sum().backward()
    return {"x": x.grad}


@case("a weight changed through .data in the second step", WRONG, into=LIMITS, operator="mm|t|tanh")
def weight_changed_through_data_later(run):
    """No version counter moves and no optimizer steps, so only values could tell."""
    weight, x = nn.Parameter(torch.randn(3, 3)), leaf(2, 3)

    def region(x):  # guilty
        return (x.sin() @ weight).tanh()  # guilty

    run(region, x).sum().backward()
    y = run(region, x)
    if not run.plain:
        weight.data.mul_(2.0)
    y.sum().backward()
    return {"x": x.grad, "weight": weight.grad}


@case("a list that grows", TWICE, into=LIMITS)
def list_that_grows(run):
    """A side effect in Python; no tensor depends on it."""
    log = []

    def region(x):
        y = x.sin()
        log.append(float(y.detach().sum()))
        return y.exp()

    x = leaf(3)
    run(region, x).sum().backward()
    return {"x": x.grad, "effects": len(log)}

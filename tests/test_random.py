"""Random numbers: which generators a replay finds as the forward found them, and what becomes of the streams.

Most tests go through `_ambient` alone. Those at the end go through `recollect.checkpoint`, with the option "all".
"""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import recollect
from recollect import _ambient, _generators
from recollect._ambient import DefaultDeviceType, RandomState
from recollect._generators import Probe, register_generator, unregister_generator
from recollect._inputs import find_tensors
from tools import CountOperators, leaf


class StopHereError(Exception):
    pass


@pytest.fixture(autouse=True)
def _leaves_the_process_alone():
    """Every test begins with seeded generators and leaves nothing registered."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    yield
    assert not _generators._registered


@pytest.fixture
def registered():
    """`register_generator` for one test."""
    made = []

    def register(generator):
        made.append(generator)
        return register_generator(generator)

    yield register
    for generator in made:
        unregister_generator(generator)


def capture(preserve, *args, **kwargs):
    return _ambient.Ambient(find_tensors(args, kwargs)[0], preserve, (args, kwargs))


@contextlib.contextmanager
def in_force(ambient):
    undo = []
    try:
        ambient.restore(undo)
        yield
    finally:
        _ambient.undo_all(undo)


# --- The generators that are no accelerator's, one by one ---


class Duck:
    """Something of the user's own, with one of the two spellings."""

    def __init__(self):
        self.count = 0

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


def draw_from(generator):
    """The next number of a generator of any kind."""
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    if isinstance(generator, Duck):
        generator.count += 1
        return generator.count
    return generator.random() if not isinstance(generator, numpy.random.RandomState) else generator.random_sample()


def gauss():
    return random.gauss(0.0, 1.0)  # Python 3.10 has no defaults for them


MAKES = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "random": lambda: random.Random(5),
    "numpy": lambda: numpy.random.default_rng(5),
    "numpy, with arrays in its state": lambda: numpy.random.Generator(numpy.random.Philox(5)),
    "numpy's RandomState": lambda: numpy.random.RandomState(5),
    "RandomState over another kind": lambda: numpy.random.RandomState(numpy.random.PCG64(5)),
    "duck": Duck,
}
GLOBALS = {
    "Python's": (random.random, gauss),
    "NumPy's": (numpy.random.rand, numpy.random.randn),
    "the CPU's": (lambda: torch.rand(()).item(), lambda: torch.randn(()).item()),
}


@pytest.mark.parametrize("of", GLOBALS)
def test_all_preserves_those_of_the_process(of):
    draws = GLOBALS[of]

    def three():
        return [draw() for draw in draws for _ in range(3)]  # an odd number of normal numbers: one is kept back

    draws[1]()
    ambient = capture("all")
    forward = three()
    ambient.forward_ended()
    three()
    reference = capture("all")
    after = three()
    reference.restore([])  # where the stream was before it was looked at
    for _ in range(2):
        with in_force(ambient):
            assert three() == forward
    assert three() == after, "the stream around it goes on as if nothing had been"


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("way", ["registered", "argument"])
def test_all_preserves_those_of_the_user(kind, way, registered):
    generator, twin = MAKES[kind](), MAKES[kind]()
    if way == "registered":
        registered(generator)
    elif kind == "duck":
        pytest.skip("only known kinds are looked for in arguments")
    arguments = (generator,) if way == "argument" else ()
    draw_from(generator), draw_from(twin)
    ambient = capture("all", *arguments)
    forward = [draw_from(generator) for _ in range(3)]
    assert forward == [draw_from(twin) for _ in range(3)]
    for _ in range(2):
        assert draw_from(generator) == draw_from(twin)  # somebody else draws in between
        with in_force(ambient):
            assert [draw_from(generator) for _ in range(3)] == forward
    assert draw_from(generator) == draw_from(twin), "the stream around it goes on as if nothing had been"


@dataclass
class Settings:
    generator: Any
    scale: float = 1.0


class Pair(NamedTuple):
    first: Any
    second: Any


class Mapping(dict):
    pass


@pytest.mark.parametrize(
    "wrap",
    [
        lambda g: (g,),
        lambda g: ([g],),
        lambda g: ({"a": [(1, {"b": g})]},),
        lambda g: (Settings(g),),
        lambda g: (deque([Settings([g])]),),
        lambda g: (Pair(1, g),),
        lambda g: (OrderedDict(a=g),),
        lambda g: (Mapping(a=g),),
        lambda g: (torch.ones(2), "text", g, g, [g]),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_generators_are_found_in_arguments_at_any_depth(wrap, keyword):
    generator = torch.Generator().manual_seed(3)
    args = wrap(generator)
    ambient = capture("all", **{f"k{i}": value for i, value in enumerate(args)}) if keyword else capture("all", *args)
    forward = draw_from(generator)
    around = generator.get_state()
    with in_force(ambient):
        assert draw_from(generator) == forward
    assert torch.equal(generator.get_state(), around)


def test_arguments_that_hold_themselves():
    generator = random.Random(1)
    loop: list[Any] = [generator]
    loop.append(loop)
    ambient = capture("all", loop, loop)
    assert sum("arguments" in part.source.name for part in ambient.parts if hasattr(part, "source")) == 1


def test_a_default_generator_among_the_arguments_is_the_one_that_is_preserved_anyway():
    ambient = capture("all", torch.default_generator)
    assert not any("arguments" in part.source.name for part in ambient.parts if hasattr(part, "source"))


@pytest.mark.parametrize("preserve", [True, False])
def test_without_all_python_numpy_and_the_users_drift(preserve, registered):
    """By contract: they are not preserved, and a replay moves them."""
    mine = registered(random.Random(5))
    given = torch.Generator().manual_seed(5)

    def draws():
        return random.random(), numpy.random.rand(), mine.random(), draw_from(given)

    ambient = capture(preserve, given)
    forward = draws()
    with in_force(ambient):
        replay = draws()
    assert not any(one == other for one, other in zip(forward, replay, strict=True))
    random.seed(1)
    numpy.random.seed(1)
    mine.seed(5)
    given.manual_seed(5)
    assert [draws(), draws()] == [forward, replay], "each draw moved them by one"


def test_false_preserves_nothing():
    ambient = capture(False)
    assert ambient.cpu_state is None
    assert not any(hasattr(part, "source") for part in ambient.parts)


def test_states_are_put_back_though_some_cannot_be(registered):
    """One generator refuses the state around it: the others are put back all the same."""

    class Refusing(Duck):
        def set_state(self, state):
            if state == 2:
                raise StopHereError
            super().set_state(state)

    refusing = registered(Refusing())
    ambient = capture("all")
    first = random.random(), torch.rand(3)
    refusing.count = 2
    random.random(), torch.rand(3)  # so that a replay does not end at the state around it by itself
    around = random.getstate(), torch.get_rng_state()
    with pytest.raises(StopHereError), in_force(ambient):
        again = random.random(), torch.rand(3)
    assert again[0] == first[0]
    assert torch.equal(again[1], first[1])
    assert random.getstate() == around[0]
    assert torch.equal(torch.get_rng_state(), around[1])


def test_a_generator_that_refuses_its_state_undoes_the_others(registered):
    class Refusing(Duck):
        def set_state(self, state):
            raise StopHereError

    ambient_before = capture("all")
    registered(Refusing())
    ambient = capture("all")
    random.random(), torch.rand(3)
    around = random.getstate(), torch.get_rng_state()
    with pytest.raises(StopHereError), in_force(ambient):
        raise AssertionError("it does not come to this")
    assert random.getstate() == around[0]
    assert torch.equal(torch.get_rng_state(), around[1])
    assert len(ambient.parts) == len(ambient_before.parts) + 1


def test_without_numpy():
    """A program that has no NumPy does not get it from here. Torch itself loads it where it is installed."""
    program = """
        import random, sys, recollect
        for name in [name for name in sys.modules if name.split(".")[0] == "numpy"]:
            del sys.modules[name]
        sys.meta_path.insert(0, type("Refuse", (), {"find_spec": staticmethod(
            lambda name, *_: (_ for _ in ()).throw(AssertionError(name)) if name.split(".")[0] == "numpy" else None)}))
        from recollect import _ambient, _generators
        ambient = _ambient.Ambient([], "all", ((random.Random(1),), {}))
        assert [part.source.name for part in ambient.parts if hasattr(part, "source")] == [
            "Python's random", "a Random in the arguments"]
        assert _generators.Probe(everything=True).moved() == []
        _generators.register_generator(random.Random(1))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# --- Registering ---


@pytest.mark.parametrize("kind", MAKES)
def test_registering_gives_the_generator_back_and_twice_is_once(kind, registered):
    generator = MAKES[kind]()
    assert registered(generator) is generator
    before = len(capture("all").parts)
    assert registered(generator) is generator
    assert len(capture("all").parts) == before
    unregister_generator(generator)
    assert len(capture("all").parts) == before - 1
    unregister_generator(generator)  # nothing to do


def test_a_module_with_the_methods_will_do(registered):
    assert registered(random) is random


@pytest.mark.parametrize(
    "wrong", [3, None, "text", object(), torch.Generator, random.Random, Duck, torch.nn.Linear(2, 2), torch.ones(2)]
)
def test_what_is_no_generator_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^generator must be a torch\.Generator, random\.Random,") as caught:
        register_generator(wrong)
    assert f"got {type(wrong).__name__} " in str(caught.value)
    assert "get_state and set_state" in str(caught.value)


def test_a_generator_without_a_state_is_refused():
    with pytest.raises(TypeError, match=r"generator must be .* got SystemRandom .*, which refuses: System entropy"):
        register_generator(random.SystemRandom())


@pytest.mark.parametrize("make", [MAKES["torch"], MAKES["random"], Duck])
def test_a_registered_generator_is_not_kept_alive(make):
    generator = make()
    try:
        gone = weakref.ref(generator)
    except TypeError:
        pytest.skip("this version's cannot be referred to weakly")
    register_generator(generator)
    ambient = capture("all")
    del generator
    assert gone() is not None, "a region whose forward has begun needs it"
    del ambient
    gc.collect()
    assert gone() is None
    assert not _generators._registered
    capture("all")


def test_a_region_goes_on_preserving_what_is_unregistered(registered):
    generator = registered(random.Random(5))
    ambient = capture("all")
    forward = generator.random()
    unregister_generator(generator)
    with in_force(ambient):
        assert generator.random() == forward


# --- The default dtype ---


@pytest.fixture
def _default_dtype_again():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_default_dtype_again")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: torch.device("cpu")])
def test_the_default_dtype_of_the_forward_is_in_force_in_the_replay(reentrant, mode):
    seen = []

    def function(x):
        seen.append(torch.ones(1).dtype)
        return (x * torch.ones(3)).sin()

    x = leaf(3, dtype=torch.float64)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    seen.clear()
    for forward, backward in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        torch.set_default_dtype(forward)
        with mode():
            y = recollect.checkpoint(function, x, use_reentrant=reentrant)
        total = y.sum()
        torch.set_default_dtype(backward)
        x.grad = None
        total.backward()
        assert torch.get_default_dtype() is backward
        assert seen == [forward, forward]
        assert torch.equal(x.grad, expected)
        seen.clear()


@pytest.mark.usefixtures("_default_dtype_again")
def test_the_default_dtype_around_a_replay_that_raises_is_put_back():
    ambient = capture(True)
    torch.set_default_dtype(torch.float64)
    with contextlib.suppress(StopHereError), in_force(ambient):
        assert torch.get_default_dtype() is torch.float32
        torch.set_default_dtype(torch.float16)  # and whatever the function leaves behind
        raise StopHereError
    assert torch.get_default_dtype() is torch.float64


# --- An accelerator with several devices ---


class Counter:
    """A generator as CUDA's: a seed and an offset. A draw is a function of both."""

    def __init__(self, seed, log):
        self.state = (seed, 0)
        self._log = log
        self._name = seed

    def initial_seed(self):
        self._log.append(("seed", self._name))
        return self.state[0]

    def get_offset(self):
        self._log.append(("get", self._name))
        return self.state[1]

    def set_offset(self, offset):
        self._log.append(("set", self._name))
        self.state = (self.state[0], offset)

    def manual_seed(self, seed):
        self._log.append(("reseed", self._name))
        self.state = (seed, 0)

    def draw(self):
        self.state = (self.state[0], self.state[1] + 4)
        return hash(self.state)


class Counting:
    """What torch.cuda is to recollect."""

    def __init__(self, count):
        self.log = []
        self.default_generators = tuple(Counter(index, self.log) for index in range(count))
        self.ready = True
        self.current = 0

    def is_initialized(self):
        return self.ready

    def current_device(self):
        return self.current

    def draw(self, index):
        return self.default_generators[index].draw()

    def states(self):
        return [generator.state for generator in self.default_generators]


class Stated:
    """Another accelerator: whole states, by the number of a device."""

    def __init__(self, count):
        self.log = []
        self._states = [torch.tensor([index, 0]) for index in range(count)]
        self.ready = True
        self.current = 0

    def is_initialized(self):
        return self.ready

    def device_count(self):
        return len(self._states)

    def current_device(self):
        return self.current

    def get_rng_state(self, index):
        self.log.append(("get", index))
        return self._states[index].clone()

    def set_rng_state(self, state, index):
        self.log.append(("set", index))
        self._states[index] = state.clone()

    def draw(self, index):
        self._states[index][1] += 1
        return tuple(self._states[index].tolist())

    def states(self):
        return [tuple(state.tolist()) for state in self._states]


@pytest.fixture
def accelerators(monkeypatch):
    """Fake ones: a dict from type to module, to be filled by the test; "cuda" is the default type."""
    modules = {}

    def get_device_module(device=None):
        try:
            return modules[torch.device(device).type]
        except KeyError:
            raise RuntimeError(f"no module for {device}") from None

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # no streams of a real one
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cuda")
    monkeypatch.setattr(_generators, "_owners", {})
    monkeypatch.setattr(_generators, "has_context", lambda index: True)
    return modules


@pytest.fixture(params=[Counting, Stated])
def accelerator(request, accelerators):
    accelerators["cuda"] = fake = request.param(4)
    return fake


class Elsewhere(torch.Tensor):
    """A tensor without data that says it lies on some device."""

    @staticmethod
    def __new__(cls, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=device)

    def __init__(self, device):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].device)
        raise AssertionError(f"nothing may run on it, least of all {func}")


ARGUMENTS = {
    "none": (),
    "on the CPU": (torch.ones(2),),
    "on one device": (1,),
    "on two devices": (1, 2),
    "on meta": (torch.ones(2, device="meta"),),
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("inside", [0, 1, 3])
def test_every_device_that_the_region_uses_is_preserved(accelerator, arguments, inside):
    args = [Elsewhere(f"cuda:{one}") if isinstance(one, int) else one for one in ARGUMENTS[arguments]]

    def draws():
        return [accelerator.draw(index) for index in (inside, 0, inside)]

    ambient = capture(True, *args)
    forward = draws()
    ambient.forward_ended()
    for index in range(4):
        accelerator.draw(index)
    around = accelerator.states()
    for _ in range(2):
        with in_force(ambient):
            assert draws() == forward
        assert accelerator.states() == around


def test_a_seed_that_the_region_sets_is_put_back_everywhere(accelerators):
    accelerators["cuda"] = accelerator = Counting(3)

    def seeds_and_draws():
        before = [accelerator.draw(index) for index in range(3)]
        for generator in accelerator.default_generators:
            generator.manual_seed(77)
        return before + [accelerator.draw(index) for index in range(3)]

    ambient = capture(True, Elsewhere("cuda:0"))
    forward = seeds_and_draws()
    ambient.forward_ended()
    for generator in accelerator.default_generators:
        generator.manual_seed(5)
    around = accelerator.states()
    with in_force(ambient):
        assert seeds_and_draws() == forward
    assert accelerator.states() == around


def test_an_own_device_is_put_though_nothing_moved_it(accelerator):
    """What is drawn within `fork_rng` leaves no trace."""
    ambient = capture(True, Elsewhere("cuda:1"))
    before = accelerator.states()[1]
    ambient.forward_ended()
    accelerator.draw(1)
    with in_force(ambient):
        assert accelerator.states()[1] == before


def test_a_device_that_the_region_did_not_move_is_left_alone(accelerator):
    """Its own region may be in the middle of a replay, in another of autograd's threads."""
    ambient = capture(True, Elsewhere("cuda:1"))
    accelerator.draw(1)
    ambient.forward_ended()
    for index in range(4):
        accelerator.draw(index)
    accelerator.log.clear()
    with in_force(ambient):
        accelerator.draw(1)
        for index in (0, 2, 3):
            accelerator.draw(index)
        around = accelerator.states()
    assert {index for _, index in accelerator.log} == {1}
    assert [accelerator.states()[index] for index in (0, 2, 3)] == [around[index] for index in (0, 2, 3)]


def test_a_backward_inside_an_unfinished_forward(accelerator):
    """What has moved by then is what the replay will want."""
    ambient = capture(True, Elsewhere("cuda:1"))
    forward = [accelerator.draw(index) for index in (1, 3)]
    around = accelerator.states()
    with in_force(ambient):
        assert [accelerator.draw(index) for index in (1, 3)] == forward
    assert accelerator.states() == around


@pytest.mark.parametrize("count", [1, 4])
def test_what_it_costs(accelerators, count):
    """One reading per generator when the forward begins; where there are several devices, one more when it ends."""
    accelerators["cuda"] = accelerator = Counting(count)
    capture(True, Elsewhere("cuda:0"))
    accelerator.log.clear()
    ambient = capture(True, Elsewhere("cuda:0"))
    assert len(accelerator.log) == 2 * count
    accelerator.log.clear()
    ambient.forward_ended()
    assert len(accelerator.log) == 2 * (count - 1)
    accelerator.log.clear()
    with in_force(ambient):
        pass
    assert accelerator.log == [("seed", 0), ("get", 0), ("seed", 0), ("set", 0)], "it stood there already"
    accelerator.draw(0)
    accelerator.log.clear()
    with in_force(ambient):
        pass
    assert accelerator.log == [("seed", 0), ("get", 0), ("seed", 0), ("set", 0), ("seed", 0), ("set", 0)]


def test_devices_that_were_never_used_cost_next_to_nothing(accelerators, monkeypatch):
    accelerators["cuda"] = accelerator = Counting(8)
    used = {0}
    monkeypatch.setattr(_generators, "has_context", used.__contains__)
    ambient = capture(True, Elsewhere("cuda:0"))
    ambient.forward_ended()
    assert {index for _, index in accelerator.log} == {0}
    with in_force(ambient):
        assert Probe().moved() == []
    assert {index for _, index in accelerator.log} == {0}

    ambient = capture(True, Elsewhere("cuda:0"))
    used.add(3)  # the region is the first to use it
    for _ in range(2):
        forward = accelerator.draw(3)
        ambient.forward_ended()
        around = accelerator.states()
        with in_force(ambient):
            assert accelerator.draw(3) == forward
        assert accelerator.states() == around
        ambient = capture(True, Elsewhere("cuda:0"))


@pytest.mark.parametrize("used", [{0}, set()])
@pytest.mark.parametrize("finished", [True, False])
def test_devices_that_were_never_used_keep_a_state_that_was_set_by_hand(accelerators, monkeypatch, used, finished):
    """As `torch.cuda.set_rng_state_all` does it, where a program goes on from where another ended."""
    accelerators["cuda"] = accelerator = Counting(3)
    monkeypatch.setattr(_generators, "has_context", used.__contains__)
    for generator in accelerator.default_generators:
        generator.state = (7, 400)
    ambient, moment = capture(True), RandomState.now([])
    if finished:
        ambient.forward_ended()
    with in_force(ambient):
        RandomState.like(ambient).put()
    assert accelerator.states() == [(7, 400)] * 3
    moment.put()
    assert accelerator.states() == [(7, 400)] * 3


def test_all_types_among_the_arguments_and_the_default_one(accelerators):
    fakes = [accelerators.setdefault(kind, make(2)) for kind, make in (("cuda", Counting), ("xpu", Stated))]

    def draws():
        return [fake.draw(index) for fake in fakes for index in range(2)]

    ambient = capture(True, Elsewhere("xpu:1"))
    forward = draws()
    ambient.forward_ended()
    around = [fake.states() for fake in fakes]
    with in_force(ambient):
        assert draws() == forward
    assert [fake.states() for fake in fakes] == around


def test_an_accelerator_set_up_in_the_forward_is_an_error_whatever_the_arguments(accelerators):
    accelerators["cuda"] = accelerator = Counting(2)
    accelerator.ready = False
    ambient = capture(True, torch.ones(2, device="meta"))
    assert accelerator.log == []
    ambient.forward_ended()
    with in_force(ambient):
        pass
    accelerator.ready = True
    with pytest.raises(RuntimeError, match="'cuda' was initialised inside the forward"):
        ambient.forward_ended()


def test_devices_that_are_counted_and_cannot_be_read(accelerators):
    class OneIsMine(Stated):
        def get_rng_state(self, index):
            if index:
                raise RuntimeError("another process has it")
            return super().get_rng_state(index)

    accelerators["cuda"] = accelerator = OneIsMine(4)
    ambient = capture(True)
    forward = accelerator.draw(0)
    with in_force(ambient):
        assert accelerator.draw(0) == forward


# --- Threads ---


def in_turns(*works):
    """Run generators as threads, one step of each in turn."""
    barrier = threading.Barrier(len(works))
    errors = []

    def run(work):
        try:
            for _ in work:
                barrier.wait(timeout=60)
            barrier.wait(timeout=60)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if errors:
        raise errors[0]


def test_a_thread_for_each_device(accelerator):
    """As `torch.nn.DataParallel` does it: forwards at the same time, then replays at the same time."""
    regions = {}

    def forward(device):
        numbers = []
        for step in range(8):
            if step == device:  # before that, no region has said whose the device is
                ambient = capture(True, Elsewhere(f"cuda:{device}"))
            numbers.append(accelerator.draw(device))
            yield
            if step == device + 2:
                ambient.forward_ended()
                regions[device] = ambient, numbers[device : device + 3]

    def replay(device):
        ambient, drawn = regions[device]
        undo, numbers = [], []
        for step in range(5):
            if step == 1:
                ambient.restore(undo)
            elif step > 1:
                numbers.append(accelerator.draw(device))
            yield
        _ambient.undo_all(undo)
        assert numbers == drawn

    in_turns(*map(forward, range(4)))
    around = accelerator.states()
    in_turns(*map(replay, range(4)))
    assert accelerator.states() == around


def test_a_replay_counts_as_the_thread_of_its_forward(accelerator):
    """A region inside a region, replayed in a thread of autograd's, must not make the device that thread's."""

    def outer(ambients_inside):
        drawn = [accelerator.draw(0)]
        ambients_inside.append(capture(True, Elsewhere("cuda:1")))
        drawn.append(accelerator.draw(1))
        ambients_inside[-1].forward_ended()
        return drawn

    regions = []
    for _ in range(2):
        ambient, inside = capture(True, Elsewhere("cuda:0")), []
        drawn = outer(inside)
        ambient.forward_ended()
        regions.append((ambient, drawn))
    around, errors = accelerator.states(), []

    def backward():
        try:
            for ambient, drawn in reversed(regions):
                with in_force(ambient):
                    assert outer([]) == drawn
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not errors, errors
    assert accelerator.states() == around


# --- The state at one moment within a region ---


def test_the_state_at_a_moment_is_that_of_what_the_region_preserves(accelerator):
    generator = random.Random(3)
    ambient = capture("all", Elsewhere("cuda:1"), generator)

    def draws():
        return [
            *(accelerator.draw(index) for index in (1, 3)),
            generator.random(),
            random.random(),
            numpy.random.rand(),
            torch.rand(()).item(),
        ]

    draws()
    moment = RandomState.like(ambient)
    after = draws()
    ambient.forward_ended()
    for index in range(4):
        accelerator.draw(index)
    around = accelerator.states()
    with in_force(ambient):
        moment.put()
        assert accelerator.states()[0] == around[0]
        assert accelerator.states()[2] == around[2]
        assert draws() == after
    assert accelerator.states() == around


def test_the_state_at_a_moment_without_preservation_is_empty(accelerator):
    moment = RandomState.like(capture(False, Elsewhere("cuda:1")))
    accelerator.draw(1)
    around = accelerator.states(), torch.get_rng_state()
    moment.put()
    assert accelerator.states() == around[0]
    assert torch.equal(torch.get_rng_state(), around[1])


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_the_state_now_is_that_of_all_devices(accelerator, arguments):
    args = [Elsewhere(f"cuda:{one}") if isinstance(one, int) else one for one in ARGUMENTS[arguments]]
    moment, before = RandomState.now(args), accelerator.states()
    for index in range(4):
        accelerator.draw(index)
    torch.rand(3)
    moment.put()
    assert accelerator.states() == before
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))


# --- Who moved ---


def test_nothing_moved():
    given, mine = torch.Generator(), register_generator(random.Random(1))
    for probe in (Probe(), Probe(everything=True, arguments=((given,), {}))):
        assert probe.moved() == []
    unregister_generator(mine)


DRAWS = {
    "the CPU generator": lambda: torch.rand(3),
    "Python's random": lambda: random.random(),
    "NumPy's global generator": lambda: numpy.random.rand(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_those_of_the_process_that_moved(name):
    probes = Probe(everything=True), Probe()
    DRAWS[name]()
    assert probes[0].moved() == [name]
    assert probes[1].moved() == ([name] if "CPU" in name else []), "torch's default generators only"


def test_a_kept_back_normal_number_is_a_move():
    for draw, name in ((gauss, "Python's random"), (numpy.random.randn, "NumPy's global generator")):
        draw()
        probe = Probe(everything=True)
        draw()
        assert probe.moved() == [name]


@pytest.mark.parametrize("kind", MAKES)
def test_those_of_the_user_that_moved(kind, registered):
    mine = registered(MAKES[kind]())
    given = MAKES[kind]()
    unmoved = MAKES[kind](), registered(MAKES[kind]())
    probe = Probe(everything=True, arguments=((), {"settings": [given, unmoved[0]]}))
    draw_from(mine), draw_from(given)
    kind_name = type(mine).__name__
    expected = [f"a registered {kind_name}", f"a {kind_name} in the arguments"]
    assert probe.moved() == (expected if kind != "duck" else expected[:1])


def test_the_devices_that_moved(accelerator):
    probe = Probe()
    accelerator.draw(1), accelerator.draw(3)
    assert probe.moved() == ["cuda:1's generator", "cuda:3's generator"]


def test_what_an_option_preserves_of_what_moved(accelerator):
    probe = Probe(everything=True)
    accelerator.draw(1), random.random(), torch.rand(1)
    names = probe.moved()
    assert names == ["the CPU generator", "cuda:1's generator", "Python's random"]
    assert [probe.is_preserved(name, True) for name in names] == [True, True, False]
    assert [probe.is_preserved(name, "all") for name in names] == [True, True, True]
    assert [probe.is_preserved(name, False) for name in names] == [False, False, False]


@pytest.mark.parametrize("everything", [False, True])
def test_a_probe_runs_no_operator(everything, registered):
    registered(torch.Generator())
    with CountOperators() as operators:
        probe = Probe(everything=everything)
        assert probe.moved() == []
        random.random()
        probe.moved()
    assert operators.names == []


# --- Through `recollect.checkpoint`, with the option "all" ---


def noise(generator, shape):
    """Numbers of a generator of any kind, as a tensor."""
    count = shape.numel()
    return torch.tensor([draw_from(generator) for _ in range(count)]).view(shape) / 8


def everything(x, generator):
    y = x * random.random() + numpy.random.rand() + torch.rand(x.shape)
    z = (y * noise(generator, x.shape)).sin()
    return torch.dropout(z, 0.5, True).exp() * gauss()


def nested(x, generator):
    y = recollect.checkpoint(everything, x.cos(), generator, preserve_rng_state="all")
    return recollect.checkpoint(everything, y * random.random(), generator, preserve_rng_state="all").sin()


def nested_with_its_own(x, generator):
    """The inner regions are given a generator that the function makes: in a replay, another one."""
    own = random.Random(draw_from(generator))
    y = recollect.checkpoint(everything, x.cos(), own, preserve_rng_state="all")
    return recollect.checkpoint(everything, y * own.random(), own, preserve_rng_state="all").sin()


def streams(generator):
    """What each generator gives next."""
    return random.random(), numpy.random.rand(), torch.rand(()).item(), draw_from(generator)


def seed_all():
    random.seed(2)
    numpy.random.seed(2)
    torch.manual_seed(2)


@pytest.mark.parametrize("kind", [kind for kind in MAKES if kind != "duck"])
@pytest.mark.parametrize("function", [everything, nested, nested_with_its_own])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_step_is_that_of_a_plain_program(kind, function, early_stop):
    def step(run):
        seed_all()
        generator, x = MAKES[kind](), leaf(4, 3)
        y = run(x, generator)
        between = streams(generator)
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0]]
        between += streams(generator)
        grads.append(torch.autograd.grad(y.sum(), x)[0])
        return y.detach(), grads, between + streams(generator)

    plain = step(function)
    ours = step(
        lambda x, generator: recollect.checkpoint(
            function, x, generator, preserve_rng_state="all", early_stop=early_stop
        )
    )
    assert torch.equal(plain[0], ours[0])
    for expected, got in zip(plain[1], ours[1], strict=True):
        assert torch.equal(expected, got)
    assert plain[2] == ours[2]


def test_the_reentrant_variant():
    def step(run):
        seed_all()
        generator, x = random.Random(5), leaf(4, 3)
        run(x, generator).sum().backward()
        return x.grad, streams(generator)

    plain = step(everything)
    ours = step(lambda *args: recollect.checkpoint(everything, *args, preserve_rng_state="all", use_reentrant=True))
    assert torch.equal(plain[0], ours[0])
    assert plain[1] == ours[1]


def test_registered_generators_that_the_function_closes_over(registered):
    mine = registered(numpy.random.default_rng(5))

    def function(x):
        return everything(x, mine)

    x = leaf(4, 3)
    seed_all()
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    after = streams(mine)
    seed_all()
    mine.bit_generator.state = numpy.random.default_rng(5).bit_generator.state
    y = recollect.checkpoint(function, x, preserve_rng_state="all")
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert streams(mine) == after


def test_the_streams_after_a_replay_that_raises():
    calls = []

    def function(x, generator):
        calls.append(1)
        y = everything(x, generator)
        if len(calls) > 1:
            raise StopHereError
        return y.sin()

    generator = torch.Generator().manual_seed(5)
    seed_all()
    y = recollect.checkpoint(function, leaf(4, 3), generator, preserve_rng_state="all")
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state(), generator.get_state()
    with pytest.raises(StopHereError):
        y.sum().backward()
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(generator.get_state(), states[3])


def test_a_kept_named_region_that_draws(registered):
    """Its function is not run again: what follows it draws from where it left the generators."""
    mine = registered(random.Random(5))

    def attention(x):
        return (x * mine.random() * numpy.random.rand()).sin()

    def function(x):
        y = recollect.region("attn", attention)(x.cos())
        return (y * mine.random() * numpy.random.rand() * random.random()).exp().sin()

    def step(run):
        seed_all()
        mine.seed(5)
        x = leaf(4, 3)
        run(x).sum().backward()
        return x.grad, streams(mine)

    plain = step(function)
    policy = recollect.by_name({"attn": recollect.Save()})
    ours = step(lambda x: recollect.checkpoint(function, x, preserve_rng_state="all", policy=policy))
    assert torch.equal(plain[0], ours[0])
    assert plain[1] == ours[1]


def test_a_kept_operator_that_draws_from_a_generator_of_the_users():
    """It is not run again: what follows it draws from where it left the generator."""

    def function(x, generator):
        y = (x * torch.rand(x.shape, generator=generator)).sin()
        return (y * torch.rand(x.shape, generator=generator)).exp().sin()

    x, decisions = leaf(4, 3), iter([recollect.Save(), recollect.Recompute()])
    expected = torch.autograd.grad(function(x, torch.Generator().manual_seed(5)).sum(), x)[0]
    y = recollect.checkpoint(
        function,
        x,
        torch.Generator().manual_seed(5),
        preserve_rng_state="all",
        policy=lambda op, ctx: next(decisions) if "rand" in str(op) else recollect.Recompute(),
    )
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_remat_takes_the_option_too():
    generator = numpy.random.RandomState(5)
    x = leaf(4, 3)
    seed_all()
    expected = torch.autograd.grad(everything(x, generator).sum(), x)[0]
    generator.seed(5)
    seed_all()
    y = recollect.remat(everything, preserve_rng_state="all")(x, generator)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)

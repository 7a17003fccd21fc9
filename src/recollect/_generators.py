"""Random generators: how each kind is read and put, and which of them a region preserves.

Three sorts: those that torch's operators draw from when they are given none (the CPU's, and one for each device of an
accelerator), those of the process (Python's `random`, NumPy's global one), and the user's own (registered, or found in
a region's arguments).

Rules:
- Every replay starts from the state at the region's entry, and the surrounding state is put back however the replay
  ends. Whether the region drew anything is not asked, because an unmoved generator does not tell
  (`torch.random.fork_rng` inside a region); setting a CPU generator costs less than a comparison.
- That holds for a region's own devices: those of its arguments, else the current one. Another device counts as used
  if its generator moved while the forward ran; it is read at the start and compared at the end, and where nothing
  moved, a replay does not touch it. It may not: autograd has a thread for each device, so regions of two devices are
  replayed at the same time, and each would set the other's generator while the other draws. Two things go unseen: what
  a region draws on such a device within `fork_rng`, and a state that was set by hand on a device that the region is
  the first to use.
- A device belongs to the thread whose regions have it for their own. If it moves while a region of another thread
  runs, that says nothing about this region (`torch.nn.DataParallel` runs a thread for each device). A replay counts
  as run by the thread of its forward.
- A state is what is small: a seed and an offset where a generator counts (CUDA's), else what it gives of itself.

Not here: when states are captured and restored (`_ambient.py`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import sys
import threading
import weakref
from _thread import RLock
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from recollect import _errors
from recollect._inputs import Arguments
from recollect._torch import accelerator_module, has_context, is_default_generator, is_initialised

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Source:
    """A generator: what a reader calls it, and how its state is read and put."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], None]
    counts: bool = False  # its state is a seed and an offset, cheaper to compare than to put


# Torch makes a Python object while it holds a generator's own lock. That may set off a garbage collection, whose
# finalizers may let another thread run, which then waits for the lock and does not let go of the interpreter: a
# deadlock. This lock is waited for without the interpreter.
_torch_lock = RLock()


def _read_torch(generator: torch.Generator) -> Tensor:
    with _torch_lock:
        return generator.get_state()


def _put_torch(generator: torch.Generator, state: Tensor) -> None:
    with _torch_lock:
        generator.set_state(state)


def get_cpu_state() -> Tensor:
    """Where the CPU generator stands."""
    with _torch_lock:
        return _cpu_generator.get_state()


def set_cpu_state(state: Tensor) -> None:
    """Put the CPU generator there."""
    with _torch_lock:
        _cpu_generator.set_state(state)


def swap_cpu_state(state: Tensor) -> Tensor:
    """Put the CPU generator there; gives where it stood."""
    with _torch_lock:
        around = _cpu_generator.get_state()
        _cpu_generator.set_state(state)
    return around


_cpu_generator = torch.default_generator
CPU = Source("the CPU generator", get_cpu_state, set_cpu_state)


# --- Those of an accelerator's devices ---


class DefaultDeviceType:
    """The accelerator type that counts when no tensor argument tells: by default the current accelerator, else cpu."""

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Name the type, process-wide."""
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        """The type in force; found once and then kept."""
        if DefaultDeviceType._default_device_type is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator is not None else "cpu"
        return DefaultDeviceType._default_device_type


def accelerators(types: tuple[str, ...]) -> Iterator[tuple[str, Any, bool]]:
    """Of these types and the default one: those that have generators, their modules, and whether they are set up."""
    default = DefaultDeviceType.get_device_type()
    for device_type in types if default in types else (*types, default):
        module = accelerator_module(device_type)
        if module is not None:
            yield device_type, module, is_initialised(module)


def get_device_state(module: Any, index: int) -> Tensor:
    """The whole state of one device's generator."""
    # torch.mps has one device and takes no index.
    state: Tensor = module.get_rng_state() if module is torch.mps else module.get_rng_state(index)
    return state


def set_device_state(module: Any, index: int, state: Tensor) -> None:
    """Put it there."""
    if module is torch.mps:
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, index)


def _read_count(generator: Any) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()


def _put_count(generator: Any, state: tuple[int, int]) -> None:
    seed, offset = state
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)


def _source(device_type: str, module: Any, index: int) -> Source:
    name = f"{device_type}:{index}'s generator"
    if device_type == "cuda" and hasattr(module, "default_generators"):
        generator = module.default_generators[index]
        return Source(name, partial(_read_count, generator), partial(_put_count, generator), counts=True)
    return Source(name, partial(get_device_state, module, index), partial(set_device_state, module, index))


def index_of(device: torch.device) -> int:
    """Its number; a type with one device may leave it out."""
    return device.index or 0


class Devices:
    """The devices of one accelerator that is set up.

    Of eight devices a program may use one and leave seven to others. A device that the process has never used has
    drawn nothing, and is not asked where its generator stands: for CUDA's, that is a question to the driver.
    """

    __slots__ = ("_module", "_others", "_type", "_unused", "sources")

    def __init__(self, device_type: str, module: Any) -> None:
        self._type = device_type
        self._module = module
        self.sources = self._find()  # of all of them; none where they cannot be told
        self._unused = tuple(index for index, source in enumerate(self.sources) if source.counts)
        self._others: dict[tuple[int, ...], tuple[list[Source], list[int]]] = {}

    def _find(self) -> list[Source]:
        kind, module = self._type, self._module
        if hasattr(module, "default_generators"):
            return [_source(kind, module, index) for index in range(len(module.default_generators))]
        found: list[Source] = []
        for index in range(module.device_count() if hasattr(module, "device_count") else 0):
            source = _source(kind, module, index)
            try:
                source.read()
            except Exception:  # it counts devices that this process may not use
                break
            found.append(source)
        return found

    def own(self, devices: Iterable[torch.device]) -> tuple[int, ...]:
        """The numbers of those that belong to a region with arguments on `devices`."""
        own = tuple([index_of(device) for device in dict.fromkeys(devices) if device.type == self._type])
        if own:
            return own
        return (int(self._module.current_device()) if hasattr(self._module, "current_device") else 0,)

    def source(self, index: int) -> Source:
        """The generator of one of them."""
        return self.sources[index] if self.sources else _source(self._type, self._module, index)

    def others(self, own: tuple[int, ...]) -> tuple[list[Source], list[int]]:
        """The generators of those in use that are not `own`, and the numbers of those that have never been used."""
        if any(map(has_context, self._unused)):
            self._unused = tuple(index for index in self._unused if not has_context(index))
            self._others = {}
        found = self._others.get(own)
        if found is None:
            rest = [index for index in range(len(self.sources)) if index not in own]
            unused = [index for index in rest if index in self._unused]
            found = self._others[own] = [self.sources[index] for index in rest if index not in unused], unused
        return found


devices_of = cache(Devices)  # by type and module


def default_generators(devices: Sequence[torch.device] = ()) -> list[Source]:
    """All that torch's operators draw from when they are given none, of the default accelerator and of `devices`."""
    found = [CPU]
    for device_type, module, ready in accelerators(tuple(dict.fromkeys(device.type for device in devices))):
        if ready:
            accelerator = devices_of(device_type, module)
            own = accelerator.own(devices)
            found += [*map(accelerator.source, own), *accelerator.others(own)[0]]
    return found


# --- What a region preserves ---


class Preserved:
    """One generator, and where it stood when the forward began."""

    __slots__ = ("source", "state")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.state = source.read()

    def restore(self) -> Callable[[], object]:
        source = self.source
        around = source.read()
        if not source.counts or around != self.state:
            source.put(self.state)
        return partial(source.put, around)

    def is_moved(self) -> bool:
        return not _same(self.state, self.source.read())


class Watching:
    """A part that has to look again when the forward has ended."""

    __slots__ = ()

    def forward_ended(self) -> None:
        raise NotImplementedError

    def restore(self) -> Callable[[], object] | None:
        return None


class Late(Watching):
    """Accelerators that were not set up when the forward began: there was nothing to record."""

    __slots__ = ("_accelerators",)

    def __init__(self, accelerators: list[tuple[str, Any]]) -> None:
        self._accelerators = accelerators

    def forward_ended(self) -> None:
        for device_type, module in self._accelerators:
            if is_initialised(module):
                raise _errors.initialised_in_forward(device_type)


class _Thread(threading.local):
    """What stands for the thread that a forward counts as run by."""

    def __init__(self) -> None:
        self.token = object()


_thread = _Thread()
_owners: dict[str, object] = {}  # the thread that each device belongs to, by the name of its generator


class OtherDevices(Watching):
    """The generators of the devices that are not the region's own."""

    __slots__ = ("_accelerator", "_preserved", "_thread", "_unused")

    def __init__(self, accelerator: Devices, sources: Iterable[Source], unused: list[int]) -> None:
        self._accelerator = accelerator
        self._preserved = [Preserved(source) for source in sources]
        self._unused = unused
        self._thread = _thread.token

    def forward_ended(self) -> None:
        self._look_at_unused()
        self._preserved = [one for one in self._preserved if one.is_moved()]
        self._unused = []

    def _look_at_unused(self) -> None:
        if any(map(has_context, self._unused)):
            for index in filter(has_context, self._unused):
                preserved = Preserved(self._accelerator.sources[index])
                preserved.state = (preserved.state[0], 0)  # where a seed leaves it
                self._preserved.append(preserved)
            self._unused = [index for index in self._unused if not has_context(index)]

    def _used(self) -> list[Preserved]:
        """Those of the devices that the region used. Judged late: another thread's first region may have come since."""
        return [one for one in self._preserved if _owners.get(one.source.name, self._thread) is self._thread]

    def read(self) -> dict[str, Any]:
        self._look_at_unused()
        return {one.source.name: one.source.read() for one in self._preserved}

    def put(self, states: dict[str, Any]) -> None:
        for one in self._used():
            # It may have come into use only after they were read.
            one.source.put(states.get(one.source.name, one.state))

    def restore(self) -> Callable[[], object] | None:
        self._look_at_unused()
        here, used = _thread.token, self._used()
        if here is self._thread and not used:
            return None
        undo = [one.restore() for one in used]

        def undo_all() -> None:
            _thread.token = here
            for step in undo:
                step()

        _thread.token = self._thread
        return undo_all


def preserve_devices(
    device_type: str, module: Any, devices: Iterable[torch.device]
) -> tuple[list[Preserved], OtherDevices | None]:
    """The parts for an accelerator that is set up: the region's own devices, and the others where there are any."""
    accelerator = devices_of(device_type, module)
    if len(accelerator.sources) == 1:
        return [Preserved(accelerator.sources[0])], None
    own = accelerator.own(devices)
    preserved = [Preserved(accelerator.source(index)) for index in own]
    sources, unused = accelerator.others(own)
    if not sources and not unused:
        return preserved, None
    for one in preserved:
        _owners[one.source.name] = _thread.token
    return preserved, OtherDevices(accelerator, sources, unused)


# --- Those of the process and of the user ---


def others(arguments: Arguments) -> Iterator[Source]:
    """What `preserve_rng_state="all"` adds: Python's, NumPy's, the registered ones, and those in `arguments`."""
    yield Source("Python's random", random.getstate, random.setstate)
    numpy = _numpy_random()
    if numpy is not None:
        yield Source("NumPy's global generator", partial(numpy.get_state, legacy=False), numpy.set_state)
    seen: set[int] = set()
    for reference in list(_registered.values()):
        generator = reference()
        if generator is not None:
            seen.add(id(generator))
            yield _source_of(generator, "a registered {}")
    # The objects themselves are kept, as the arguments are: in a region inside another one, that is the generator
    # which this region's forward got, whatever the replay of the region around it has made or been given since.
    for generator in _find(arguments, _kinds(), seen):
        yield _source_of(generator, "a {} in the arguments")


def _numpy_random() -> Any:
    """NumPy's `random`, if the program has NumPy; a program without it shall not load it for our sake."""
    return getattr(sys.modules.get("numpy"), "random", None)


def _kinds() -> tuple[type, ...]:
    """The types of generators that are looked for in arguments."""
    numpy = _numpy_random()
    return (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))


def _find(value: Any, kinds: tuple[type, ...], seen: set[int]) -> Iterator[Any]:
    """The generators in `value`, each once, in the containers that arguments are made of."""
    if isinstance(value, kinds):
        if id(value) not in seen and not (isinstance(value, torch.Generator) and is_default_generator(value)):
            seen.add(id(value))
            yield value
        return
    parts: Iterable[Any]
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple, deque)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)]
    else:
        return
    if id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from _find(part, kinds, seen)


def _source_of(generator: Any, name: str) -> Source:
    access = _access(generator)
    assert access is not None  # it was let in
    return Source(name.format(type(generator).__name__), *access)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How the state of a generator is read and put; None for what is none."""
    if isinstance(generator, torch.Generator):
        return partial(_read_torch, generator), partial(_put_torch, generator)
    if isinstance(generator, type):  # it has the methods, and no state
        return None
    numpy = _numpy_random()
    if numpy is not None and isinstance(generator, numpy.Generator):
        return partial(getattr, generator.bit_generator, "state"), partial(setattr, generator.bit_generator, "state")
    if numpy is not None and isinstance(generator, numpy.RandomState):
        return partial(generator.get_state, legacy=False), generator.set_state
    for read, put in (("get_state", "set_state"), ("getstate", "setstate")):
        pair = getattr(generator, read, None), getattr(generator, put, None)
        if callable(pair[0]) and callable(pair[1]):
            return pair[0], pair[1]
    return None


# --- Registering ---

_registered: dict[int, Callable[[], Any]] = {}


def register_generator(generator: G) -> G:
    """Let regions with `preserve_rng_state="all"` preserve a generator of yours.

    Generators among a region's arguments are found without this; it is for those that a function reaches in another
    way: a global, a closure, an attribute of a module. It is not kept alive by this where it can be referred to weakly
    (NumPy's cannot, nor can torch's in 2.11). To register it twice does no harm.

    Args:
        generator: A `torch.Generator`, `random.Random`, `numpy.random.Generator` or `numpy.random.RandomState`, or
            anything else with methods `get_state` and `set_state`, or `getstate` and `setstate`.

    Returns:
        The generator itself, so that this can be written around the place where it is made.

    Raises:
        TypeError: It is nothing whose state can be read and put.

    Example:
        >>> import random, torch, recollect
        >>> rng = recollect.register_generator(random.Random(0))
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = recollect.checkpoint(lambda x: (x * rng.random()).exp(), x, preserve_rng_state="all")
        >>> y.sum().backward()  # multiplies by the same number again
        >>> torch.equal(x.grad, y * random.Random(0).random())
        True
        >>> recollect.unregister_generator(rng)
    """
    access = _access(generator)
    if access is None:
        raise TypeError(f"{_EXPECTED}, got {_errors.describe_value(generator)}")
    try:
        access[0]()
    except NotImplementedError as error:  # random.SystemRandom has the methods
        raise TypeError(f"{_EXPECTED}, got {_errors.describe_value(generator)}, which refuses: {error}") from None
    key = id(generator)
    try:
        _registered[key] = weakref.ref(generator, lambda _: _registered.pop(key, None))
    except TypeError:  # of an object that cannot be referred to weakly
        _registered[key] = lambda: generator
    return generator


_EXPECTED = (
    "generator must be a torch.Generator, random.Random, numpy.random.Generator or numpy.random.RandomState, or have "
    "get_state and set_state (or getstate and setstate)"
)


def unregister_generator(generator: object) -> None:
    """Undo `register_generator`; for one that is not registered there is nothing to do.

    Args:
        generator: What was registered. Regions whose forward has begun go on preserving it.

    Example:
        >>> import random, recollect
        >>> rng = recollect.register_generator(random.Random(0))
        >>> recollect.unregister_generator(rng)
    """
    _registered.pop(id(generator), None)


# --- Who moved ---


class Probe:
    """Tells which generators moved since it was made: who drew random numbers in between.

    One that moved was drawn from, or seeded. One that did not may have been drawn from within `fork_rng`.

    Args:
        everything: Look also at the generators that only `preserve_rng_state="all"` preserves. Reading Python's and
            NumPy's takes some tens of microseconds.
        arguments: With `everything`, where to look for generators of the user.
    """

    __slots__ = ("_generators", "_torchs")

    def __init__(self, *, everything: bool = False, arguments: Arguments = ((), {})) -> None:
        sources = default_generators()
        self._torchs = len(sources)
        if everything:
            sources += others(arguments)
        self._generators = [Preserved(source) for source in sources]

    def moved(self) -> list[str]:
        """Their names, in words: "the CPU generator", "Python's random"."""
        return [one.source.name for one in self._generators if one.is_moved()]

    def is_preserved(self, name: str, preserve_rng_state: bool | str) -> bool:
        """Whether a region with this option preserves a generator that `moved` named."""
        if preserve_rng_state is True:
            return any(one.source.name == name for one in self._generators[: self._torchs])
        return preserve_rng_state == "all"


def _same(one: Any, other: Any) -> bool:
    """Whether two states of one generator are equal. No operator is run: a dispatch mode would see it."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _bytes(one) == _bytes(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if hasattr(one, "tobytes"):  # an array of NumPy's, which compares place by place
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, (list, tuple)) and not _NUMBERS.issuperset(map(type, one)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


_NUMBERS = frozenset((int, float, str, type(None)))


def _bytes(state: Tensor) -> bytes:
    if not state.is_cpu or not state.is_contiguous():  # no generator of torch's has such a state
        state = state.cpu().contiguous()
    return (ctypes.c_char * state.nbytes).from_address(state.data_ptr()).raw

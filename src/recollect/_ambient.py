"""Ambient state: what a function reads without being given it. Captured in the forward, in force again in the replay.

Parts: random generators, autocast, the default device, the accelerator's device and stream, torch functions. Each
part has one method, `restore`: put the captured state in force and return how to undo that, or return None if it is
in force already. That is judged at the replay, never assumed from the forward. A part that could not matter is not
made at all.

Random numbers are exact: every replay starts from the state at the region's entry, and the surrounding state is put
back however the replay ends. Whether the region drew anything is not asked, because an unmoved generator does not
tell (`torch.random.fork_rng` inside a region); setting a CPU generator costs less than a comparison.

Grad mode is not here: a replay always runs with it on.
"""

from __future__ import annotations

import contextlib
import warnings
from _thread import RLock
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled

from recollect import _errors
from recollect._inputs import find_tensors
from recollect._torch import (
    TORCH_FUNCTION_ENABLED,
    accelerator_module,
    are_plain,
    default_device,
    function_mode_count,
    is_initialised,
    level_of_user_code,
    set_torch_function_state,
    torch_function_enabled,
    torch_function_state,
    without_torch_function,
)

Undo = Callable[[], object]

_cpu_generator = torch.default_generator
# Torch makes a Python object while it holds the generator's own lock. That may set off a garbage collection, whose
# finalizers may let another thread run, which then waits for the lock and does not let go of the interpreter: a
# deadlock. This lock is waited for without the interpreter.
_cpu_generator_lock = RLock()


def get_cpu_state() -> Tensor:
    """Where the CPU generator stands."""
    with _cpu_generator_lock:
        return _cpu_generator.get_state()


def set_cpu_state(state: Tensor) -> None:
    """Put the CPU generator there."""
    with _cpu_generator_lock:
        _cpu_generator.set_state(state)


class Part(Protocol):
    """A piece of ambient state as it was in the forward."""

    def restore(self) -> Undo | None:
        """Put it in force; return how to undo that, None if there was nothing to do."""


def capture(tensors: Sequence[Tensor], *, preserve_rng_state: bool) -> list[Part]:
    """The state around a region that is about to run on `tensors`."""
    devices = _devices_of(tensors)
    device_type = _type_of(devices)
    module = accelerator_module(device_type)
    parts: list[Part] = [Modes(device_type)]
    if module is not None and is_initialised(module) and torch.accelerator.is_available():
        parts.append(Place(torch.accelerator.current_stream()))
    if preserve_rng_state:
        parts.append(CpuGenerator())
        if module is not None:
            parts.append(Generators(device_type, module, devices))
    return parts


def restore(parts: Sequence[Part], undo: list[Undo]) -> None:
    """Put the state of `parts` in force; what puts back the state before is added to `undo`, also if this fails."""
    for part in parts:
        step = part.restore()
        if step is not None:
            undo.append(step)


def undo_all(steps: list[Undo]) -> None:
    """Run all steps, the last first, whatever some of them raise."""
    while steps:
        try:
            steps[-1]()  # taken off only when done: an interrupt rather makes one run twice than not at all
        except BaseException:
            steps.pop()
            undo_all(steps)
            raise
        steps.pop()


def forward_ended(parts: Sequence[Part]) -> None:
    """Raise if the forward brought up an accelerator whose random state should have been recorded at its start."""
    generators = parts[-1]
    if isinstance(generators, Generators):
        generators.check_initialised()


# --- Random generators ---


class CpuGenerator:
    """The CPU generator."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = get_cpu_state()

    def restore(self) -> Undo:
        around = get_cpu_state()
        set_cpu_state(self._state)
        return partial(set_cpu_state, around)


class Generators:
    """Those of one accelerator type: of the arguments' devices, else of the current device."""

    __slots__ = ("_late", "_states", "_type", "ids", "module")

    def __init__(self, device_type: str, module: Any, devices: Sequence[torch.device]) -> None:
        self._type = device_type
        self.module = module
        self._late = not is_initialised(module)
        self.ids: list[int] = []
        if not self._late:
            ids = dict.fromkeys(_index_of(device) for device in devices if device.type == device_type)
            self.ids = list(ids) or [_current_index(module)]
        self._states = [_snapshot(module, index) for index in self.ids]

    def check_initialised(self) -> None:
        if self._late and is_initialised(self.module):
            raise _errors.initialised_in_forward(self._type)

    def restore(self) -> Undo:
        module, ids = self.module, self.ids
        around = [_snapshot(module, index) for index in ids]

        def undo() -> None:
            for index, state in zip(ids, around, strict=True):
                _put(module, index, state)

        for index, state in zip(ids, self._states, strict=True):
            _put(module, index, state)
        return undo


def _index_of(device: torch.device) -> int:
    return device.index or 0  # a type with one device may leave it out


def _current_index(module: Any) -> int:
    return int(module.current_device()) if hasattr(module, "current_device") else 0


def _is_mps(module: Any) -> bool:
    return bool(module is torch.mps)


def _get_state(module: Any, index: int) -> Tensor:
    # torch.mps has one device and takes no index.
    state: Tensor = module.get_rng_state() if _is_mps(module) else module.get_rng_state(index)
    return state


def _set_state(module: Any, index: int, state: Tensor) -> None:
    if _is_mps(module):
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, index)


class RandomState:
    """Where generators stand at one moment within a region, to be put there again."""

    __slots__ = ("_states",)

    def __init__(self, states: list[tuple[Callable[[Any], object], Any]]) -> None:
        self._states = states

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> RandomState:
        """Of the CPU's generator and of those on the tensors' devices."""
        states: list[tuple[Callable[[Any], object], Any]] = [(set_cpu_state, get_cpu_state())]
        for device in dict.fromkeys(_devices_of(tensors)):
            module = accelerator_module(device.type)
            if module is not None:
                index = _index_of(device)
                states.append((partial(_put, module, index), _snapshot(module, index)))
        return cls(states)

    @classmethod
    def like(cls, parts: Sequence[Part]) -> RandomState:
        """Of the generators that a region preserves."""
        states: list[tuple[Callable[[Any], object], Any]] = []
        for part in parts:
            if type(part) is CpuGenerator:
                states.append((set_cpu_state, get_cpu_state()))
            elif type(part) is Generators:
                states += [(partial(_put, part.module, index), _snapshot(part.module, index)) for index in part.ids]
        return cls(states)

    def put(self) -> None:
        for put, state in self._states:
            put(state)


def _snapshot(module: Any, index: int) -> Any:
    """Where a generator stands. One that counts (CUDA's) stands at a seed and an offset: two numbers, no tensor."""
    if module is torch.cuda:
        generator = module.default_generators[index]
        return generator.initial_seed(), generator.get_offset()
    return _get_state(module, index)


def _put(module: Any, index: int, snapshot: Any) -> None:
    if not isinstance(snapshot, tuple):
        _set_state(module, index, snapshot)
        return
    generator = module.default_generators[index]
    seed, offset = snapshot
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)


# --- Modes ---


class Modes:
    """Whether torch functions are asked, autocast, and the default device: three parts that share one look.

    They are almost always as they were. So they are read together, compared at once, and taken apart only where
    something differs.
    """

    __slots__ = ("_parts", "_seen", "_types")

    def __init__(self, device_type: str) -> None:
        self._types = types = _autocast_types(device_type)
        self._seen = seen = _look(types)
        self._parts: list[Part] | None = None if seen[:2] == _USUAL else self._taken_apart()

    def _taken_apart(self) -> list[Part]:
        usual = self._seen[:2] == _USUAL
        return [
            TorchFunctions(TORCH_FUNCTION_ENABLED if usual else torch_function_state()),
            Autocast(self._types, self._seen[2:]),
            DefaultDevice(None if usual else default_device()),
        ]

    def restore(self) -> Undo | None:
        # A default device is a torch-function mode: where there are any, their number does not tell.
        if self._parts is None and _look(self._types) == self._seen:
            return None
        undo: list[Undo] = []
        restore(self._parts or self._taken_apart(), undo)
        return partial(undo_all, undo)


def _look(types: tuple[str, ...]) -> tuple[Any, ...]:
    seen = (
        torch_function_enabled(),
        function_mode_count(),
        is_autocast_cache_enabled(),
        is_autocast_enabled("cpu"),
        get_autocast_dtype("cpu"),
    )
    if len(types) > 1:
        return (*seen, is_autocast_enabled(types[1]), get_autocast_dtype(types[1]))
    return seen


_USUAL = (True, 0)  # torch functions are asked, and no mode could be a default device


class Autocast:
    """Autocast for the CPU and one accelerator type: whether casts are cached, and for each on or off and its dtype.

    The dtype and the cache flag count also where autocast is off: a region that switches it on takes them from
    around it.
    """

    __slots__ = ("_seen", "_types")

    def __init__(self, types: tuple[str, ...], seen: tuple[Any, ...]) -> None:
        self._types = types
        self._seen = seen

    def restore(self) -> Undo | None:
        if _look(self._types)[2:] == self._seen:
            return None
        cache, *each = self._seen
        return _enter(
            [
                torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)
                for kind, enabled, dtype in zip(self._types, each[::2], each[1::2], strict=True)
            ]
        )


@cache
def _autocast_types(device_type: str) -> tuple[str, ...]:
    has_its_own = device_type != "cpu" and torch.amp.is_autocast_available(device_type)
    return ("cpu", device_type) if has_its_own else ("cpu",)


def _enter(contexts: Sequence[Any]) -> Undo:
    with contextlib.ExitStack() as stack:  # leaves those already entered if one fails to enter
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all().close


class DefaultDevice:
    """`torch.device(...)` as a context around the forward, or `torch.set_default_device`. None: neither."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def restore(self) -> Undo | None:
        if default_device() == self._device:
            return None
        return _enter([self._device or torch.device("cpu")])


class TorchFunctions:
    """Whether `__torch_function__` is asked.

    A backward that is called on a tensor of a subclass runs inside that subclass's `__torch_function__`, where it
    is switched off: a replay there would see plain tensors.
    """

    __slots__ = ("_state",)

    def __init__(self, state: Any) -> None:
        self._state = state

    def restore(self) -> Undo | None:
        now = torch_function_state()
        if now == self._state:
            return None
        set_torch_function_state(self._state)
        return partial(set_torch_function_state, now)


# --- Where an accelerator works ---


class Place:
    """The current device and stream of the accelerator.

    Autograd runs backward in threads of its own, each on its own device, and a CPU node asks from the caller's
    thread and stream: without this, a replay would put its tensors where the first to ask happens to be.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def restore(self) -> Undo | None:
        here = torch.accelerator.current_stream()
        if here == self._stream:
            return None
        torch.accelerator.set_stream(self._stream)

        def undo() -> None:
            torch.accelerator.set_stream(here)

        return undo


# --- Which accelerator (the drop-in's names) ---


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


def _devices_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """Where the tensors are that are not on the CPU."""
    if are_plain(tensors):
        return [tensor.device for tensor in tensors if not tensor.is_cpu]
    with without_torch_function():
        return [tensor.device for tensor in tensors if not tensor.is_cpu]


def _type_of(devices: Sequence[torch.device]) -> str:
    """The accelerator type that counts."""
    if not devices:
        return DefaultDeviceType.get_device_type()
    first = devices[0].type
    types = sorted({device.type for device in devices})
    if len(types) == 1:
        return first
    chosen = "cuda" if "cuda" in types else first
    warnings.warn(
        "Tensor arguments, excluding CPU tensors, are detected on at least two types of devices. Random state and "
        f"autocast are kept for one type only: {chosen}. Device types: {types} first device type: {first}",
        stacklevel=level_of_user_code(),
    )
    return chosen


def infer_device_type(*args: Any) -> str:
    """The accelerator type of the tensors in `args`, at any depth."""
    return _type_of(_devices_of(find_tensors(args, {})[0]))


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """Device numbers and generator states of the tensors in `args`, at any depth, one entry per tensor.

    CPU and meta tensors are passed over.
    """
    devices = _devices_of(find_tensors(args, {})[0])
    ids = [_index_of(device) for device in devices if device.type != "meta"]
    if not ids:
        return [], []
    module = accelerator_module(_type_of(devices))
    return ids, [_get_state(module, index) for index in ids]


def set_device_states(devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None) -> None:
    """Put generator states back that `get_device_states` gave. Nothing to do for meta."""
    device_type = DefaultDeviceType.get_device_type() if device_type is None else device_type
    module = accelerator_module(device_type)
    if module is None and device_type != "meta" and devices:
        raise ValueError(f"device_type must name an accelerator that has generators, got {device_type!r}")
    if module is None:
        return
    for index, state in zip(devices, states, strict=True):
        _set_state(module, index, state)

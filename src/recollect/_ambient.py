"""Ambient state: what a function reads without being given it. Captured in the forward, in force again in the replay.

Parts: random generators, autocast, the default device and dtype, the accelerator's device and stream, torch
functions. Each part has one method, `restore`: put the captured state in force and return how to undo that, or return
None if it is in force already. That is judged at the replay, never assumed from the forward. A part that could not
matter is not made at all.

Which generators there are, and how exact their preservation is, stands in `_generators.py`. Here is which of them a
region takes: those of torch's operators, or, with `preserve_rng_state="all"`, the others too.

Grad mode is not here: a replay always runs with it on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import (
    Tensor,
    get_autocast_dtype,
    get_default_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_default_dtype,
)

from recollect._generators import DefaultDeviceType as DefaultDeviceType
from recollect._generators import (
    Late,
    OtherDevices,
    Preserved,
    PreservedCpu,
    Watching,
    accelerators,
    default_generators,
    get_device_state,
    index_of,
    others,
    preserve_devices,
    set_device_state,
)
from recollect._generators import get_cpu_state as get_cpu_state
from recollect._generators import set_cpu_state as set_cpu_state
from recollect._inputs import Arguments, find_tensors
from recollect._torch import (
    PLAIN_TYPES,
    TORCH_FUNCTION_ENABLED,
    accelerator_module,
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
# Which random generators a replay finds as the forward found them: True, those of torch; False, none; "all".
Preserve = bool | str


class Part(Protocol):
    """A piece of ambient state as it was in the forward."""

    def restore(self) -> Undo | None:
        """Put it in force; return how to undo that, None if there was nothing to do."""


_NO_ARGUMENTS: Arguments = ((), {})


def capture(
    tensors: Sequence[Tensor], *, preserve_rng_state: Preserve, arguments: Arguments = _NO_ARGUMENTS
) -> list[Part]:
    """The state around a region that is about to run on `tensors`, which are those of `arguments`."""
    devices = _devices_of(tensors)
    types = _types_of(devices) if devices else (DefaultDeviceType.get_device_type(),)
    parts: list[Part] = [Modes(types[0])]
    module = None if types == _CPU else accelerator_module(types[0])
    if module is not None and is_initialised(module) and torch.accelerator.is_available():
        parts.append(Place(torch.accelerator.current_stream()))
    if preserve_rng_state:
        parts.append(PreservedCpu())
        if preserve_rng_state is not True and preserve_rng_state == "all":
            parts += map(Preserved, others(arguments))
        if devices or module is not None:
            parts += _preserve_accelerators(types, devices)
    return parts


_CPU = ("cpu",)


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
    """Let the parts look again that have to; they are the last ones.

    Raises if the forward brought up an accelerator whose random state should have been recorded at its start.
    """
    if isinstance(parts[-1], Watching):
        for part in parts:
            if isinstance(part, Watching):
                part.forward_ended()


# --- Random generators ---


def _preserve_accelerators(types: tuple[str, ...], devices: Sequence[torch.device]) -> list[Part]:
    """The generators of all accelerators that are set up. Parts that have to look again come last."""
    parts: list[Part] = []
    look_again: list[Part] = []
    late: list[tuple[str, Any]] = []
    for device_type, module, ready in accelerators(types):
        if ready:
            own, rest = preserve_devices(device_type, module, devices)
            parts += own
            if rest is not None:
                look_again.append(rest)
        else:
            late.append((device_type, module))
    if late:
        look_again.append(Late(late))
    return parts + look_again if look_again else parts


class RandomState:
    """Where generators stand at one moment within a region, to be put there again."""

    __slots__ = ("_states",)

    def __init__(self, states: list[tuple[Callable[[Any], object], Any]]) -> None:
        self._states = states

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> RandomState:
        """Of all that a region on `tensors` may draw from without being given it."""
        return cls([(source.put, source.read()) for source in default_generators(_devices_of(tensors))])

    @classmethod
    def like(cls, parts: Sequence[Part]) -> RandomState:
        """Of the generators that a region preserves."""
        states: list[tuple[Callable[[Any], object], Any]] = []
        for part in parts:
            if isinstance(part, Preserved):
                states.append((part.source.put, part.source.read()))
            elif isinstance(part, OtherDevices):
                states.append((part.put, part.read()))
        return cls(states)

    def put(self) -> None:
        for put, state in self._states:
            put(state)


# --- Modes ---


class Modes:
    """Whether torch functions are asked, the default device and dtype, and autocast: parts that share one look.

    They are almost always as they were. So they are read together, compared at once, and taken apart only where
    something differs.
    """

    __slots__ = ("_parts", "_seen", "_types")

    def __init__(self, device_type: str) -> None:
        self._types = types = _CPU if device_type == "cpu" else _autocast_types(device_type)
        self._seen = seen = _look(types)
        self._parts: list[Part] | None = None if seen[0] and not seen[1] else self._taken_apart()

    def _taken_apart(self) -> list[Part]:
        # Torch functions are asked, and there is no mode that could be a default device.
        usual = self._seen[0] and not self._seen[1]
        return [
            TorchFunctions(TORCH_FUNCTION_ENABLED if usual else torch_function_state()),
            DefaultDtype(self._seen[2]),
            Autocast(self._types, self._seen[3:]),
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
        get_default_dtype(),
        is_autocast_cache_enabled(),
        is_autocast_enabled("cpu"),
        get_autocast_dtype("cpu"),
    )
    if len(types) > 1:
        return (*seen, is_autocast_enabled(types[1]), get_autocast_dtype(types[1]))
    return seen


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
        if _look(self._types)[3:] == self._seen:
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


class DefaultDtype:
    """`torch.set_default_dtype`. It holds for the whole process, so a replay changes it for other threads too."""

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def restore(self) -> Undo | None:
        now = get_default_dtype()
        if now is self._dtype:
            return None
        set_default_dtype(self._dtype)
        return partial(set_default_dtype, now)


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


def _devices_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """Where the tensors are that are not on the CPU."""
    if PLAIN_TYPES.issuperset(map(type, tensors)):
        return [tensor.device for tensor in tensors if not tensor.is_cpu]
    with without_torch_function():
        return [tensor.device for tensor in tensors if not tensor.is_cpu]


def _types_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """The accelerator types of a call, the one that counts for autocast and streams first."""
    if not devices:
        return (DefaultDeviceType.get_device_type(),)
    first = devices[0].type
    types = sorted({device.type for device in devices})
    if len(types) == 1:
        return (first,)
    chosen = "cuda" if "cuda" in types else first
    warnings.warn(
        "Tensor arguments, excluding CPU tensors, are detected on at least two types of devices. Autocast and stream "
        f"are kept for one type only: {chosen}. Device types: {types} first device type: {first}",
        stacklevel=level_of_user_code(),
    )
    return (chosen, *(one for one in types if one != chosen))


def infer_device_type(*args: Any) -> str:
    """The accelerator type of the tensors in `args`, at any depth."""
    return _types_of(_devices_of(find_tensors(args, {})[0]))[0]


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """Device numbers and generator states of the tensors in `args`, at any depth, one entry per tensor.

    CPU and meta tensors are passed over.
    """
    devices = _devices_of(find_tensors(args, {})[0])
    ids = [index_of(device) for device in devices if device.type != "meta"]
    if not ids:
        return [], []
    module = accelerator_module(_types_of(devices)[0])
    return ids, [get_device_state(module, index) for index in ids]


def set_device_states(devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None) -> None:
    """Put generator states back that `get_device_states` gave. Nothing to do for meta."""
    device_type = DefaultDeviceType.get_device_type() if device_type is None else device_type
    module = accelerator_module(device_type)
    if module is None and device_type != "meta" and devices:
        raise ValueError(f"device_type must name an accelerator that has generators, got {device_type!r}")
    if module is None:
        return
    for index, state in zip(devices, states, strict=True):
        set_device_state(module, index, state)

"""Ambient state: what a function reads without being given it. Captured in the forward, in force again in the replay.

Parts: random generators, autocast, the default device and dtype, which kernels may be chosen, the accelerator's device
and stream, torch functions, what `torch.distributed` keeps (`_meshes.py`); `Ambient` is all of them. Each part has one
method, `restore`: put the captured state in force and return how to undo that, or return None if it is in force
already. That is judged at the replay, never assumed from the forward. A part that could not matter is not made at all.

Which generators there are, and how exact their preservation is, stands in `_generators.py`. Here is which of them a
region takes: those of torch's operators, or, with `preserve_rng_state="all"`, the others too.

Grad mode is not here: a replay always runs with it on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
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
    Watching,
    accelerators,
    default_generators,
    get_device_state,
    index_of,
    others,
    preserve_devices,
    set_device_state,
    swap_cpu_state,
)
from recollect._generators import get_cpu_state as get_cpu_state
from recollect._generators import set_cpu_state as set_cpu_state
from recollect._inputs import Arguments, find_tensors
from recollect._meshes import Meshes
from recollect._torch import (
    PLAIN_TYPES,
    TORCH_FUNCTION_ENABLED,
    accelerator_module,
    default_device,
    function_mode_count,
    is_initialised,
    kernel_switches,
    level_of_user_code,
    process_groups,
    put_kernel_switches,
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


class Ambient:
    """The state around a region that is about to run on `tensors`, which are those of `arguments`.

    Most regions run on the CPU or on one device, and find everything in their replay as their forward found it. So
    modes (whether torch functions are asked, the default device and dtype, which kernels may be chosen, autocast) are
    read together, compared at once, and taken apart only where something differs; they and the CPU generator are no
    parts of their own.
    """

    __slots__ = ("_device_type", "_look", "_modes", "_seen", "cpu_state", "parts")

    def __init__(
        self, tensors: Sequence[Tensor], preserve_rng_state: Preserve, arguments: Arguments = _NO_ARGUMENTS
    ) -> None:
        self.parts: Sequence[Part] = ()
        self._device_type, look = "cpu", _look_on_cpu
        if not (
            preserve_rng_state is True
            and DefaultDeviceType._default_device_type == "cpu"
            and PLAIN_TYPES.issuperset(map(type, tensors))
            and all(map(_is_cpu, tensors))
        ):
            devices = _devices_of(tensors)
            types = _types_of(devices)
            self._device_type, look = types[0], _look_at(types[0])
            self.parts = _parts(types, devices, preserve_rng_state, arguments)
        if process_groups:
            self.parts = (*self.parts, Meshes())
        self._look = look
        self._seen = seen = look()
        # A default device is a torch-function mode: where there are any, their number does not tell.
        self._modes: Sequence[Part] | None = None if seen[0] and not seen[1] else self._taken_apart()
        self.cpu_state = get_cpu_state() if preserve_rng_state else None

    def _taken_apart(self) -> Sequence[Part]:
        seen = self._seen
        usual = seen[0] and not seen[1]  # no mode that could be a default device
        return (
            TorchFunctions(TORCH_FUNCTION_ENABLED if usual else torch_function_state()),
            DefaultDtype(seen[2]),
            Kernels(seen[3]),
            Autocast(self._device_type, seen[4:]),
            DefaultDevice(None if usual else default_device()),
        )

    def restore(self, undo: list[Undo]) -> None:
        """Put it in force; what puts back the state before is added to `undo`, also if this fails."""
        if self._modes is not None or self._look() != self._seen:
            restore(self._modes or self._taken_apart(), undo)
        if self.cpu_state is not None:
            undo.append(partial(set_cpu_state, swap_cpu_state(self.cpu_state)))
        if self.parts:
            restore(self.parts, undo)

    def forward_ended(self) -> None:
        """Let the parts look again that have to.

        Raises if the forward brought up an accelerator whose random state should have been recorded at its start.
        """
        for part in self.parts:
            if isinstance(part, Watching):
                part.forward_ended()


def _parts(
    types: tuple[str, ...], devices: Sequence[torch.device], preserve_rng_state: Preserve, arguments: Arguments
) -> list[Part]:
    """Where an accelerator works, and the generators besides the CPU's."""
    module = accelerator_module(types[0])
    parts: list[Part] = []
    if module is not None and is_initialised(module) and torch.accelerator.is_available():
        parts.append(Place(torch.accelerator.current_stream()))
    if preserve_rng_state:
        if preserve_rng_state == "all":
            parts += map(Preserved, others(arguments))
        if devices or module is not None:
            parts += _preserve_accelerators(types, devices)
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


# --- Random generators ---


def _preserve_accelerators(types: tuple[str, ...], devices: Sequence[torch.device]) -> list[Part]:
    """The generators of all accelerators that are set up."""
    parts: list[Part] = []
    late: list[tuple[str, Any]] = []
    for device_type, module, ready in accelerators(types):
        if ready:
            own, rest = preserve_devices(device_type, module, devices)
            parts += own
            if rest is not None:
                parts.append(rest)
        else:
            late.append((device_type, module))
    if late:
        parts.append(Late(late))
    return parts


# How generators are read and put, together.
Access = tuple[Callable[[], Any], Callable[[Any], object]]


def access_to(ambient: Ambient) -> Access:
    """The generators that a region preserves."""
    each: list[Access] = [] if ambient.cpu_state is None else [(get_cpu_state, set_cpu_state)]
    each += [
        (part.source.read, part.source.put) if isinstance(part, Preserved) else (part.read, part.put)
        for part in ambient.parts
        if isinstance(part, (Preserved, OtherDevices))
    ]
    return _together(each)


def _together(each: list[Access]) -> Access:
    if len(each) == 1:
        return each[0]

    def put(states: list[Any]) -> None:
        for (_, put_one), state in zip(each, states, strict=True):
            put_one(state)

    return lambda: [read() for read, _ in each], put


class RandomState:
    """Where generators stand at one moment within a region, to be put there again."""

    __slots__ = ("_put", "_state")

    def __init__(self, access: Access) -> None:
        read, self._put = access
        self._state = read()

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> RandomState:
        """Of all that a region on `tensors` may draw from without being given it."""
        return cls(_together([(source.read, source.put) for source in default_generators(_devices_of(tensors))]))

    @classmethod
    def like(cls, ambient: Ambient) -> RandomState:
        """Of the generators that a region preserves."""
        return cls(access_to(ambient))

    def put(self) -> None:
        self._put(self._state)


# --- Modes ---


Look = Callable[[], list[Any]]


def _look_on_cpu() -> list[Any]:
    """How the modes are. Written out, for every region asks twice."""
    return [
        torch_function_enabled(),
        function_mode_count(),
        get_default_dtype(),
        kernel_switches(),
        is_autocast_cache_enabled(),
        is_autocast_enabled("cpu"),
        get_autocast_dtype("cpu"),
    ]


@cache
def _look_at(device_type: str) -> Look:
    if device_type == "cpu" or not torch.amp.is_autocast_available(device_type):
        return _look_on_cpu

    def look() -> list[Any]:
        return [*_look_on_cpu(), is_autocast_enabled(device_type), get_autocast_dtype(device_type)]

    return look


class Autocast:
    """Autocast for the CPU and one accelerator type: whether casts are cached, and for each on or off and its dtype.

    The dtype and the cache flag count also where autocast is off: a region that switches it on takes them from
    around it.
    """

    __slots__ = ("_seen", "_types")

    def __init__(self, device_type: str, seen: Sequence[Any]) -> None:
        self._types = ("cpu",) if len(seen) == 3 else ("cpu", device_type)
        self._seen = seen

    def _now(self) -> list[Any]:
        each = [(is_autocast_enabled(kind), get_autocast_dtype(kind)) for kind in self._types]
        return [is_autocast_cache_enabled(), *(one for pair in each for one in pair)]

    def restore(self) -> Undo | None:
        now = self._now()
        if now == self._seen:
            return None
        # What `torch.autocast` does, for less: under mixed precision it is on in forwards and off in backward.
        self._put(self._seen)
        torch.autocast_increment_nesting()

        def undo() -> None:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            self._put(now)

        return undo

    def _put(self, state: Sequence[Any]) -> None:
        cache, *each = state
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in zip(self._types, each[::2], each[1::2], strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


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


class Kernels:
    """Which kernels may be chosen: `sdpa_kernel`, `torch.backends.cudnn.flags` and others around the forward.

    Another kernel saves other tensors, or rounds in other places. The switches hold for the whole process, so a replay
    turns them for other threads too.
    """

    __slots__ = ("_switches",)

    def __init__(self, switches: Sequence[Any]) -> None:
        self._switches = switches

    def restore(self) -> Undo | None:
        now = kernel_switches()
        if now == self._switches:
            return None
        put_kernel_switches(self._switches)
        return partial(put_kernel_switches, now)


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


_is_cpu: Callable[[Tensor], bool] = attrgetter("is_cpu")


def _devices_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """Where the tensors are that are not on the CPU."""
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

"""How many bytes a step has alive, and how long work takes: on an accelerator, on the CPU, and on paper.

A meter says how many bytes are alive now and how many there were at the worst since it was last reset. On an
accelerator the allocator counts itself. On the CPU a dispatch mode follows every storage from the operator that makes
it until it is gone: once, however many views it has. What a kernel takes and gives back while it runs is not seen
there.

A clock says how long work takes. `Roofline` is a clock on paper: it adds up, operator by operator, what a named GPU
needs at least, by its arithmetic or by its memory, whichever takes longer. Nothing has to be computed for that: tensors
on the meta device will do.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recollect import _errors
from recollect._inputs import find_tensors
from recollect._torch import (
    METADATA_OPERATORS,
    OperatorMode,
    changes_arguments,
    efficient_attention,
    flash_attention,
    gives_views,
    local_part,
    packet_of,
    storage_key,
)


class Meter(Protocol):
    """Bytes alive."""

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """What has to be around the work that is measured."""

    def now(self) -> int: ...

    def peak(self) -> int:
        """The most since the last reset."""

    def reset(self) -> None: ...


class DeviceMeter:
    """The counters of an accelerator's allocator: what `torch.cuda.max_memory_allocated` says."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: Any = torch.cuda if device.type == "cuda" else torch.accelerator

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def now(self) -> int:
        return int(self._of.memory_allocated(self._device))

    def peak(self) -> int:
        return int(self._of.max_memory_allocated(self._device))

    def reset(self) -> None:
        self._of.reset_peak_memory_stats(self._device)


class StorageMeter:
    """Storages alive: those it is told of, and those that operators make while it watches."""

    def __init__(self, tensors: Iterable[Tensor], device_type: str) -> None:
        self._device_type = device_type
        self._now = 0
        self._peak = 0
        self._sizes: dict[int, int] = {}  # of every storage met that is alive
        self._gathered: dict[int, weakref.ref[Any]] = {}  # those that collectives fill, which FSDP frees by resizing
        for tensor in tensors:
            self._meet(tensor, is_new=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _Watching(self._meet, self._follow):
            yield

    def now(self) -> int:
        self._follow()
        return self._now

    def peak(self) -> int:
        self._follow()
        return self._peak

    def reset(self) -> None:
        self._follow()
        self._peak = self._now

    def _follow(self) -> None:
        """Look at the storages that are resized behind the backs of operators."""
        for key, reference in list(self._gathered.items()) if self._gathered else ():
            storage = reference()
            if storage is None:
                del self._gathered[key]
            elif (more := storage.nbytes() - self._sizes.get(key, 0)) and key in self._sizes:
                self._sizes[key] += more
                self._now += more
        self._peak = max(self._peak, self._now)

    def _meet(self, tensor: Tensor, *, is_new: bool, is_gathered: bool = False) -> None:
        tensor = local_part(tensor)
        if tensor.device.type != self._device_type:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a layout of its own: its parts are met where they are made
            return
        key = storage_key(tensor)
        if is_gathered and key not in self._gathered:
            self._gathered[key] = weakref.ref(storage)
        known = self._sizes.get(key)
        if known is None:
            # What was there before is somebody else's; it is told of, or does not count.
            self._sizes[key] = size = storage.nbytes() if is_new else 0
            weakref.finalize(storage, _forget, weakref.ref(self), key)
            self._now += size
        elif is_new and known and known != storage.nbytes():  # an operator has resized it
            self._now += storage.nbytes() - known
            self._sizes[key] = storage.nbytes()
        self._peak = max(self._peak, self._now)


def _forget(meter: weakref.ref[StorageMeter], key: int) -> None:
    there = meter()
    if there is not None:
        there._now -= there._sizes.pop(key, 0)


class _Watching(OperatorMode):
    def __init__(self, meet: Callable[..., None], follow: Callable[[], None]) -> None:
        super().__init__()
        self._meet = meet
        self._follow = follow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._follow()
        is_gathered = func.namespace in ("c10d", "fsdp")
        for tensor in find_tensors(args, kwargs or {})[0]:
            self._meet(tensor, is_new=False, is_gathered=is_gathered)
        result = func(*args, **(kwargs or {}))
        for tensor in find_tensors((result,), {})[0]:
            self._meet(tensor, is_new=True)
        return result


def meter_of(device: torch.device, tensors: Iterable[Tensor]) -> Meter:
    """A meter for what is on a device, where some tensors are already."""
    return StorageMeter(tensors, device.type) if device.type in ("cpu", "meta") else DeviceMeter(device)


# --- Time ---


class Clock(Protocol):
    """Seconds."""

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """How long `work` takes, on average over some times in a row."""


class RealClock:
    """Time that passes, until the device has done all that it was given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wait: Callable[[], object] = (  # until the device has done all that it was given
            (lambda: torch.accelerator.synchronize(device)) if device.type not in ("cpu", "meta") else (lambda: None)
        )

    def seconds(self, work: Callable[[], object], times: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - start) / times


@dataclass(frozen=True)
class Gpu:
    """What a GPU does in a second, by its data sheet, without sparsity."""

    flops: float  # of 16-bit matrix products
    flops_of_32_bits: float
    bytes: float  # of its memory
    link: float  # bytes to the host, each way


GPUS = {
    "A100": Gpu(312e12, 19.5e12, 2.04e12, 25e9),
    "H100": Gpu(989e12, 67e12, 3.35e12, 55e9),
    "H200": Gpu(989e12, 67e12, 4.8e12, 55e9),
    "B200": Gpu(2250e12, 80e12, 8.0e12, 55e9),
    "L40S": Gpu(362e12, 91.6e12, 0.864e12, 25e9),
    "MI300X": Gpu(1307e12, 163e12, 5.3e12, 55e9),
}
# Of what a data sheet says, large kernels reach about so much.
_REACHED = 0.75
_LAUNCH = 3e-6


def gpu_of(name: str) -> Gpu:
    """A GPU by name."""
    if name not in GPUS:
        raise _errors.not_one_of("gpu", name, tuple(GPUS))
    return GPUS[name]


class Roofline:
    """A clock on paper."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def seconds(self, work: Callable[[], object], times: int) -> float:
        mode = _AddingUp(self._gpu)
        with mode:
            work()
        return mode.seconds


class _AddingUp(OperatorMode):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.seconds += operator_seconds(self._gpu, func, args, kwargs, result)
        return result


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Have attention on the meta device run by the kernels that a GPU would take, instead of being taken apart.

    The function is replaced, for the whole process: a torch-function mode is not in force where backward runs.
    """
    F.scaled_dot_product_attention = _fused_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _attention


_attention = F.scaled_dot_product_attention


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.device.type != "meta" or query.dim() != 4:
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    result: Tensor
    if attn_mask is None and query.element_size() <= 2:
        result, *_ = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return result
    if enable_gqa:
        key, value = (one.repeat_interleave(query.size(1) // one.size(1), 1) for one in (key, value))
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.size(-2))
    result, *_ = efficient_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
    return result


def operator_seconds(gpu: Gpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """What an operator takes at least."""
    from torch.utils.flop_counter import flop_registry  # loads Triton where it is installed

    if func in METADATA_OPERATORS or (gives_views(func) and not changes_arguments(func)):
        return 0.0
    results = find_tensors((result,), {})[0]
    touched = [*find_tensors(args, kwargs)[0], *results]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in touched) / gpu.bytes
    count = flop_registry.get(packet_of(func))
    computed = 0.0
    if count is not None:
        narrow = any(tensor.element_size() <= 2 for tensor in touched)
        flops: float = count(*args, **kwargs, out_val=result)
        computed = flops / (gpu.flops if narrow else gpu.flops_of_32_bits)
    return float(max(moved, computed) / _REACHED + _LAUNCH)

"""Digests: a few numbers that stand for a tensor's values.

Taken on the tensor's own device and not waited for; read, all at once, when two of them are to be compared. A digest
depends on where each value stands: a floating-point tensor is projected on a few fixed vectors of random numbers (a
norm alone sees neither permuted rows nor another dropout mask, and random signs miss every fourth swap of two values),
an integer tensor is multiplied with fixed random integers, which is exact. A vector is the product of three: random
in a block, over blocks and over chunks of them, so that it needs little memory however large the tensor.

Floating-point values go through asinh first, which is nearly x for small x and grows like a logarithm: a mask of
-1e9 or -inf next to activations does not hide them. NaN counts as a number of its own.

Comparison. The differences of the projections estimate the norm of the difference: for a change of relative size r
they are about r times the norm. Kernels with atomics are not stable to the last bit, so floating-point digests may
differ by a tolerance per dtype, in units of the norm.

Nothing here is seen by the user's dispatch and torch-function modes, touched by autocast, or drawn from a generator
that anybody else uses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recollect import _errors
from recollect._torch import detach_below_autograd, has_plain_memory, keeps_its_own_memory, out_of_sight, waited_for

_BLOCK = 4096
_CHUNK = 16384  # blocks at a time: what is made on the way is bounded, and the calls are few
_VECTORS = 8  # as many as a matrix product is fast for

# One tensor of a few numbers for each plain tensor inside; None where there are no values to look at.
Digest = tuple[Tensor, ...] | None

# For 16 bits a unit in the last place of every value; None stands for those of 8 bits and less.
_tolerances: dict[torch.dtype | None, float] = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    None: 2e-2,
}


def set_tolerance(tolerance: float, dtype: torch.dtype | None = None) -> None:
    """Say how much values may differ between a forward and its replay before they count as different.

    Args:
        tolerance: Relative to the norm of the tensor. 0 asks for digests that are equal to the last bit.
        dtype: Of which floating-point tensors; all of them if it is left out.

    Example:
        >>> import torch, recollect
        >>> recollect.set_tolerance(5e-2, torch.bfloat16)  # for kernels that are not stable
        >>> recollect.set_tolerance(8e-3, torch.bfloat16)  # as it was
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a number from 0 up, got {_errors.describe_value(tolerance)}")
    if dtype is None:
        _tolerances.update(dict.fromkeys([*_tolerances], tolerance))
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {_errors.describe_value(dtype)}")
    _tolerances[dtype] = tolerance


def digest(tensor: Tensor) -> Digest:
    """What stands for the values of `tensor`."""
    with out_of_sight():
        return tuple(_digest_of(part) for part in _plain_parts(tensor)) or None


def summary(tensor: Tensor) -> Digest:
    """The norm and the largest absolute value of a floating-point tensor, for people to read."""
    with out_of_sight():
        parts = [part for part in _plain_parts(tensor) if part.is_floating_point() and part.numel()]
        wide = [part if part.dtype is torch.float64 else part.float() for part in parts]
        return tuple(torch.stack([part.norm(), part.abs().amax()]).double() for part in wide) or None


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, out of sight."""
    with out_of_sight():
        return [tensor.detach().clone() for tensor in tensors]


def alias_of(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, without a history."""
    with out_of_sight():
        return detach_below_autograd(tensor)


def overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put the values into the tensors, out of sight and of the version counters."""
    with out_of_sight():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the values: of a subclass such as DTensor, those that it is made of."""
    if keeps_its_own_memory(type(tensor)):
        return [tensor] if has_plain_memory(tensor) else []
    there = waited_for(tensor)  # before a collective has given its result, there is anything in its memory
    if there is not tensor:
        return _plain_parts(there)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, _ = flatten()
    inner = [getattr(tensor, name) for name in names]  # of a DTensor also its mesh
    return [part for one in inner if isinstance(one, Tensor) for part in _plain_parts(one)]


def _digest_of(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    if values.is_conj() or values.is_neg():
        values = values.resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_contiguous():
        values = values.contiguous()
    flat = values.view(-1)
    if flat.is_floating_point():
        return _floating(flat)
    return _exact(flat)


def _floating(flat: Tensor) -> Tensor:
    dtype = _working_dtype(flat)
    within, over, beyond = _vectors(flat.device, dtype)
    total = torch.zeros(_VECTORS + 1, dtype=torch.float64, device=flat.device)
    for number, piece in enumerate(flat.split(_BLOCK * _CHUNK)):
        # In place from here on, on memory that is no one else's: `to` copies only to another dtype.
        values = torch.asinh(piece) if piece.dtype is dtype else piece.to(dtype).asinh_()
        values.nan_to_num_(nan=7.3, posinf=11.0, neginf=-9.0)
        whole = values.numel() // _BLOCK
        sums = values[: whole * _BLOCK].view(whole, _BLOCK) @ within if whole else None
        rest = values[whole * _BLOCK :]
        if rest.numel():
            last = (rest @ within[: rest.numel()]).view(1, _VECTORS)
            sums = last if sums is None else torch.cat([sums, last])
        if sums is None:
            continue
        sums = sums.double()
        total[:_VECTORS] += (sums * over[: len(sums)]).sum(0) * beyond[number % _CHUNK]
        # The projections know the norm too, if they are many. In double precision, or small squares would be nothing.
        few = whole < _MANY
        square = torch.linalg.vector_norm(values, dtype=_wide(dtype)).double() if few else None
        total[_VECTORS] += sums.square().sum() / _VECTORS if square is None else square.square()
    total[_VECTORS].sqrt_()
    return total


_MANY = 64


def _working_dtype(flat: Tensor) -> torch.dtype:
    if flat.dtype is torch.float64:
        return torch.float64
    # An accelerator multiplies 16 bits as they are, and sums in 32: a third of what there is to move.
    return flat.dtype if flat.dtype in _HALVES and not flat.is_cpu else torch.float32


_HALVES = (torch.float16, torch.bfloat16)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else torch.float64


def _exact(flat: Tensor) -> Tensor:
    within, over, beyond = _integers(flat.device)
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(flat.split(_BLOCK * _CHUNK)):
        values = piece.to(torch.int64)  # wraps around at 64 bits, in both passes alike
        whole = values.numel() // _BLOCK
        sums = (values[: whole * _BLOCK].view(whole, _BLOCK) * within).sum(1)
        rest = values[whole * _BLOCK :]
        over_rest = (rest * within[: rest.numel()]).sum() * over[whole]
        total += ((sums * over[:whole]).sum() + over_rest) * beyond[number % _CHUNK]
    return total


_LENGTHS = (_BLOCK, _CHUNK + 1, _CHUNK)


@functools.cache
def _vectors(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(20)
    with torch.inference_mode(False):
        within, over, beyond = (
            torch.randn(length, _VECTORS, generator=generator, dtype=torch.float64, device="cpu") for length in _LENGTHS
        )
        return within.to(device, dtype), over.to(device), beyond.to(device)


@functools.cache
def _integers(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(21)
    with torch.inference_mode(False):
        within, over, beyond = (
            torch.randint(-(2**62), 2**62, (length,), generator=generator, device="cpu").to(device) * 2 + 1
            for length in _LENGTHS
        )
    return within, over, beyond


# --- Comparing ---


class Numbers(NamedTuple):
    """A digest that has been read."""

    parts: tuple[tuple[float, ...], ...]


def read(digests: Sequence[Digest]) -> list[Numbers | None]:
    """The numbers of each digest: one transfer for all that are alike, however many."""
    places: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for index, one in enumerate(digests):
        for position, part in enumerate(one or ()):
            places.setdefault((part.device, part.dtype), []).append((index, position))
    found: list[list[Any]] = [[None] * len(one or ()) for one in digests]
    with out_of_sight():
        for group in places.values():
            rows = torch.stack([digests[index][position] for index, position in group]).tolist()  # type: ignore[index]
            for (index, position), row in zip(group, rows, strict=True):
                found[index][position] = tuple(row)
    return [None if one is None else Numbers(tuple(parts)) for one, parts in zip(digests, found, strict=True)]


def difference(then: Numbers, now: Numbers, dtype: torch.dtype) -> float:
    """How far two digests are apart, relative to the norm of the values: 0 if they count as equal."""
    if len(then.parts) != len(now.parts):
        return math.inf
    return max((_apart(a, b, dtype) for a, b in zip(then.parts, now.parts, strict=True)), default=0.0)


def _apart(then: tuple[float, ...], now: tuple[float, ...], dtype: torch.dtype) -> float:
    if then == now:
        return 0.0
    if len(then) == 1 or len(now) == 1:
        return math.inf
    by = math.sqrt(sum((a - b) ** 2 for a, b in zip(then[:-1], now[:-1], strict=True)) / _VECTORS)
    by = max(by, abs(then[-1] - now[-1]))
    real = dtype.to_real() if dtype.is_complex else dtype
    # Next to nothing, numbers have fewer digits.
    scale = max(then[-1], now[-1], 1e6 * torch.finfo(torch.float32).tiny)
    relative = by / scale
    return 0.0 if relative <= _tolerances.get(real, _tolerances[None]) else relative

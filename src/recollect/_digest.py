"""Digests: a few numbers that stand for a tensor's values.

Taken on the tensor's own device and not waited for; read, all at once, when two of them are to be compared. A digest
depends on where each value stands: a floating-point tensor is projected on two fixed vectors of random signs (a norm
alone sees neither permuted rows nor another dropout mask), an integer tensor is multiplied with fixed random numbers,
which is exact. Signs are random in blocks and over blocks, so that they need little memory however large the tensor.

Floating-point values go through asinh first, which is nearly x for small x and grows like a logarithm: a mask of
-1e9 or -inf next to activations does not hide them. NaN counts as a number of its own.

Comparison. The difference of two projections estimates the norm of the difference: for a change of relative size r
it is about r times the norm. Kernels with atomics are not stable to the last bit, so floating-point digests may differ
by a tolerance per dtype, in units of the norm.

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
from recollect._torch import has_plain_memory, out_of_sight

_BLOCK = 4096
_CHUNK = 1024  # blocks at a time: what is made on the way takes 16 MiB, not twice the tensor

# One tensor of a few numbers for each plain tensor inside; None where there are no values to look at.
Digest = tuple[Tensor, ...] | None

_tolerances = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}
_OTHERS = 2e-2  # 8 bits and less


def set_tolerance(tolerance: float, dtype: torch.dtype | None = None) -> None:
    """Say how much values may differ between a forward and its replay before they count as different.

    Args:
        tolerance: Relative to the norm of the tensor. 0 asks for digests that are equal to the last bit.
        dtype: Of which floating-point tensors; all of them if it is left out.

    Example:
        >>> import torch, recollect
        >>> recollect.set_tolerance(1e-2, torch.bfloat16)  # for kernels that are not stable
        >>> recollect.set_tolerance(4e-3, torch.bfloat16)  # as it was
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a number from 0 up, got {_errors.describe_value(tolerance)}")
    if dtype is None:
        _tolerances.update(dict.fromkeys(_tolerances, tolerance))
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {_errors.describe_value(dtype)}")
    _tolerances[dtype] = tolerance


def digest(tensor: Tensor) -> Digest:
    """What stands for the values of `tensor`."""
    parts = _plain_parts(tensor)
    if not parts:
        return None
    with out_of_sight():
        return tuple(_digest_of(part) for part in parts)


def summary(tensor: Tensor) -> Digest:
    """The norm and the largest absolute value of a floating-point tensor, for people to read."""
    parts = [part for part in _plain_parts(tensor) if part.is_floating_point() and part.numel()]
    with out_of_sight():
        wide = [part if part.dtype is torch.float64 else part.float() for part in parts]
        return tuple(torch.stack([part.norm(), part.abs().amax()]).double() for part in wide) or None


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, out of sight."""
    with out_of_sight():
        return [tensor.detach().clone() for tensor in tensors]


def overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put the values into the tensors, out of sight and of the version counters."""
    with out_of_sight():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the values: of a subclass such as DTensor, those that it is made of."""
    if isinstance(tensor, torch.nn.Parameter) or type(tensor) is Tensor:
        return [tensor] if has_plain_memory(tensor) else []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, _ = flatten()
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]


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
    dtype = torch.float64 if flat.dtype is torch.float64 else torch.float32
    signs, block_signs = _signs(flat.device, dtype)
    total = torch.zeros(3, dtype=dtype, device=flat.device)
    for number, piece in enumerate(flat.split(_BLOCK * _CHUNK)):
        # In place from here on, on memory that is no one else's: `to` copies only to another dtype.
        values = torch.asinh(piece) if piece.dtype is dtype else piece.to(dtype).asinh_()
        values.nan_to_num_(nan=313.0, posinf=1009.0, neginf=-717.0)
        whole = values.numel() // _BLOCK
        sums = torch.stack([_projected(values, whole, signs[k], block_signs[k], number) for k in (0, 1)])
        total += torch.cat([sums, values.dot(values).view(1)])
    total[2] = total[2].sqrt()
    return total


def _projected(values: Tensor, whole: int, signs: Tensor, block_signs: Tensor, number: int) -> Tensor:
    """Blocks on one vector of signs, their sums on another, which is shifted by the number of the chunk."""
    rest = values[whole * _BLOCK :]
    over_rest = rest.dot(signs[: rest.numel()])
    if not whole:
        return over_rest
    first = number * 127 % _CHUNK
    return (
        torch.mv(values[: whole * _BLOCK].view(whole, _BLOCK), signs)
        .dot(block_signs[first : first + whole])
        .add_(over_rest)
    )


def _exact(flat: Tensor) -> Tensor:
    numbers, block_numbers = _numbers(flat.device)
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(flat.split(_BLOCK * _CHUNK)):
        values = piece.to(torch.int64)  # wraps around at 64 bits, in both passes alike
        whole = values.numel() // _BLOCK
        first = number * 127 % _CHUNK
        sums = (values[: whole * _BLOCK].view(whole, _BLOCK) * numbers).sum(1)
        rest = values[whole * _BLOCK :]
        total += (sums * block_numbers[first : first + whole]).sum() + (rest * numbers[: rest.numel()]).sum()
    return total


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    def draw(generator: torch.Generator, length: int) -> Tensor:
        drawn = torch.randint(0, 2, (2, length), generator=generator, device="cpu")
        return (drawn * 2 - 1).to(device=device, dtype=dtype)

    generator = torch.Generator().manual_seed(20)
    with torch.inference_mode(False):
        return draw(generator, _BLOCK), draw(generator, 2 * _CHUNK)


@functools.cache
def _numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(21)
    with torch.inference_mode(False):
        drawn = [
            torch.randint(-(2**62), 2**62, (length,), generator=generator, device="cpu").to(device) * 2 + 1
            for length in (_BLOCK, 2 * _CHUNK)
        ]
    return drawn[0], drawn[1]


# --- Comparing ---


class Numbers(NamedTuple):
    """A digest that has been read."""

    parts: tuple[tuple[float, ...], ...]

    @property
    def norm(self) -> float:
        """Of the values after asinh; NaN where they are integers."""
        norms = [part[2] for part in self.parts if len(part) == 3]
        return math.sqrt(sum(norm * norm for norm in norms)) if norms else math.nan


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
    if len(then) != 3 or len(now) != 3:
        return math.inf
    by = max(abs(a - b) for a, b in zip(then, now, strict=True))
    scale = max(then[2], now[2])
    relative = by / scale if scale else math.inf
    real = dtype.to_real() if dtype.is_complex else dtype
    return 0.0 if relative <= _tolerances.get(real, _OTHERS) else relative

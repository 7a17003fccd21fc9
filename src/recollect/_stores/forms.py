"""How a tensor is taken down to flat memory of bytes, and made again of it.

What travels is the whole storage, if the tensor is a good part of it: then other tensors over the same memory (query,
key and value of one product) come back with it, as views of one memory, which they were. Of a small part of a storage
the values alone travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recollect._inputs import with_stride
from recollect._torch import negative_view

_GOOD_PART = 4  # a fourth of the storage's bytes


class Form:
    """What makes a tensor of flat memory."""

    __slots__ = ("_dtype", "_is_conjugate", "_is_negative", "_is_whole", "_offset", "_shape", "_stride")

    def __init__(self, tensor: Tensor, *, is_whole: bool) -> None:
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._is_whole = is_whole
        self._is_conjugate = tensor.is_conj()
        self._is_negative = tensor.is_neg()

    def of(self, memory: Tensor) -> Tensor:
        """The tensor; memory that came back for several of them has views, which share its version counter."""
        values = memory[: memory.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        if self._is_whole:
            tensor = values.as_strided(self._shape, self._stride, self._offset)
        else:
            tensor = values[: self._shape.numel()].view(self._shape)
            if tensor.stride() != self._stride:
                tensor = with_stride(tensor, self._stride)
        if self._is_conjugate:
            tensor = tensor.conj()
        if self._is_negative:
            tensor = negative_view(tensor)
        return tensor.detach()  # no view, which one made without grad could not be changed in place

    def again(self, tensor: Tensor) -> Tensor:
        """The tensor, of one that is still over the same memory, or has the very same form."""
        return self.of(whole_storage(tensor)) if self._is_whole else tensor.detach()


def takes_whole_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= _GOOD_PART * tensor.nbytes


def whole_storage(tensor: Tensor) -> Tensor:
    """All the memory behind a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def values_alone(tensor: Tensor) -> Tensor:
    """The values in a row, as bytes."""
    # As they are in memory: the form knows of the rest.
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = negative_view(tensor)
    return tensor.contiguous().view(-1).view(torch.uint8)

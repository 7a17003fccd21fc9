"""The exceptions themselves. What is not one of these is an exception of Python's own."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointError as TorchsCheckpointError

Signature = tuple[Any, ...]


class CheckpointError(TorchsCheckpointError):
    """A replay cannot give backward what the forward had: it would have been a guess.

    A subclass of torch's own, so that programs which catch that one catch this too, however they came by the name.

    Attributes:
        operator: The first operator that differs, where that is known: "aten.mul.Tensor".
        where: The line of user code that ran it, else where the region's function begins: "model.py:12 in forward".
        cause: The likely cause, in words, where one was found.
    """

    __module__ = "recollect"  # where programs find it, and what a traceback calls it

    operator: str | None = None
    where: str | None = None
    cause: str | None = None


class SavedTensorChangedError(CheckpointError):
    """A recovered tensor was changed in place by the function itself, or one in a store before it was copied."""


class InfeasibleError(ValueError):
    """A budget into which nothing fits, whatever is chosen.

    Attributes:
        smallest: The least number of bytes that would do.
        where: The moment of the step that sets it: "backward of layers.7".
    """

    smallest: int = 0
    where: str = ""

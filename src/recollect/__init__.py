"""Activation checkpointing for PyTorch that you can trust, see and budget."""

from recollect._checkpoint import checkpoint, remat
from recollect._errors import CheckpointError

__version__ = "0.1.0"
__all__ = ["CheckpointError", "checkpoint", "remat"]

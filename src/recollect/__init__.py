"""Activation checkpointing for PyTorch that you can trust, see and budget."""

from recollect import policies
from recollect._checkpoint import checkpoint, remat
from recollect._engine.named import region
from recollect._errors import CheckpointError
from recollect.explain import explain
from recollect.policy import Offload, Recompute, Save, by_name, offload_ops, save_ops

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Offload",
    "Recompute",
    "Save",
    "by_name",
    "checkpoint",
    "explain",
    "offload_ops",
    "policies",
    "region",
    "remat",
    "save_ops",
]

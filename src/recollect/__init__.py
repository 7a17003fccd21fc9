"""Activation checkpointing for PyTorch that you can trust, see and budget."""

from recollect import composable, policies, schedules
from recollect._checkpoint import checkpoint, remat, verify_again
from recollect._digest import set_tolerance
from recollect._engine.named import region
from recollect._engine.pinned import is_recomputing, once, pin, skip_on_replay
from recollect._errors import CheckpointError
from recollect._generators import register_generator, unregister_generator
from recollect._patch import patch_torch
from recollect._shard import Shard
from recollect._stores.chosen import offload_stats
from recollect.explain import explain
from recollect.fit import BudgetError, Frontier, frontier, plan
from recollect.modules import apply, unapply
from recollect.offload import offload
from recollect.plan import Plan
from recollect.policy import Offload, Recompute, Save, by_name, offload_ops, save_ops
from recollect.sequential import sequential, while_loop

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "CheckpointError",
    "Frontier",
    "Offload",
    "Plan",
    "Recompute",
    "Save",
    "Shard",
    "apply",
    "by_name",
    "checkpoint",
    "composable",
    "explain",
    "frontier",
    "is_recomputing",
    "offload",
    "offload_ops",
    "offload_stats",
    "once",
    "patch_torch",
    "pin",
    "plan",
    "policies",
    "region",
    "register_generator",
    "remat",
    "save_ops",
    "schedules",
    "sequential",
    "set_tolerance",
    "skip_on_replay",
    "unapply",
    "unregister_generator",
    "verify_again",
    "while_loop",
]

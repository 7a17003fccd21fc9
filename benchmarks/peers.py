"""What the benchmarks share: the peers that may be missing, the machine in words, a table."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as stock

from recollect import dropin


def torch_remat_checkpoint() -> Callable[..., Any] | None:
    """`torch_remat.checkpoint` called like stock's, None where it is not installed."""
    try:
        import torch_remat
    except ImportError:
        return None

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return torch_remat.checkpoint()(function)(*args)

    return call


def checkpoints() -> dict[str, Callable[..., Any]]:
    """Non-reentrant checkpointing of each peer that is there, all called like (function, *args)."""
    found: dict[str, Callable[..., Any]] = {
        "stock": partial(stock.checkpoint, use_reentrant=False),
        "recollect": partial(dropin.checkpoint, use_reentrant=False),
    }
    remat = torch_remat_checkpoint()
    if remat is not None:
        found["torch_remat"] = remat
    return found


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine() + " CPU"
    return (
        f"{device}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"torch_remat {version_of('torch_remat')}, {torch.get_num_threads()} thread(s)"
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, so that it can go into the docs as it is."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")

"""What there is on this machine: versions, extras, devices, the link to the host, features of torch, settings."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import platform
import time
from typing import Any

import torch

import recollect
from recollect import _torch
from recollect._stores.pool import memory_to_spare

# What each needs, and what it is for. A test holds this against pyproject.toml.
EXTRAS = {
    "cli": (("typer", "rich"), "the commands but for run"),
    "plan": (("scipy",), "plans that offload"),
    "report": (("plotly",), "--report and --plot, Plan.report"),
    "transformers": (("transformers",), "recollect.integrations.transformers"),
    "lightning": (("lightning",), "recollect.integrations.lightning"),
}
VARIABLES = {
    "RECOLLECT_PATCH": "0: recollect run leaves torch as it is",
    "RECOLLECT_CHECK": "the determinism_check of every region",
}
_COPIED = 2**28
_TIMES = 4


def examine() -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "recollect": recollect.__version__,
        "python": platform.python_version(),
        "torch": {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda,
            "wanted": _wanted(),
        },
        "extras": {
            name: {"packages": {package: version_of(package) for package in packages}, "for": purpose}
            for name, (packages, purpose) in EXTRAS.items()
        },
        "devices": devices(),
        "features": [
            {"name": name, "there": there, "without": without} for name, there, without in _torch.optional_names()
        ],
        "variables": variables(),
    }


def missing(extra: str) -> list[str]:
    """What an extra needs and is not installed."""
    return [package for package in EXTRAS[extra][0] if version_of(package) is None]


def version_of(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted() -> str | None:
    """The versions of torch that this package allows; None if it is not installed but only found in the path."""
    try:
        needs = importlib.metadata.requires("recollect") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((need.removeprefix("torch") for need in needs if need.startswith(("torch<", "torch>"))), None)


def devices() -> list[dict[str, Any]]:
    """The host, and every accelerator with the speed of its link."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.machine(), "memory": host, "free": 2 * memory_to_spare()}
    ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for index in range(0 if accelerator is None else torch.accelerator.device_count()):
        assert accelerator is not None
        found.append(_accelerator(torch.device(accelerator.type, index)))
    return found


def _accelerator(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"device": str(device), "name": device.type, "memory": None, "free": None}
    try:
        if device.type == "cuda":
            about["name"] = torch.cuda.get_device_name(device)
            about["free"], about["memory"] = torch.cuda.mem_get_info(device)
            about["to_host"], about["from_host"] = link_speed(device)
    except RuntimeError as error:  # a device that is there and does not answer is what a doctor is asked about
        about["error"] = str(error).splitlines()[0]
    return about


def link_speed(device: torch.device) -> tuple[float, float]:
    """Bytes a second to pinned memory of the host and back, one way at a time: the best of some copies."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    return _speed(there, host, device), _speed(host, there, device)


def _speed(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    best = float("inf")
    for _ in range(_TIMES):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return source.numel() / best


def variables() -> list[dict[str, Any]]:
    """The environment variables that recollect reads, as far as they are set, and those that look like one."""
    found = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("RECOLLECT_"):
            close = [] if name in VARIABLES else difflib.get_close_matches(name, VARIABLES, n=1)
            found.append({"name": name, "value": value, "known": name in VARIABLES, "close": close})
    return found


def name_of(device: torch.device) -> str:
    """In words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "one CPU thread" if device.type == "cpu" else str(device)

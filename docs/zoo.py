"""Runs the zoo (tests/zoo.py) under recollect and its peers and prints docs/zoo.md.

    python docs/zoo.py > docs/zoo.md

Every program runs in a process of its own, so that a crash, or state that a program leaves behind, touches no other.
Takes about a minute. torch_remat may be missing: `pip install torch_remat`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # before this directory, which has a zoo.py as well

import torch
import torch._dynamo  # PyTorch's checkpoint imports it at its first call, which every process would have to pay for

import zoo

SECONDS = 60
CRASH = "crash"

CONTENDERS: dict[str, Callable[[], zoo.Run]] = {
    "recollect": zoo.Recollect,
    "recollect.dropin": zoo.DropIn,
    "PyTorch": zoo.Stock,
    "torch_remat": zoo.TorchRemat,
}
WITH_VALUES = {
    "recollect": zoo.Recollect,
    'recollect, determinism_check="values"': partial(zoo.Recollect, check="values"),
    "PyTorch": zoo.Stock,
    "torch_remat": zoo.TorchRemat,
}

INTRODUCTION = """\
# The zoo

Programs that activation checkpointing gets wrong: mistakes that are easy to make, and programs without a mistake that a
second run disturbs. Each is a few lines in [tests/zoo.py](../tests/zoo.py). It runs once without regions, which gives
what is **right**: the gradients, bit for bit, and the state (buffers, counters, random streams) as after one forward.
Then it runs with regions.

- **right**: as without regions.
- **error that names the line**: the message shows the line to look at, or it is the innermost line of the program in
  the traceback. For a change from outside, such as an optimizer step too early, it is the function that reads what was
  changed.
- **error elsewhere**: it stops, and you search.
- **silently wrong**: other gradients or other state, and no word.
- **gradients right, but done twice**: the replay did again what was to be done once: a side effect, or an operator
  whose result was to be kept.
- **no such feature**: the program uses something that this library does not offer.

`tests/test_zoo.py` holds recollect to its columns. This page is the output of `python docs/zoo.py`.

How they are called: `recollect.checkpoint(function, ...)` with its defaults; `recollect.dropin.checkpoint`, which is
recollect for programs that change their import and nothing else, and `torch.utils.checkpoint.checkpoint`, both with
`use_reentrant=False`; `torch_remat.checkpoint` with `determinism_check="default"`, which it has off, and with a hook
that restores PyTorch's generator, as its documentation asks for (a hook for every generator where the case says
`"all"`). It takes no policy over operators and no nested regions, and its `region(..., recompute=False)` stands for
`pin`. The page says nothing about speed or memory.
"""

LIMITS = """\
## What the checks cannot see

A replay is compared value by value until the region has been verified once, which is in the first step. After that
recollect compares shapes, dtypes and devices, and the guards stay on that cost next to nothing: parameters that were
stepped or replaced, inputs that were changed, a module switched to eval, a default that moved. So these are silent:

- A mistake that **begins after the verified step**: a condition that turns in step 1000, a counter that starts late.
  `recollect.verify_again()`, called every thousand steps, say, lets the next step be verified;
  `determinism_check="values"`, or `RECOLLECT_CHECK=values` in the environment, compares every replay.
- A weight that is changed **through `.data`**, without an optimizer, after the first step: no version counter moves.
- **Side effects in Python**: a list that grows, a counter, a line in a log. No tensor depends on them, so nothing can
  differ, in the first step or later. `recollect.once(...)` and `recollect.is_recomputing()` are for that.
- A difference that is **below the tolerance** for the dtype, or that changes no operator's result in the steps that are
  compared.
- In `recollect.dropin`, which does not look at single operators: values, also in the first step; buffers that the
  function changes; a parameter that is read but not saved (a bias) and that is changed by hand, not by an optimizer.
- Whatever happens under `determinism_check="none"`.
"""


def judge_and_send(case: zoo.Case, make: Callable[[], zoo.Run], sender: Connection) -> None:
    """What one contender makes of one case; runs in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        run = make()
    except ImportError:
        sender.send("not installed")
        return
    sender.send(zoo.judge(case, run, zoo.seeded(case.program, zoo.Plain())))


def verdict(case: zoo.Case, make: Callable[[], zoo.Run]) -> str:
    """The same, and what to say where there is no answer."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=judge_and_send, args=(case, make, sender))
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(SECONDS) else "does not end"
    except EOFError:
        return CRASH
    finally:
        process.kill()
        process.join()


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown."""
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(row) + " |")
    print()


def compare(cases: dict[str, zoo.Case], contenders: dict[str, Callable[[], zoo.Run]], *, totals: bool) -> None:
    """Print what each contender makes of each case, and how often it came to what."""
    found = {name: [verdict(case, make) for make in contenders.values()] for name, case in cases.items()}
    print_table(["case", *contenders], [[name, *verdicts] for name, verdicts in found.items()])
    if totals:
        counts = [Counter(verdicts) for verdicts in zip(*found.values(), strict=True)]
        order = (zoo.RIGHT, zoo.NAMED, zoo.WARNED, zoo.ELSEWHERE, zoo.TWICE, zoo.WRONG, zoo.NOTHING)
        rest = sorted(set().union(*counts) - set(order))
        kinds = [kind for kind in (*order, *rest) if any(count[kind] for count in counts)]
        print_table(["in all", *contenders], [[kind, *(str(count[kind]) for count in counts)] for kind in kinds])


def version_of(package: str) -> str:
    """Of an installed package, in words."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Print the whole page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    only = parser.parse_args().only
    print(INTRODUCTION)
    compare({name: case for name, case in zoo.ZOO.items() if only in name}, CONTENDERS, totals=not only)
    print(LIMITS)
    compare({name: case for name, case in zoo.LIMITS.items() if only in name}, WITH_VALUES, totals=False)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, torch_remat {version_of('torch_remat')}, "
        f"numpy {version_of('numpy')}, on the CPU."
    )


if __name__ == "__main__":
    main()

"""What do a region and a saved tensor cost, in processor instructions?

The question of `overhead.py`, answered without a clock: valgrind counts the instructions of a hundred steps, after a
warm-up that it does not count. A count is the same to one or two in a hundred whatever else the machine does, so small
changes of the engine show. It says nothing of caches. Each contestant runs in a process of its own, some 20 seconds.

    python benchmarks/instructions.py [--only recollect] [--json instructions.json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import torch

import overhead
from peers import describe_machine, print_table

STEPS = 100
WARM_UP = 30
CONTESTANTS = ("bare hooks (floor)", "the smallest engine (floor)", "stock", "recollect", "recollect, native")


def run_steps(name: str, length: int) -> None:
    """In the process that valgrind looks at: switch the counting on for the steps alone."""
    torch.set_num_threads(1)
    step = overhead.contestants()[name]
    for _ in range(WARM_UP):
        step(length)
    count(on=True)
    for _ in range(STEPS):
        step(length)
    count(on=False)
    os._exit(0)  # taking an interpreter down takes long under valgrind


def count(*, on: bool) -> None:
    command = ["callgrind_control", "--instr=" + ("on" if on else "off"), str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def instructions(name: str, length: int) -> float:
    """Of one step."""
    with tempfile.TemporaryDirectory() as folder:
        found = os.path.join(folder, "found")
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={found}"]
        script = [sys.executable, __file__, "--steps", name, str(length)]
        subprocess.run(valgrind + script, check=True, capture_output=True)
        with open(found) as file:
            total = re.search(r"^totals: (\d+)", file.read(), re.MULTILINE)
    if total is None:
        raise RuntimeError("valgrind wrote no total")
    return int(total[1]) / STEPS


def measure(names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    short, long = overhead.LENGTHS
    work = {length: instructions(overhead.WORK, length) for length in overhead.FUNCTIONS}
    result = {}
    for name in names:
        over = {length: instructions(name, length) - work[length] for length in overhead.FUNCTIONS}
        per_tensor = (over[long] - over[short]) / (long - short)
        result[name] = {"region": over[short] - short * per_tensor, "tensor": per_tensor, "block": over[overhead.BLOCK]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=CONTESTANTS, help="contestants; stock is always among them")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--steps", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        run_steps(options.steps[0], int(options.steps[1]))
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: instructions cannot be counted here")
        return
    result = measure(tuple(dict.fromkeys(("stock", *options.only))))
    stock = result["stock"]
    rows = [
        [name, *(cell for kind in stock for cell in (f"{cost[kind]:,.0f}", f"{cost[kind] / stock[kind]:.2f}"))]
        for name, cost in result.items()
    ]
    print_table(["", "per region", "of stock's", "per saved tensor", "of stock's", "per block", "of stock's"], rows)
    print(describe_machine())
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": describe_machine(), "instructions": result}, file, indent=1)


if __name__ == "__main__":
    main()

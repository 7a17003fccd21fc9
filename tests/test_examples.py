"""Every example runs by itself and prints the line that shows that it worked."""

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
TWICE = r"runs of the first layer: 1 in forward, 1 in backward"
RANKS = {"fsdp2_llama": 2}  # those that torchrun starts, and how many of them
# What each needs besides torch, and the line.
EXAMPLES = {
    "accelerate_fsdp": (["accelerate"], TWICE),
    "composable": ([], TWICE),
    "fsdp2_llama": (["transformers"], r"2 ranks trained under \d{2},\d{3},\d{3} bytes each"),
    "lightning_module": (["lightning"], TWICE),
    "long_context": ([], r"left the device: 6 MiB"),
    "lstm": ([], r"with 128 slots every step but the last was run again 1\.7 times"),
    "neural_ode": ([], r"gradients .* are equal to those of the plain chain, to the last bit: True"),
    "resnet": ([], r"kept: 3,\d{3},\d{3} bytes before, 9\d{2},\d{3} after; batches .* in two steps: 2"),
    "tensor_parallel": ([], TWICE),
    "torchtitan_policy": ([], TWICE),
    "transformers_llama": (["transformers"], TWICE),
    "transformers_trainer": (["transformers", "accelerate"], TWICE),
    "wave_equation": ([], r"the gradient says at 254 of 256 points of the string how its speed should change"),
    "unet": ([], r"regions .*: down\.0 up\.0 up\.0 down\.0"),
}


def missing(name):
    return [package for package in EXAMPLES[name][0] if importlib.util.find_spec(package) is None]


def test_every_example_is_here():
    assert {file.stem for file in FOLDER.glob("*.py")} == set(EXAMPLES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of them, two at a time: most of it is the import of a framework."""
    folder = tmp_path_factory.mktemp("examples")  # some write files where they run

    def run(name):
        # Those in torch alone have nobody who may warn.
        strict = [] if EXAMPLES[name][0] else ["-W", "error"]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS.get(name)}"]
        command = [sys.executable, *strict, *(ranks if name in RANKS else []), str(FOLDER / f"{name}.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in EXAMPLES if not missing(name)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name, runs):
    if packages := missing(name):
        pytest.skip(f"not installed: {', '.join(packages)}")
    done = runs[name].result()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EXAMPLES[name][1], done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short(name):
    """Ten lines that matter, and what is imported, defined and printed besides."""
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 40

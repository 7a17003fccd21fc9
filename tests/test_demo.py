"""`make demo` runs `recollect demo`, which keeps its promise."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_demo_runs_and_finds_equal_gradients(tmp_path) -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-W", "error", "-m", "recollect", "demo", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gradients equal, bit for bit: yes" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    (peak,) = (float(row[3]) for row in rows if row[:1] == ["recollect"])
    assert peak <= 0.5  # of the plain step's
    assert (tmp_path / "demo.html").exists() == ("demo.html" in done.stdout) == (find_spec("plotly") is not None)


def test_make_calls_it() -> None:
    assert "recollect demo" in (ROOT / "Makefile").read_text()

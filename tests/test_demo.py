import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_the_demo_runs_and_finds_equal_gradients() -> None:
    done = subprocess.run([sys.executable, str(DEMO), "--tiny"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "gradients equal, bit for bit: yes" in done.stdout
    assert "operators replayed" in done.stdout

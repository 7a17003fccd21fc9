"""`python -m recollect run`: a script is run as Python runs it, under a patched torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.checkpoint as stock

import recollect
from recollect import _run

# Under Python itself it is not to load torch, which takes long.
REPORT = """
import json, pathlib, sys

names = sorted(name for name in globals() if name.startswith("__"))
told = [__name__, __file__, __package__, getattr(__spec__, "name", None), sys.argv, sys.path[0], names]
served = None
if "torch" in sys.modules:
    from torch.utils.checkpoint import checkpoint

    served = checkpoint.__module__
pathlib.Path(sys.argv[-1]).write_text(json.dumps([told, served]))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with scripts; what a run changes for good in its process is put back."""
    package = tmp_path / "a_package"
    (package / "inner").mkdir(parents=True)
    files = {
        tmp_path / "script.py": REPORT,
        tmp_path / "wrong.py": "x = = 3",
        package / "__init__.py": "",
        package / "part.py": REPORT,
        package / "__main__.py": REPORT,
        package / "inner" / "__init__.py": "import no_such_thing",
        tmp_path / "a_directory" / "__main__.py": REPORT,
        tmp_path / "an_empty_directory" / "nothing.py": "",
    }
    for file, source in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recollect"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delenv("RECOLLECT_PATCH", raising=False)
    patches = []
    monkeypatch.setattr(_run, "patch_torch", lambda: patches.append(recollect.patch_torch()))
    yield tmp_path
    for patch in patches:
        patch.undo()
    for name in [name for name in sys.modules if name.split(".")[0] in ("a_package", "wrong")]:
        del sys.modules[name]


def told(arguments):
    """What a script tells of itself, and whose checkpoint it was served."""
    out = Path("told.json")
    _run.main(["run", *arguments, str(out)])
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "arguments",
    [["script.py", "--lr", "3", "-m"], ["-m", "a_package.part", "-x"], ["-m", "a_package"], ["a_directory", "--", "x"]],
)
def test_a_script_finds_itself_as_under_python(place, arguments):
    about, served = told(arguments)
    assert served == "recollect._served"
    subprocess.run([sys.executable, *arguments, "told.json"], check=True)
    assert about == json.loads(Path("told.json").read_text())[0]


@pytest.mark.parametrize(("choice", "served"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_the_environment_decides(place, monkeypatch, choice, served):
    if choice is not None:
        monkeypatch.setenv("RECOLLECT_PATCH", choice)
    assert told(["script.py"])[1] == ("recollect._served" if served else "torch.utils.checkpoint")
    assert (stock.checkpoint.__module__ == "recollect._served") is served


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "Try python -m recollect --help"),
        (["fly"], 2, "there is no command 'fly'"),
        (["run"], 2, "run takes a script, or -m and a module, got nothing"),
        (["run", "-m"], 2, "got -m"),
        (["run", "--fast", "script.py"], 2, "got --fast script.py"),
        (["run", "missing.py"], 2, "can't open file"),
        (["run", "an_empty_directory"], 1, "can't find '__main__' module in 'an_empty_directory'"),
        (["run", "-m", "no_such_module"], 1, "No module named no_such_module"),
        (["run", "-m", "no_such.module"], 1, "No module named no_such.module"),
        (["run", "-m", "a_package.none"], 1, "No module named a_package.none"),
        (["run", "-m", "wrong.py"], 1, "Try 'wrong' instead"),
        (["run", "-m", ".part"], 1, "No module named .part"),
        (["run", "-m", "sys"], 1, "sys is not written in Python"),
    ],
)
def test_what_cannot_be_run_is_said(place, capsys, arguments, code, says):
    (place / "wrong.py").write_text("")
    with pytest.raises(SystemExit) as info:
        _run.main(arguments)
    assert info.value.code == code
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""


def test_a_wrong_choice_is_said(place, monkeypatch, capsys):
    monkeypatch.setenv("RECOLLECT_PATCH", "yes")
    with pytest.raises(SystemExit):
        _run.main(["run", "script.py", "out.json"])
    assert "RECOLLECT_PATCH must be one of '0', '1', got 'yes'" in capsys.readouterr().err
    assert not (place / "out.json").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["run", "--help"]])
def test_help(capsys, arguments):
    _run.main(arguments)
    out, err = capsys.readouterr()
    assert "RECOLLECT_PATCH" in out
    assert err == ""


def test_version(capsys):
    _run.main(["--version"])
    assert capsys.readouterr().out == f"recollect {recollect.__version__}\n"


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    raise ValueError('no')\n\ntry:\n    f()\nexcept ValueError:\n    1 / 0",
        "import wrong",
        "import a_package.inner",
        "x = = 3",
    ],
)
def test_a_traceback_begins_in_the_script(place, source):
    (place / "script.py").write_text(source)
    shown = []
    sys.excepthook = lambda *failure: shown.append(failure)
    with pytest.raises((ZeroDivisionError, SyntaxError, ModuleNotFoundError)) as info:
        _run.main(["run", "script.py"])
    sys.excepthook(info.type, info.value, info.tb.tb_next)  # without the frame of this test
    ((kind, error, traceback),) = shown
    assert kind is info.type
    assert error.__traceback__ is traceback
    files = []
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    assert all(str(place) in file or "importlib" in file for file in files)
    assert files[:1] == ([] if source == "x = = 3" else [str(place / "script.py")])


PROGRAM = """
import atexit, sys

def last():
    served = sys.modules["torch.utils.checkpoint"].checkpoint.__module__ if "torch" in sys.modules else None
    print("last", sys.modules["__main__"].last is last, served)

atexit.register(last)

def fail():
    {end}

fail()
"""


@pytest.mark.parametrize("end", ["raise ValueError('no')", "sys.exit(7)", "raise KeyboardInterrupt"])
def test_a_process_ends_as_under_python(place, end):
    (place / "script.py").write_text(PROGRAM.format(end=end))
    plain, ours = (
        subprocess.run([sys.executable, *how, "script.py"], capture_output=True, text=True, check=False)
        for how in ([], ["-m", "recollect", "run"])
    )
    assert ours.returncode == plain.returncode != 0
    assert ours.stderr == plain.stderr
    assert plain.stdout == "last True None\n"
    assert ours.stdout == "last True recollect._served\n"

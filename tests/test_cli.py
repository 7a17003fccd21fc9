"""The command line: every command, what it prints where, and every way to be refused."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner

import recollect
from recollect import _check, _cli_tables, _cli_terminal, _doctor, _run, _torch, cli
from recollect.explain import explain
from recollect.plan import Plan, Step

ROOT = Path(__file__).parents[1]
TOY = """
import itertools, os, random, sys, time
import torch
from torch import nn

class Noise(nn.Module):
    def __init__(self, noisy):
        super().__init__()
        self.is_noisy = noisy

    def forward(self, x):
        return x * random.random() if self.is_noisy else x

class Layer(nn.Module):
    def __init__(self, noisy):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), Noise(noisy), nn.Linear(64, 16))

    def forward(self, x):
        return self.inner(x)

def model(noisy=False):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(noisy) for _ in range(4)))

def batch():
    return torch.ones(256, 16)

def loss(model, batch):
    return model(batch).square().mean()

def build():
    print("the toy is built")
    return model(), batch()

def with_step():
    return model(), {"input": batch()}, lambda model, batch: loss(model, batch["input"])

def as_dict():
    return model(), {"input": batch()}

def as_tuple():
    return model(), (batch(),)

def on_paper():
    return model().to("meta"), batch().to("meta")

def noisy():
    return model(noisy=True), batch()

times = itertools.count(1)

def unsteady():
    return model(), batch(), lambda model, batch: loss(model, batch) * next(times)

def not_a_number():
    return model(), batch(), lambda model, batch: model(batch).sum() * float("nan")

def too_large():
    def step(model, batch):
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
    return model(), batch(), step

def loud():
    print("printed")
    os.system("echo by a child")
    return build()

def slow():
    time.sleep(60)

class Things:
    @staticmethod
    def build():
        return build()

# --- Wrong in one way each ---

def raises():
    raise ValueError("no data\\nof any kind")

def leaves():
    sys.exit("bye")

def interrupted():
    raise KeyboardInterrupt

def takes(one):
    return build()

def gives_nothing(): pass
def gives_a_model(): return model()
def gives_four(): return model(), batch(), loss, 4
def gives_no_model(): return 3, batch()
def gives_no_step(): return model(), batch(), 3
def gives_no_loss(): return model(), batch(), lambda model, batch: 3
def is_frozen(): return model().requires_grad_(False), batch()
def does_not_match(): return model(), torch.ones(32, 17)

def step_raises():
    def step(model, batch):
        raise RuntimeError("wrong way")  # here
    return model(), batch(), step

a_number = 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a module in it, and one thread, so that others on the machine do not slow us down."""
    (tmp_path / "toys.py").write_text(TOY)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "beside.py").write_text("from toys import *")
    (tmp_path / "inner" / "toy_file.py").write_text("import dataclasses\nfrom beside import build, model")
    (tmp_path / "no_syntax.py").write_text("def build(:\n")
    (tmp_path / "no_import.py").write_text("\nimport nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("COLUMNS", "RECOLLECT_PATCH", "RECOLLECT_CHECK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(sys.modules)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in ["toys", "beside", "toy_file", "no_syntax", "no_import"]:
        if name not in before:
            sys.modules.pop(name, None)


def call(*arguments, code=0, **environment):
    """The result of a command in this process."""
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="recollect", env=environment)
    if result.exit_code != code:
        raise AssertionError(f"{result.exit_code}\n{result.stdout}\n{result.stderr}") from result.exception
    assert "Traceback" not in result.stderr or "--traceback" in arguments
    return result


def document(*arguments, code=0):
    """The one JSON document that it prints."""
    return json.loads(call(*arguments, "--json", code=code).stdout, parse_constant=pytest.fail)


def start(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **{**pipes, **options})


# --- plan ---


def test_plan_decides_saves_and_reports(place):
    pytest.importorskip("plotly")
    done = call(
        "plan", "toys:build", "--budget", "60%", "--repeats", "1", "--save", "plan.json", "--report", "plan.html"
    )
    assert "A plan for Sequential, for a budget of" in done.stdout
    for word in ("modules", "decision", "recompute", "plain", "predicted", "measured", "plan.json", "plan.html"):
        assert word in done.stdout
    assert "the toy is built" not in done.stdout  # results alone are there
    assert "the toy is built" in done.stderr
    plan = Plan.load("plan.json")
    assert plan.measured.peak <= plan.budget
    assert "<html" in Path("plan.html").read_text()


def test_plan_as_json_is_the_plan(place):
    data = document("plan", "inner/toy_file.py:build", "--budget", "900KiB", "--repeats", "1")
    assert Plan.from_dict(data).budget == 900 * 1024


def test_plan_for_a_time(place):
    data = document("plan", "toys:with_step", "--time-budget", "1.5", "--repeats", "1")
    assert data["budget"] is None


def test_plan_on_paper(place):
    data = document("plan", "toys:on_paper", "--budget", "70%", "--gpu", "A100")
    assert data["is_estimated"]
    assert data["measured"] is None


def test_plan_that_does_not_fit(place):
    done = call("plan", "toys:build", "--budget", "1KiB", "--repeats", "1", code=3)
    assert "no plan fits into 1.0 KiB: the smallest that would is" in done.stderr
    assert done.stdout == ""
    data = document("plan", "toys:build", "--budget", "1KiB", "--repeats", "1", code=3)
    assert f"--budget {data['smallest']}" in data["error"]
    assert data["code"] == 3


# --- frontier ---


def test_frontier(place):
    pytest.importorskip("plotly")
    done = call("frontier", "toys:build", "--points", "3", "--repeats", "1", "--plot", "frontier.html")
    assert "plain" in done.stdout
    assert "<html" in Path("frontier.html").read_text()


def test_frontier_as_json(place):
    data = document("frontier", "toys:as_tuple", "--points", "3", "--repeats", "1")
    assert 2 <= len(data["points"]) <= 3
    assert data["points"][0]["peak"] < data["plain"]["peak"]


# --- explain ---


@pytest.mark.parametrize("target", ["build", "as_dict", "as_tuple", "with_step", "Things.build"])
def test_explain(place, target):
    done = call("explain", f"toys:{target}", "--top", "2")
    table = done.stdout.splitlines()
    assert "What autograd saves in" in table[0]
    # All layers are in one row, whatever their number.
    assert any("4 x 64.0 KiB" in line and "Sequential.*.inner." in line for line in table), done.stdout
    assert any("toys.py:" in line for line in table)
    assert "smaller; in all " in table[-1]


def test_explain_as_json_has_all(place):
    data = document("explain", "toys:build", "--top", "1")
    assert len(data["rows"]) > 10
    assert data["totals"]["recomputed"] > 0


def test_explain_says_why_there_is_nothing(place):
    said = call("explain", "toys:is_frozen").stdout
    assert "autograd saves nothing in it, because nothing in it needs grad" in said
    assert "shape" not in said, "no table without rows"


def test_numbers_that_do_not_differ_are_shown(place):
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    found = explain(layers, torch.ones(3, 4, requires_grad=True))
    modules = {group.module for group in _cli_tables.groups(found) if "tanh" in group.first.operator}
    assert modules == {"Sequential.*"} or modules == {"Sequential.1", "Sequential.3"}
    assert all(group.first.decision != "parameter" for group in _cli_tables.groups(found))


# --- check ---


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """Made once: the plan of the toy for three fifths of its memory."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "toys.py").write_text(TOY)
    file = folder / "plan.json"
    call("plan", f"{folder / 'toys.py'}:build", "--budget", "60%", "--repeats", "1", "--save", str(file))
    sys.path.remove(str(folder))
    sys.modules.pop("toys")
    return str(file)


def test_check_of_a_saved_plan(place, plan_file):
    done = call("check", "toys:build", "--plan", plan_file, "--repeats", "1")
    assert "gradients equal, bit for bit: yes" in done.stdout
    assert "within the budget of" in done.stdout
    assert "planned" in done.stdout


def test_check_of_a_budget_as_json(place):
    data = document("check", "toys:with_step", "--budget", "70%", "--repeats", "1")
    assert data["passed"]
    assert data["equal"]
    assert data["within_budget"]
    assert data["different"] == []
    assert data["planned"]["peak"] <= data["budget"] < data["plain"]["peak"]
    assert data["loss"][0] == data["loss"][1]
    assert any("recompute" in choice for choice in data["decisions"].values())


def test_check_of_a_plan_that_takes_more_than_it_may(place, plan_file):
    data = json.loads(Path(plan_file).read_text())
    Path("less.json").write_text(json.dumps({**data, "budget": data["measured"]["peak"] - 1}))
    done = call("check", "toys:build", "--plan", "less.json", "--repeats", "1", code=1)
    assert done.stdout.splitlines()[-1].endswith(": no")
    assert "bit for bit: yes" in done.stdout


def test_check_of_a_step_that_does_not_repeat_itself(place, plan_file):
    done = call("check", "toys:unsteady", "--plan", plan_file, "--repeats", "1", code=1)
    assert "gradients equal, bit for bit: no" in done.stdout
    assert "not equal: loss, the gradient of 0.inner.0.weight, the gradient of 0.inner.0.bias and " in done.stdout
    assert "the step itself is not deterministic" in done.stdout
    data = document("check", "toys:unsteady", "--plan", plan_file, "--repeats", "1", code=1)
    assert not data["passed"]
    assert data["repeats_itself"] is False


def test_check_of_a_replay_that_differs(place, plan_file):
    done = call("check", "toys:noisy", "--plan", plan_file, "--repeats", "1", code=1)
    assert "The first operator whose result differs: aten.mul" in done.stderr


def test_check_of_what_is_no_number(place, plan_file):
    data = document("check", "toys:not_a_number", "--plan", plan_file, "--repeats", "1")
    assert data["equal"]
    assert data["loss"] == [None, None]


def test_check_leaves_the_model_as_it_was(place, plan_file):
    torch.manual_seed(1)
    norm = torch.nn.BatchNorm1d(16)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), norm) for _ in "ab"))
    batch = torch.ones(4, 16, requires_grad=True)
    batch.grad = torch.zeros(4, 16)
    held = batch.grad
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = Plan(
        "", {n: tuple(p.shape) for n, p in model.named_parameters()}, "cpu", None, (), *[Step(1, 1.0)] * 3, 0, False
    )
    found = _check.check(model, batch, plan, repeats=1)
    assert found.is_passed
    assert found.compared == 1 + 6 + 1 + 3  # the loss, parameters, the input, buffers
    assert batch.grad is held
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic implementation")
@pytest.mark.parametrize("has_one", [True, False], ids=["all deterministic", "one that is not"])
def test_check_asks_for_deterministic_kernels_as_far_as_there_are_any(has_one):
    """Some have one and use it only if everything else is an error."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)))
    modes = []

    def step(model, batch):
        modes.append(torch.get_deterministic_debug_mode())
        loss = model(batch).sum()
        if not has_one:
            torch.zeros(3).put_(torch.tensor([1]), loss.detach().view(1))
        return loss

    plan = recollect.plan(model, torch.randn(8, 4), budget="100%", step=step, repeats=1)
    modes.clear()
    found = _check.check(model, torch.randn(8, 4), plan, step=step, repeats=1)
    assert found.is_passed
    assert modes[:2] == ([2, 2] if has_one else [2, 1])
    assert modes[2] == (0 if has_one else 1)
    assert set(modes[3:]) == {0}
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic implementation")
def test_check_holds_nothing_of_a_step_that_it_runs_again():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)))
    graphs, alive = [], []

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            graphs.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.zeros(3).put_(torch.tensor([1]), grad.flatten()[:1])
            return grad

    def step(model, batch):
        alive.append(sum(one() is not None for one in graphs))
        return model(Refused.apply(model(batch))).sum()

    plan = recollect.plan(model, torch.randn(8, 4), budget="100%", step=step, repeats=1)
    alive.clear()
    assert _check.check(model, torch.randn(8, 4), plan, step=step, repeats=1).is_passed
    assert not any(alive)


def test_check_names_what_differs():
    assert not _check._are_equal(torch.ones(2), torch.ones(3))
    assert not _check._are_equal(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not _check._are_equal(None, torch.ones(2))
    assert _check._are_equal(None, None)
    assert _check._are_equal(torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 1]))
    assert not _check._are_equal(torch.tensor([torch.nan, 1]), torch.tensor([1, torch.nan]))


# --- doctor, demo ---


def test_doctor(place, monkeypatch):
    monkeypatch.setenv("RECOLLECT_CHEK", "first")
    monkeypatch.setenv("RECOLLECT_PATCH", "0")
    monkeypatch.setitem(_doctor.EXTRAS, "cli", (("typer", "no_such_package"), "something"))
    done = call("doctor")
    assert f"torch {torch.__version__}" in done.stdout
    assert "no no_such_package: pip install 'recollect[cli]'" in done.stdout
    assert "RECOLLECT_CHEK=first (nobody reads it: did you mean RECOLLECT_CHECK?)" in done.stdout
    assert "RECOLLECT_PATCH=0\n" in done.stdout
    data = document("doctor")
    assert data["devices"][0]["memory"] > data["devices"][0]["free"] > 0
    assert {feature["name"] for feature in data["features"]} == {name for name, _, _ in _torch.optional_names()}


def test_the_doctor_knows_the_extras():
    tomllib = pytest.importorskip("tomllib")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ours = {name: {need.partition(">")[0] for need in needs} for name, needs in declared.items()}
    assert {name: set(packages) for name, (packages, _) in _doctor.EXTRAS.items()} == {
        name: ours[name] for name in _doctor.EXTRAS
    }
    everything = declared["all"][0].partition("[")[2].rstrip("]").split(",")
    assert set(everything) == set(_doctor.EXTRAS)


def test_demo_without_the_report(place, monkeypatch):
    monkeypatch.setattr(_doctor, "missing", lambda extra: ["plotly"])
    assert "html" not in call("demo", "--tiny").stdout
    assert not Path("demo.html").exists()


# --- What is refused ---


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("toys", "the target must be pkg.module:build or path/to/file.py:build, got 'toys'"),
        (":build", "the target must be"),
        ("toys:", "the target must be"),
        ("no_such_module:build", "there is no module no_such_module, neither in "),
        ("toys.part:build", "there is no module toys.part"),
        ("inner/none.py:build", "there is no file inner/none.py"),
        ("inner:build", "there is no 'build' in inner"),
        ("toys:biuld", "there is no 'biuld' in toys; it has build"),
        ("toys:Things.bild", "there is no 'Things.bild' in toys; it has build"),
        ("toys:a_number", "a_number of toys must be a function without arguments, got int 3"),
        ("toys:takes", "takes of toys is called without arguments, and needs some: missing a required argument: 'one'"),
        ("toys:raises", "raises() of toys raised ValueError: no data (toys.py:"),
        ("toys:leaves", "leaves() of toys ended the program with sys.exit('bye') (toys.py:"),
        ("no_syntax:build", "importing no_syntax raised SyntaxError: invalid syntax (no_syntax.py:1)"),
        ("no_syntax.py:build", "importing no_syntax.py raised SyntaxError: invalid syntax (no_syntax.py:1)"),
        ("no_import:build", "importing no_import raised ModuleNotFoundError: No module named 'nothing_of_that_name' ("),
        ("toys:gives_nothing", "build() must return (model, batch) or (model, batch, step), got None"),
        ("toys:gives_a_model", "build() must return (model, batch) or (model, batch, step), got a Sequential"),
        ("toys:gives_four", "build() must return (model, batch) or (model, batch, step), got a tuple of 4"),
        ("toys:gives_no_model", "the first is a torch.nn.Module, got int 3"),
        ("toys:gives_no_step", "the third is a function (model, batch) -> loss, got int 3"),
        ("toys:gives_no_loss", "step must return the loss"),
        ("toys:is_frozen", "the outputs of the model do not require grad"),
        ("toys:does_not_match", "a training step raised RuntimeError: mat1 and mat2 shapes"),
        ("toys:step_raises", "a training step raised RuntimeError: wrong way (toys.py:"),
    ],
)
def test_a_wrong_target(place, target, says):
    done = call("plan", target, "--budget", "1GiB", code=2)
    assert says in done.stderr
    told = done.stderr[done.stderr.index("recollect: ") :]
    assert len(told.splitlines()) <= 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fly"], "No such command 'fly'"),
        (["plan"], "Missing argument 'TARGET'\nTry recollect plan --help"),
        (["plan", "toys:build"], "give --budget (bytes, such as 8GiB) or --time-budget (such as 1.1), one of them"),
        (["plan", "toys:build", "--budget", "1GiB", "--time-budget", "2"], "one of them"),
        (["plan", "toys:build", "--budgt", "1GiB"], "--budget"),
        (["plan", "toys:build", "--budget", "8Gibs"], "got '8Gibs'"),
        (["plan", "toys:build", "--budget", "0%"], "got '0%'"),
        (["plan", "toys:build", "--budget", "x%"], "got 'x%'"),
        (["plan", "toys:build", "--budget", "8GiB", "--reserve", "much"], "--reserve must be a number of bytes"),
        (["plan", "toys:build", "--time-budget", "0.5"], "--time-budget must be a number from 1 on, got 0.5"),
        (["plan", "toys:build", "--time-budget", "soon"], "'--time-budget'"),
        (["plan", "toys:build", "--budget", "8GiB", "--gpu", "X9"], "gpu must be one of 'A100'"),
        (["plan", "toys:build", "--budget", "8GiB", "--repeats", "0"], "'--repeats'"),
        (["plan", "toys:build", "--budget", "8GiB", "--save", "none/plan.json"], "--save: there is no directory none"),
        (["plan", "toys:build", "--budget", "8GiB", "--save", "inner"], "--save must be a file, got the directory"),
        (["plan", "toys:build", "--budget", "8GiB", "--report", "none/x.html"], "--report: there is no directory none"),
        (["frontier", "toys:build", "--points", "1"], "'--points'"),
        (["frontier", "toys:build", "--plot", "none/x.html"], "--plot: there is no directory none"),
        (["explain", "toys:build", "--top", "0"], "'--top'"),
        (["check", "toys:build"], "check takes a plan: --plan FILE, --budget BYTES or --time-budget FACTOR"),
        (["check", "toys:build", "--plan", "x", "--budget", "1GiB"], "one of them"),
        (["check", "toys:build", "--plan", "none.json"], "cannot read the plan none.json: No such file"),
        (["check", "toys:build", "--plan", "toys.py"], "toys.py cannot be used as a plan"),
        (["check", "toys:on_paper", "--budget", "70%"], "check runs the model, got one on the meta device"),
    ],
)
def test_a_wrong_command_line(place, arguments, says):
    done = call(*arguments, code=2)
    assert says in done.stderr
    assert done.stdout == ""
    assert "╭" not in done.stderr


def test_a_plan_of_another_model(place, plan_file):
    Path("other.py").write_text("import torch\ndef build(): return torch.nn.Linear(3, 3), torch.ones(2, 3)\n")
    done = call("check", "other.py:build", "--plan", plan_file, code=2)
    assert "the plan was made for another model than this one" in done.stderr


def test_pages_need_their_extra(place, monkeypatch):
    monkeypatch.setattr(_doctor, "missing", lambda extra: ["plotly"])
    for arguments in (["plan", "toys:build", "--budget", "1GiB", "--report"], ["frontier", "toys:build", "--plot"]):
        done = call(*arguments, "x.html", code=2)
        assert "needs plotly: pip install 'recollect[report]'" in done.stderr
        assert "building" not in done.stderr  # said before anything is done


def test_a_device_that_is_too_small(place):
    done = call("plan", "toys:too_large", "--budget", "1GiB", code=3)
    assert "the device has not enough memory for it: OutOfMemoryError: tried to allocate 20.00 GiB" in done.stderr


def test_interrupted(place):
    done = call("plan", "toys:interrupted", "--budget", "1GiB", code=130)
    assert done.stderr.endswith("recollect: interrupted\n")


def test_the_traceback_is_the_users(place):
    done = call("explain", "toys:raises", "--traceback", code=2)
    assert 'raise ValueError("no data' in done.stderr
    assert "direct cause" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "frontier", "explain", "check", "demo", "doctor"])
def test_help_says_what_exit_codes_mean(command):
    done = call(command, "--help")
    assert "Exit codes" in done.stdout
    assert "--traceback" in done.stdout


def test_help():
    done = call("--help")
    assert all(name in done.stdout for name in (*_run.COMMANDS, "run", "Exit codes"))
    assert "--version" in done.stdout
    assert call("--version").stdout == f"recollect {recollect.__version__}\n"
    assert call(code=2).stdout.strip() == done.stdout.strip()


def test_all_commands_are_known_without_the_extra():
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names == {*_run.COMMANDS, "run"}


# --- Terminals ---


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    for is_terminal in (True, False):
        written = io.StringIO()
        with _cli_terminal.Steps(Console(file=written, force_terminal=is_terminal, width=80, markup=False)) as steps:
            for done in range(3):
                steps("measuring [a] thing", done, 3)
            steps("measuring [a] thing", 3, 3)
            steps("looking", 0, 1)
        text = written.getvalue()
        if is_terminal:
            assert "━" in text
            assert text.endswith("\x1b[2K")  # nothing stays
        else:
            assert text == "".join(f"measuring [a] thing ({n}/3)\n" for n in (1, 2, 3)) + "looking\n"


def test_a_narrow_terminal(place):
    wide = call("doctor", COLUMNS="200").stdout
    narrow = call("doctor", COLUMNS="40").stdout
    assert "device   name" in wide
    assert "device cpu\n  name " in narrow


def test_no_color(place, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in call("doctor").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in call("doctor").stdout


# --- As processes ---

BIN = """
import sys
from recollect.__main__ import script
if __name__ == "__main__":
    sys.argv[0] = "recollect"
    sys.exit(script())
"""


@pytest.fixture
def installed(place, tmp_path_factory):
    """The script as pip makes it, away from the current directory."""
    file = tmp_path_factory.mktemp("bin") / "recollect"
    file.write_text(BIN)
    return str(file)


def test_the_document_is_all_there_is_on_stdout(installed):
    process = start(installed, "explain", "toys:loud", "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["rows"]
    for text in ("printed", "by a child", "the toy is built", "running the forward"):
        assert text in err


def test_a_process_is_interrupted(place):
    # Who is started in the background by a shell ignores the signal, and so do those whom he starts.
    listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = start("-m", "recollect", "plan", "toys:slow", "--budget", "1GiB", preexec_fn=listens)
    assert process.stderr.readline() == "building toys:slow\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "recollect: interrupted\n")


def test_nobody_reads_the_result(place):
    reads, writes = os.pipe()
    os.close(reads)
    process = start("-m", "recollect", "doctor", stdout=writes)
    os.close(writes)
    assert process.communicate()[1] == "looking at devices\n"
    assert process.returncode == 141


def test_the_script_runs_scripts_as_python_does(installed):
    Path("fails.py").write_text("import sys\nprint(sys.argv, sys.path[0])\ndef f():\n    raise ValueError('no')\nf()\n")
    plain, ours, module = (
        start(*command, "fails.py" if "-m" not in command else "fails", "-x")
        for command in ([], [installed, "run"], [installed, "run", "-m"])
    )
    told = plain.communicate()
    assert ours.communicate() == told
    out, err = module.communicate()
    assert err.splitlines()[-1] == "ValueError: no"
    assert str(Path.cwd()) in out
    assert plain.returncode == ours.returncode == module.returncode == 1


WITHOUT = """
import contextlib, io, sys
sys.modules["typer"] = None
from recollect.__main__ import main
for arguments in (["--version"], ["--help"], ["plan", "--help"], ["doctor"], ["run", "script.py", "7"]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    sys.__stdout__.write(repr((code, out.getvalue(), err.getvalue())) + "\\n")
"""


def test_without_the_extra(place):
    Path("script.py").write_text("import sys, torch.utils.checkpoint as c\nprint(c.checkpoint.__module__, sys.argv[1])")
    process = start("-c", WITHOUT)
    out, err = process.communicate()
    assert err == ""
    version, helped, plan, doctor, ran = map(eval, out.splitlines())
    assert version[1].startswith("recollect 0")
    assert "pip install 'recollect[cli]'" in helped[1]
    for name, told in (("plan", plan), ("doctor", doctor)):
        assert told[:2] == (2, "")
        assert told[2].startswith(
            f"recollect: {name} needs typer and rich, which are missing: pip install 'recollect[cli]'"
        )
    assert ran == (0, "recollect._served 7\n", "")

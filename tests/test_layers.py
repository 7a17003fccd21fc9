"""The map of the package is true: imports point downwards, and private names of torch stay in one file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as stock

import recollect
from recollect import dropin
from tools import leaf

ROOT = Path(recollect.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From top to bottom. A module may import what stands below its own line, and nothing on it or above.
# A new file takes its place here first.
LAYERS = [
    ["recollect.__main__"],
    ["recollect.cli"],
    ["recollect._cli_terminal"],
    ["recollect._cli_tables", "recollect._cli_target"],
    ["recollect._check", "recollect._demo", "recollect._doctor", "recollect._run"],
    ["recollect"],
    ["recollect._patch"],
    ["recollect._served"],
    ["recollect.fit"],
    ["recollect._trial"],
    ["recollect.plan"],
    ["recollect.profile"],
    ["recollect._alone"],
    ["recollect._tried"],
    ["recollect.dropin", "recollect.explain", "recollect.modules", "recollect.offload", "recollect.report"],
    ["recollect._bench", "recollect._plan_data", "recollect._replays"],
    ["recollect._candidates", "recollect._writes"],
    ["recollect._aside", "recollect._calls"],
    ["recollect.composable", "recollect._charts"],
    ["recollect._decided", "recollect._page"],
    ["recollect.sequential"],
    ["recollect.policies", "recollect._checkpoint", "recollect._progress"],
    ["recollect._chains.choice", "recollect._chains.node"],
    ["recollect._chains.later", "recollect._chains.measured"],
    ["recollect._chains.first"],
    ["recollect._chains.chain"],
    ["recollect._chains.cuts"],
    ["recollect._chains.kept", "recollect._chains.notes", "recollect._chains.outside", "recollect._chains.structure"],
    ["recollect._chains"],
    ["recollect._engine"],
    ["recollect._engine.named", "recollect._engine.pinned", "recollect._engine.opened", "recollect._watcher"],
    ["recollect._compile"],
    ["recollect._engine.caching"],
    ["recollect._engine.frame", "recollect._engine.kept_region"],
    ["recollect._engine.replay", "recollect._engine.reentrant"],
    ["recollect._engine.selective", "recollect._engine.inside"],
    ["recollect._engine.calls"],
    ["recollect._engine.groups", "recollect._engine.scope"],
    ["recollect._verification"],
    ["recollect._differences"],
    ["recollect._gathering"],
    ["recollect._guards", "recollect._restored", "recollect._ambient", "recollect._kept", "recollect._stores.chosen"],
    ["recollect._options"],
    ["recollect._stores.store", "recollect.policy"],
    ["recollect._stores.courses", "recollect._stores.flights", "recollect._stores.forms", "recollect._stores.disk"],
    ["recollect._stores.media", "recollect._stores.files"],
    ["recollect._stores.pool", "recollect._travel"],
    ["recollect._stores", "recollect._stores.links", "recollect._stores.ranges", "recollect._stores.statistics"],
    ["recollect._record", "recollect._generators", "recollect._known", "recollect._meters"],
    ["recollect._inputs", "recollect._verify", "recollect._digest"],
    ["recollect._shard"],
    ["recollect._sizes", "recollect._solver", "recollect._faults"],
    ["recollect._ties"],
    ["recollect._knapsack", "recollect._milp", "recollect._ranks"],
    ["recollect.schedules"],
    ["recollect._schedules.online"],
    ["recollect._schedules.schedule", "recollect._schedules.hrevolve", "recollect._schedules.rotor"],
    ["recollect._schedules.diagram"],
    ["recollect._schedules.simulator", "recollect._schedules.revolve"],
    ["recollect._schedules.chain"],
    ["recollect._schedules", "recollect._schedules.actions"],
    ["recollect._errors"],
    [
        "recollect._errors.arguments",
        "recollect._errors.chains",
        "recollect._errors.files",
        "recollect._errors.kept",
        "recollect._errors.modules",
        "recollect._errors.ranks",
        "recollect._errors.regions",
    ],
    ["recollect._errors.words"],
    ["recollect._errors.kinds"],
    [
        "recollect._steps",
        "recollect._optimizers",
        "recollect._patterns",
        "recollect._names",
        "recollect._meshes",
    ],
    ["recollect._problem", "recollect._shards", "recollect._failures"],
    ["recollect._torch"],
]
HEIGHT = {name: -depth for depth, layer in enumerate(LAYERS) for name in layer}


def name_of(file):
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def is_integration(name):
    return name.startswith("recollect.integrations")


def without_type_checking(tree):
    """The nodes of `tree` that run: what stands under `if TYPE_CHECKING` is for readers and checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from without_type_checking(other)
            continue
        yield node
        yield from without_type_checking(node)


def imports_of(name, source, modules):
    """The modules of recollect that a file imports, at any depth of its code."""
    is_package = name in modules and modules[name].name == "__init__.py"
    package = name if is_package else name.rpartition(".")[0]
    for node in without_type_checking(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "recollect")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            if base.split(".")[0] == "recollect":
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield full if full in modules else base


def upward_edges(name, source, modules):
    own = HEIGHT.get(name)
    for target in imports_of(name, source, modules):
        if is_integration(target):
            if not is_integration(name):
                yield f"{name} imports {target}: integrations are imported by their users only"
        elif is_integration(name):
            continue
        elif own is None or target not in HEIGHT or HEIGHT[target] >= own:
            yield f"{name} imports {target}"


def test_there_is_something_to_read():
    assert {"recollect", "recollect._torch", "recollect._engine.frame"} <= set(MODULES)


def test_the_map_shows_every_file_and_no_other():
    assert set(HEIGHT) == {name for name in MODULES if not is_integration(name)}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    assert list(upward_edges(name, MODULES[name].read_text(), MODULES)) == []


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("recollect._torch", "from recollect._errors import CheckpointError", True),
        ("recollect._engine.replay", "from recollect._engine.frame import Frame", True),
        ("recollect._engine.replay", "from recollect._engine import frame", True),
        ("recollect._engine.replay", "from .frame import Frame", True),
        ("recollect._engine.replay", "from . import frame", True),
        ("recollect._engine.replay", "def late():\n    import recollect._checkpoint", True),
        ("recollect._ambient", "import recollect", True),
        ("recollect._ambient", "from recollect import checkpoint", True),
        ("recollect._checkpoint", "import recollect.integrations.compile", True),
        ("recollect._engine.replay", "if TYPE_CHECKING:\n    from recollect._engine.frame import Frame", False),
        ("recollect._ambient", "import torch\nfrom recollect import _errors\nfrom recollect._torch import x", False),
        ("recollect._engine.frame", "from .replay import Replay\nfrom .. import _errors", False),
    ],
)
def test_the_reader_of_imports_tells_up_from_down(name, source, found):
    assert bool(list(upward_edges(name, source, MODULES))) is found


# --- Private names of torch ---

# Documented in torch's notes on autograd, in use everywhere, and the same since 0.4.
PUBLIC_ENOUGH = {"_version", "_base"}
# Private by spelling only: Python's own.
PYTHONS = {"_make", "_replace", "_asdict", "_fields", "_getframe"}


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_private_names():
    """Every underscored name that some file of recollect defines itself."""
    names = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).split(".")[-1])
    return {name for name in names if is_private(name)} | {name.rpartition(".")[2] for name in MODULES}


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_torch_names(source, own):
    """What a file takes of torch that torch calls private."""
    tree = ast.parse(source)
    from_torch = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    from_torch.add((alias.asname or alias.name).split(".")[0])
                    if any(map(is_private, alias.name.split("."))):
                        yield f"line {node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                from_torch.add(alias.asname or alias.name)
                full = f"{node.module}.{alias.name}"
                if any(map(is_private, full.split("."))):
                    yield f"line {node.lineno}: from {node.module} import {alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PUBLIC_ENOUGH | PYTHONS:
            root = node.value
            while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
                root = root.func if isinstance(root, ast.Call) else root.value
            # By its root it is torch's; or it is nobody's of ours, such as module._forward_hooks.
            if (isinstance(root, ast.Name) and root.id in from_torch) or node.attr not in own:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr")
            and isinstance(node.args[1], ast.Constant)
            and is_private(node.args[1].value)
            and node.args[1].value not in own | PUBLIC_ENOUGH | PYTHONS
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "recollect._torch"])
def test_private_names_of_torch_occur_in_one_file_only(name):
    assert list(private_torch_names(MODULES[name].read_text(), own_private_names())) == []


def test_that_file_has_them():
    assert len(list(private_torch_names(MODULES["recollect._torch"].read_text(), own_private_names()))) > 5


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._autograd", True),
        ("import torch\ntorch.nn.Module._call_impl", True),
        ("import torch.nn as nn\nnn.Module()._forward_hooks", True),
        ("from torch import autograd\nautograd._is_checkpoint_valid()", True),
        ("import torch._dynamo", True),
        ("from torch._C import _autograd", True),
        ("from torch.utils._python_dispatch import TorchDispatchMode", True),
        ("from torch.overrides import _get_current_function_mode_stack", True),
        ("module._forward_hooks", True),
        ("getattr(torch, '_C')", True),
        ("import torch\ntensor._version, tensor._base, torch.__version__", False),
        ("import sys\nsys._getframe(1)\npair._replace(a=1)\nself._own", False),
    ],
)
def test_the_reader_of_names_tells_private_from_public(source, found):
    assert bool(list(private_torch_names(source, {"_own"}))) is found


# --- What is loaded, and what is never called ---


def test_importing_the_package_loads_no_extra():
    program = (
        "import torch, sys\n"
        "before = set(sys.modules)\n"
        "import recollect, recollect.dropin\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'rich', 'typer', 'plotly', 'scipy', 'numpy', 'pandas', 'transformers', 'lightning'}))\n"
        "print(sorted(name for name in sys.modules if name.startswith('recollect.integrations')))\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'torch', 'recollect'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]", "[]"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoint_is_never_called(monkeypatch, reentrant):
    def refuse(*args, **kwargs):
        raise AssertionError("the engine is ours")

    for name, value in list(vars(stock).items()):
        ours = getattr(value, "__module__", None) == stock.__name__
        if ours and callable(value):
            if isinstance(value, type):
                for attribute in ("__init__", "__enter__", "forward", "backward"):
                    if attribute in vars(value):
                        monkeypatch.setattr(value, attribute, refuse)
            else:
                monkeypatch.setattr(stock, name, refuse)
    with pytest.raises(AssertionError, match="the engine is ours"):
        stock.checkpoint(torch.sin, leaf(3), use_reentrant=False)

    x = leaf(3)
    y = dropin.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=reentrant)
    dropin.checkpoint_sequential([torch.sin, torch.exp], 2, y, use_reentrant=reentrant).sum().backward()
    expected = torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)[0]
    assert torch.equal(x.grad, expected)

"""`remat`: a wrapper and decorator whose every call is a region."""

import contextlib
import copy
import functools
import inspect
import operator
import pickle
import subprocess
import sys

import pytest
import torch

import recollect
from recollect import remat
from tools import leaf

OPTIONS = {"determinism_check", "debug", "early_stop", "preserve_rng_state", "context_fn", "name", "policy", "inputs"}


def block(x, scale=2.0, *, shift=0.0):
    """Documented."""
    block.calls = getattr(block, "calls", 0) + 1
    return (x * scale).sin().exp() + shift


@remat
def decorated(x, scale=2.0):
    """Documented too."""
    return (x * scale).sin().exp()


@remat(early_stop=False, name="called")
def decorated_with_options(x):
    return x.sin().exp()


def assert_is_region(call, plain, *inputs):
    """`call` gives what `plain` gives, keeps nothing of what it computes, and replays in backward."""
    computed = []

    def noting(tensor):
        computed.append(tensor)
        return tensor

    inputs = inputs or (leaf(3),)
    with torch.autograd.graph.saved_tensors_hooks(noting, lambda tensor: tensor):
        y = call(*inputs)
    assert all(any(tensor is given for given in inputs) for tensor in computed), "hooks around it see its inputs only"
    expected = plain(*inputs)
    assert torch.equal(y, expected)
    got = torch.autograd.grad(y.sum(), inputs)
    assert all(map(torch.equal, got, torch.autograd.grad(expected.sum(), inputs)))


# --- What it wraps ---


@pytest.mark.parametrize(
    "wrapped", [remat(block), remat()(block), remat(early_stop=False)(block), remat(block, name="b")]
)
def test_functions(wrapped):
    assert_is_region(wrapped, block)
    assert wrapped.__name__ == "block"
    assert wrapped.__qualname__ == "block"
    assert wrapped.__doc__ == "Documented."
    assert wrapped.__module__ == __name__
    assert wrapped.__wrapped__ is block


def test_decorators():
    assert_is_region(decorated, decorated.__wrapped__)
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Documented too."
    assert_is_region(decorated_with_options, decorated_with_options.__wrapped__)


@pytest.mark.parametrize("run", [remat, remat(early_stop=False), remat(debug=True)])
def test_each_call_is_a_region_that_replays(run):
    calls = []

    @run
    def function(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    for _ in range(2):
        calls.clear()
        y = function(x)
        assert len(calls) == 1
        y.sum().backward()
        assert len(calls) == 2


def test_lambdas():
    function = lambda x: x.sin().exp()  # noqa: E731
    wrapped = remat(function)
    assert_is_region(wrapped, function)
    assert wrapped.__name__ == "<lambda>"
    assert wrapped.__wrapped__ is function


def test_partials():
    function = functools.partial(block, scale=3.0)
    wrapped = remat(function)
    assert_is_region(wrapped, function)
    assert wrapped.__wrapped__ is function
    assert isinstance(wrapped.__name__, str)
    assert wrapped.__name__ != "region"


@pytest.mark.parametrize("function", [torch.sin, torch.nn.functional.gelu, torch.Tensor.exp])
def test_builtins(function):
    wrapped = remat(function)
    assert_is_region(wrapped, function)
    assert wrapped.__name__ == function.__name__
    assert wrapped.__wrapped__ is function


def test_builtins_of_python():
    assert_is_region(remat(operator.mul), operator.mul, leaf(3), leaf(3, seed=1))


class Gate(torch.nn.Module):
    """A module."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x, *, scale=1.0):
        return (self.linear(x) * scale).sigmoid()

    @remat
    def decorated(self, x, scale=1.0):
        """A method."""
        return (self.linear(x) * scale).sigmoid()

    @remat(early_stop=False)
    def decorated_with_options(self, x):
        return self.linear(x).sigmoid()

    @staticmethod
    @remat
    def static(x):
        return x.sin().exp()

    @classmethod
    @remat
    def of_class(cls, x):
        assert cls is Gate
        return x.sin().exp()


def test_modules():
    module, x = Gate(), leaf(2, 3)
    wrapped = remat(module)
    assert_is_region(wrapped, module, x)
    assert wrapped.__wrapped__ is module
    assert wrapped.__name__ == "Gate"
    assert wrapped.__doc__ == "A module."
    assert not hasattr(wrapped, "linear"), "the state of the module stays where it is"
    wrapped(x, scale=2.0).sum().backward()
    got = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    module(x, scale=2.0).sum().backward()
    assert all(map(torch.equal, got, [parameter.grad for parameter in module.parameters()]))


def test_a_module_keeps_its_hooks():
    module, notes = Gate(), []
    module.register_forward_hook(lambda *_: notes.append("after"))
    remat(module, early_stop=False)(leaf(2, 3)).sum().backward()
    assert notes == ["after", "after"]


def test_methods_decorated_in_the_class_body():
    gate, x = Gate(), leaf(2, 3)
    assert_is_region(gate.decorated, gate, x)
    assert_is_region(gate.decorated_with_options, gate, x)
    assert gate.decorated.__name__ == "decorated"
    assert gate.decorated.__doc__ == "A method."
    assert gate.decorated.__self__ is gate
    assert Gate.decorated.__qualname__ == "Gate.decorated"
    assert_is_region(lambda x: gate.decorated(x, scale=2.0), lambda x: gate(x, scale=2.0), x)


def test_static_and_class_methods():
    for method in (Gate.static, Gate().static, Gate.of_class, Gate().of_class):
        assert_is_region(method, lambda x: x.sin().exp())


def test_bound_methods():
    gate, x = Gate(), leaf(2, 3)
    wrapped = remat(gate.forward)
    assert_is_region(wrapped, gate, x)
    assert wrapped.__name__ == "forward"


def test_callable_objects():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return (x * self.factor).sin().exp()

    assert_is_region(remat(Scale(2.0)), Scale(2.0))


def test_a_wrapper_can_be_wrapped():
    calls = []

    @remat
    @remat
    def function(x):
        calls.append(1)
        return x.sin().exp()

    x = leaf(3)
    function(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert len(calls) == 2, "the outer replay stops as soon as it has the input of the inner region"


def test_attributes_of_a_function_are_kept():
    def function(x):
        return x

    function.tag = "tag"
    assert remat(function).tag == "tag"


# --- Arguments of a call ---


def test_every_argument_goes_to_the_function():
    seen = []

    @remat
    def function(x, *args, **kwargs):
        seen.append((args, kwargs))
        return x.sin()

    given = {
        "debug": 1,
        "use_reentrant": 2,
        "context_fn": 3,
        "name": 4,
        "determinism_check": 5,
        "early_stop": 6,
        "preserve_rng_state": 7,
        "function": 8,
        "self": 9,
        "args": 10,
        "kwargs": 11,
        "options": 12,
        "policy": 13,
    }
    function(leaf(3), "a", "b", **given).sum().backward()
    assert seen == [(("a", "b"), given)] * 2


def test_options_with_the_names_of_arguments_do_not_meet():
    notes = []

    def context_fn():
        notes.append("called")
        return contextlib.nullcontext(), contextlib.nullcontext()

    @remat(context_fn=context_fn, name="outer", debug=True)
    def function(x, *, context_fn, name, debug):
        assert (context_fn, name, debug) == (1, 2, 3)
        return x.sin()

    function(leaf(3), context_fn=1, name=2, debug=3).sum().backward()
    assert notes == ["called"]


def test_context_fn_is_called_once_per_call():
    notes = []

    def context_fn():
        notes.append("called")
        return contextlib.nullcontext(), contextlib.nullcontext()

    function = remat(block, context_fn=context_fn)
    assert notes == []
    x = leaf(3)
    for count in (1, 2):
        function(x).sum().backward()
        assert len(notes) == count


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(early_stop):
    ended = []

    @remat(early_stop=early_stop)
    def function(x):
        y = x.sin()
        ended.append(True)
        return y

    function(leaf(3)).sum().backward()
    assert len(ended) == (1 if early_stop else 2)


@pytest.mark.parametrize("preserve", [True, False])
def test_preserve_rng_state(preserve):
    noises = []

    @remat(preserve_rng_state=preserve, determinism_check="none")
    def function(x):
        noises.append(torch.rand(8))
        return (x * noises[-1]).sin()

    function(leaf(8)).sum().backward()
    assert torch.equal(noises[0], noises[1]) is preserve


def changes_shape():
    calls = []

    def function(x):
        calls.append(1)
        return (x if len(calls) == 1 else x[:1]).sin()

    return function


def test_determinism_check():
    x = leaf(3)
    y = remat(changes_shape(), determinism_check="none")(x)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach()[:1].cos().expand(3))
    y = remat(changes_shape())(x)
    with pytest.raises(recollect.CheckpointError, match="different metadata"):
        y.sum().backward()


def test_errors_show_the_name():
    y = remat(changes_shape(), name="the third block")(leaf(3))
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    message = str(info.value)
    assert "the third block" in message
    assert "changes_shape" in message
    assert __file__ in message

    y = remat(changes_shape())(leaf(3))
    with pytest.raises(recollect.CheckpointError) as info:
        y.sum().backward()
    assert "the third block" not in str(info.value)


def test_without_grad_it_runs_plainly():
    with torch.no_grad():
        assert torch.equal(decorated(leaf(3)), decorated.__wrapped__(leaf(3)))


# --- Introspection and pickling ---


def test_signatures_follow_the_function():
    assert inspect.signature(remat(block)) == inspect.signature(block)
    assert str(inspect.signature(decorated)) == "(x, scale=2.0)"
    assert inspect.unwrap(remat(remat(block))) is block
    assert list(inspect.signature(Gate().decorated).parameters) == ["x", "scale"]
    assert next(iter(inspect.signature(remat(functools.partial(block, scale=1.0))).parameters)) == "x"


def test_its_own_signature_names_its_options():
    parameters = inspect.signature(remat).parameters
    keywords = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert keywords == OPTIONS


def test_a_decorated_function_of_a_module_can_be_pickled(tmp_path):
    (tmp_path / "model.py").write_text(
        "import recollect\n"
        "@recollect.remat(early_stop=False)\n"
        "def block(x):\n"
        "    return x.sin().exp()\n"
        "class Model:\n"
        "    @recollect.remat\n"
        "    def forward(self, x):\n"
        "        return x.sin().exp()\n"
    )
    program = (
        "import pickle, torch, model\n"
        "assert pickle.loads(pickle.dumps(model.block)) is model.block\n"
        "bound = pickle.loads(pickle.dumps(model.Model().forward))\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "bound(x).sum().backward()\n"
        "assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_with_decorated_methods_can_be_pickled():
    pytest.importorskip(__name__)  # pytest may have loaded this file under a name that cannot be imported
    gate, x = Gate(), leaf(2, 3)
    twin = pickle.loads(pickle.dumps(gate))
    assert torch.equal(twin.decorated(x), gate.decorated(x))


class HoldsAWrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.run = recollect.remat(self.linear, name="linear")

    def forward(self, x):
        return self.run(x).exp()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_model_that_holds_a_wrapper_uses_its_own_weights(how):
    model, x = HoldsAWrapper(), leaf(2, 3)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert twin.run.__wrapped__ is twin.linear
    twin(x).sum().backward()
    assert model.linear.weight.grad is None
    assert twin.linear.weight.grad is not None
    assert [name for name, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]

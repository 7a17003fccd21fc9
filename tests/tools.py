"""What several test files need: count operators, track bytes, look at the ambient state, compare bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

IN_PLACE = "modified by an inplace operation"
FREED = "Trying to backward through the graph a second time"


class Once:
    """True at the first call, False at later ones: a function that takes another path in its replay."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls == 1


def leaf(*shape, dtype=torch.float32, seed=0):
    """A leaf that needs grad, with values that differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def patience(seconds):
    """A limit in seconds for something that takes half as long on a quiet machine; longer on a slow or busy one.

    To find what takes another order of time than it should, not to measure it: that is for the benchmarks.
    """
    slowest = 0.0
    for _ in range(3):
        begin = time.process_time()
        sum([number * number for number in range(300_000)])
        slowest = max(slowest, time.process_time() - begin)
    return seconds * max(1.0, slowest / 0.015)


class CountOperators(TorchDispatchMode):
    """Every operator that runs under it, in order: `names`, and how often: `counts["sin"]`."""

    def __init__(self):
        super().__init__()
        self.names = []

    @property
    def counts(self):
        return Counter(self.names)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made under it and that are still alive, each storage once.

    `steps` holds, for every operator, its name and the bytes alive right after it.
    """

    def __init__(self):
        super().__init__()
        self._storages = {}
        self.steps = []

    @property
    def now(self):
        dead = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in dead:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())

    @property
    def peak(self):
        return max(bytes_alive for _, bytes_alive in self.steps)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {key_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage, key = tensor.untyped_storage(), key_of(tensor)
            known = self._storages.get(key)
            if key not in given and (known is None or known[0].expired()):
                self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
        self.steps.append((func.overloadpacket.__name__, self.now))
        return result


def key_of(tensor):
    return tensor.untyped_storage()._cdata


def tensors_in(value):
    return [part for part in tree_leaves(value) if isinstance(part, torch.Tensor) and part.layout == torch.strided]


def hooks_in_force():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def ambient_state():
    """Everything thread-wide that a region touches for a while, as a dict that compares."""
    return {
        "saved-tensor hooks": hooks_in_force(),
        "hooks enabled": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": [type(mode) for mode in _get_current_dispatch_mode_stack()],
        "function modes": torch._C._len_torch_function_stack(),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "graph task": torch._C._current_graph_task_id(),
    }


def in_backward():
    return torch._C._current_graph_task_id() >= 0


def assert_equal(got, expected):
    """Same structure, same types of leaves, tensors equal bit for bit and of one dtype, layout and need of grad."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert type(got) is type(expected)
        about = [(tensor.dtype, tensor.layout, tensor.requires_grad) for tensor in (got, expected)]
        assert about[0] == about[1]
        got, expected = got.detach(), expected.detach()
        if expected.is_sparse:
            got, expected = got.to_dense(), expected.to_dense()
        if expected.is_nested:
            for one, other in zip(got.unbind(), expected.unbind(), strict=True):
                assert_equal(one, other)
        elif expected.is_meta:
            assert (got.shape, got.device) == (expected.shape, expected.device)
        else:
            assert got.shape == expected.shape
            assert torch.equal(got, expected), f"\n{got}\nis not\n{expected}"
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, dict):
        assert type(got) is type(expected)
        assert list(got) == list(expected)
        assert_equal(list(got.values()), list(expected.values()))
    elif dataclasses.is_dataclass(expected):
        assert type(got) is type(expected)
        assert_equal(vars(got), vars(expected))
    else:
        assert got == expected


@contextlib.contextmanager
def garbage_collector_off():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def engine_objects():
    """The frames, slots, inputs and replays that are alive, found without the library's help."""
    return [
        value
        for value in gc.get_objects()
        if type(value).__module__ in ("recollect._engine.frame", "recollect._engine.replay", "recollect._inputs")
        and type(value).__name__ != "Options"
    ]


class Identity(torch.autograd.Function):
    """The identity, which saves the other tensors it is given, so that tests can tell which objects come back.

    `came_back` gets a list of the saved tensors at each backward.
    """

    @staticmethod
    def forward(ctx, x, came_back, *saved):
        ctx.save_for_backward(*saved)
        ctx.came_back = came_back
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        if ctx.came_back is not None:
            ctx.came_back.append(saved)
        return (grad, None, *(None for _ in saved))

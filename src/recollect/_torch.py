"""The only file that touches private names of torch.

Every name was there in torch 2.11, 2.13 and 2.15, on which this project's tests ran, unless its comment says
otherwise; a missing one is an AttributeError when recollect is imported. Nothing here holds state of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import operator
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import torch.nn.modules.module as _modules
import torch.utils.checkpoint as _stock
from torch._C._dynamo import eval_frame as _frames
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_F = TypeVar("_F", bound=Callable[..., Any])
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_autograd = torch._C._autograd

# Saved-tensor hooks of this thread, the innermost last. The public `saved_tensors_hooks` calls them and
# costs five times as much.
push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None]
push_hooks = _autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# The innermost saved-tensor hooks of this thread, or None.
top_hooks: Callable[[], Hooks | None] = functools.partial(_autograd._top_saved_tensors_default_hooks, False)
# The same, also if they are out of action because a compiler traces.
pushed_hooks: Callable[[], Hooks | None] = functools.partial(_autograd._top_saved_tensors_default_hooks, True)


# Which backward call runs in this thread, -1 outside of any. Autograd never uses a number twice.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# The node whose backward runs in this thread, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def reads_once(node: Any) -> bool:
    """Whether a node is one of torch's own, which read each tensor that they saved once; a Function's may read more."""
    return node is not None and not isinstance(node, torch.autograd.function.FunctionCtx)


def gradients_of(node: Any) -> tuple[set[int], set[int]]:
    """Which gradients a node gives, by number, and which of them the running backward is after."""
    every = {number: after for number, (after, _) in enumerate(node.next_functions) if after is not None}
    return set(every), {number for number, after in every.items() if will_run(after)}


def will_run(node: Any) -> bool:
    """Whether the running backward comes to a node, or gives a gradient that would be summed up in it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # It refuses to answer for a leaf that `torch.autograd.grad` is asked about, and for no other one.
        if "leaf node" not in str(error):
            raise
        return True


# Autograd numbers its nodes as it makes them, so an unmoved number means that the same operator still runs.
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

# The number of a node: later ones of a thread have larger ones, the next will have `sequence_number()`, and that of a
# leaf's is larger than all others.
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
# `torch.set_grad_enabled` without the cost of a context manager.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# How many torch-function modes this thread has: without any, no default device can be in force.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
# Whether a subclass's __torch_function__ and torch-function modes are asked in this thread.
torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
TORCH_FUNCTION_ENABLED = torch._C._TorchFunctionState.ENABLED  # type: ignore[attr-defined]
torch_function_state: Callable[[], Any] = torch._C._get_torch_function_state  # type: ignore[attr-defined]
set_torch_function_state: Callable[[Any], None] = torch._C._set_torch_function_state  # type: ignore[attr-defined]
# Hides a tensor subclass's __torch_function__.
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass

# Of tensors whose attributes can be read without a `__torch_function__` being asked.
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none is of a subclass, whose `__torch_function__` would be asked even when an attribute is read."""
    return PLAIN_TYPES.issuperset(map(type, tensors))


# Have the running backward call something at its end; a backward that fails drops it without a call.
at_end_of_pass: Callable[[Callable[[], None]], None]
at_end_of_pass = torch.autograd.Variable._execution_engine.queue_callback


# False under `torch.autograd.grad` and `backward(inputs=...)`.
is_plain_backward: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid


def backward_inside_backward(tensors: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor | None, ...]) -> None:
    """`torch.autograd.backward` for gradients that autograd itself has made, without its checks of them."""
    if are_plain(tensors):
        torch.autograd.Variable._execution_engine.run_backward(
            tensors, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(tensors, grads)


def gradients(
    tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` inside a backward, without its checks of what autograd itself has made; None if unused."""
    found: tuple[torch.Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
        tuple(tensors), tuple(grads), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


# Autograd's nodes for leaves; each has its `variable`.
LEAF_NODE: Any = type(torch.ones(1, requires_grad=True).view(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def is_needed(node: Any) -> bool:
    """Whether the running backward wants what a node is given, or what it leads to."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that `torch.autograd.grad` asks for, and that will not run
        return True


def hooks_on(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The hooks that `register_hook` has put on a tensor: the very dict that autograd reads, None without any."""
    return tensor._backward_hooks or None


# The group of backward calls that is in force. It travels with torch's own thread-local state, so that autograd's
# device threads see it. PyTorch's own groups are kept here too, so ours and theirs know of each other.
current_group: Callable[[], Any] = torch._C._get_graph_exec_group
set_current_group: Callable[[Any], None] = torch._C._set_graph_exec_group


def default_device() -> torch.device | None:
    """The device that `torch.device(...)` as a context or `torch.set_default_device` put in force in this thread.

    `torch.get_default_device` is not enough: it cannot tell "none" from "cpu" and makes a tensor to find an index.
    """
    if not function_mode_count():
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


# Which kernels torch may choose from: those of attention and their order, cuDNN's, oneDNN's. They hold for the whole
# process. The public functions are Python around these, or contexts.
_C: Any = torch._C
_READ_FLASH, _PUT_FLASH = _C._get_flash_sdp_enabled, _C._set_sdp_use_flash
_READ_MATH, _PUT_MATH = _C._get_math_sdp_enabled, _C._set_sdp_use_math
_READ_EFFICIENT, _PUT_EFFICIENT = _C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient
_READ_CUDNN_SDP, _PUT_CUDNN_SDP = _C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn
_READ_OTHER_SDP, _PUT_OTHER_SDP = _C._get_overrideable_sdp_enabled, _C._set_sdp_use_overrideable
_READ_ORDER, _PUT_ORDER = _C._get_sdp_priority_order, _C._set_sdp_priority_order
_READ_CUDNN, _PUT_CUDNN = _C._get_cudnn_enabled, _C._set_cudnn_enabled
_READ_STEADY, _PUT_STEADY = _C._get_cudnn_deterministic, _C._set_cudnn_deterministic
_READ_ONEDNN, _PUT_ONEDNN = _C._get_mkldnn_enabled, _C._set_mkldnn_enabled


def kernel_switches() -> list[Any]:
    """Which kernels may be chosen. Written out: it is asked twice for every region."""
    return [
        _READ_FLASH(),
        _READ_MATH(),
        _READ_EFFICIENT(),
        _READ_CUDNN_SDP(),
        _READ_OTHER_SDP(),
        _READ_ORDER(),
        _READ_CUDNN(),
        _READ_STEADY(),
        _READ_ONEDNN(),
    ]


def put_kernel_switches(switches: Sequence[Any]) -> None:
    """Let those kernels be chosen that could be when `kernel_switches` gave this."""
    puts: tuple[Callable[[Any], None], ...] = (
        _PUT_FLASH,
        _PUT_MATH,
        _PUT_EFFICIENT,
        _PUT_CUDNN_SDP,
        _PUT_OTHER_SDP,
        _PUT_ORDER,
        _PUT_CUDNN,
        _PUT_STEADY,
        _PUT_ONEDNN,
    )
    for put, value in zip(puts, switches, strict=True):
        put(value)


def accelerator_module(device_type: str) -> Any:
    """`torch.cuda` for "cuda" and so on; None for a type without a module of its own (cpu counts as without)."""
    if device_type in ("cpu", "meta"):
        return None
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:
        return None


def is_initialised(module: Any) -> bool:
    """Whether an accelerator has been set up in this process.

    `is_initialized` is public where it exists; `_initialized` is the older spelling. A module with neither
    (torch.mps) needs no setting up.
    """
    asked = getattr(module, "is_initialized", None)
    if asked is not None:
        return bool(asked())
    return bool(getattr(module, "_initialized", True))


def nested_sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What stands for the shape of a nested tensor: a strided one has none of its own.

    A jagged shape names its ragged dimension by a number that is new for every construction: a tensor that was built
    anew in a replay does not fit the graph of the forward, and shows here.
    """
    if type(tensor) is not torch.Tensor:
        return tuple(tensor.shape)
    with torch._C._DisableTorchDispatch():  # dispatch modes shall see the user's operators only
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))


def is_stock_noop_context_fn(function: object) -> bool:
    """Programs pass torch's own default explicitly; it means "no contexts" here too."""
    return function is STOCK["noop_context_fn"]


# --- A tensor's place in autograd ---

# A saved tensor as autograd's own nodes have them. Not in 2.11: there a node is made that saves the tensor.
_make_saved_tensor = getattr(_autograd, "_make_saved_tensor", None)


def is_view_without_grad(tensor: torch.Tensor) -> bool:
    """Whether it is a view, made without grad, of something that needs grad.

    Such a view says that it needs grad, as a leaf does, and no gradient goes there: operators pass it over.
    """
    if tensor._base is None or not tensor.requires_grad or not tensor.is_leaf:
        return False
    # `requires_grad_()` makes a true leaf of it. Neither modes nor subclasses shall see how that is found out.
    with torch.enable_grad(), without_torch_function(), torch._C._DisableTorchDispatch():
        node: Any = torch.ops.aten.alias.default(tensor).grad_fn
    return node.next_functions[0][0] is None


def view_without_grad(values: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory of which `is_view_without_grad` is true."""
    with torch.no_grad(), without_torch_function():
        view: torch.Tensor = torch.ops.aten.alias.default(values.detach().requires_grad_())
    return view


class _SavingNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.clone()


class PlaceInGraph:
    """Remembers where a tensor stands in autograd's graph, without its values, and puts other values there."""

    __slots__ = ("_unpack", "_values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values: list[torch.Tensor] = []
        if tensor._base is not None and is_view_without_grad(tensor):
            given = self._values
            self._unpack = lambda: view_without_grad(given.pop())
            return
        push_hooks(lambda _: None, lambda _, values=self._values: values.pop())  # type: ignore[misc]
        try:
            make = _make_saved_tensor
            self._unpack = make(tensor, False).unpack if make is not None else self._save_in_a_node(tensor)
        finally:
            pop_hooks()

    def _save_in_a_node(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        values = self._values
        if tensor.is_nested:  # autograd Functions refuse it: without its place, a leaf that needs grad must do
            return lambda: values.pop().detach().requires_grad_()
        # Dispatch modes shall not see the node being made.
        with torch.enable_grad(), torch._C._DisableTorchDispatch():
            result: Any = _SavingNode.apply(torch.empty(0, requires_grad=True), tensor)
        # The node keeps what it saved for as long as its result lives.
        return lambda: result.grad_fn.saved_tensors[0]

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor with these values at that place."""
        self._values.append(values)
        tensor: torch.Tensor = self._unpack()
        kind = type(values)
        if kind not in PLAIN_TYPES and type(tensor) is torch.Tensor:
            # Autograd gives back a plain tensor: its class would be lost, and with it what its operators do.
            tensor.__class__ = kind
            vars(tensor).update(vars(values))
        return tensor


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape read the same memory in the same way; False where there is none to compare."""
    try:
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    except RuntimeError:  # a sparse tensor, a wrapper around others
        return False


def pop_hooks_of(pack: object) -> None:
    """Pop the innermost hooks if they are those of `pack`: after an interrupt they may not have been pushed."""
    hooks = pushed_hooks()
    if hooks is not None and hooks[0] is pack:
        pop_hooks()


def remove_hooks_of(pack: object) -> None:
    """Take the hooks of `pack` off wherever they are in the stack; those above them stay."""
    above: list[Hooks] = []
    try:
        while (hooks := pushed_hooks()) is not None and hooks[0] is not pack:
            above.append(hooks)
            pop_hooks()
        if hooks is not None:
            pop_hooks()
    finally:
        for hooks in reversed(above):
            push_hooks(*hooks)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; one made in inference mode does not count and stays at 0."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def may_be_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a packed tensor without grad may be memory that its operator is yet to write.

    Of all operators of torch one packs what its kernel then writes and its backward reads: `rrelu`, its noise, before
    its input and of the same shape and dtype. (Found from the schemas and the derivative formulas, and by running the
    operators: the tests say more.) The write does not show in the version, and the noise may be anybody's.
    """
    return tensor.is_floating_point()


def packs_what_is_written(node: Any, slot: object) -> bool:
    """Whether it is known that `node` saved what stands in `slot`, and that it is not `rrelu`."""
    if node is None or node.name() == "RreluWithNoiseBackward0":
        return False
    return any(
        getattr(getattr(node, name, None), "data", None) is slot for name in dir(node) if name.startswith("_raw_saved_")
    )


# --- Modules that run, and those that a stop cuts short ---

_FUNCTIONAL_CALL = torch.func.functional_call.__code__
_STATELESS_CALL = torch.nn.utils.stateless.functional_call.__code__


def in_functional_call() -> bool:
    """Whether somewhere up the stack `torch.func.functional_call` has put other tensors into a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code  # compared by identity: the compiler's cannot be hashed
        if code is _FUNCTIONAL_CALL or code is _STATELESS_CALL:
            return True
        frame = frame.f_back
    return False


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of a module itself, to look at and to put others in their places."""
    return module._parameters, module._buffers


def identities_of_own_tensors(modules: Iterable[torch.nn.Module]) -> list[int]:
    """The identities of the parameters and buffers that some modules have themselves."""
    chained = itertools.chain.from_iterable
    there = filter(None, chained(map(_own_tensors, modules)))  # most have no buffers, and many no parameters
    return list(map(id, chained(map(_values, there))))


_own_tensors = operator.attrgetter("_parameters", "_buffers")
_values = operator.methodcaller("values")


def parameters_at(homes: Iterable[tuple[Callable[[], torch.nn.Module | None], str]]) -> list[torch.Tensor | None]:
    """What `parameter_of` gives for each module and name; None where the module is gone."""
    modules = [(module(), name) for module, name in homes]
    return [
        None if module is None or name not in module._parameters else module._parameters[name]
        for module, name in modules
    ]


def parameter_of(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    """The parameter that a module has under a name, and nothing that it computes: `getattr` runs a parametrization."""
    own = module._parameters  # of a scripted module it is no dict, and has no `get`
    return own[name] if name in own else None  # noqa: SIM401


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` gives (2.11 to 2.15: an attribute that no other module has)."""
    return hasattr(module, "_orig_mod")


def remove_forward_hooks(module: torch.nn.Module, kind: type) -> None:
    """Take forward hooks of a kind off a module: a copy of a module has hooks without their handles."""
    for key in [key for key, one in module._forward_hooks.items() if isinstance(one, kind)]:
        del module._forward_hooks[key]


_CALL_IMPL = torch.nn.Module._call_impl.__code__


def called_module(frame: FrameType) -> torch.nn.Module | None:
    """The module whose call a Python frame is, if it is one."""
    if frame.f_code is not _CALL_IMPL:
        return None
    with locals_of(frame) as values:
        module: torch.nn.Module | None = values.get("self")
    return module


def modules_being_called(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """The modules whose calls a Python frame is in, from the inside out."""
    while frame is not None:
        if frame.f_code is _CALL_IMPL:
            module = called_module(frame)
            if module is not None:
                yield module
        frame = frame.f_back


def call_of_hook(frame: FrameType) -> FrameType:
    """The Python frame of the module's call in which a hook was called by `frame`; itself if that is no module's."""
    outer = frame if frame.f_code is _CALL_IMPL or frame.f_back is None else frame.f_back
    return outer if outer.f_code is _CALL_IMPL else frame


def is_failed_call(hook_caller: FrameType) -> bool:
    """Whether a hook after the forward is called because something failed.

    Such calls stand in `Module._call_impl` itself, the others in a function inside of it.
    """
    return hook_caller.f_code is _CALL_IMPL


def replace_forward(call: FrameType, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Let a running call of a module run another forward than it was about to; False where that cannot be done.

    `Module._call_impl` looks the forward up before it calls any hook, and keeps it in `forward_call`, a variable that
    it shares with its inner function `inner`: the same in 2.11, 2.12, 2.13 and 2.15.
    """
    with locals_of(call) as values:
        inner: Any = values.get("inner") if call.f_code is _CALL_IMPL else None
    shared: tuple[str, ...] = () if inner is None else inner.__code__.co_freevars
    if "forward_call" not in shared:
        return False
    cell = inner.__closure__[shared.index("forward_call")]
    cell.cell_contents = replace(cell.cell_contents)
    return True


@contextlib.contextmanager
def locals_of(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    """The local variables of a function that runs.

    Up to Python 3.12 they are a copy that the frame holds on to, and would keep alive what the function lets go of.
    """
    values = frame.f_locals
    try:
        yield values
    finally:
        if type(values) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            values.clear()


def run_cut_short_hooks(traceback: TracebackType | None) -> None:
    """Run the `always_call` forward hooks of the modules whose calls `traceback` left, innermost first.

    `Module.__call__` does it by itself for an Exception only. Reads the locals of `Module._call_impl`, the
    same in 2.11, 2.13 and 2.15: `self`, `args`, `kwargs`, `result` and `called_always_called_hooks`.
    Where a name is missing the module is passed over.
    """
    calls = []
    while traceback is not None:
        if traceback.tb_frame.f_code is _CALL_IMPL and traceback.tb_lasti not in _WITHOUT_HOOKS:
            calls.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    for frame, place in reversed(calls):
        values = frame.f_locals
        done = values.get("called_always_called_hooks")
        if done is None:
            _WITHOUT_HOOKS.add(place)
            continue
        module, args, kwargs, result = values["self"], values["args"], values["kwargs"], values.get("result")
        hooks = [
            (hook, False)
            for key, hook in _modules._global_forward_hooks.items()
            if key in _modules._global_forward_hooks_always_called and key not in done
        ] + [
            (hook, key in module._forward_hooks_with_kwargs)
            for key, hook in module._forward_hooks.items()
            if key in module._forward_hooks_always_called and key not in done
        ]
        for hook, with_kwargs in hooks:
            try:
                changed = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
            except Exception as error:
                warnings.warn(
                    f"an always_call forward hook of {type(module).__name__} raised {error!r} "
                    "while a replay was being stopped; the replay is complete and goes on",
                    stacklevel=2,
                )
            else:
                result = result if changed is None else changed


# Places in `Module._call_impl` where modules without hooks are called: the locals of a frame there need not be read.
_WITHOUT_HOOKS: set[int] = set()


# --- Where user code is ---

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__) if file is not None
)


@functools.cache
def is_library_file(filename: str) -> bool:
    """Whether a Python file belongs to torch or to recollect rather than to the user."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen")


def level_of_user_code() -> int:
    """The `stacklevel` with which the caller's warning points at the line of user code that led to it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors over the same memory share; a tensor without any gets one of its own."""
    try:
        memory: int = tensor.untyped_storage()._cdata
        return memory
    except (RuntimeError, NotImplementedError):  # a sparse tensor, a wrapper around others
        return id(tensor)


# Whether a storage is still alive, without keeping it so. As long as it is held, the storage's identity is not given to
# another. The class is public, what it is made of is not.
StorageReference = torch.multiprocessing.reductions.StorageWeakRef


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the bit turned over that says whether the values are to be read as their negatives."""
    return torch._neg_view(tensor)


# --- Operators ---


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that higher-order operators reach too, and that costs no more than it has to.

    Torch wraps a mode's handler so that the compiler does not look into it, which doubles its price, unless the class
    says that it does not want that (2.13; 2.11 has neither).
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


_ADINPLACE = torch._C.DispatchKey.ADInplaceOrView
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded


def detach_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` inside a dispatch mode, with a version counter that the two share.

    There the dispatch key that shares it is switched off, and a change in place would go unnoticed.
    """
    if not _is_excluded(_ADINPLACE):
        return tensor.detach()
    _set_excluded(_ADINPLACE, False)
    try:
        return tensor.detach()
    finally:
        _set_excluded(_ADINPLACE, True)


_PYTHON_KEYS = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)
# How many dispatch modes of the user's or ours are in force in this thread.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack


def unseen(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """A saved-tensor hook whose operators no dispatch mode is asked about, where a mode could but look on.

    What `_DisableTorchDispatch` does, at a fifth of the price. A subclass that is made of dispatch needs it.
    """
    python, snapshot = _PYTHON_KEYS

    def hidden(tensor: torch.Tensor) -> Any:
        if type(tensor) not in PLAIN_TYPES or _is_excluded(python):
            return pack(tensor)
        _set_excluded(python, True)
        _set_excluded(snapshot, True)
        try:
            return pack(tensor)
        finally:
            _set_excluded(snapshot, False)
            _set_excluded(python, False)

    return hidden


def as_inner_result(value: torch.Tensor, history: Sequence[torch.Tensor], message: str) -> torch.Tensor:
    """The same memory as the result of an operator on `history`; a backward through it raises `message`.

    `DelayedError` is what `once_differentiable` is made of.
    """
    if type(value) is not torch.Tensor:  # it would lose its type
        return value.detach().requires_grad_().clone()
    sources = [tensor for tensor in history if tensor.requires_grad]
    result: torch.Tensor
    if sources:
        result = _delayed_error(message, 1 + len(sources))(value, *sources)[0]
    else:
        result = _delayed_error(message, 1)(value.detach().requires_grad_())
    return result


@functools.cache
def _delayed_error(message: str, inputs: int) -> Any:
    return torch._C._functions.DelayedError(message, inputs)


class _FastPaths:
    """Attention modules take a path of their own where no graph is made, and it rounds in other places.

    The switch is one for all threads: it is back where it was when the last one that needs it off is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                torch.backends.mha.set_fastpath_enabled(self._before)


no_fast_paths = _FastPaths()


def in_dual_level() -> bool:
    """Whether forward-mode AD is going on: then tensors have tangents, which are not kept."""
    return torch.autograd.forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether tensors are more than they can be kept as: with tangents in forward-mode AD, with another dimension in
    `vmap`, outside of which they are of no use.
    """
    return in_dual_level() or torch._C._functorch.peek_interpreter_stack() is not None


def function_nodes(tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    """The autograd Functions in the graph of `tensors`, by autograd's number: `Scale.apply`."""
    found: dict[int, str] = {}
    waiting = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[node._sequence_nr()] = f"{type(node).__name__.removesuffix('Backward')}.apply"
        waiting += [following for following, _ in node.next_functions]
    return found


def graph_is_kept() -> bool:
    """Whether the running backward retains the graph; True outside of any."""
    return graph_task_id() < 0 or bool(_autograd._get_current_graph_task_keep_graph())


def is_operator(value: object) -> bool:
    """Whether a dispatch mode could be handed it."""
    return isinstance(value, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def direct_call(operator: Any) -> Callable[..., Any]:
    """What runs an operator inside of a dispatch mode: what its `__call__` calls, where that is all that it does.

    `OpOverload.__call__` is a Python function around `_op` in 2.11 to 2.15; without it, or for what is called in
    another way (a higher-order operator, one on script objects), the operator itself.
    """
    is_usual = type(operator) is torch._ops.OpOverload
    call: Callable[..., Any] = getattr(operator, "_op", operator) if is_usual else operator
    return call


def is_packet(value: object) -> bool:
    """Whether it stands for all overloads of an operator."""
    return isinstance(value, torch._ops.OpOverloadPacket)


def overloads_of(value: Any) -> list[Any]:
    """The operators that a user means: itself, or all overloads of a packet; empty if it is neither."""
    if is_operator(value):
        return [value]
    if is_packet(value):
        return [getattr(value, name) for name in value.overloads()]
    return []


def wait_for(arguments: Iterable[Any]) -> None:
    """Wait for the collectives among an operator's arguments, where the operator is not run that would have."""
    for value in arguments:
        wait = getattr(value, "trigger_wait", None)  # of AsyncCollectiveTensor
        if wait is not None:
            wait()


def operator_from_name(name: str) -> Any:
    """The operator whose name `str` gives: "aten.mm.default", "flex_attention"."""
    space, _, rest = name.rpartition(".")[0].partition(".") if "." in name else ("higher_order", "", name)
    found = getattr(getattr(torch.ops, space), rest)
    return getattr(found, name.rpartition(".")[2]) if "." in name else found


def is_default_generator(generator: Any) -> bool:
    """Whether it is one that operators draw from when they are given none. Inside an operator it is another object."""
    defaults: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return generator._cdata in [one._cdata for one in defaults]


def packet_of(operator: Any) -> Any:
    """The packet of an overload; a higher-order operator stands for itself."""
    return getattr(operator, "overloadpacket", operator)


def find_operators(names: Iterable[str]) -> list[Any]:
    """The operators "namespace.name" that exist; "namespace.*" means those that are registered for it."""
    found = []
    for name in names:
        space, _, packet = name.partition(".")
        if packet == "*":
            schemas = torch._C._jit_get_all_schemas()
            packets = sorted({schema.name.split("::")[1] for schema in schemas if schema.name.startswith(f"{space}::")})
        else:
            packets = [packet]
        for one in packets:
            found += overloads_of(getattr(getattr(torch.ops, space), one, None))
    return found


def operator_name(operator: Any) -> str:
    """`aten.mm`, without the overload."""
    return str(getattr(operator, "overloadpacket", operator)).removeprefix("higher_order.")


def is_pointwise(operator: Any) -> bool:
    """Whether an operator works element by element or only moves data."""
    return torch.Tag.pointwise in getattr(operator, "tags", ()) or operator in _MOVES


_MOVES = frozenset(find_operators(("aten._to_copy", "aten.clone", "aten.copy", "aten.lift_fresh_copy")))


def makes_from_nothing(operator: Any) -> bool:
    """Whether an operator fills memory without computing anything from a tensor: `zeros`, `new_empty`, `rand_like`."""
    name = operator_name(operator).rpartition(".")[2]
    if name.startswith("new_") or name.endswith("_like"):
        return True
    schema = getattr(operator, "_schema", None)
    return schema is not None and not any("Tensor" in str(argument.type) for argument in schema.arguments)


def changes_arguments(operator: Any) -> bool:
    """Whether an operator writes to a tensor that it is given."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or _hides_its_writes(operator))


def _hides_its_writes(operator: Any) -> bool:
    """The collectives of `torch.distributed` write to their arguments, and their schemas do not say so."""
    return getattr(operator, "namespace", "") == "c10d"


def only_reshapes(operator: Any) -> bool:
    """Whether an operator changes the shape of its argument in place, and not its values."""
    return torch.Tag.inplace_view in getattr(operator, "tags", ())


def written_arguments(operator: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    schema = getattr(operator, "_schema", None)
    return [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments if schema is not None else ())
        if _hides_its_writes(operator) or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def has_statistics(operator: Any) -> bool:
    """Whether an operator is a batch norm that may write to running statistics without its schema saying so."""
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.is_mutable or not any(one.name == "running_mean" for one in schema.arguments):
        return False
    return not any(part in schema.name for part in ("backward", "no_update", "no_training", "functional"))


def running_statistics(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, str]]:
    """Positions and names of the arguments that a batch norm writes to without its schema saying so."""
    if not has_statistics(operator):
        return []
    found = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in ("running_mean", "running_var"):
            found.append((position, argument.name))
        elif argument.name in ("training", "train", "use_input_stats"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, False)
            if not given:
                return []
    return found


def keeps_running_statistics(module: torch.nn.Module) -> bool:
    """Whether it is a batch norm, or an instance norm, of torch's. 2.11 to 2.15."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


def gives_views(operator: Any) -> bool:
    """Whether an operator's result is a view of its argument, said or unsaid."""
    schema = getattr(operator, "_schema", None)
    says_so = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return says_so or operator in _UNSAID_VIEWS


def decides_nothing_new(operator: Any) -> bool:
    """Whether keeping an operator's output keeps memory that belongs to its arguments."""
    return gives_views(operator) or changes_arguments(operator)


def may_draw(operator: Any) -> bool:
    """Whether an operator may draw random numbers; of a custom one, which need not say, that is assumed."""
    tags = getattr(operator, "tags", None)
    if tags is None:  # a higher-order operator, which runs others
        return True
    return torch.Tag.nondeterministic_seeded in tags or getattr(operator, "namespace", "") not in _TAGGED


_TAGGED = ("aten", "prim", "prims", "_c10d_functional", "mkldnn", "quantized")


def dropout_argument(operator: Any) -> tuple[int, str] | None:
    """Position and name of the argument that, being 0, switches an operator's random numbers off."""
    schema = getattr(operator, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            return position, argument.name
    return None


# Operators that only read metadata, and detach: they say nothing about a computation, and their number differs between
# a forward and its replay.
METADATA_OPERATORS = frozenset(
    find_operators(
        (
            "aten.detach",
            "prim.device",
            "prim.layout",
            "aten.dim",
            "aten.is_contiguous",
            "aten.is_strides_like_format",
            "aten.is_non_overlapping_and_dense",
            "aten.numel",
            "aten.size",
            "aten.storage_offset",
            "aten.stride",
            "aten.sym_is_contiguous",
            "aten.sym_numel",
            "aten.sym_size",
            "aten.sym_storage_offset",
            "aten.sym_stride",
        )
    )
)
# Their result is over the memory of their argument, and neither their schema nor the version counter says so.
_UNSAID_VIEWS = frozenset(
    find_operators(("aten._unsafe_view", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.unsafe_chunk"))
)
SHARES_UNSAID = _UNSAID_VIEWS | frozenset(find_operators(("_c10d_functional.wait_tensor",)))
CAST = torch.ops.aten._to_copy.default
DETACH = torch.ops.aten.detach.default


# --- Work of our own in the middle of a user's computation ---


class out_of_sight:  # noqa: N801 - it is used as a function is
    """Operators that no mode of the user sees, that no graph records and that autocast does not touch.

    Views share version counters with what they are views of, also inside a dispatch mode: see `detach_below_autograd`.
    """

    # A class, because a generator would cost more than all that it guards.
    __slots__ = ("_autocast", "_dispatch", "_function", "_grad", "_is_below")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._is_below = _is_excluded(_ADINPLACE) and not torch.is_inference_mode_enabled()
        if self._is_below:
            _set_excluded(_ADINPLACE, False)
        self._function = torch._C.DisableTorchFunction()
        self._dispatch = torch._C._DisableTorchDispatch()
        # By dispatch keys, which the public context, a nesting with a cache, is not.
        self._autocast = torch._C._DisableAutocast()
        self._function.__enter__()
        self._dispatch.__enter__()
        self._autocast.__enter__()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._grad)
        self._autocast.__exit__(*error)
        self._dispatch.__exit__(*error)
        self._function.__exit__(*error)
        if self._is_below:
            _set_excluded(_ADINPLACE, True)


def keeps_its_own_memory(kind: type) -> bool:
    """Whether tensors of a class have their values in memory of their own, rather than in other tensors."""
    # A parameter of a subclass is of that subclass.
    return kind in PLAIN_TYPES or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of no subclass has values in memory: not sparse, nested, quantized, meta, or all zero."""
    return tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor._is_zerotensor()
    )


def makes_unwritten_memory(operator: Any) -> bool:
    """Whether an operator gives memory without writing to it."""
    name = operator_name(operator).rpartition(".")[2]
    return name.startswith(("empty", "new_empty", "_efficientzerotensor"))


def copied_argument(operator: Any) -> int | None:
    """The position of the argument whose values an operator's result has, if it does nothing but copy them."""
    return _COPIED.get(operator)


_COPIED = {torch.ops.aten.clone.default: 0, torch.ops.aten.copy_.default: 1}


@functools.cache
def may_give_unwritten_memory(operator: Any) -> bool:
    """Whether results of an operator are to be looked at for memory without values: `empty`, a kernel's workspace."""
    schema = getattr(operator, "_schema", None)
    return schema is None or len(schema.returns) > 1 or makes_unwritten_memory(operator)


def leaves_unwritten(operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator does not write to an argument that its schema says it writes to: rrelu, but for training."""
    return operator_name(operator).rpartition(".")[2] in ("rrelu_with_noise", "rrelu_with_noise_") and not (
        len(args) > 4 and args[4]
    )


# Hides torch-function modes too, which see attributes being read.
without_any_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction


def gives_more(operator: Any) -> bool:
    """Whether what an operator gives may depend on what an argument held that it changes in place.

    Not that of a batch norm, which has running statistics to write.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None or any(argument.is_out or argument.name == "running_mean" for argument in schema.arguments):
        return False
    return any(result.alias_info is None for result in schema.returns)


def overwrites(operator: Any) -> bool:
    """Whether an operator replaces what it writes to without reading it."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return False
    if any(argument.is_out for argument in schema.arguments):
        return True
    return operator_name(operator).rpartition(".")[2] in (
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "bernoulli_",
    )


def put_versions(tensors: list[torch.Tensor], versions: list[int]) -> None:
    """Set the version counters, for changes that were taken back."""
    _autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def share_version_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a change of one counts as a change of the other. Only a change tells: this one is taken back at once."""
    version = one._version
    if one is other or other._version != version:
        return one is other
    put_versions([one], [version + 1])
    try:
        return other._version != version
    finally:
        put_versions([one], [version])


def can_be_recorded() -> bool:
    """Whether values may be looked at.

    Not while a compiler traces or a CUDA graph is captured, nor in forward-mode AD, whose zeros have no memory.
    """
    if torch.compiler.is_compiling() or in_dual_level():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


# Builds without CUDA do not have the name, nor such a stream.
_raw_stream: Callable[[int], Any] = getattr(torch._C, "_cuda_getCurrentStream", torch.cuda.current_stream)
_streams: dict[Any, torch.cuda.Stream] = {}


def current_cuda_stream(index: int) -> torch.cuda.Stream:
    """The current stream of a CUDA device, as `torch.cuda.current_stream`, which takes many times as long.

    That looks the device up and makes an object each time, around the same function (in 2.11 and 2.13).
    """
    raw = _raw_stream(index)
    stream = _streams.get(raw)
    if stream is None:
        stream = _streams[raw] = torch.cuda.current_stream(index)
    return stream


# Whether this process has used a CUDA device. Builds without CUDA do not have the name, nor such a device.
has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True)


# --- The compiler ---

# The names of torch.utils.checkpoint as they are when recollect is imported. The compiler works with them, whatever a
# program puts in their place later.
STOCK: dict[str, Any] = {
    name: value for name, value in vars(_stock).items() if getattr(value, "__module__", None) == _stock.__name__
}
# The partitioner knows the members of torch's own enum, by identity.
TAGS: dict[str, Any] = {member.name: member for member in STOCK["CheckpointPolicy"]}


@contextlib.contextmanager
def stock_names() -> Iterator[None]:
    """Torch's own checkpointing, whose functions look each other up by name, finds its own names."""
    replaced = {name: vars(_stock)[name] for name, value in STOCK.items() if vars(_stock).get(name) is not value}
    vars(_stock).update(STOCK)
    try:
        yield
    finally:
        vars(_stock).update(replaced)


_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL
_dispatch_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode


def makes_a_graph() -> bool:
    """Whether operators that run now in this thread become nodes of a graph."""
    return _dispatch_mode(_PROXY) is not None


def is_traced_by_autograd() -> bool:
    """Whether AOTAutograd, the part of the compiler behind Dynamo, runs something now in this thread.

    It runs everything at least twice: first to see what comes out, then to make a graph of it.
    """
    return makes_a_graph() or _dispatch_mode(_FUNCTIONAL) is not None


def constant_when_traced(function: _F) -> _F:
    """Let Dynamo call a function while it traces, on constants, rather than trace it.

    `torch.compiler.assume_constant_result` sets the same mark, and imports the whole compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Whether Dynamo, where it reads `id(function)`, compiles anew for another function. Without that it takes two functions
# with the same code for one (2.11, 2.12).
ID_IS_GUARDED: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]


# What Dynamo does with a Python frame that it comes across, and with the frames inside of that, is noted with the
# code of the frame. Functions that Dynamo meets in a frame that it traces are another matter: it looks into them.
_SKIP = _frames._FrameAction.SKIP
_ALONE = _frames._FrameExecStrategy(_SKIP, _frames._FrameAction.DEFAULT)
_WITH_ALL_INSIDE = _frames._FrameExecStrategy(_SKIP, _SKIP)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def begin_inside(function: _F) -> _F:
    """Let Dynamo not begin to trace at a function when it comes across a call of it, but at what that calls."""
    _frames.set_code_exec_strategy(function.__code__, _ALONE)
    return function


def never_begin(function: _F) -> _F:
    """Let Dynamo not begin to trace at a function when it comes across a call of it, nor at anything that it calls.

    Costs nothing at a call.
    """
    for code in _codes(function.__code__):
        _frames.set_code_exec_strategy(code, _WITH_ALL_INSIDE)
    return function


def never_begin_in(module: ModuleType) -> None:
    """`never_begin` for all functions and methods of a module: hooks, dispatch modes and what else torch calls."""
    for owner in (module, *(value for value in vars(module).values() if isinstance(value, type))):
        if getattr(owner, "__module__", module.__name__) != module.__name__:
            continue
        for value in vars(owner).values():
            function = _function_in(value)
            if function is not None and function.__module__ == module.__name__:
                never_begin(function)


def never_look_into(function: _F) -> _F:
    """Let Dynamo break its graph where it comes across a call in code that it traces, instead of looking into it.

    `torch.compiler.disable` sets the same mark, on a function around it that costs something at each call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _function_in(value: Any) -> FunctionType | None:
    """The function that a class or a module has as it is, as a method or a property, or decorated."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    if callable(value) and not isinstance(value, type):
        value = inspect.unwrap(value)
    return value if isinstance(value, FunctionType) else None


def composable_module() -> ModuleType | None:
    """Where torch defines its module API of checkpointing; None in builds without torch.distributed."""
    if not torch.distributed.is_available():
        return None
    return importlib.import_module("torch.distributed._composable.checkpoint_activation")


# --- Process groups ---

# Those of this process. Empty outside of a distributed job, which is the cheapest way to know.
process_groups: Mapping[Any, Any] = (
    torch.distributed.distributed_c10d._pg_map if torch.distributed.is_available() else {}
)


# --- What torch.distributed keeps for a thread, or for the process ---

# How a setting is read, and put.
Setting = tuple[Callable[[], Any], Callable[[Any], object]]


_groups: Any = None
_meshes: Any = None
if torch.distributed.is_available():
    _groups = importlib.import_module("torch.distributed.distributed_c10d")
    _meshes = importlib.import_module("torch.distributed.device_mesh")


def distributed_settings() -> tuple[Setting, ...]:
    """The default groups, the meshes that are entered, and, once DTensors are in use, what they go by."""
    return _settings_of_groups() if _DISPATCH not in sys.modules else _settings_of_groups() + _settings_of_dtensors()


_DISPATCH = "torch.distributed.tensor._dispatch"


@functools.cache
def _settings_of_groups() -> tuple[Setting, ...]:
    def meshes() -> tuple[Any, ...]:
        return tuple(_meshes._mesh_resources.mesh_stack)

    def put_meshes(stack: tuple[Any, ...]) -> None:
        _meshes._mesh_resources.mesh_stack[:] = stack

    # Groups are held weakly: `destroy_process_group` is to be their end, whatever graphs there still are.
    def default_group() -> Any:
        group = _groups._world.default_pg
        return None if group is None else weakref.ref(group)

    def put_default_group(reference: Any) -> None:
        group = None if reference is None else reference()
        if reference is None or group in _groups._world.pg_map:  # else it was destroyed since
            _groups._update_default_pg(group)

    settings: list[Setting] = [(default_group, put_default_group), (meshes, put_meshes)]
    named: Any = torch._C._distributed_c10d
    if hasattr(named, "_current_process_group"):  # of this thread: torch.distributed._dist2

        def current_group_of_ranks() -> Any:
            group = named._current_process_group()
            return None if group is None else weakref.ref(group)

        def put_current_group(reference: Any) -> None:
            group = None if reference is None else reference()
            if reference is None or group is not None:
                named._set_process_group(group)

        settings.append((current_group_of_ranks, put_current_group))
    return tuple(settings)


@functools.cache
def _settings_of_dtensors() -> tuple[Setting, ...]:
    redistribute, rules = (
        importlib.import_module(f"torch.distributed.tensor.{name}") for name in ("_redistribute", "_utils")
    )
    dispatcher = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
    handlers: dict[Any, Any] = getattr(dispatcher, "_custom_op_handlers", {})  # `loss_parallel` adds to them

    def put_handlers(those: dict[Any, Any]) -> None:
        handlers.clear()
        handlers.update(those)

    # Whether plain tensors count as replicated ones: of the thread in 2.13, of the process before.
    settings = [(handlers.copy, put_handlers), _attribute(dispatcher, "_allow_implicit_replication")]
    settings += [
        _attribute(redistribute, name)
        for name in ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION")
        if hasattr(redistribute, name)
    ]
    explicit = getattr(rules, "ExplicitRedistributionContext", None)
    if explicit is not None:
        settings.append(_attribute(explicit._local, "_active"))
    return tuple(settings)


def _attribute(owner: Any, name: str) -> Setting:
    return functools.partial(getattr, owner, name, None), functools.partial(setattr, owner, name)


# --- Ranks, and tensors that are on several ---


def is_group(value: Any) -> bool:
    """Whether it is a process group."""
    return _groups is not None and isinstance(value, torch.distributed.ProcessGroup)


def is_mesh(value: Any) -> bool:
    """Whether it is a device mesh."""
    return _meshes is not None and isinstance(value, _meshes.DeviceMesh)


def group_exists(group: Any) -> bool:
    """Whether a process group is there, with this rank in it, and has not been destroyed."""
    return group in _groups._world.pg_map


def current_mesh() -> Any:
    """The device mesh that is entered in this thread, or None."""
    stack = _meshes._mesh_resources.mesh_stack
    return stack[-1] if stack else None


def new_group_like(group: Any, ranks: Sequence[int]) -> Any:
    """Another process group of the same ranks, with the same backend and timeout. Only these ranks need to make it."""
    config = torch.distributed.get_backend_config(group)
    backend = torch.distributed.get_backend(group)
    try:
        timeout = group._get_backend(torch.device(config.partition(":")[0])).options._timeout
    except (AttributeError, RuntimeError):  # a backend that does not say
        timeout = None
    is_mixed = len({one.partition(":")[2] for one in config.split(",")}) > 1
    return torch.distributed.new_group(
        list(ranks),
        timeout=timeout,
        backend=config if is_mixed else backend,
        use_local_synchronization=True,
        group_desc="recollect",
    )


_all_gather: Any = getattr(torch.distributed, "all_gather_single", None)  # its name since 2.13


def all_gather(target: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """Begin to gather the parts of all ranks, one after the other; gives what waits for that."""
    gather = _all_gather or torch.distributed.all_gather_into_tensor
    return gather(target, part, group=group, async_op=True)


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """What a collective that is under way will give, when it has; any other tensor as it is."""
    wait = getattr(tensor, "trigger_wait", None)  # of AsyncCollectiveTensor
    return tensor if wait is None else wait()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_of(tensor: torch.Tensor) -> Any:
    """The device mesh of a DTensor, None of any other tensor."""
    return tensor.device_mesh if _is_dtensor(tensor) else None  # type: ignore[attr-defined]


def local_copy_of(tensor: Any, ranks: Sequence[int]) -> tuple[torch.Tensor | None, Any]:
    """The local tensor of a DTensor that some ranks have copies of, and the rest of it; None if they have not."""
    if not _is_dtensor(tensor):
        return None, None
    mesh = tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if sorted(torch.distributed.get_process_group_ranks(mesh.get_group(dimension))) == list(ranks):
            if placement.is_replicate():
                return waited_for(tensor.to_local()), (mesh, tensor.placements, tensor.shape, tensor.stride())
            break
    return None, None


def dtensor_like(like: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor again, with another local tensor."""
    mesh, placements, shape, stride = like
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    made: torch.Tensor = kind.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return made


def default_store() -> Any:
    """What the ranks of a distributed job share: words under keys."""
    return torch.distributed.distributed_c10d._get_default_store()


# --- Parameters that are sharded between ranks ---


class Sharded:
    """A parameter that is gathered from shards: which tensors an optimizer steps, and whether it is gathered anew.

    Holds nothing alive.
    """

    def shards(self) -> list[torch.Tensor]:
        """The parameters that an optimizer has in its place."""
        raise NotImplementedError

    def is_away(self) -> bool:
        """Whether what was gathered is not there now, and will come from the shards when it is next asked for."""
        raise NotImplementedError

    def goes_away_after_forward(self) -> bool:
        """Whether that is so from the end of every forward on, until backward comes to it."""
        raise NotImplementedError

    def goes_away_after_backward(self) -> bool:
        """Whether that is so from the end of every backward on."""
        raise NotImplementedError


class _FullySharded(Sharded):
    """One of `fully_shard`: a parameter on the module for the time of a forward, another one for the optimizer."""

    def __init__(self, parameter: Any, group: Any) -> None:
        self._parameter = weakref.ref(parameter)
        self._group = weakref.ref(group)

    def shards(self) -> list[torch.Tensor]:
        parameter = self._parameter()
        return [] if parameter is None else [parameter.sharded_param]

    def is_away(self) -> bool:
        group = self._group()
        # If it is sharded between fewer ranks after the forward, it is gathered from there, as it was.
        return group is not None and group.is_sharded

    def goes_away_after_forward(self) -> bool:
        group = self._group()
        return group is not None and group._reshard_after_forward and not group._use_post_forward_mesh

    def goes_away_after_backward(self) -> bool:
        group = self._group()
        return group is not None and group.reshard_after_backward


class _Flattened(Sharded):
    """One of FullyShardedDataParallel: views of one long parameter, which the optimizer has or has the parts of."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = weakref.ref(flat)

    def shards(self) -> list[torch.Tensor]:
        return list(getattr(self._flat(), "_params", None) or ())  # None: the optimizer has the long one itself

    def is_away(self) -> bool:
        gathered = getattr(self._flat(), "_full_param_padded", None)
        return gathered is None or gathered.untyped_storage().size() == 0

    def goes_away_after_forward(self) -> bool:
        return False  # the parameter does not say

    def goes_away_after_backward(self) -> bool:
        return False


def fully_sharded() -> Iterator[tuple[torch.Tensor, Sharded]]:
    """Every parameter that `fully_shard` has gathered so far, and where it comes from.

    A state has one group of parameters (2.11: `_fsdp_param_group`) or several (2.12 to 2.15: `_fsdp_param_groups`).
    """
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            for parameter in () if group is None else group.fsdp_params:
                gathered = getattr(parameter, "_unsharded_param", None)
                if gathered is not None:
                    yield gathered, _FullySharded(parameter, group)


def flattened(leaf: torch.Tensor) -> Sharded | None:
    """Where the parameter of a FullyShardedDataParallel comes from; None of any other."""
    return _Flattened(leaf) if getattr(leaf, "_is_flat_param", False) else None


# Where FSDP, 1 and 2, does its work around the forwards of modules. (2.11 to 2.15.)
_OF_FSDP = os.path.join(_LIBRARIES[0], "distributed", "fsdp") + os.sep


def is_work_of_fsdp(frame: FrameType | None) -> bool:
    """Whether what runs in a Python frame gathers, casts or lets go around the forward of a module."""
    while frame is not None and frame.f_code is not _CALL_IMPL and is_library_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OF_FSDP):
            # What `register_fsdp_forward_method` puts around a method does nothing by itself but call it.
            return frame.f_code.co_name != "wrapped_method"
        frame = frame.f_back
    return False


def gathers_twice(module: torch.nn.Module) -> bool:
    """Whether a module that a replay is about to call gathers its parameters for that alone.

    A FullyShardedDataParallel that backward has not come to gathers in the replay, lets go at its end, and gathers
    again when backward comes to it. (Names as in 2.11 to 2.15.)
    """
    handle = getattr(module, "_handle", None)
    if handle is None or not isinstance(module, _wrapper_of_parameters()) or getattr(module, "_is_root", False):
        return False
    lets_go = handle._sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD")
    return lets_go and handle._training_state.name != "BACKWARD_PRE"


def _wrapper_of_parameters() -> tuple[type, ...]:
    home = sys.modules.get("torch.distributed.fsdp")
    return () if home is None else (home.FullyShardedDataParallel,)


def is_wrapped_for_ranks(module: torch.nn.Module) -> bool:
    """Whether it is a DistributedDataParallel or a FullyShardedDataParallel, whose forwards want their backwards."""
    return isinstance(module, (torch.nn.parallel.DistributedDataParallel, *_wrapper_of_parameters()))


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module itself. Such a module has `unshard()` and `reshard()`."""
    home = sys.modules.get("torch.distributed.fsdp")
    return home is not None and isinstance(module, home.FSDPModule)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that ranks have together; the tensor itself if there is no such thing."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return part


# --- For people ---


def optional_names() -> list[tuple[str, bool, str]]:
    """What not every torch has: its name, whether it is there, and what is so without it.

    Every other name in this file has to be there: without it, recollect cannot be imported.
    """
    return [
        (
            "torch._C._autograd._make_saved_tensor",
            _make_saved_tensor is not None,
            "a node of autograd is made to save a tensor, which takes longer",
        ),
        (
            "torch._dynamo guards id(function)",
            ID_IS_GUARDED,
            "a function as a policy that is replaced by another with the same code is not noticed under torch.compile",
        ),
        (
            "torch._C._cuda_hasPrimaryContext",
            hasattr(torch._C, "_cuda_hasPrimaryContext"),
            "this build has no CUDA: nothing is offloaded but to disk",
        ),
        (
            "torch.distributed._composable",
            torch.distributed.is_available(),
            "this build has no torch.distributed: patch_torch does not serve its checkpoint(module)",
        ),
    ]


# --- Fused attention ---

# The kernels behind `scaled_dot_product_attention` on CUDA; their results on the meta device are known everywhere.
# Names and arguments are the same in 2.11 to 2.15.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention

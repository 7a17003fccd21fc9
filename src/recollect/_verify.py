"""What is compared between a forward and its replay: tensor signatures always, operator traces under `debug=True`.

A signature is a tuple of shape, dtype and device: cheap enough for every saved tensor. A trace is a list of the
operators that a function ran, with the line of user code and the module each came from; taking one costs a dispatch
mode and a walk over the Python stack per operator, so it is taken only when asked for. `first_difference` says
where two traces part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter, eq
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from recollect import _errors
from recollect._errors import Signature
from recollect._torch import (
    PLAIN_TYPES,
    OperatorMode,
    called_module,
    is_library_file,
    nested_sizes,
    without_torch_function,
)

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


# Of a tensor of a plain type. A nested one of strided layout has no shape: RuntimeError.
plain_signature: Callable[[Tensor], Signature] = attrgetter("shape", "dtype", "device")


def signature(tensor: Tensor) -> Signature:
    """Shape, dtype and device, read without waking a subclass's `__torch_function__`."""
    if type(tensor) in PLAIN_TYPES:
        try:
            return plain_signature(tensor)
        except RuntimeError:
            pass
    with without_torch_function():
        shape = nested_sizes(tensor) if tensor.is_nested else tensor.shape
        return (shape, tensor.dtype, tensor.device)


Mismatch = tuple[int, Signature, Signature]  # place, expected and found


def find_mismatches(tensors: Sequence[Tensor | None], signatures: Sequence[Signature]) -> Sequence[Mismatch]:
    """Where tensors do not have the signatures that they should have. None has any."""
    if PLAIN_TYPES.issuperset(map(type, tensors)):
        try:
            # In one go, which is cheaper than one by one.
            if all(map(eq, map(plain_signature, tensors), signatures)):  # type: ignore[arg-type]
                return ()
        except RuntimeError:
            pass
    pairs = enumerate(zip(tensors, signatures, strict=False))
    return [(i, then, now) for i, (one, then) in pairs if one is not None and (now := signature(one)) != then]


class Operator(NamedTuple):
    """One operator of a trace."""

    name: str
    results: tuple[str, ...]
    module: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        return f"{self.name} -> {', '.join(self.results) or 'nothing'}{place}"

    @property
    def where(self) -> str:
        """The line of user code that ran it."""
        return self.lines[-1] if self.lines else "no line of user code"


class OperatorTrace(OperatorMode):
    """Records every operator that runs under it, except what `without` covers. It runs none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.paused = False
        self._is_within = False  # an operator: it may be entered twice, above the modes of a part
        self.call = 0  # as for `user_code`

    def without(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, with its operators left out of the trace."""

        def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
            before, self.paused = self.paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = before

        return hidden

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused or self._is_within:
            return func(*args, **(kwargs or {}))
        # Noted before it runs, so that an operator that fails or that a stop cuts off is there too.
        place = len(self.operators)
        module, lines = user_code(sys._getframe().f_back, self.call)
        self.operators.append(Operator(str(func), ("did not finish",), module, lines))
        self._is_within = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._is_within = False
        self.operators[place] = self.operators[place]._replace(results=_summarise(result))
        return result


def _summarise(result: Any) -> tuple[str, ...]:
    values = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(_errors.describe_tensor(value) for value in values if isinstance(value, Tensor))


_BOUNDARIES: set[CodeType] = set()


def traces_start_here(function: F) -> F:
    """Mark what calls a region's function: what lies further out is the same for all its operators."""
    _BOUNDARIES.add(function.__code__)
    return function


def is_boundary(code: CodeType) -> bool:
    """Whether it calls a region's function."""
    return code in _BOUNDARIES


def call_site(frame: FrameType | None) -> str | None:
    """The innermost line of user code that `frame` was called from."""
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def user_code(frame: FrameType | None, call: int = 0) -> tuple[str, tuple[str, ...]]:
    """The module path and the lines of user code that `frame` was called from, outermost first.

    `call` is the identity of the Python frame where a region begins, if it is a module's own call.
    """
    lines: list[str] = []
    modules: list[torch.nn.Module] = []
    while frame is not None and frame.f_code not in _BOUNDARIES:
        code = frame.f_code
        if not is_library_file(code.co_filename):
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        elif (module := called_module(frame)) is not None:
            modules.append(module)
        frame = frame.f_back if id(frame) != call else None
    return module_path(modules[::-1]), tuple(reversed(lines))


def module_path(modules: Sequence[torch.nn.Module]) -> str:
    """`Block.attn.proj` from the modules whose calls are open, outermost first."""
    if not modules:
        return ""
    path = type(modules[0]).__name__
    for outer, inner in pairwise(modules):
        name = next((name for name, module in outer.named_modules() if module is inner), None)
        path += f".{name}" if name else f".{type(inner).__name__}"
    return path


def first_difference(forward: Sequence[Operator], replay: Sequence[Operator], *, stopped: bool) -> str:
    """Where two traces part, in a few lines; then both lists."""
    index = next(
        (i for i, (then, now) in enumerate(zip(forward, replay, strict=False)) if then[:2] != now[:2]),
        min(len(forward), len(replay)),
    )
    return "\n".join(
        [
            "",
            _errors.DEBUG_NOTE + ".",
            *_parting(forward, replay, index, stopped),
            "",
            f"Operators of the forward ({len(forward)}):",
            *_listing(forward),
            "",
            f"Operators of the replay ({len(replay)}{', stopped early' if stopped else ''}):",
            *_listing(replay),
        ]
    )


def _parting(forward: Sequence[Operator], replay: Sequence[Operator], index: int, stopped: bool) -> list[str]:
    if index == len(replay) and (stopped or index == len(forward)):
        return [
            f"The replay ran the same {index} operators as the forward, with results of the same shapes and dtypes."
        ]
    same = f"The first {index} operators are the same. Then they part" if index else "They part at once"
    lines = [f"{same}, at operator {index}:"]
    for name, trace in (("forward", forward), ("replay", replay)):
        if index < len(trace):
            lines += [f"  {name}: {trace[index]}", f"           at {trace[index].where}"]
        else:
            lines.append(f"  {name}: no further operator")
    return lines


def _listing(trace: Sequence[Operator]) -> list[str]:
    lines = []
    for index, operator in enumerate(trace):
        lines.append(f"  {index:4d} {operator}")
        lines += [f"         at {line}" for line in operator.lines]
    return lines

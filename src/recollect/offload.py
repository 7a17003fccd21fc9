"""`offload`: everything that autograd saves in a piece of code goes to the host or to disk.

What it does is one decision for all: `Offload` with the same options, whose store it uses. Inside of a checkpointed
region, hooks inside of the region own what is saved under them, as always: there it keeps, in the store, what the
region would have recomputed. Around regions it takes their inputs, which are what they keep.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from torch import Tensor

from recollect import _errors
from recollect._engine.scope import here
from recollect._kept import hooks_into
from recollect._sizes import MIN_BYTES
from recollect._stores.chosen import store_of
from recollect._torch import Hooks, never_begin, never_look_into, push_hooks, remove_hooks_of
from recollect.policy import Offload


class offload:  # noqa: N801 - it is used as a function is
    """Offload what autograd saves inside: the replacement of `torch.autograd.graph.save_on_cpu`.

    Copies go on beside the computation and come back ahead of their use. Parameters, buffers and small tensors are
    never copied, and memory that several operators save is copied once. May be entered again and again, by
    several threads too: it is about what is saved by the thread that entered it.

    Args:
        min_bytes: As for `recollect.Offload`, like the others.
        max_host_bytes: How much memory of the host may be used; what finds no more room stays on the device.
        in_flight: How much may be on its way out at a time.
        ahead: How much may be back on the device ahead of its use.
        to: "cpu" or "disk".
        directory: Where on disk.

    Example:
        >>> import torch, recollect
        >>> x = torch.ones(3, requires_grad=True)
        >>> with recollect.offload(max_host_bytes="64 GiB"):
        ...     y = x.sin().exp().sum()
        >>> y.backward()
    """

    def __init__(
        self,
        *,
        min_bytes: int | str = MIN_BYTES,
        max_host_bytes: int | str | None = None,
        in_flight: int | str | None = None,
        ahead: int | str | None = None,
        to: str = "cpu",
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._decision = Offload(
            to,
            min_bytes=min_bytes,
            max_host_bytes=max_host_bytes,
            in_flight=in_flight,
            ahead=ahead,
            directory=directory,
        )
        self._entered: dict[int, list[Any]] = {}  # by thread, for hooks are a thread's own

    @never_look_into
    def __enter__(self) -> None:
        pack, unpack = _outside_of_replays(hooks_into(store_of(self._decision), _errors.offloaded_tensor_changed))
        push_hooks(pack, unpack)
        self._entered.setdefault(threading.get_ident(), []).append(pack)

    @never_look_into
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered = self._entered.get(threading.get_ident())
        if entered is None:
            raise _errors.offload_left_in_another_thread()
        pack = entered.pop()
        if not entered:
            del self._entered[threading.get_ident()]
        remove_hooks_of(pack)  # wherever they are: generators may leave what they entered in any order

    def __repr__(self) -> str:
        return f"recollect.offload: {self._decision!r}"


@never_begin
def _outside_of_replays(hooks: Hooks) -> Hooks:
    """What is saved in a replay belongs to a graph that nobody needs: it is not worth a copy."""
    keep, get = hooks

    def pack(tensor: Tensor) -> Any:
        scope = here.scope
        return tensor if scope is not None and scope.following else keep(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else get(packed)

    return pack, unpack

"""Which modules a step calls, what autograd saves in each call, and which of the calls a plan decides about: blocks.

One forward is watched. What autograd wants to save is noted and let go of, so that looking takes no more memory than
the forward itself. A step that goes backward on its way, for gradients that it accumulates, needs what is saved; calls
from before its last backward are over when the loss is returned, and are no blocks.

Blocks are calls that do not contain each other. A model is taken apart from the outside until its parts are small
beside the whole, or have no parts themselves: the layers of a transformer, the bottlenecks of a ResNet. Blocks are of
one kind if they cannot be told apart by class, shapes and what is saved in them; then one of them is measured for all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.jit import ScriptModule
from torch.nn import Module, Parameter, Sequential

from recollect import _errors
from recollect._ambient import Ambient
from recollect._decided import why_not
from recollect._engine.pinned import is_recomputing
from recollect._inputs import Arguments, find_tensors, rebuild
from recollect._restored import Training
from recollect._torch import storage_key

# A call that holds more than this share of all that is saved is taken apart, if it has parts.
_LARGE = 0.25
# Its parts have to hold at least so much of it: else what matters is what the module does itself.
_COVERED = 0.5
# Below this share of all that is saved nothing is worth deciding about.
_SMALL = 0.002


@dataclass(eq=False)
class Call:
    """A call of a module in a step."""

    name: str
    module: Module
    parent: Call | None = None
    signature: tuple[Any, ...] = ()
    inputs: tuple[int, ...] = ()  # the memory of its arguments, in order
    number: int = 0  # among the calls of the module
    is_training: bool = True  # which the step may change after the call
    parts: list[Call] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # the memory that autograd saves in it, and bytes
    shapes: list[Any] = field(default_factory=list)  # of what is saved, in order
    is_over: bool = False  # before the step returns: it has gone backward since

    def bytes(self) -> int:
        """What a region of it would let go of."""
        return sum(size for one, size in self.saved.items() if one not in self.inputs)

    def largest(self) -> int:
        """Bytes of the largest piece of memory among those."""
        return max((size for one, size in self.saved.items() if one not in self.inputs), default=0)

    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that cannot be told apart."""
        weights = tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in self.module.named_parameters())
        return type(self.module), weights, self.is_training, self.signature, tuple(self.shapes)


class Memory:
    """Storages by numbers which are not given to another one later, as addresses are."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._next = 0

    def __call__(self, tensor: Tensor) -> int:
        key = storage_key(tensor)
        if key not in self._numbers:
            self._next += 1
            self._numbers[key] = self._next
            with contextlib.suppress(RuntimeError, NotImplementedError):
                weakref.finalize(tensor.untyped_storage(), self._numbers.pop, key, None)
        return self._numbers[key]


def signature_of(arguments: Arguments) -> tuple[Any, ...]:
    """What there is to tell about arguments but for their values."""
    args, kwargs = arguments
    return tuple(
        (where, value.shape, value.dtype, value.requires_grad)
        if isinstance(value, Tensor)
        else (where, type(value), tuple(one.shape for one in find_tensors((value,), {})[0]))
        for where, value in (*enumerate(args), *kwargs.items())
    )


@contextlib.contextmanager
def hooks_on(
    modules: Iterable[Module],
    before: Callable[[Module, Arguments], None],
    after: Callable[[Module, Any], None],
    *,
    in_replays: bool = False,
) -> Iterator[None]:
    """Have functions called before and after every call of the modules in a forward, or `in_replays` in those alone.

    Scripted modules take no hooks: what they do counts as that of the module around them.
    """

    def pre(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_recomputing() == in_replays:
            before(module, (args, kwargs))

    def post(module: Module, args: tuple[Any, ...], result: Any) -> None:
        if is_recomputing() == in_replays:
            after(module, result)

    with contextlib.ExitStack() as stack:
        for module in {id(module): module for module in modules}.values():
            if isinstance(module, ScriptModule):
                continue
            stack.callback(module.register_forward_pre_hook(pre, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(post, always_call=True).remove)
        yield


def watch_calls(
    model: Module, outside: Iterable[Tensor], forward: Callable[[], object], *, keeps: bool = False
) -> tuple[Call, frozenset[int]]:
    """The tree of calls in a forward, whose root is the forward itself; and the memory that is there all the time.

    `outside` are tensors that were there before, besides those of the model. What autograd saves is let go of, unless
    `keeps` says otherwise.

    Raises:
        BackwardInsideError: If the forward needs what was let go of.
    """
    names = {id(module): name for name, module in model.named_modules()}
    memory = Memory()
    weights = {memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    there = frozenset(weights | set(map(memory, outside)))
    root = Call("", model)
    open_calls, since_backward = [root], [root]
    counts: Counter[int] = Counter()

    def before(module: Module, arguments: Arguments) -> None:
        given = tuple(map(memory, find_tensors(*arguments)[0]))
        number = counts[id(module)]
        counts[id(module)] += 1
        call = Call(names[id(module)], module, open_calls[-1], signature_of(arguments), given, number, module.training)
        open_calls[-1].parts.append(call)
        open_calls.append(call)
        since_backward.append(call)

    def after(module: Module, result: Any) -> None:
        while len(open_calls) > 1 and open_calls.pop().module is not module:
            pass  # calls inside of it that ended by an exception which somebody has caught

    def pack(tensor: Tensor) -> Any:
        one = memory(tensor)
        if one in weights or isinstance(tensor if tensor._base is None else tensor._base, Parameter):
            return  # a parameter that is there for the time of a forward alone: gathered from shards
        size = tensor.numel() * tensor.element_size()
        with contextlib.suppress(RuntimeError, NotImplementedError):
            size = tensor.untyped_storage().nbytes()
        for call in open_calls:
            call.saved[one] = size
            call.shapes.append((tensor.shape, tensor.dtype))

    def goes_backward() -> None:
        for call in since_backward:
            call.is_over = True
        since_backward.clear()

    with hooks_on(model.modules(), before, after), _looking(pack, keeps=keeps, unpacked=goes_backward):
        forward()
    return root, there


class BackwardInsideError(Exception):
    """A step goes backward through what it has computed itself."""


def _nothing(*_: Any) -> None: ...


@contextlib.contextmanager
def _looking(
    note: Callable[[Tensor], object], *, keeps: bool, unpacked: Callable[[], object] = _nothing
) -> Iterator[None]:
    """Note what autograd saves, and have nothing saved, so that no backward can go through it, unless that `keeps`."""
    is_over = False

    def pack(tensor: Tensor) -> Tensor | None:
        note(tensor)
        return tensor.detach() if keeps else None  # its own output would hold a node for good

    def unpack(kept: Tensor | None) -> Tensor:
        if is_over:  # a block that is run by itself
            raise ValueError(
                "results of others reach it in an object that is no list, tuple, dict or dataclass, such as a cache: "
                "set use_cache=False"
            )
        if kept is None:
            raise BackwardInsideError
        unpacked()
        return kept

    with saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            is_over = True


def find_blocks(root: Call) -> list[Call]:
    """The calls that a plan decides about, in the order of the forward.

    A decision about a module holds wherever it is called. So one that is taken apart in a large call is taken apart in
    its small ones too, and one that is a part of another block is none itself.
    """
    total = sum(part.bytes() for part in root.parts if not part.is_over)
    found: list[Call] = []
    apart: set[int] = set()

    def take(call: Call) -> None:
        size = call.bytes()
        if size <= _SMALL * total:
            return
        parts = [part for part in call.parts if part.bytes() > 0 and not part.is_over]
        # A chain of blocks; one of single operations is better taken as a whole.
        is_chain = isinstance(call.module, Sequential) and any(part.parts for part in parts)
        is_large = size > _LARGE * total or is_chain or id(call.module) in apart
        is_covered = sum(part.bytes() for part in parts) >= _COVERED * size
        can_be_decided = call.parent is not None and why_not(call.module, may_be_lazy=False) is None
        if parts and (not can_be_decided or (is_large and is_covered)):
            apart.add(id(call.module))
            for part in parts:
                take(part)
        elif can_be_decided:
            found.append(call)

    take(root)
    if any(id(block.module) in apart for block in found):
        found.clear()
        take(root)
    inside = {id(part.module) for block in found for part in _within(block)}
    return [block for block in found if id(block.module) not in inside]


def _within(call: Call) -> Iterator[Call]:
    for part in call.parts:
        yield part
        yield from _within(part)


# --- Calls that are made again ---


@dataclass(eq=False)
class Sample:
    """A call of a block that can be made again by itself: its arguments, and what was around it."""

    module: Module
    arguments: Arguments
    shared: frozenset[int]  # identities of tensors among them that live on whatever becomes of the block
    around: Ambient
    modes: Training

    def fresh(self) -> Arguments:
        """Arguments as a step gives them: results of others, which nobody else holds."""
        made: dict[int, Tensor] = {}

        def renew(tensor: Tensor) -> Tensor:
            if id(tensor) in self.shared:
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = tensor.clone()
            return made[id(tensor)]

        renewed: Arguments = rebuild(self.arguments, Tensor, renew)
        return renewed

    def leaves(self) -> list[Tensor]:
        """What gradients can be asked for."""
        tensors = [*find_tensors(*self.arguments)[0], *self.module.parameters()]
        return list({id(one): one for one in tensors if one.requires_grad}.values())


def take_samples(
    forward: Callable[[], object],
    blocks: Sequence[Call],
    lives_on: Sequence[Sequence[bool]],
    wanted: Container[int],
    *,
    keeps: bool = False,
) -> dict[int, Sample]:
    """Run a forward once more, and hold on to what some of the blocks are given, by number.

    `lives_on` says of every tensor that a block is given whether it lives on whatever becomes of the block.
    """
    waiting = {(id(block.module), block.number): number for number, block in enumerate(blocks)}
    counts: Counter[int] = Counter()
    samples: dict[int, Sample] = {}

    def before(module: Module, arguments: Arguments) -> None:
        number = waiting.pop((id(module), counts[id(module)]), -1)
        counts[id(module)] += 1
        if number < 0:
            return
        if signature_of(arguments) != blocks[number].signature:
            raise _errors.step_changes(blocks[number].name)
        if number in wanted:
            samples[number] = _sample(module, arguments, lives_on[number])

    with hooks_on((block.module for block in blocks), before, _nothing), _looking(_nothing, keeps=keeps):
        forward()
    for number in waiting.values():
        raise _errors.step_changes(blocks[number].name)
    return samples


def _sample(module: Module, arguments: Arguments, lives_on: Sequence[bool]) -> Sample:
    tensors = find_tensors(*arguments)[0]
    around = Ambient(tensors, False, arguments)
    held: dict[int, Tensor] = {id(one): one.detach().requires_grad_(one.requires_grad) for one in tensors}
    shared = {id(held[id(one)]) for one, lives in zip(tensors, lives_on, strict=True) if lives}
    kept: Arguments = rebuild(arguments, Tensor, lambda tensor: held[id(tensor)])
    return Sample(module, kept, frozenset(shared), around, Training(list(module.modules())))

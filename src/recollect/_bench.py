"""Training steps of a model that leave nothing behind: run, weighed and timed.

A step is a forward, which gives a loss, and its backward. Everything that it changes is put back when measuring has
ended: gradients, buffers, what modules remember, random generators (`_aside.py`). Each step gets the batch in
containers of its own, so that it may take things out of them. No optimizer is touched, and no parameter changes
(`_writes.py`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from recollect import _errors
from recollect._ambient import RandomState
from recollect._aside import Aside, set_aside
from recollect._calls import hooks_on
from recollect._generators import others
from recollect._inputs import Arguments, find_tensors, rebuild
from recollect._meters import Clock, Meter, RealClock, Roofline, as_on_gpu, gpu_of, meter_of
from recollect._ranks import worst
from recollect._torch import is_fully_sharded
from recollect._writes import Writes

Step = Callable[[Any, Any], Tensor]
START, FORWARD, BETWEEN, LOSS, BACKWARD, END = "start", "forward", "between", "loss", "backward", "end"


@dataclass(frozen=True)
class Mark:
    """A moment of a step: what begins there, of which block, and the bytes alive then and at most until the next."""

    what: str
    block: int | None
    now: int
    peak: int


def sum_of_outputs(model: Any, batch: Any) -> Tensor:
    """The default step: call the model on a batch; its `loss` if it gives one, else the sum of all that it gives."""
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    elif isinstance(batch, (tuple, list)):
        outputs = model(*batch)
    else:
        outputs = model(batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [one for one in find_tensors((outputs,), {})[0] if one.requires_grad]
    if not tensors:
        raise ValueError(
            "step: the outputs of the model do not require grad, so there is no training step to measure. Is the model "
            "frozen, or grad switched off (torch.no_grad, torch.inference_mode)?"
        )
    total: Tensor = sum(one.float().sum() for one in tensors)  # type: ignore[assignment]
    return total


class Bench:
    """A model, a batch and a step, on one device."""

    def __init__(self, model: Module, batch: Any, step: Step | None, gpu: str | None) -> None:
        self.model = model
        self._batch = batch
        self._step = sum_of_outputs if step is None else step
        self.device = _device_of(model)
        self.is_estimated = self.device.type == "meta"
        if gpu is not None and not self.is_estimated:
            raise ValueError(f"gpu is for a model on the meta device, got {gpu!r} for one on {self.device}")
        self.gpu = gpu_of(gpu or "H100") if self.is_estimated else None
        self.clock: Clock = RealClock(self.device) if self.gpu is None else Roofline(self.gpu)
        self._sharded: list[Any] = [module for module in model.modules() if is_fully_sharded(module)]
        plain = dict(batch) if isinstance(batch, Mapping) else batch
        self.outside = find_tensors((plain,), {})[0]
        self.meter: Meter = meter_of(self.device, [*model.parameters(), *model.buffers(), *self.outside])
        self._leaves = [*model.parameters(), *(one for one in self.outside if one.requires_grad and one.is_leaf)]
        self._writes = Writes(model, plain)
        own = [value for module in model.modules() for value in vars(module).values() if _is_generator(value)]
        arguments: Arguments = ((plain, own), {})
        self._random = RandomState.now([*model.parameters()][:1])
        self._others = [(source.put, source.read()) for source in others(arguments)]

    def sharded_around(self, module: Module) -> list[Any]:
        """The modules around one that `fully_shard` was applied to: they may gather parameters of its for it."""
        return [unit for unit in self._sharded if unit is not module and any(one is module for one in unit.modules())]

    # --- Steps ---

    def start_anew(self) -> None:
        """Put random generators where they were, and let go of gradients."""
        self._random.put()
        for put, state in self._others:
            put(state)
        for unit in self._sharded:
            unit.reshard()  # a forward without a backward may leave parameters gathered
        for leaf in self._leaves:
            leaf.grad = None

    def let_go(self) -> None:
        """Give back what nobody uses any more."""
        gc.collect()
        if not self.is_estimated and self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def forward(self) -> Tensor:
        """The loss."""
        self.start_anew()
        loss = self._step(self.model, _in_own_containers(self._batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise _errors.not_a_loss(loss)
        return loss

    def watched_forward(self) -> Tensor:
        """The loss; raises before the step writes to what must not change."""
        with self._writes.watching():
            return self.forward()

    def watched_train(self) -> None:
        """A step; likewise."""
        with self._writes.watching():
            loss = self.forward()
            try:
                loss.backward()
            except RuntimeError as error:
                if "a second time" not in str(error):
                    raise
                raise ValueError(
                    "step has called backward on the loss that it returns, or on a part of it: leave that backward to "
                    "the measurement"
                ) from error

    def train(self) -> None:
        """A step."""
        self.forward().backward()

    def seconds(self, repeats: int) -> float:
        """How long a step takes: the median, of the slowest rank."""
        self.train()
        times = [self.clock.seconds(self.train, 1) for _ in range(1 if self.is_estimated else repeats)]
        return worst([statistics.median(times)])[0]

    def weigh(self, blocks: Sequence[tuple[Module, int]]) -> list[Mark]:
        """A step, moment by moment. Blocks are modules and the numbers of their calls. The last mark is the end.

        Where there are several ranks, peaks are those of the rank that needs most.
        """
        self.start_anew()
        gc.collect()
        with self.meter.watching():
            line = _Line(self.meter, blocks)
            with hooks_on((module for module, _ in blocks), line.forward, line.after):
                loss = self.forward()
            line.mark(LOSS)
            loss.backward()
            del loss
            line.mark(END)
        self.start_anew()
        line.check()
        peaks = worst([mark.peak for mark in line.marks])
        return [dataclasses.replace(mark, peak=peak) for mark, peak in zip(line.marks, peaks, strict=True)]

    @contextlib.contextmanager
    def leaving_nothing(self) -> Iterator[None]:
        """Put everything back that steps change."""
        aside = Aside(self.model)
        leaves = {id(leaf): leaf for leaf in (*self._leaves, *aside.leaves())}
        gradients = set_aside(leaves.values(), to_host=self.device.type not in ("cpu", "meta"))
        try:
            with as_on_gpu() if self.is_estimated else contextlib.nullcontext():
                yield
        finally:
            self.start_anew()
            for gradient in gradients:
                gradient.put_back()
            aside.put_back()
            self._writes.put_back()
        self._writes.check()


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def _in_own_containers(batch: Any) -> Any:
    """The same tensors in lists and dicts that nobody else has."""
    made = rebuild(batch, Tensor, lambda tensor: tensor)
    if made is batch and (isinstance(batch, (MutableMapping, MutableSequence)) or dataclasses.is_dataclass(batch)):
        made = copy.copy(batch)
    return made


def _device_of(model: Module) -> torch.device:
    sizes: dict[torch.device, int] = {}
    for parameter in model.parameters():
        sizes[parameter.device] = sizes.get(parameter.device, 0) + parameter.numel()
    if not sizes:
        raise ValueError(f"model has no parameters, so there is nothing to train: {type(model).__name__}")
    return max(sizes, key=lambda device: sizes[device])


class _Line:
    """Notes what is alive as a step goes on."""

    def __init__(self, meter: Meter, blocks: Sequence[tuple[Module, int]]) -> None:
        self._meter = meter
        self._waiting = {(id(module), call): number for number, (module, call) in enumerate(blocks)}
        self._calls: Counter[int] = Counter()
        self._names = [type(module).__name__ for module, _ in blocks]
        self._open: list[int] = []
        self.marks: list[Mark] = []
        meter.reset()
        self._begun: tuple[str, int | None, int] = (START, None, meter.now())

    def mark(self, what: str, block: int | None = None) -> None:
        """Something else begins."""
        self.marks.append(Mark(*self._begun, self._meter.peak()))
        self._meter.reset()
        self._begun = (what, block, self._meter.now())
        if what == END:
            self.marks.append(Mark(*self._begun, self._meter.now()))

    def check(self) -> None:
        """Raise if a block was not called as often as it was before."""
        for number in self._waiting.values():
            raise _errors.step_changes(self._names[number])

    def forward(self, module: Module, _: Arguments) -> None:
        number = self._waiting.pop((id(module), self._calls[id(module)]), -1)
        self._calls[id(module)] += 1
        self._open.append(number)
        if number >= 0:
            self.mark(FORWARD, number)

    def after(self, module: Module, result: Any) -> None:
        number = self._open.pop()
        if number < 0:
            return
        outputs = [one for one in find_tensors((result,), {})[0] if one.requires_grad]
        self.mark(BETWEEN, number)
        begun = False

        def backward(_: Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self.mark(BACKWARD, number)

        for output in outputs:
            output.register_hook(backward)

"""Measure a training step: what its blocks cost in bytes and seconds, for each way to treat them.

Two kinds of measurements, and what ties them together:

- *By itself.* One block of each kind is run alone, forward and backward, on the arguments that the step gave it, under
  every way to treat it (`_alone.py`): what it holds between forward and backward, the worst moments of both, and how
  long both take.
- *In place.* A whole step is weighed from moment to moment (`_bench.py`), with all blocks kept or, if that does not
  fit, all recomputed. What is alive at a moment besides what the blocks hold is the difference of the two.

So everything that is not a block (embeddings, heads, losses, gradients, skips) is in the sums as it was measured, and
only the difference that a decision makes is predicted.

What this is not: it decides nothing (`plan.py`).
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from recollect import _errors
from recollect._alone import measure_kind
from recollect._bench import BACKWARD, FORWARD, START, Bench, Mark
from recollect._calls import BackwardInsideError, Call, find_blocks, take_samples, watch_calls
from recollect._failures import IN_PLACE, Failure
from recollect._options import KEEP, RECOMPUTE, Kind, Option
from recollect._problem import NEVER, Block, Choice, Link, Moment, Problem
from recollect._ranks import worst
from recollect._stores.courses import SPARE
from recollect._stores.files import Files, not_written
from recollect._stores.links import link_of
from recollect._stores.store import bound_of
from recollect._travel import LINK_BYTES, price_of_copies, speeds_of_link
from recollect._tried import attempt, decided
from recollect.policy import Decision, Offload

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Profile:
    """A step, measured.

    Attributes:
        blocks: The names of the modules that can be decided, in the order of their calls.
        calls: The number of each block's call among those of its module in a step.
        kind_of: Of each block, which of `kinds` it is.
        kinds: With the ways to treat them.
        marks: The moments of a step.
        base: How each block was treated in that step.
        is_plain: Whether all blocks were kept in that step, or recomputed, because keeping them did not fit.
        seconds: How long that step takes.
        tied: Blocks that are calls of the same module.
        device: Where.
        is_estimated: Whether nothing was run, and times are those of a GPU on paper.
        link: Bytes per second to where blocks can be offloaded, and back; None if they cannot.
        in_flight: How many bytes may be on their way there or back; None for any number.
        largest: Bytes of the largest tensor that is held for a block.
        accumulates: Whether the step has gone backward before the first of the blocks. What is decided holds there too,
            and so the worst moment there says nothing about other decisions.
    """

    blocks: tuple[str, ...]
    calls: tuple[int, ...]
    kind_of: tuple[int, ...]
    kinds: tuple[Kind, ...]
    marks: tuple[Mark, ...]
    base: tuple[int, ...]
    is_plain: bool
    seconds: float
    tied: tuple[tuple[int, ...], ...]
    device: str
    is_estimated: bool
    link: tuple[float, float] | None = None
    in_flight: int | None = None
    largest: int = 0
    accumulates: bool = False

    def option(self, block: int, choice: int) -> Option:
        """A way to treat a block."""
        return self.kinds[self.kind_of[block]].options[choice]

    def options(self, block: int) -> tuple[Option, ...]:
        """All ways to treat a block."""
        return self.kinds[self.kind_of[block]].options

    def decisions(self, chosen: Sequence[int]) -> dict[str, Mapping[str, Decision]]:
        """What a choice for every block means: decisions by names within the block, by the names of the blocks."""
        return {name: self.option(number, chosen[number]).decisions for number, name in enumerate(self.blocks)}

    @property
    def failures(self) -> list[Failure]:
        """The ways that do not work."""
        return [one for kind in self.kinds for one in kind.failures]

    @property
    def families(self) -> tuple[int, ...]:
        """Of each kind, a number; kinds whose blocks are calls of the same modules are treated alike, and share it."""
        return _families(len(self.kinds), self.kind_of, self.tied)

    def ruling_out(self, failures: Mapping[int, Sequence[Failure]]) -> Profile:
        """The same, where ways do not work: by the number of a kind. For blocks that are tied that is enough."""
        kinds = [kind.ruling_out(failures.get(number, ())) for number, kind in enumerate(self.kinds)]
        return dataclasses.replace(self, kinds=tuple(kinds))

    def without_recomputing(self) -> Profile:
        """The same with the options alone that compute nothing again."""
        if not self.is_plain:
            raise ValueError('allow must hold "recompute": without it the step does not fit on the device')
        return dataclasses.replace(self, kinds=tuple(kind.without_recomputing() for kind in self.kinds))

    def problem(self, *, offloading: bool = False, host_bytes: int | None = None) -> Problem:
        """What a solver needs to know. Options that offload come last, and are left out unless they are wanted."""
        chosen = [self.option(number, choice) for number, choice in enumerate(self.base)]
        held = [0]
        for option in chosen:
            held.append(held[-1] + option.kept)
        forward, backward = [0] * len(chosen), [0] * len(chosen)
        moments: list[Moment] = []
        through = 0
        for mark in self.marks[:-1]:
            number = mark.block
            if mark.what == FORWARD and number is not None:
                forward[number] = mark.peak - held[number] - chosen[number].forward
                through = max(through, number + 1)
            elif mark.what == BACKWARD and number is not None:
                backward[number] = mark.peak - held[number] - chosen[number].backward
            else:
                peak = self.marks[1].now if mark.what == START and self.accumulates else mark.peak
                moments.append(Moment(peak - held[through], through, self._words(mark)))
        return Problem(
            tuple(
                Block(
                    tuple(_choice(one) for one in self.options(number) if offloading or not one.out),
                    forward[number],
                    backward[number],
                    self.kinds[self.kind_of[number]].forward_seconds,
                    self.kinds[self.kind_of[number]].backward_seconds,
                    name or "the model",
                    self.kind_of[number],
                )
                for number, name in enumerate(self.blocks)
            ),
            tuple(moments),
            self.tied,
            self._slow_link() if offloading else None,
            host_bytes,
        )

    def _slow_link(self) -> Link | None:
        """Copies have time to spare (`_stores/courses.py`): memory is counted on only when they surely are through."""
        if self.link is None:
            return None
        out, back = (rate / (1 + SPARE) for rate in self.link)
        return Link(out, back, self.in_flight)

    def _words(self, mark: Mark) -> str:
        where = "the beginning" if mark.block is None else f"what comes after {self.blocks[mark.block] or 'the model'}"
        return {"start": "the beginning of the step", "loss": "the beginning of backward"}.get(mark.what, where)


def _choice(option: Option) -> Choice:
    kept = option.kept if option.works else NEVER
    return Choice(option.seconds, kept, option.forward, option.backward, option.out)


def _families(count: int, kind_of: Sequence[int], tied: Iterable[Sequence[int]]) -> tuple[int, ...]:
    families = list(range(count))
    for numbers in tied:
        joined = {families[kind_of[number]] for number in numbers}
        families = [min(joined) if one in joined else one for one in families]
    return tuple(families)


# --- Measuring ---


def measure(
    bench: Bench, *, repeats: int = 3, offload: Offload | None = None, progress: Progress | None = None
) -> Profile:
    """Measure a step of a model, which is left as it was; `offload` says where blocks could be offloaded to."""
    tell = progress or (lambda what, done, of: None)
    with bench.leaving_nothing():
        tell("looking at the model", 0, 1)
        keeps = False
        try:
            root, there = watch_calls(bench.model, bench.outside, bench.watched_forward)
        except BackwardInsideError:  # accumulated gradients, or a penalty for them
            keeps = True
            root, there = watch_calls(bench.model, bench.outside, bench.watched_forward, keeps=True)
        blocks = find_blocks(root)
        if keeps and not blocks:
            raise ValueError(
                "step goes backward through all that the model has computed before it returns the loss. If that is the "
                "backward of the loss itself, leave it to the measurement; for a penalty on gradients there is no "
                "plan: make one for the loss without it"
            )
        if not blocks:
            raise _errors.nothing_to_decide(type(bench.model).__name__)
        shared = _shared_parts(blocks)
        uses = Counter(one for block in blocks for one in set(block.inputs))
        results = {one for block in blocks for one in block.saved if one not in block.inputs}  # which their makers hold
        lives_on = [tuple(one in there or uses[one] > 1 or one in results for one in block.inputs) for block in blocks]
        alike: dict[object, list[int]] = {}
        for number, block in enumerate(blocks):
            alike.setdefault((block.kind(), lives_on[number], shared[number]), []).append(number)
        kinds: list[Kind] = []
        settled: dict[int, tuple[Option, ...]] = {}  # by module
        samples = take_samples(bench.forward, blocks, lives_on, {numbers[0] for numbers in alike.values()}, keeps=keeps)
        for done, numbers in enumerate(alike.values()):
            first = numbers[0]
            tell(f"measuring {blocks[first].name or 'the model'} ({len(numbers)} alike)", done, len(alike))
            # Calls of one module share its decision, so they must have the same ways to be treated, in the same order.
            before = next((settled[id(blocks[n].module)] for n in numbers if id(blocks[n].module) in settled), None)
            kinds.append(
                measure_kind(
                    bench, blocks[first], samples.pop(first), repeats=repeats, shared=shared[first], settled=before
                )
            )
            settled.update((id(blocks[number].module), kinds[-1].options) for number in numbers)
        del samples
        gc.collect()
        calls: dict[int, list[int]] = {}
        for number, block in enumerate(blocks):
            calls.setdefault(id(block.module), []).append(number)
        numbered = {number: index for index, numbers in enumerate(alike.values()) for number in numbers}
        kind_of = tuple(numbered[number] for number in range(len(blocks)))
        tied = tuple(tuple(numbers) for numbers in calls.values() if len(numbers) > 1)
        tell("weighing a step", 0, 1)
        profile = dataclasses.replace(_weigh(bench, blocks, kind_of, kinds, tied, repeats), accumulates=keeps)
        tell("weighing a step", 1, 1)
    if offload is not None:
        tell("measuring the link", 0, 1)
        link = _link(bench, offload)
        price = _price(bench, profile, offload, link, repeats)
        kinds = [kind.with_offloading(offload, price) for kind in profile.kinds]
        largest = worst([max(block.largest() for block in blocks)])[0]
        profile = dataclasses.replace(
            profile, kinds=tuple(kinds), link=link, in_flight=_in_flight(bench, offload), largest=largest
        )
    return profile


def _shared_parts(blocks: Sequence[Call]) -> list[tuple[str, ...]]:
    """Of each block, the names of the modules within it that are within other blocks too."""
    modules = {id(block.module): block.module for block in blocks}
    homes = Counter(id(part) for module in modules.values() for part in module.modules())
    return [tuple(name for name, part in block.module.named_modules() if homes[id(part)] > 1) for block in blocks]


def _weigh(
    bench: Bench,
    blocks: Sequence[Call],
    kind_of: tuple[int, ...],
    kinds: Sequence[Kind],
    tied: tuple[tuple[int, ...], ...],
    repeats: int,
) -> Profile:
    """A whole step with all blocks kept or, if the device has not enough memory for that, recomputed."""
    modules = [(block.module, block.number) for block in blocks]
    try:
        bench.watched_train()
        marks = bench.weigh(modules)
    except torch.OutOfMemoryError:
        marks = []  # the traceback holds what was computed, until here
    bench.let_go()
    (does_not_fit,) = worst([not marks])
    profile = Profile(
        tuple(block.name for block in blocks),
        tuple(block.number for block in blocks),
        kind_of,
        tuple(kinds),
        tuple(marks),
        (KEEP,) * len(blocks),
        not does_not_fit,
        0.0,
        tied,
        str(bench.device),
        bench.is_estimated,
    )
    if not does_not_fit:
        return dataclasses.replace(profile, seconds=bench.seconds(repeats))
    profile = _recomputed(bench, profile)
    try:
        with decided(bench.model, profile.decisions(profile.base)):
            bench.watched_train()
            return dataclasses.replace(profile, marks=tuple(bench.weigh(modules)), seconds=bench.seconds(repeats))
    except torch.OutOfMemoryError:
        raise torch.OutOfMemoryError(
            "even with all blocks recomputed a step takes more memory than the device has: make the batch smaller, or "
            "split what is computed in the largest of the model's modules into more of them"
        ) from None


def _recomputed(bench: Bench, profile: Profile) -> Profile:
    """With all blocks recomputed, but for one kind at most for which that does not work."""
    everything = tuple(profile.kinds[kind].recompute for kind in profile.kind_of)
    reason = attempt(bench, profile.decisions(everything)).reason
    if not reason:
        return dataclasses.replace(profile, base=everything)
    families = profile.families
    for family in sorted(set(families)):
        base = tuple(
            KEEP if families[kind] == family else choice
            for kind, choice in zip(profile.kind_of, everything, strict=True)
        )
        if attempt(bench, profile.decisions(base)).works:
            kind = profile.kinds[family]
            block = profile.blocks[profile.kind_of.index(family)]
            failure = Failure(block, kind.module, RECOMPUTE, IN_PLACE, reason)
            return dataclasses.replace(profile.ruling_out({family: [failure]}), base=base)
    raise ValueError(
        "the step does not fit on the device as it is, and recomputing its blocks does not work, so that there is "
        f"nothing to measure. {reason}"
    )


def _link(bench: Bench, offload: Offload) -> tuple[float, float]:
    """Bytes per second to where blocks are offloaded, and back, of the rank for which it is slowest."""
    if bench.gpu is not None:
        return bench.gpu.link, bench.gpu.link
    if offload.to == "cpu":
        speeds = speeds_of_link(bench.device, "cpu", None)
    else:
        files = Files(None if offload.directory is None else os.fspath(offload.directory))
        try:
            files.prepare()
            speeds = speeds_of_link(bench.device, "disk", files.directory)
        except OSError as error:
            raise not_written(files.directory, LINK_BYTES, error) from error
    out, back = worst([-speed for speed in speeds])
    return -out, -back


def _in_flight(bench: Bench, offload: Offload) -> int | None:
    link = None if bench.gpu is not None else link_of(bench.device)
    if link is None:
        return None
    return min(bound_of(None if one is None else int(one), link) for one in (offload.in_flight, offload.ahead))


def _price(bench: Bench, profile: Profile, offload: Offload, link: tuple[float, float], repeats: int) -> float:
    """Seconds that a byte adds to a step that does not wait for it."""
    if bench.gpu is not None:
        return 2 / bench.gpu.bytes  # it is read from the device's memory, and written to it
    if offload.to != "cpu":
        return 0.0
    price = 0.0
    with bench.leaving_nothing(), decided(bench.model, profile.decisions(profile.base)):
        try:
            price = price_of_copies(bench.device, bench.train, profile.seconds, link, repeats)
        except torch.OutOfMemoryError:  # the step alone fits: then it costs nothing, as far as can be told
            pass
    return worst([price])[0]

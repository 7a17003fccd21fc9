"""Kept states: what a step needs to be run again from there, and where its tensors are meanwhile.

With the leaves of a state goes what steps depend on without being given it: where random generators stand, and what
they change in place outside and read (`Hidden`). Tensors of tier 0 stay where they are; those of other tiers go to a
store, which may leave some of them here (small ones, parameters).

A kept tensor that was changed in place is an error when it is asked for, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from recollect._ambient import Access, Undo
from recollect._digest import copies, overwrite
from recollect._inputs import versions_of
from recollect._restored import Buffers
from recollect._stores.store import Store, Ticket
from recollect._torch import storage_key


class Hidden:
    """What steps depend on besides their state, and change: random generators, buffers."""

    __slots__ = ("_access", "_only_written", "_with_values")

    def __init__(self, access: Access | None) -> None:
        self._access = access
        self._with_values: dict[int, Tensor] = {}  # by memory: those that a step reads
        self._only_written: dict[int, Tensor] = {}

    def add(self, tensor: Tensor, *, is_read: bool) -> bool:
        """Note something that a step changes in place; False if that is known already."""
        memory = storage_key(tensor)
        if memory in self._with_values or (memory in self._only_written and not is_read):
            return False
        (self._with_values if is_read else self._only_written)[memory] = tensor
        return True

    def has(self, tensor: Tensor) -> bool:
        """Whether steps change it themselves."""
        memory = storage_key(tensor)
        return memory in self._with_values or memory in self._only_written

    def is_only_written(self, tensor: Tensor) -> bool:
        """Whether steps change it, and none is known to read it."""
        memory = storage_key(tensor)
        return memory in self._only_written and memory not in self._with_values

    def now(self) -> tuple[Any, dict[int, Tensor]]:
        """As it is at this moment."""
        there = self._with_values
        values = dict(zip(there, copies(list(there.values())), strict=True)) if there else {}
        return None if self._access is None else self._access[0](), values

    def put(self, state: tuple[Any, dict[int, Tensor]]) -> None:
        """Put it back to what it was then."""
        random, values = state
        if self._access is not None:
            self._access[1](random)
        if values:
            overwrite([self._with_values[memory] for memory in values], list(values.values()))

    def restore(self) -> Undo | None:
        """Gives what puts everything that steps write to back to what it holds now."""
        tensors = [*self._with_values.values(), *self._only_written.values()]
        if not tensors:
            return None
        undo: Undo | None = Buffers([partial(_itself, one) for one in tensors], [None] * len(tensors)).restore()
        return undo


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Kept:
    """A state in a slot."""

    __slots__ = ("_leaves", "_store", "_tensors", "_versions", "hidden")

    def __init__(
        self, leaves: list[Any], places: Sequence[int], hidden: tuple[Any, dict[int, Tensor]], store: Store | None
    ) -> None:
        self._leaves = leaves
        self._store = store
        self.hidden = hidden
        if store is not None:
            self._leaves = leaves = list(leaves)
            for place in places:
                leaves[place] = store.put(leaves[place]) or leaves[place]
        self._tensors = [leaf for place in places if not isinstance(leaf := leaves[place], Ticket)]
        self._versions = versions_of(self._tensors)

    def is_changed(self) -> bool:
        """Whether a tensor was changed in place since."""
        return versions_of(self._tensors) != self._versions

    def leaves(self) -> list[Any]:
        """The leaves, all of them here."""
        store = self._store
        if store is None:
            return self._leaves
        return [store.get(leaf) if isinstance(leaf, Ticket) else leaf for leaf in self._leaves]


class Slots:
    """The kept states of a chain, by tier and number."""

    __slots__ = ("_places", "_start", "_states", "_stores", "hidden", "last")

    def __init__(self, places: Sequence[int], hidden: Hidden, stores: Sequence[Store | None], start: Kept) -> None:
        self._places = places
        self._states: dict[tuple[int, int], Kept] = {}
        self._start = start
        self.last: Kept | None = None  # the running state, where it is not known yet whether it will be kept
        self._stores = stores
        self.hidden = hidden

    def keep(self, state: int, tier: int, leaves: list[Any]) -> Kept:
        """Keep what is the running state now."""
        kept = Kept(leaves, self._places, self.hidden.now(), self._stores[tier])
        self._states[tier, state] = kept
        return kept

    def put(self, state: int, tier: int, kept: Kept) -> None:
        """Keep what was the running state before."""
        self._states[tier, state] = kept

    def __getitem__(self, place: tuple[int, int]) -> Kept:
        return self._states[place]

    def drop(self, state: int, tier: int) -> None:
        """Free a slot."""
        del self._states[tier, state]

    def learn(self, changed: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Note what steps change and what it held before, if they read it.

        No step has changed it up to now, so that is what it held at all states that are kept.
        """
        for tensor, before in changed:
            if self.hidden.add(tensor, is_read=before is not None) and before is not None:
                for kept in (self._start, self.last or self._start, *self._states.values()):
                    kept.hidden[1].setdefault(storage_key(tensor), before)

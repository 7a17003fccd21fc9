"""What is kept, wherever it is. One interface: make a `Kept`, ask whether it is still what it was, `get` it.

On its device a kept tensor is an alias without history, which shares its version counter with the original, so that
a change in place shows. In a store (`_stores/`) it is a copy, and what the store does not take stays on its device.
Under saved-tensor hooks (a region around, `save_on_cpu`) neither: what is kept is handed to those hooks, as a tensor
that autograd saves would be, so that whoever is around decides about both alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect import _errors
from recollect._inputs import by_hand, copy_of, with_stride
from recollect._stores.store import Store
from recollect._torch import Hooks, may_be_unfilled, share_version_counter, storage_key, version_of

# A slot is what autograd holds instead of a saved tensor: its number in its frame, counted from here on. It is an int
# because those are cheap and no concern of the garbage collector; and one that CPython does not share, as it does small
# ones, so that each slot is an object of its own, whose references can be counted.
FIRST_SLOT = 2**20


class Kept:
    """A kept value. Values that are no tensors are simply held."""

    # Defaults on the class: most of them are never set, and there is one object per kept tensor.
    _unpack: Callable[[Any], Tensor] | None = None
    _store: Store | None = None  # that has a copy
    _stride: tuple[int, ...] | None = None  # the order of memory, which hooks may not keep
    _held: Any = None  # what is held of the original's own memory, by hooks through a weak reference
    _aliases: tuple[tuple[Tensor, int], ...] = ()  # over the same memory, with version counters of their own
    _reshapes = 0  # how often the original was given another shape in place
    call = 0  # which call of its operator it is from
    packed = 0  # how many tensors its region had packed by then
    needs_grad = False  # whether it is handed out as a result that does
    path = ""  # of the named region that it was saved in
    after: Any = None  # the random state after the call whose result this is, where it may have drawn
    copies_on_write = False  # if the region itself is about to change the original
    changed_by = ""  # who changed it in place, in words, where that was seen
    changed_at: str | None = None  # on which line

    def __init__(
        self,
        value: Any,
        *,
        store: Store | None = None,
        hooks: Hooks | None = None,
        is_private: bool = False,
        is_being_saved: bool = False,
    ) -> None:
        """Keep `value`; `is_private` if nobody else has its memory. With a store it may have a history.

        With hooks: `is_being_saved` if autograd saves it at this moment, for an operator that may have yet to write it.
        """
        self._packed = value
        if not isinstance(value, Tensor):
            return
        self._version = version_of(value)
        if hooks is not None:
            self._hand_to(hooks, value, by_hand.packing or not is_being_saved)
        elif store is not None:
            ticket = store.put(value)
            if ticket is not None:
                self._store, self._packed = store, ticket
                return
            value = self._packed = without_history(value)
        if not is_private:
            # Hooks may hold the very tensor, or a copy: as long as it is there, its version counts.
            self._held = value if self._packed is value else weakref.ref(value)

    def _hand_to(self, hooks: Hooks, value: Tensor, is_by_hand: bool) -> None:
        pack, self._unpack = hooks
        dense = type(value) is Tensor and value.layout is torch.strided and not value.is_nested
        self._stride = value.stride() if dense else None
        by_hand.packing = is_by_hand
        try:
            with torch.no_grad():  # as around autograd's own calls of a pack hook
                self._packed = pack(value)
        finally:
            by_hand.packing = False

    @property
    def val(self) -> Any:
        """What is kept."""
        return self.get()

    def get(self) -> Any:
        if self._unpack is not None:
            with torch.no_grad():
                value = self._unpack(self._packed)
                if any(version_of(one) != then for one, then in getattr(value, "kept_aliases", ())):
                    raise _errors.changed_through_a_view()
                if self._stride is not None and value.stride() != self._stride:
                    value = with_stride(value, self._stride)  # random operators draw in the order of memory
                return value
        if self._store is not None:
            return self._store.get(self._packed)
        return self._packed

    @property
    def needs_replay(self) -> bool:
        """Whether `get` may set off the replay of a region around."""
        packed = self._packed
        return self._unpack is not None and (type(packed) is int or getattr(packed, "needs_replay", False))

    def is_changed(self) -> bool:
        """Whether the original was changed in place since, and with it what is kept."""
        if self.changed_by:
            return True
        held = self._held
        if type(held) is weakref.ref:
            held = held()
        if held is None:
            return False
        moves = version_of(held) - self._version
        for one, then in self._aliases:
            moves += version_of(one) - then
        return moves != self._reshapes

    def may_be_changed_in_replay(self) -> bool:
        """Whether what `get` gives may be a copy of the original that is kept itself.

        Then a change of the original did not matter, and the replay will change this in place as the forward did.
        """
        return self._store is None and not isinstance(self._held, Tensor) and not self.needs_replay

    def make_private(self) -> None:
        """Keep a copy from now on: the original is about to be changed."""
        held = self._original()
        if held is not None and held is self._packed:
            self._packed = copy_of(held)
            self._held, self._aliases = None, ()

    def is_copied_before_a_change(self) -> bool:
        """Let a change in place that is about to come wait for the copy in a store; whether there is one."""
        kept = self._in_a_store()
        if kept is None or kept._store is None:
            return False
        kept._store.hold_back(kept._packed)
        return True

    def also_held_by(self, alias: Tensor) -> None:
        """Watch another tensor over the same memory, if it does not share a version counter that is watched."""
        kept, original = self._in_a_store(), self._original()
        if kept is not None and kept._store is not None:
            kept._store.also_watch(kept._packed, alias)
        elif original is not None:
            watched = (original, *(one for one, _ in self._aliases))
            if not any(share_version_counter(alias, one) for one in watched):
                self._aliases += ((alias, version_of(alias)),)
                if self._unpack is not None:  # in a replay: who gets this very tensor from the hooks has to know
                    original.kept_aliases = self._aliases  # type: ignore[attr-defined]

    def is_reshaped(self) -> None:
        """The original is being given another shape in place: that counts as a version and leaves the values."""
        self._reshapes += 1
        held = self._original()
        if held is not None:  # told to a region around, if it is the one that holds it
            held.expected_version = version_of(held) + 1  # type: ignore[attr-defined]

    def memory(self) -> int | None:
        """The key of the memory that is held or being copied here and that a change would reach, if there is any."""
        kept = self._in_a_store()
        if kept is not None:
            memory: int = kept._packed.copy.key[0]
            return memory
        held = self._original()
        return None if held is None else storage_key(held)

    def _in_a_store(self) -> Kept | None:
        """Who has a copy in a store: this, or what the hooks around gave for it (those of `hooks_into`)."""
        kept = self._packed if isinstance(self._packed, Kept) else self
        return None if kept._store is None else kept

    def _original(self) -> Tensor | None:
        return self._held() if isinstance(self._held, weakref.ref) else self._held


def without_history(tensor: Tensor) -> Tensor:
    """What may be held without holding the graph, which holds what is kept here. A view has that of its base."""
    return tensor if tensor.is_leaf and tensor._base is None else tensor.detach()


def is_written(tensor: Tensor) -> bool:
    """Whether a tensor that is being packed has its values: else a copy must not be made yet (`may_be_unfilled`).

    It is enough to be sure of those that need grad, or were written to before: the others are constants, alive anyway.
    """
    return tensor.requires_grad or by_hand.packing or version_of(tensor) > 0 or not may_be_unfilled(tensor)


def hooks_into(store: Store, changed: Callable[[], Exception]) -> Hooks:
    """Saved-tensor hooks that keep everything in a store; `changed` makes the error about what the store did not take
    and was changed in place.
    """

    def pack(tensor: Tensor) -> Kept:
        return Kept(tensor, store=store) if is_written(tensor) else Kept(without_history(tensor))

    def unpack(kept: Kept) -> Tensor:
        if kept.is_changed():
            raise changed()
        value: Tensor = kept.get()
        return value

    return pack, unpack

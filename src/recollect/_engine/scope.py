"""Which region's function runs in this thread, and the journal of what was decided in it.

A scope is there while a region's function runs, in the forward or in a replay; scopes of one thread form a stack.

The journal. What a policy decided must hold for every later run of the same code: the region's own replay, but also
the replay of a region around it, which runs this region's forward anew. So decisions are noted in order in a
journal that the outermost region begins and all regions inside share. A forward that nobody replays appends; every
run inside a replay reads, from the place where its region began. It holds decisions and no tensors: what was kept
belongs to the frame that kept it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from recollect._engine.calls import Awaited, Opened
    from recollect._engine.frame import Frame
    from recollect.policy import Policy

T = TypeVar("T")
# Told of every tensor that is saved in a region, and what becomes of it: "recomputed", "kept" or "offloaded".
Watch = Callable[["Tensor", str], None]


class Scope:
    """A region's function at work."""

    # Defaults on the class: a region has two of these or more, and most need none of it.
    replaying = False  # whether this is a replay of the frame
    following = False  # whether it is within a replay
    policy: Any = None  # that decides here
    watch: Watch | None = None
    outside = ""  # of watched ones: the path of the named regions around the place where `path` begins
    trace: Any = None  # of operators, for `debug`
    recorder: Any = None  # of operators and values, where this run is to be compared
    modes: tuple[Any, ...] = ()  # the dispatch modes that keep or hand out operators' outputs here
    keeper: Any = None  # of named regions, in a forward that has come to one: see kept_region.py
    opened: Opened | None = None  # where a module's hooks began it, and no function of ours is around it
    unpack: Callable[[Any], Tensor]  # the other half of `pack`, in a forward
    is_bare = True  # whether the engine itself has no context to enter around a forward
    names: Any = ()  # the paths of the named regions that were called, until the policy matched

    def __init__(
        self,
        frame: Frame,
        pack: Callable[[Tensor], Any],
        packed: Callable[[], int],
        around: Scope | None,
        replaying: bool = False,
    ) -> None:
        self.frame = frame
        self.pack = pack  # the saved-tensor hook that this run of the function pushes
        self.packed = packed  # how many it packed so far
        self.around = around
        self.position: int = frame.start
        self.path = frame.path  # of the named regions that are open
        # Asked at every call of a named region, where an attribute of the instance is found at once.
        self.saving = False  # within one that is kept
        self.known: dict[str, Any] | None = None  # by path, where the policy decides about such: see named.py
        if replaying:
            self.replaying = self.following = True
        if around is not None:
            self.following |= around.following
            if around.watch is not None:
                self.watch = around.watch
                self.outside = around.outside if frame.path else around.whole_path()
        if frame.options.policy is not None:
            self.decide_by(frame.options.policy)

    def decide_by(self, policy: Policy | None) -> None:
        """Ask `policy` from here on."""
        self.policy = policy
        self.known = policy.known_paths if policy is not None and policy.decides_names() else None

    def whole_path(self) -> str:
        """The path of all named regions that are open, also of those around the place where a policy begins its own."""
        return f"{self.outside}/{self.path}" if self.outside and self.path else self.outside or self.path

    def noted(self, make: Callable[..., T], *args: Any) -> T | None:
        """The next entry of the journal: what `make` gives in a forward, what it gave then within a replay.

        None within a replay that has got further than the forward, which is then unfinished or took another path.
        """
        entry: T | None = self.note(None if self.following else make(*args))
        return entry

    def note(self, entry: Any) -> Any:
        """The same for an entry that is there already."""
        position = self.position
        self.position = position + 1
        journal = self.frame.journal
        if not self.following:
            journal.append(entry)
            return entry
        end = self.frame.end if self.replaying and self.frame.finished else len(journal)
        return journal[position] if position < end else None

    def outer(self) -> Iterator[Scope]:
        """Those around it, from the inside out."""
        scope = self.around
        while scope is not None:
            yield scope
            scope = scope.around

    def pause(self) -> list[Any]:
        """Let the dispatch modes of this function, and of those around it, see nothing; gives those it paused.

        What runs in a replay that a backward inside the function set off is none of theirs.
        """
        paused = []
        for scope in (self, *self.outer()):
            modes = (*scope.modes, scope.trace, scope.recorder)
            paused += [mode for mode in modes if mode is not None and not mode.paused]
        for mode in paused:
            mode.paused = True
        return paused


class _Here(threading.local):
    scope: Scope | None = None
    reentrant: str | None = None  # "forward" or "replay" while a region of the reentrant variant runs
    chain: Any = None  # the step of a chain that runs: see _chains/notes.py
    awaited: Awaited | None = None  # what a module is being called for, until the module's own hook begins it


here = _Here()

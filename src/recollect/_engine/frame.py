"""Frames and slots: who owns a saved tensor, who may ask for it, and when it is replayed.

Theory. Inside a region autograd is given a slot, a number, for every tensor that it wants to save; the tensor
itself is let go. Autograd holds the region's hooks, which hold the frame; the frame holds nothing of autograd's. So a
frame lives exactly as long as the graph holds a slot of it, and dies without the garbage collector. Whether a slot is
still alive is read off its reference count: if nobody but the frame holds it, autograd has let go of it.

When backward asks for a slot, the frame sees to it that its function has been replayed for the current pass and
hands over what was recovered. A pass has a replay of its own, so passes that overlap (a backward inside a hook of
another, two threads over one graph) do not meet.

Rules (numbers as in the contract):
1. The innermost hooks own a saved tensor: that is how autograd's hook stack works, nothing is done for it here.
2. A region's inputs go through the hooks around it (`_inputs.py`), so asking for something deep makes the parents
   replay first.
3. A replay pushes its own hooks and knows of no others.
4. A pass is autograd's graph task, or a group of them; outside of any, each access is a pass of its own. A pass owns
   its replays, and frames know them by weak reference alone: what a pass leaves behind is gone with it, also if the
   backward fails.
5, 6, 8. replay.py.
7. Nothing here refers to an output of the region, nor to a tensor that was computed inside.
9. Freed graphs have no slots. Inputs are checked by `_inputs.py`; a recovered tensor is compared with its version
   at the time it was saved, which restores the check that autograd itself leaves out under hooks.

Threads. Two device threads of one backward may ask at once, and two Python threads may run backward over one graph:
a frame replays under its lock, and locks are taken from inner frames to outer ones only. Nobody waits for
ever, see `_PATIENCE`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from _thread import RLock  # threading.RLock is a Python function around it
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from recollect import _errors, _faults
from recollect._ambient import Ambient
from recollect._engine.calls import innermost, take_off
from recollect._engine.groups import Shared
from recollect._engine.replay import Replay, describe_difference, run_replay
from recollect._engine.scope import Scope, Watch, here
from recollect._engine.selective import forward_mode, takes_a_mode, tell_if_useless
from recollect._errors import Signature
from recollect._gathering import Gathering, gather_later
from recollect._guards import leaf_of
from recollect._inputs import Arguments, Inputs, find_tensors
from recollect._kept import FIRST_SLOT, hooks_into
from recollect._shard import Shard
from recollect._stores.chosen import store_of
from recollect._torch import (
    PLAIN_TYPES,
    Hooks,
    at_end_of_pass,
    current_group,
    current_node,
    graph_task_id,
    process_groups,
    push_hooks,
    reads_once,
    top_hooks,
)
from recollect._verification import begin
from recollect._verify import OperatorTrace, call_site, plain_signature, signature, traces_start_here
from recollect.policy import Offload, Policy


@dataclass(frozen=True, slots=True)
class Options:
    """How a region behaves; what its user chose."""

    determinism_check: str = "default"
    early_stop: bool = True
    debug: bool = False
    preserve_rng_state: bool | str = True
    name: str | None = None
    policy: Policy | None = None
    inputs: Offload | Shard | None = None
    # Said once, because every region asks: whether nothing was chosen that asks for more than guards.
    is_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        guards_alone = self.determinism_check == "default" and self.preserve_rng_state is not False
        object.__setattr__(self, "is_plain", guards_alone and self.policy is None and not self.debug)


# Seconds. Long, because two replays at once share the random generators: it is to end a deadlock, not to save time.
_PATIENCE = 60.0


class Frame:
    """What one call of a checkpointed function owns."""

    # Defaults on the class: there is one of these per region, and few regions need any of it.
    finished = False  # whether the forward has come to its end
    # Where this region's decisions stand in the journal: see scope.py.
    start = 0
    end = 0
    differentiated = False  # whether a backward inside the function came by
    trace: OperatorTrace | None = None
    # Of operators, by place in the journal: see selective.py.
    kept_outputs: dict[int, dict[Any, list[Any]]] | None = None
    kept_regions: Any = None  # named ones: see kept_region.py
    gathering: Gathering | None = None  # of inputs that several ranks keep

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        tensors: list[Tensor],
        flat: bool,
        options: Options,
        replay_context: contextlib.AbstractContextManager[Any] | None,
        outer: Scope | None,
        path: str,
    ) -> None:
        self.function = function
        self.options = options
        self.replay_context = replay_context
        self.path = path  # of the named regions around the function, where its policy was handed down to it
        self.verification = begin(function, arguments, tensors, options, outer is not None and outer.following)
        self.ambient = Ambient(tensors, options.preserve_rng_state, arguments)
        self.around = hooks = top_hooks()  # the saved-tensor hooks around the region
        if hooks is None and options.inputs is not None:
            hooks = self._hooks_for(options.inputs, tensors)
        self.inputs = Inputs(arguments, tensors, flat, hooks)
        if self.gathering is not None:
            compares = self.verification is not None and self.verification.record is not None
            self.gathering.begin(self.region, arguments, compares=compares)
        self.slots: list[int] = []
        self.signatures: list[Signature] = []
        self.replays: dict[object, weakref.ref[Replay]] = {}  # by pass
        self._lock = RLock()
        self.journal: list[Any]
        if outer is None:
            self.journal = []
        else:
            self.journal = outer.frame.journal
            self.end = self.start = outer.position
        if options.debug:
            self.trace = OperatorTrace()
        if _noted and (noted := _noted.get(threading.get_ident())) is not None:
            noted.append(weakref.ref(self))

    def _hooks_for(self, decision: Offload | Shard, tensors: list[Tensor]) -> Hooks | None:
        """Where the inputs wait for the replay."""
        if isinstance(decision, Offload):
            return hooks_into(store_of(decision), _inputs_are_checked)
        self.gathering = gather_later(decision, self.function, tensors)
        return None if self.gathering is None else self.gathering.hooks

    def region(self) -> str:
        """How messages name it."""
        return _errors.describe_function(self.function, self.options.name)

    def place(self) -> str | None:
        """Where its function stands."""
        return _errors.place_of(self.function)

    def replay_for(self, index: int, *, once_more: bool = False) -> Replay:
        """The replay of the running pass: run now, unless another thread of this backward was faster.

        Or `once_more` for this slot alone, as for an access outside of any backward.
        """
        task = -1 if once_more else graph_task_id()
        if not self.finished:
            self.differentiated = True
        # A backward inside the function may need the very thread that waits here: after a while, replay beside it.
        locked = self._lock.acquire(True, _PATIENCE)
        try:
            if task < 0:
                return self._replay_outside(index)
            replay = self.replay_known_to(task)
            if replay is not None and len(replay.tensors) > index:
                return replay
            group = current_group()
            if group is None:
                replay = run_replay(self, self.inputs.restore(self.region))
                at_end_of_pass(replay)  # which holds it until then
            else:
                replay = self._replay_in_group(group, index)
            self.replays[task] = weakref.ref(replay)
            return replay
        except BaseException as error:
            if process_groups:
                _faults.raised(error, _errors.in_replay, self.region)
            raise
        finally:
            if locked:
                self._lock.release()

    def replay_known_to(self, key: object) -> Replay | None:
        """The replay of a pass that is still going on."""
        replays = self.replays
        if not replays:
            return None
        # A copy made at once: a garbage collection in between may take entries out.
        for ended in [one for one, reference in replays.copy().items() if reference() is None]:
            replays.pop(ended, None)
        reference = replays.get(key)
        return None if reference is None else reference()

    def _forget(self, replay: Replay) -> None:
        """Let the next who asks have a replay of his own, as if the pass had ended."""
        for key in [one for one, reference in self.replays.copy().items() if reference() is replay]:
            self.replays.pop(key, None)

    def _replay_in_group(self, group: Any, index: int) -> Replay:
        replay = self.replay_known_to(weakref.ref(group))
        if replay is None or len(replay.tensors) <= index:
            replay = run_replay(self, self.inputs.restore(self.region))
            # So that every slot looks as if it had been handed over, and is asked for there.
            replay.shared = Shared(replay.tensors)
            replay.tensors = [None] * len(replay.tensors)
            self.replays.pop(weakref.ref(group), None)  # or an equal key of an earlier replay would stay
            # A reference to the group holds the replay until the group is gone.
            self.replays[weakref.ref(group, partial(_group_ended, weakref.ref(self), replay))] = weakref.ref(replay)
        return replay

    def _replay_outside(self, index: int) -> Replay:
        """Replay for an access outside of any backward: a pass of its own, shared by the regions around this one."""
        access = _outside.access
        if access is None:
            return self._replay_for_access(_Access(), only=index)
        replay = self.replay_known_to(weakref.ref(access))
        if replay is None:
            replay = self._replay_for_access(access)
            access.replays.append(replay)
            self.replays[weakref.ref(access)] = weakref.ref(replay)
        return replay

    def _replay_for_access(self, access: _Access, only: int | None = None) -> Replay:
        before, _outside.access = _outside.access, access
        try:
            arguments = self.inputs.restore(self.region)
            _outside.access = None  # what the function accesses is not part of this pass
            return run_replay(self, arguments, only)
        finally:
            _outside.access = before

    def _recover_again(self, index: int, replay: Replay) -> tuple[Replay, Tensor]:
        """For a slot whose tensor has been handed over in this pass, or is shared by the calls of a group."""
        shared = replay.shared
        if shared is not None:
            tensor = shared.take(index)
            if tensor is None and getattr(current_group(), "may_overlap", False):
                self._forget(replay)
                replay = self.replay_for(index)
                tensor = None if replay.shared is None else replay.shared.take(index)
            if tensor is not None:
                return replay, tensor
        elif reads_once(current_node()):
            # Two nodes own it. A change of a view stands in the graph as a change of its base, and if the view is
            # gone, a double backward comes by the change itself too.
            replay = self.replay_for(index, once_more=True)
            tensor = replay.tensors[index]
            if tensor is not None:
                return replay, tensor
        error = _errors.unpacked_twice if shared is None else _errors.groups_overlap
        raise error(self.region(), index, describe_difference(self, replay), call_site(sys._getframe()))

    def _changed_since(self, index: int, replay: Replay, tensor: Tensor) -> Exception:
        details = describe_difference(self, replay)
        record = None if self.verification is None else self.verification.record
        change = None if record is None else record.change_of(index)
        return _errors.saved_tensor_changed(self.region(), index, tensor, current_node(), details, change)


class frames_made:  # noqa: N801 - it is used as a function is
    """Notes the frames that this thread makes meanwhile, so that they can be told to let go."""

    __slots__ = ("_noted",)

    def __enter__(self) -> frames_made:
        self._noted = _noted.setdefault(threading.get_ident(), [])
        return self

    def __exit__(self, *_: object) -> None:
        _noted.pop(threading.get_ident(), None)

    def release_what_cannot_be_replayed(self) -> None:
        """Let go of inputs that were changed in place since.

        Where such an input was changed by what a region gave (`x.add_(layer(x))`), it holds the graph, which holds the
        frame, which holds it: a cycle that Python's garbage collector cannot see, and that only a replay would end.
        """
        for reference in self._noted:
            frame = reference()
            if frame is not None:
                frame.inputs.let_go_of_what_was_changed()


_noted: dict[int, list[weakref.ref[Frame]]] = {}  # by thread; empty but while a plan tries decisions


class _Access:
    """An access to a saved tensor outside of any backward, as a pass: owns the replays of the regions around."""

    __slots__ = ("__weakref__", "replays")

    def __init__(self) -> None:
        self.replays: list[Replay] = []


class _Outside(threading.local):
    """The access for which this thread is fetching a region's inputs."""

    access: _Access | None = None


_outside = _Outside()


def _group_ended(frame: weakref.ref[Frame], replay: Replay, group: object) -> None:
    """Let go of the reference to a group, which holds the group's replay."""
    there = frame()
    if there is not None:
        there.replays.pop(group, None)


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    contexts: tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]] | None = None,
    path: str = "",
    watch: Watch | None = None,
) -> Any:
    """Call `function` as a region: what autograd saves in it becomes slots of a new frame."""
    scope, tensors = prepare(function, args, kwargs, options, None if contexts is None else contexts[1], path, watch)
    succeeded = False
    try:
        here.scope = scope
        push_hooks(scope.pack, scope.unpack)
        if contexts is None and scope.is_bare:
            result = function(*args, **kwargs)
        else:
            result = _call_in_contexts(scope, args, kwargs, None if contexts is None else contexts[0])
        succeeded = True
    finally:
        forward_ended(scope, args, kwargs, tensors, succeeded)
    return result


def prepare(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    replay_context: contextlib.AbstractContextManager[Any] | None,
    path: str = "",
    watch: Watch | None = None,
) -> tuple[Scope, list[Tensor]]:
    """What a region needs before its function runs: a scope with its frame and hooks, and the tensors of the arguments.

    None of it is in force yet.
    """
    tensors, flat = find_tensors(args, kwargs)
    outer = here.scope
    if outer is not None and outer.opened is not None:
        outer = innermost()
    frame = Frame(function, (args, kwargs), tensors, flat, options, replay_context, outer, path)
    signatures, slots, replays, verification = frame.signatures, frame.slots, frame.replays, frame.verification
    arguments = set(map(id, tensors))
    add_signature, add_slot, replay_of = signatures.append, slots.append, replays.get
    last: Any = None

    def pack(tensor: Tensor) -> int:
        nonlocal last
        leaf: Tensor | None
        if type(tensor) in PLAIN_TYPES:
            try:
                now = plain_signature(tensor)
            except RuntimeError:
                now = signature(tensor)
            # Nearly all are neither leaves nor views of one.
            base = tensor._base
            if base is None or type(base) in PLAIN_TYPES:
                leaf = tensor if base is None else base
                if not leaf.is_leaf or not leaf.requires_grad or id(leaf) in arguments:
                    leaf = None
            else:
                leaf = leaf_of(tensor)
        else:
            now, leaf = signature(tensor), leaf_of(tensor)
        # Equal neighbours share one signature: less for the garbage collector to look at.
        if now != last:
            last = now
        add_signature(last)
        slot = FIRST_SLOT + len(slots)
        add_slot(slot)
        if leaf is not None and verification is not None:
            verification.saved(slot - FIRST_SLOT, leaf)
        return slot

    def unpack(slot: int) -> Tensor:
        index = slot - FIRST_SLOT
        known = replay_of(graph_task_id())
        replay = None if known is None else known()
        if replay is None or len(replay.tensors) <= index:
            replay = frame.replay_for(index)
        tensors = replay.tensors
        tensor = tensors[index]
        if tensor is None:
            replay, tensor = frame._recover_again(index, replay)
            tensors = replay.tensors
        tensors[index] = None
        try:
            version = tensor._version
        except RuntimeError:
            return tensor
        if version and version != replay.versions.get(index, 0) and version != getattr(tensor, "expected_version", 0):
            raise frame._changed_since(index, replay, tensor)
        return tensor

    scope = Scope(frame, pack, slots.__len__, outer)
    scope.unpack = unpack
    if watch is not None:
        scope.watch = watch
    if scope.watch is not None:
        scope.pack = _watched(pack, scope.watch)
    if not options.is_plain:
        scope.trace = frame.trace
        record = None if verification is None else verification.record
        if record is not None:
            scope.recorder = record
            scope.pack = record.saving(scope.pack)
        looks_on = any(one is not None for one in (record, frame.trace, scope.watch))
        scope.is_bare = not looks_on and not takes_a_mode(options.policy)
    return scope, tensors


def _inputs_are_checked() -> Exception:
    return AssertionError("an input that was changed in place is found by Inputs")


def forward_ended(
    scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], succeeded: bool
) -> None:
    """Take a region's hooks and scope off again, however its function has ended, and note what that has shown."""
    frame, outer = scope.frame, scope.around
    take_off(scope.pack)
    here.scope = outer
    if outer is not None:
        outer.position = scope.position
    frame.inputs.forward_ended(args, kwargs, tensors)
    if succeeded:
        frame.finished = True
        frame.end = scope.position
        if frame.gathering is not None:
            frame.gathering.forward_ended(saved=bool(frame.slots))
        if frame.ambient.parts:
            frame.ambient.forward_ended()
        if frame.verification is not None:
            frame.verification.forward_ended()


def _watched(pack: Callable[[Tensor], int], watch: Watch) -> Callable[[Tensor], int]:
    def watched(tensor: Tensor) -> int:
        watch(tensor, "recomputed")
        return pack(tensor)

    return watched


# --- What else is around a function in its forward ---


@traces_start_here
def _call_in_contexts(
    scope: Scope,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: contextlib.AbstractContextManager[Any] | None,
) -> Any:
    contexts = Contexts(scope, context)
    try:
        result = scope.frame.function(*args, **kwargs)
    except BaseException as error:
        contexts.leave(error)
        raise
    contexts.leave(None)
    return result


class Contexts:
    """The user's context for a forward, the policy's mode, a trace and a record: entered in this order."""

    __slots__ = ("_mode", "_scope", "_stack")

    def __init__(self, scope: Scope, context: contextlib.AbstractContextManager[Any] | None) -> None:
        self._scope = scope
        self._stack = contextlib.ExitStack()
        frame = scope.frame
        policy = frame.options.policy
        self._mode = None if policy is None else forward_mode(policy, scope)
        try:
            for one in (context, self._mode, frame.trace, scope.recorder):
                if one is not None:
                    self._stack.enter_context(one)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            self._forget()
            raise

    def leave(self, error: BaseException | None) -> None:
        """Leave them; `error` is what the function raised, and is for the caller to raise unless another is raised."""
        scope, mode, policy = self._scope, self._mode, self._scope.frame.options.policy
        refusal = None
        try:
            if isinstance(error, TypeError):
                refusal = next((one.refused for one in scope.modes if one.refused is not None), None)
                error = refusal or error
            if error is None:
                self._stack.close()
                if policy is not None and not policy.settled and not scope.following:
                    tell_if_useless(policy, scope, () if mode is None else mode.seen)
            elif self._stack.__exit__(type(error), error, error.__traceback__):
                raise _errors.context_suppressed(scope.frame.region()) from error
            elif refusal is not None:
                raise refusal from None
        finally:
            error = refusal = None  # a traceback that holds this Python frame must not be held by it
            self._forget()

    def _forget(self) -> None:
        scope = self._scope
        for one in scope.modes:
            one.refused = None
        scope.modes = ()  # they hold the scope
        scope.recorder = None

"""`checkpoint` and `remat`: check what the caller asked for, put an engine together, run it.

Also the two process-wide overrides. They are read when a region's forward begins and hold for its backward, wherever
that runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from recollect import _compile, _errors
from recollect._engine.frame import Options, run_region
from recollect._engine.reentrant import CheckpointFunction
from recollect._known import all_known
from recollect._shard import Shard
from recollect._torch import is_stock_noop_context_fn, is_traced_by_autograd, never_begin
from recollect.policy import Decision, Offload, Policy, Question, as_policy, checked_inputs

P = ParamSpec("P")
R = TypeVar("R")
Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]
PolicyLike = Policy | Callable[[Any, Question], Decision | None]

DETERMINISM_CHECKS = ("none", "default", "first", "values")
_DEFAULTS = {check: Options(determinism_check=check) for check in DETERMINISM_CHECKS}


def noop_context_fn() -> Contexts:
    """Two contexts that do nothing: the default of `context_fn`."""
    return contextlib.nullcontext(), contextlib.nullcontext()


# --- Process-wide overrides ---


def _check_of_this_run() -> str | None:
    """What RECOLLECT_CHECK says: a check that takes the place of every region's own."""
    check = os.environ.get("RECOLLECT_CHECK") or None
    if check is not None and check not in DETERMINISM_CHECKS:
        raise _errors.not_one_of("the environment variable RECOLLECT_CHECK", check, DETERMINISM_CHECKS)
    return check


class _Overrides:
    early_stop: bool | None = None
    debug: bool | None = None
    check: str | None = _check_of_this_run()


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Override `early_stop` for the regions whose forward runs under it.

    Example:
        >>> from recollect.dropin import set_checkpoint_early_stop
        >>> with set_checkpoint_early_stop(False):
        ...     pass  # replays of regions made here run to their end
    """
    before, _Overrides.early_stop = _Overrides.early_stop, enable
    try:
        yield
    finally:
        _Overrides.early_stop = before


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Override `debug` for the regions whose forward runs under it; None leaves it to each region.

    Example:
        >>> from recollect.dropin import set_checkpoint_debug_enabled
        >>> with set_checkpoint_debug_enabled(True):
        ...     pass  # errors of regions made here list their operators
    """
    before, _Overrides.debug = _Overrides.debug, enabled
    try:
        yield
    finally:
        _Overrides.debug = before


# --- Running a region ---


def checked_options(
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    preserve_rng_state: bool | str,
    name: str | None,
    policy: PolicyLike | None,
    inputs: Offload | Shard | None = None,
) -> Options:
    if determinism_check not in DETERMINISM_CHECKS:
        raise _errors.not_one_of("determinism_check", determinism_check, DETERMINISM_CHECKS)
    is_default = debug is False and early_stop is preserve_rng_state is True
    if is_default and policy is None and name is None and inputs is None:
        return _DEFAULTS[determinism_check]
    _check_switches(debug, early_stop, preserve_rng_state)
    return Options(
        determinism_check,
        bool(early_stop),
        bool(debug),
        preserve_rng_state if preserve_rng_state == "all" else bool(preserve_rng_state),
        name,
        None if policy is None else as_policy(policy),
        None if inputs is None else checked_inputs(inputs),
    )


def _check_switches(debug: Any, early_stop: Any, preserve_rng_state: Any) -> None:
    for argument, value in (("debug", debug), ("early_stop", early_stop)):
        if not isinstance(value, int):  # bool among them
            raise _errors.not_a_bool(argument, value)
    if preserve_rng_state != "all" and not isinstance(preserve_rng_state, int):
        raise _errors.not_a_bool("preserve_rng_state", preserve_rng_state, or_else="all")


def overridden(options: Options) -> Options:
    """`options` with what the process-wide overrides say."""
    early_stop, debug, check = _Overrides.early_stop, _Overrides.debug, _Overrides.check
    if early_stop is None and debug is None and check is None:
        return options
    return dataclasses.replace(
        options,
        determinism_check=options.determinism_check if check is None else check,
        early_stop=options.early_stop if early_stop is None else early_stop,
        debug=options.debug if debug is None else debug,
    )


def gives_contexts(context_fn: ContextFn) -> bool:
    """Whether it is more than the default, ours or torch's."""
    return not (context_fn is noop_context_fn or is_stock_noop_context_fn(context_fn))


def contexts_of(context_fn: ContextFn) -> Contexts | None:
    """What `context_fn` gives, None for the default."""
    if not gives_contexts(context_fn):
        return None
    if not callable(context_fn):
        raise _errors.not_callable("context_fn", context_fn)
    got: Any = context_fn()
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise _errors.bad_contexts(got)
    if not all(hasattr(type(one), "__enter__") and hasattr(type(one), "__exit__") for one in got):
        raise _errors.bad_contexts(got)
    return got[0], got[1]


RUN_LATER = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def refuse_to_run_later(function: Callable[..., Any], result: Any) -> None:
    if isinstance(result, types.CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise _errors.runs_later(function, type(result).__name__.replace("_", " "))


def refuse_if_it_runs_later(function: Callable[..., Any]) -> None:
    """The same at the time of wrapping, for what shows it from outside."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    for kind, test in (
        ("generator", inspect.isgeneratorfunction),
        ("coroutine", inspect.iscoroutinefunction),
        ("async generator", inspect.isasyncgenfunction),
    ):
        if test(called):
            raise _errors.runs_later(function, kind)


@never_begin
def _run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, context_fn: ContextFn
) -> Any:
    if is_dynamo_compiling():
        return run_compiled(function, args, kwargs, options, context_fn)
    return _run_eagerly(function, args, kwargs, options, context_fn)


@never_begin
def _run_eagerly(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, context_fn: ContextFn
) -> Any:
    contexts = None
    if context_fn is not noop_context_fn:
        if is_traced_by_autograd() and gives_contexts(context_fn):
            return _compile.hand_over(function, args, kwargs, context_fn)
        contexts = contexts_of(context_fn)
    if torch.is_grad_enabled():
        result = run_region(function, args, kwargs, overridden(options), contexts)
    else:
        result = function(*args, **kwargs)
    if isinstance(result, RUN_LATER):
        refuse_to_run_later(function, result)
    return result


def run_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    context_fn: ContextFn = noop_context_fn,
    *,
    has_parts: bool = False,
) -> Any:
    """`_run`, for Dynamo to read; `has_parts` if modules inside have decisions of their own."""
    check, debug, policy = options.determinism_check, options.debug, options.policy
    if options.inputs is not None:
        _compile.say("inputs")
    return _run_compiled(
        function, args, kwargs, check, debug=debug, policy=policy, context_fn=context_fn, has_parts=has_parts
    )


def _run_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    determinism_check: str,
    *,
    debug: bool,
    policy: PolicyLike | None,
    context_fn: ContextFn,
    has_parts: bool = False,
) -> Any:
    """What Dynamo reads in the place of an engine."""
    cannot = ("values",) if "values" in (determinism_check, _Overrides.check) else ()
    if debug:
        cannot = (*cannot, "debug")
    contexts = context_fn if gives_contexts(context_fn) else None
    return _compile.run(function, args, kwargs, policy=policy, context_fn=contexts, needs_tags=has_parts, cannot=cannot)


def _run_reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool | str,
) -> Any:
    result = CheckpointFunction.apply(function, preserve_rng_state, *args)
    if isinstance(result, RUN_LATER):
        refuse_to_run_later(function, result)
    return result


def _check_reentrant(kwargs: dict[str, Any], context_fn: ContextFn, debug: bool, policy: PolicyLike | None) -> None:
    if kwargs:
        raise _errors.unexpected_keywords(list(kwargs))
    given = ["context_fn"] if gives_contexts(context_fn) else []
    if debug:
        given.append("debug")
    if policy is not None:
        given.append("policy")
    if given:
        raise _errors.only_non_reentrant(given)


def chosen_variant(use_reentrant: bool | None, *, stacklevel: int) -> bool:
    """Whether to take the reentrant variant; warns the caller `stacklevel` above who left it open."""
    if use_reentrant is None:
        warnings.warn(
            "the use_reentrant parameter should be passed explicitly: without it the reentrant variant is taken, as "
            "PyTorch does.\n"
            "Pass use_reentrant=False, which supports keyword arguments, torch.autograd.grad and nested structures, or "
            "use_reentrant=True to keep what you have",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
        return True
    return bool(use_reentrant)


@never_begin
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "first",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> R:
    """Call `function` and recompute in backward what autograd would have saved in it.

    Args:
        function: What to run. Its result, of any structure, is returned.
        *args: Its arguments. Tensors in lists, tuples, dicts and dataclasses count as inputs too.
        use_reentrant: Take the reentrant variant, for programs that rely on it.
        context_fn: Called once; gives a context manager for the forward and one for the replays.
        determinism_check: "first" compares the first replay of a function with its forward by value, operator by
            operator, and later ones as "default" does: by shape, dtype and device of every recovered tensor,
            and by whether the weights are the same and unchanged. "values" compares every replay by value, saved tensor
            by saved tensor. "none" compares nothing. The environment variable RECOLLECT_CHECK overrides it.
        debug: Let errors list the operators of the forward and of the replay, and where they part. Slow.
        early_stop: Stop a replay as soon as everything that is still needed has been recovered.
        preserve_rng_state: Let a replay draw the random numbers that the forward drew, from the generators of
            the CPU and the accelerators. "all" adds Python's `random`, NumPy's global generator, generators among the
            arguments, and those of `recollect.register_generator`.
        policy: What to keep all the same: a policy such as `recollect.save_ops(torch.ops.aten.mm)`,
            `recollect.by_name({"attn": recollect.Save()})` or `recollect.policies.save_attention`, or a function
            `(op_or_name, ctx) -> decision`, asked in the forward alone.
        **kwargs: Every other keyword goes to `function`.

    Returns:
        What `function` returns.

    Example:
        >>> import torch, recollect
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = recollect.checkpoint(lambda x: x.sin().exp(), x)
        >>> y.sum().backward()  # runs the function again
        >>> torch.equal(x.grad, x.sin().exp() * x.cos())
        True
    """
    # By position: by name it would take as long again.
    result: R = run(
        function,
        args,
        kwargs,
        use_reentrant,
        context_fn,
        determinism_check,
        debug,
        early_stop,
        preserve_rng_state,
        policy,
    )
    return result


@never_begin
def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool | None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    policy: PolicyLike | None = None,
) -> Any:
    """`checkpoint` with the function's arguments apart, so that no name is taken from them. For functions like it."""
    if is_dynamo_compiling():  # it has one variant, which is as good as either
        if use_reentrant is None or use_reentrant:
            _check_reentrant(kwargs, context_fn, debug, policy)
        if determinism_check not in DETERMINISM_CHECKS:
            raise _errors.not_one_of("determinism_check", determinism_check, DETERMINISM_CHECKS)
        _check_switches(debug, early_stop, preserve_rng_state)
        return _run_compiled(
            function, args, kwargs, determinism_check, debug=debug, policy=policy, context_fn=context_fn
        )
    if not callable(function):
        raise _errors.not_callable("function", function)
    if use_reentrant is not False and chosen_variant(use_reentrant, stacklevel=3):
        _check_reentrant(kwargs, context_fn, debug, policy)
        return _run_reentrant(function, args, kwargs, preserve_rng_state)
    options = checked_options(determinism_check, debug, early_stop, preserve_rng_state, None, policy)
    return _run_eagerly(function, args, kwargs, options, context_fn)


def verify_again(function: Callable[..., Any] | None = None) -> None:
    """Let the next replay of a function be compared by value again, or of all functions.

    Args:
        function: As it is given to `checkpoint` or `remat`; what `remat` made of it will do too.

    Example:
        >>> import recollect
        >>> recollect.verify_again()  # after something has changed that the model depends on
    """
    if function is not None and not callable(function):
        raise _errors.not_callable("function", function)
    if hasattr(function, "recollect_options"):
        function = function.__wrapped__  # type: ignore[union-attr]
    for known in all_known(function):
        known.verify_again()


class _Rematted:
    """What `remat` makes of anything but a plain function: a copy of it has a copy of the module inside."""

    def __init__(self, function: Callable[..., Any], options: Options, context_fn: ContextFn) -> None:
        # The attributes of a module are its state, not its description: they are not taken over.
        functools.update_wrapper(self, function, updated=())
        if not hasattr(function, "__name__"):  # a module or a partial
            self.__name__ = self.__qualname__ = type(function).__name__
        self.recollect_options = options
        self._context_fn = context_fn

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.__wrapped__, args, kwargs, self.recollect_options, self._context_fn)

    def __repr__(self) -> str:
        return f"recollect.remat({self.__wrapped__!r})"


_OPTION_NAMES = (
    *("determinism_check", "debug", "early_stop", "preserve_rng_state", "context_fn", "name", "policy", "inputs"),
)


@overload
def remat(
    function: Callable[P, R],
    /,
    *,
    determinism_check: str = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool | str = ...,
    context_fn: ContextFn = ...,
    name: str | None = ...,
    policy: PolicyLike | None = ...,
    inputs: Offload | Shard | None = ...,
) -> Callable[P, R]: ...


@overload
def remat(
    *,
    determinism_check: str = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    preserve_rng_state: bool | str = ...,
    context_fn: ContextFn = ...,
    name: str | None = ...,
    policy: PolicyLike | None = ...,
    inputs: Offload | Shard | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def remat(
    function: Any = None,
    /,
    *,
    determinism_check: str = "first",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool | str = True,
    context_fn: ContextFn = noop_context_fn,
    name: str | None = None,
    policy: PolicyLike | None = None,
    inputs: Offload | Shard | None = None,
    **unknown: Any,
) -> Any:
    """Make a function whose every call is a region: `checkpoint` with the options chosen once.

    A wrapper and a decorator, with or without options. Every argument of a call goes to `function`, also one that is
    named like an option. A wrapped module stays where it is: keep it as an attribute of its parent, so that its
    parameters are found, and call the wrapper.

    Args:
        function: A function, method, partial or module.
        determinism_check: As for `checkpoint`.
        debug: As for `checkpoint`.
        early_stop: As for `checkpoint`.
        preserve_rng_state: As for `checkpoint`.
        context_fn: As for `checkpoint`; called once per call.
        name: What messages call the region.
        policy: As for `checkpoint`.
        inputs: Where the tensors among the arguments wait for the replay: None leaves them where they are,
            `recollect.Offload()` puts them on the host, `recollect.Shard(...)` leaves one part on each of the ranks
            that have copies of them.
        **unknown: Refused.

    Returns:
        A function with the name, documentation and `__wrapped__` of the original.

    Example:
        >>> import torch, recollect
        >>> @recollect.remat
        ... def block(x, debug):
        ...     return (x * debug).sin().exp()
        >>> x = torch.ones(3, requires_grad=True)
        >>> block(x, debug=2.0).sum().backward()
        >>> block.__name__
        'block'
    """
    for option in unknown:
        raise _errors.unknown_option("remat", option, _OPTION_NAMES)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {_errors.describe_value(name)}")
    if not callable(context_fn):
        raise _errors.not_callable("context_fn", context_fn)
    options = checked_options(determinism_check, debug, early_stop, preserve_rng_state, name, policy, inputs)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise _errors.not_callable("function", function)
        refuse_if_it_runs_later(function)

        if not isinstance(function, types.FunctionType):
            return _Rematted(function, options, context_fn)

        @functools.wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            return _run(function, args, kwargs, options, context_fn)

        region.recollect_options = options  # type: ignore[attr-defined]
        return region

    return decorate if function is None else decorate(function)

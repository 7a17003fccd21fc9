"""The command line: `recollect plan`, `frontier`, `explain`, `check`, `demo`, `doctor`. Wiring, and nothing else.

What is about a target is in `_cli_target.py`, streams, progress and errors in `_cli_terminal.py`, tables in
`_cli_tables.py`. `run` and `--version` are answered before this file is loaded (`__main__.py`): they need torch alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from recollect import __version__, _check, _cli_tables, _demo, _doctor, _run, fit
from recollect._cli_target import Failure, Target, load
from recollect._cli_terminal import BAD, FAILED, INTERRUPTED, Output, console, output, say
from recollect._meters import gpu_of
from recollect._sizes import bytes_of, human
from recollect.explain import explain as explain_call
from recollect.plan import Plan

_HELP = (
    "Activation checkpointing for PyTorch: trust it, see it, budget it.\n\n"
    "TARGET is a function of yours, as pkg.module:build or path/to/file.py:build. It takes no arguments and returns "
    "(model, batch) or (model, batch, step), where step(model, batch) gives the loss. "
    "Results go to stdout, everything else to stderr, also what your code prints."
)
_CODES = (
    "Exit codes: 0 all is well; 1 the check failed: results differ, or more memory than the budget; 2 bad usage or bad "
    "input; 3 no plan fits the budget or the device; 130 interrupted."
)


class _Commands(TyperGroup):
    """Says in a line what is wrong with a command line, where typer draws a box."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            # Typer has click's errors, or its own copies of them, depending on its version: known by what they can do.
            told = getattr(error, "format_message", None)
            if told is None:
                raise
            code = getattr(error, "exit_code", BAD)
            context = getattr(error, "ctx", None)
            asked = context.command_path if context is not None else "recollect"
            if message := told():  # there is none where help was shown because nothing was asked for
                say(console(sys.stderr), f"{message.rstrip('.')}\nTry {asked} --help")
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    epilog=_CODES,
    no_args_is_help=True,
    add_completion=False,  # it would load torch at every key
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetName = Annotated[str, typer.Argument(metavar="TARGET", help="pkg.module:build or path/to/file.py:build")]
Budget = Annotated[
    str | None,
    typer.Option(
        help='Bytes at the peak of a step, all told: 8GiB, "60%" of the plain step, or device (what is free).'
    ),
]
TimeBudget = Annotated[
    float | None, typer.Option(help="Or the time of a step: 1.1 asks for the least memory within 10% more time.")
]
Repeats = Annotated[int, typer.Option(min=1, help="How often times are taken; the median counts.")]
Gpu = Annotated[str | None, typer.Option(help="Which GPU to estimate for, if the model is on the meta device.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
WithTraceback = Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")]


def main(arguments: list[str]) -> None:
    """The commands, but for `run`."""
    app(arguments, prog_name="recollect")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"recollect {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


# --- Commands ---


@app.command(epilog=_CODES)
def plan(
    target: TargetName,
    budget: Budget = None,
    time_budget: TimeBudget = None,
    reserve: Annotated[str, typer.Option(help="Of the budget, for what is not there yet: optimizer state.")] = "0",
    report: Annotated[Path | None, typer.Option(help="Write a report to this file (HTML).")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file (JSON).")] = None,
    repeats: Repeats = 3,
    gpu: Gpu = None,
    as_json: AsJson = False,
    with_traceback: WithTraceback = False,
) -> None:
    """Decide what to keep, recompute and offload, so that a training step fits into a budget."""
    with output(as_json=as_json, with_traceback=with_traceback) as out:
        _check_budget(budget, time_budget)
        bytes_of("--reserve", reserve)
        _check_gpu(gpu)
        _check_file("--save", save)
        _check_page("--report", report)
        found = _planned(out, _load(out, target), budget, time_budget, reserve=reserve, repeats=repeats, gpu=gpu)
        if save is not None:
            found.save(save)
        if report is not None:
            found.report(report)
        if as_json:
            out.document(found.to_dict())
            return
        _show_plan(out, found)
        if save is not None:
            out.show(f"saved: recollect.Plan.load({str(save)!r}).apply(model) puts it in force")
        if report is not None:
            out.show(f"report: {report}")


@app.command(epilog=_CODES)
def frontier(
    target: TargetName,
    points: Annotated[int, typer.Option(min=2, help="How many plans, at most.")] = 12,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file (HTML).")] = None,
    repeats: Repeats = 3,
    gpu: Gpu = None,
    as_json: AsJson = False,
    with_traceback: WithTraceback = False,
) -> None:
    """Show what every amount of memory costs in time."""
    with output(as_json=as_json, with_traceback=with_traceback) as out:
        _check_gpu(gpu)
        _check_page("--plot", plot)
        one = _load(out, target)
        found = fit.frontier(
            one.model, one.batch, step=one.step, points=points, repeats=repeats, gpu=gpu, progress=out.progress
        )
        out.progress.end()
        if plot is not None:
            found.plot(plot)
        if as_json:
            out.document(found.to_dict())
            return
        out.show(f"What memory costs in time for {type(one.model).__name__}, predicted from one measured step")
        out.show(_cli_tables.frontier(found))
        out.show("One of them: recollect plan TARGET --budget PEAK" + (f"; drawn in {plot}" if plot else ""))


@app.command(epilog=_CODES)
def explain(
    target: TargetName,
    top: Annotated[int, typer.Option(min=1, help="How many rows. The JSON document has all.")] = 20,
    as_json: AsJson = False,
    with_traceback: WithTraceback = False,
) -> None:
    """Show what autograd saves in a step: which operator, module and line, and how much."""
    with output(as_json=as_json, with_traceback=with_traceback) as out:
        one = _load(out, target)
        out.progress("running the forward", 0, 1)
        function, args, kwargs = one.call()
        found = explain_call(function, *args, **kwargs)
        out.progress.end()
        if as_json:
            out.document(found.to_dict())
            return
        called = f"a call of {type(one.model).__name__}" if one.step is None else found.function
        out.show(f"What autograd saves in {called}")
        if not found.rows:
            out.show(*found.notes)
            return
        out.show(_cli_tables.saved(found, top, os.path.join(os.getcwd(), "")))
        left = len(_cli_tables.groups(found)) - top
        activations, inputs = found.totals["recomputed"], found.totals["input"]
        out.show(
            (f"and {left} smaller; " if left > 0 else "")
            + f"in all {human(activations)} of activations and {human(inputs)} of inputs, each storage once, "
            "parameters left out"
        )


@app.command(epilog=_CODES)
def check(
    target: TargetName,
    plan: Annotated[Path | None, typer.Option(help="A plan that was saved.")] = None,
    budget: Budget = None,
    time_budget: TimeBudget = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
    with_traceback: WithTraceback = False,
) -> None:
    """Run a step plainly and under a plan, and compare: loss and gradients bit for bit, memory, time."""
    with output(as_json=as_json, with_traceback=with_traceback) as out:
        if (plan is not None) + (budget is not None) + (time_budget is not None) != 1:
            raise Failure("check takes a plan: --plan FILE, --budget BYTES or --time-budget FACTOR, one of them")
        loaded = None if plan is None else _load_plan(plan)
        if loaded is None:
            _check_budget(budget, time_budget)
        _repeatable()
        one = _load(out, target)
        chosen = loaded or _planned(out, one, budget, time_budget, repeats=repeats)
        found = _check.check(one.model, one.batch, chosen, step=one.step, repeats=repeats, progress=out.progress)
        out.progress.end()
        if as_json:
            out.document({**found.to_dict(), "decisions": {block.name: block.choice for block in chosen.blocks}})
        else:
            out.show(_cli_tables.steps([("plain", found.plain), ("planned", found.planned)]))
            out.show(*_cli_tables.verdict(found))
    if not found.is_passed:
        sys.exit(FAILED)


@app.command(epilog=_CODES)
def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="A model so small that it only shows that all works.")] = False,
    report: Annotated[Path, typer.Option(help="Where to write the report, if what it needs is installed.")] = Path(
        "demo.html"
    ),
    with_traceback: WithTraceback = False,
) -> None:
    """Plan a small GPT at half of its memory, and see that its gradients stay the same."""
    with output(with_traceback=with_traceback) as out:
        _check_file("--report", report)
        _repeatable()
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)  # several threads on busy cores wait for each other
        sizes = _demo.sizes_for(device, tiny=tiny)
        model, batch = _demo.build(sizes, device)
        one = Target("recollect demo", model, batch, _demo.next_token_loss)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        out.show(
            f"A GPT with dropout: {sizes.layers} blocks, {parameters:,} parameters, {sizes.batch} x "
            f"{sizes.tokens} tokens, on {_doctor.name_of(device)}, at half of its memory"
        )
        chosen = _planned(out, one, "50%", None, repeats=3)
        found = _check.check(model, batch, chosen, step=one.step, progress=out.progress)
        out.progress.end()
        out.show(_cli_tables.decisions(chosen))
        out.show(_cli_tables.steps([("plain", found.plain), ("recollect", found.planned)]))
        out.show(*_cli_tables.verdict(found))
        if not _doctor.missing("report"):
            chosen.report(report)
            out.show(f"the plan in pictures: {report}")
    if not found.is_passed:
        sys.exit(FAILED)


@app.command(epilog=_CODES)
def doctor(as_json: AsJson = False, with_traceback: WithTraceback = False) -> None:
    """Show what is installed, which devices there are, and how fast the link to the host is."""
    with output(as_json=as_json, with_traceback=with_traceback) as out:
        out.progress("looking at devices", 0, 1)
        found = _doctor.examine()
        out.progress.end()
        if as_json:
            out.document(found)
        else:
            out.show(*_cli_tables.findings(found))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def run(context: typer.Context) -> None:
    """Run a script, or -m and a module, with torch.utils.checkpoint served by recollect."""
    _run.main(["run", *context.args])


# --- What several of them do ---


def _load(out: Output, target: str) -> Target:
    out.progress(f"building {target}", 0, 1)
    return load(target)


def _planned(out: Output, one: Target, budget: str | None, time_budget: float | None, **options: Any) -> Plan:
    found = fit.plan(
        one.model,
        one.batch,
        budget=budget,
        time_budget=time_budget,
        step=one.step,
        progress=out.progress,
        **options,
    )
    out.progress.end()
    return found


def _show_plan(out: Output, found: Plan) -> None:
    out.show(found.title())
    out.show(_cli_tables.decisions(found), _cli_tables.steps(found.steps()), *found.notes)


def _load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise Failure(f"cannot read the plan {path}: {error.strerror}") from error


def _repeatable() -> None:
    """Products of matrices that add up in the same order every time. CUDA reads this when it begins."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# --- What is wrong is said before anything is measured ---


def _check_budget(budget: str | None, time_budget: float | None) -> None:
    if (budget is None) == (time_budget is None):
        raise Failure("give --budget (bytes, such as 8GiB) or --time-budget (such as 1.1), one of them")
    if time_budget is not None and not time_budget >= 1:
        raise Failure(f"--time-budget must be a number from 1 on, got {time_budget}")
    try:
        if budget is not None:
            fit.share_of(budget)
    except (ValueError, TypeError):
        raise Failure(
            f'--budget must be bytes, such as 8GiB, a share of the plain step, "60%", or device, got {budget!r}'
        ) from None


def _check_gpu(gpu: str | None) -> None:
    if gpu is not None:
        gpu_of(gpu)


def _check_file(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise Failure(f"{option} must be a file, got the directory {path}")
    if not path.parent.is_dir():
        raise Failure(f"{option}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Failure(f"{option}: {path} cannot be written")


def _check_page(option: str, path: Path | None) -> None:
    _check_file(option, path)
    if path is not None and (missing := _doctor.missing("report")):
        raise Failure(f"{option} needs {' and '.join(missing)}: pip install 'recollect[report]'")

"""The command line. Each command is a module of its own, imported only when it is called.

To add a command: write `kvsim/cli/NAME.py` with a typer function `command`, and give it a line in `COMMANDS`.
Nothing below this package prints or exits; a `KvsimError` that reaches `main` becomes one message and exit code 2.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer import Exit, Option

from kvsim.types import Terminated

COMMANDS = {
    "run": "Simulate a scenario and write its results.",
    "compare": "Run the same workload under several engines, side by side.",
    "validate": "Check a scenario without running it.",
    "schema": "Print the JSON Schema of scenario files, for editors.",
    "init": "Write a commented scenario to start from.",
    "sweep": "Run a grid of scenarios.",
    "advise": "Answer the common questions about a workload by simulation.",
    "capacity": "How many KV blocks and tokens a model leaves on a GPU.",
    "trace": "Describe or convert a request trace.",
    "conform": "Replay recorded engine decisions and compare every field.",
    "calibrate": "Fit a cost profile to kernel measurements.",
    "validate-run": "Simulate a recorded engine run and compare predicted with measured.",
    "explain": "The life of one request in words.",
    "journal": "Ask the block journal (events.csv) what happened.",
    "plot": "Draw the pictures of a results folder.",
    "report": "Write a self-contained page for a results folder.",
    "reproduce": "Reproduce the figures of the PagedAttention paper.",
    "bench": "Measure the simulator's speed.",
}
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143
INSIST_AFTER_S = 10.0
SHOW_TRACEBACK = "KVSIM_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 2 bad input, 130 interrupted, 1 anything else."""
    args = list(sys.argv[1:] if argv is None else argv)
    _make_streams_safe()
    _handle_signals()
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail("interrupted: nothing was written that was not whole", EXIT_INTERRUPTED)
    except MemoryError:
        return _fail("out of memory: make the scenario smaller, or record less (--record summary)", EXIT_BAD_INPUT)
    except Exception as error:
        return _explain(error)


def _dispatch(args: list[str]) -> int:
    app = _build_app(args)
    try:
        code = typer.main.get_command(app).main(args=args, prog_name="kvsim", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as end:
        # Click's way to leave when nobody reads what is printed; commands raise `Exit`, which arrives as a code.
        if end.code == 1:
            raise BrokenPipeError from None
        raise
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _build_app(args: list[str]) -> Any:
    """The application in which only the command that is called is more than its name and its help line."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    called = next((arg for arg in args if not arg.startswith("-")), None)
    app.callback(help="A wind tunnel for KV-cache allocators: paged against contiguous memory, no GPU needed.")(_root)
    for name, help_line in COMMANDS.items():
        function = _load(name) if name == called else _not_called
        app.command(name, help=None if name == called and function.__doc__ else help_line)(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvsim import __version__

        print(f"kvsim {__version__}")
        raise Exit()


def _root(
    version: Annotated[
        bool, Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What stands before a command; an option without one must act in its callback, before a command is missed."""


def _not_called() -> None:
    """Stands for a command in the list that `--help` prints."""


def _load(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").command
    return function


def _explain(error: Exception) -> int:
    from kvsim.types import KvsimError, LawViolation

    if os.environ.get(SHOW_TRACEBACK):
        raise error
    if isinstance(error, KvsimError):
        return _fail(str(error), EXIT_BAD_INPUT)
    show: Callable[[], None] | None = getattr(error, "show", None)
    if show is not None and isinstance(code := getattr(error, "exit_code", None), int):
        show()
        return code
    if isinstance(error, OSError):
        return _fail(f"{_named(error)}cannot be read or written: {error.strerror or error}", EXIT_BAD_INPUT)
    if isinstance(error, RecursionError):
        return _fail("something in the input is nested too deeply; make it flatter", EXIT_BAD_INPUT)
    if isinstance(error, LawViolation):
        return _fail(f"a law does not hold: {error}", 1)
    return _fail(f"this is a fault of kvsim: {type(error).__name__}: {error} (set {SHOW_TRACEBACK}=1 to see where)", 1)


def _named(error: OSError) -> str:
    return f"{error.filename}: " if error.filename is not None else "standard output, or a file, "


def _fail(message: str, code: int) -> int:
    try:
        print(f"error: {message}", file=sys.stderr)
    except OSError:
        return code
    return code


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. A class of its own, because Python remembers a plain KeyboardInterrupt that passed through `exec` (as in
    making a dataclass) and dies by the signal at exit although it was handled."""


def _handle_signals() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)


def _interrupt(signum: int, frame: object) -> None:
    _insist(_interrupt)
    raise Interrupted


def _terminate(signum: int, frame: object) -> None:
    """A polite kill: leave through the `finally` clauses, so that half-written results go."""
    _insist(_terminate)
    raise Terminated(EXIT_TERMINATED)


def _insist(handler: Callable[[int, object], None]) -> None:
    """Raise once more after a while: an exception that happens to meet a destructor or a callback is swallowed."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, INSIST_AFTER_S)


def _make_streams_safe() -> None:
    """Closed streams take what is printed and drop it; letters that the terminal's encoding lacks become `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _silence_stdout() -> None:
    """Python flushes stdout once more at exit; whoever read it is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The command line: which commands there are, and how anything that goes wrong is told.

Every module here is one command: a function named like the file (a trailing underscore is dropped from
the command's name) whose docstring is its help, and `EXAMPLES`, two runnable command lines. `--help` imports
them all, so they import whatever is heavy inside the function. A module whose name starts with an
underscore is shared by the commands. A command raises SpecbenchError, or `typer.Exit(code)`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import specbench
from specbench.errors import SpecbenchError, did_you_mean

INTERRUPTED = 130
LISTED_FIRST = ("run", "report")
"""Commands that `--help` lists before the others, which follow by name."""

# Typer ships its own click since 0.26, and before that depended on it: reach its error class through Typer.
_ClickException: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="specbench",
    help="Benchmark and audit speculative decoding of language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 fine; 1 regression or failed check; 2 wrong usage; 3 could not measure; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    for _ in range(options.count("--debug")):  # a global flag, wherever it stands
        words.remove("--debug")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a dash must not end a report on an ASCII terminal
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.close()
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as problem:  # noqa: BLE001 - the last line of defence, and it tells the user
        if debug:
            traceback.print_exc()
        return _explain(problem)
    return _interrupted() if code == INTERRUPTED else code


def _run(words: list[str]) -> int:
    try:
        code: Any = app(args=words, prog_name="specbench", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except SystemExit as leaving:  # Typer's way out when the reader of stdout is gone
        code = leaving.code
    return code if isinstance(code, int) else 0


def _explain(problem: Exception) -> int:
    """Say in one line what went wrong, and what to do; return the exit code."""
    if isinstance(problem, SpecbenchError):
        _say(problem.message, problem.hint)
        return problem.exit_code
    if isinstance(problem, _ClickException):
        return _explain_usage(problem)
    _say(f"internal error: {type(problem).__name__}: {problem}, rerun with --debug", None)
    return 3


def _explain_usage(problem: Any) -> int:
    context = getattr(problem, "ctx", None)
    if type(problem).__name__ == "NoArgsIsHelpError":
        typer.echo(problem.format_message(), err=True)
        return 2
    message = " ".join(str(problem.format_message()).split()).rstrip(".")
    unknown = re.match(r"No such (command|option):? '?([^\s']+)'?", message)
    if unknown:
        kind, word = unknown.groups()
        message = f"no {kind} '{word}'{did_you_mean(word, _known(kind, context))}"
    if wrong := re.match(r"Invalid value for '([^']+)': (.*)", message):
        message = f"{wrong[1]}: {_expectation(wrong[2])}"
    path = context.command_path if context else "specbench"
    _say(
        message if message.startswith("-") else message[:1].lower() + message[1:],
        f"`{path} --help` shows what it takes",
    )
    return 2


def _expectation(complaint: str) -> str:
    """Word what a value should have been, the same whichever library noticed."""
    for pattern, words in (
        (
            r"(?:Input should be greater than or equal to|.* is not in the range x>=)\s*(\S+)",
            "expected {} or more",
        ),
        (r"(?:Input should be|.* is not) a valid int(?:eger)?\b.*", "expected a whole number"),
        (r"(?:Input should be|.* is not) a valid (?:number|float)\b.*", "expected a number"),
    ):
        if found := re.fullmatch(pattern, complaint):
            return words.format(*found.groups())
    return complaint


def _known(kind: str, context: Any) -> list[str]:
    if context is None:
        return []
    if kind == "command":
        return list(context.command.list_commands(context))
    return [name for parameter in context.command.params for name in parameter.opts] + ["--help"]


def _say(message: str, hint: str | None) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    if hint:
        typer.echo(f"\nhint: {hint}", err=True)


def _interrupted() -> int:
    typer.echo("interrupted; where results are stored, the same command goes on", err=True)
    return INTERRUPTED


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specbench {specbench.__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def _register() -> None:
    stems = [found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")]
    for stem in [s for s in LISTED_FIRST if s in stems] + sorted(set(stems) - set(LISTED_FIRST)):
        module = importlib.import_module(f"{__name__}.{stem}")
        examples = "\n".join(f"  {line}" for line in getattr(module, "EXAMPLES", ()))
        # The \b keeps the lines as they are.
        epilog = f"\b\nExamples:\n{examples}" if examples else None
        name = stem.rstrip("_").replace("_", "-")
        app.command(name, epilog=epilog)(getattr(module, stem))


_register()

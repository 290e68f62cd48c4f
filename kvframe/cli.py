"""The command line: `kvframe COMMAND [KEY=VALUE ...]`. Each command is a Hydra app.

Exit codes: 0 done; 1 some requests or jobs failed, the results of the others are there; 2 nothing could be done;
130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvframe import __version__
from kvframe.commands import COMMANDS, Command
from kvframe.errors import ConfigError, KVFrameError
from kvframe.jobs import OutputClosed, Run, Sweep
from kvframe.plugins import insist

# Hydra's flags that take a value of their own
_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--info", "-i", "--config-path", "-cp", "--config-name", "-cn"}
_WITH_VALUE |= {"--config-dir", "-cd", "--experimental-rerun"}
_SWEEP = {"-m", "--multirun", "hydra.mode=MULTIRUN"}


def main(argv: list[str] | None = None) -> int:
    """Runs a command and answers its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    debug = any(os.environ.get(name) == "1" for name in ("KVFRAME_DEBUG", "HYDRA_FULL_ERROR"))
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except KVFrameError as error:
        if debug:
            raise
        return _say(str(error))
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except (BrokenPipeError, OutputClosed):  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        from kvframe.help import overview

        print(overview())
        return 0
    if argv[0] == "--version":
        print(f"kvframe {__version__}")
        return 0
    name, arguments = argv[0], argv[1:]
    if name not in COMMANDS:
        from kvframe.create import nearest, resembling

        close = resembling(name, COMMANDS)
        fix = f"kvframe {close[0]} ..." if close else "kvframe --help"
        raise ConfigError(f"there is no command {name!r}", options=nearest(name, COMMANDS), fix=fix)
    command = COMMANDS[name]
    overrides, flags = split(list(command.overrides(arguments, _WITH_VALUE)), command)
    insist(overrides)
    if {"--help", "-h"} & set(flags):
        from kvframe.help import command_help

        print(command_help(command, overrides))
        return 0
    return _run(command, overrides, flags)


def split(arguments: list[str], command: Command) -> tuple[list[str], list[str]]:
    """Overrides, and flags with their values: Hydra does not take them mixed."""
    overrides, flags = [], []
    for i, argument in enumerate(arguments):
        if i and arguments[i - 1] in _WITH_VALUE and flags[-1:] == [arguments[i - 1]] and not _is_override(argument, i):
            flags.append(argument)
        elif argument.startswith("-"):
            flags.append(argument)
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        else:
            hint = f"kvframe {command.name} --help"
            if command.name == "generate" and not any(a.startswith(("prompt=", "prompts=")) for a in arguments):
                hint = f"prompt={argument!r}"
            raise ConfigError(f"{argument!r} is not KEY=VALUE", fix=hint)
    return overrides, flags


def _is_override(argument: str, i: int) -> bool:
    return re.match(r"[+~]{0,2}[A-Za-z_][\w./@]*=", argument) is not None or argument.startswith("-")


def _run(command: Command, overrides: list[str], flags: list[str]) -> int:
    """Hands the command to Hydra. Errors inside a job come back as they were raised, without Hydra's traceback."""
    import hydra

    from kvframe import config
    from kvframe.overrides import quote

    overrides = quote(overrides)
    with Sweep(command, overrides) if _SWEEP & {*flags, *overrides} else Run() as run:

        def job(cfg):
            run.job(command.load(), cfg)

        job.__module__ = "__main__"  # else Hydra puts the folder of this file on its search path
        app = hydra.main(version_base=config.VERSION_BASE, config_path=None, config_name=command.name)(job)
        with _arguments([*run.overrides(overrides), *flags]):
            try:
                app()
            except KVFrameError:
                raise
            except Exception as error:
                told = config.explained(error, overrides, command.name)
                if told is error:
                    raise
                raise told from error
    return run.code()


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv; HYDRA_FULL_ERROR=1 makes it raise what went wrong instead of printing it."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *arguments], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _say(text: str) -> int:
    """An error message on stderr, in red where that can be seen."""
    red = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\033[31m{text}\033[0m" if red else text, file=sys.stderr)
    return 2

"""The commands of the command line: one primary config and one function `run(cfg, job) -> exit code` each.

A new command is a line in this table, `conf/<name>.yaml` and a module here. The comment at the head of the YAML file is
what `--help` shows: a headline, and indented examples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """`name` is also the name of the primary config; `run` is "module:function"."""

    name: str
    run: str

    def load(self):
        """The function, imported now."""
        from importlib import import_module

        module, _, function = self.run.partition(":")
        return getattr(import_module(module), function)


COMMANDS = {
    command.name: command
    for command in (
        Command("generate", "kvframe.commands.generate:run"),
        Command("list", "kvframe.commands.list:run"),
        Command("simulate", "kvframe.commands.simulate:run"),
        Command("evaluate", "kvframe.commands.evaluate:run"),
        Command("calibrate", "kvframe.commands.calibrate:run"),
        Command("inspect", "kvframe.commands.inspect:run"),
    )
}

"""The commands of the command line: one primary config and one function `run(cfg, job) -> exit code` each.

A new command is a line in this table, `conf/<name>.yaml` and a module here. The comment at the head of the YAML file is
what `--help` shows: a headline, and indented examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvframe.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: of the command and of its primary config; run: "module:function".
        argument: the key that a bare word sets, for commands that take one.
        options: keys that may be written as `--key VALUE`; switches: keys that `--key` sets to true.
    """

    name: str
    run: str
    argument: str = ""
    options: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()

    def load(self):
        """The function, imported now."""
        from importlib import import_module

        module, _, function = self.run.partition(":")
        return getattr(import_module(module), function)

    def overrides(self, arguments: list[str], flags: Collection[str] = ()) -> Iterator[str]:
        """The arguments with those that are the command's own as `KEY=VALUE`.

        Args:
            flags: of Hydra, whose values are the arguments behind them.
        Raises: ConfigError when a value is missing.
        """
        rest, bare, before = iter(arguments), False, ""
        for argument in rest:
            is_value, before = before in flags, argument
            key, equals, value = argument.removeprefix("--").partition("=")
            if argument.startswith("--") and key in self.options:
                value = value if equals else next(rest, None)
                if value is None:
                    raise ConfigError(f"--{key} needs a value", fix=f"--{key} VALUE; see kvframe {self.name} --help")
                yield self._set(key, value)
            elif argument.startswith("--") and argument[2:] in self.switches:
                yield f"{argument[2:]}=true"
            elif self.argument and not (bare or is_value or "=" in argument or argument.startswith(("-", "~"))):
                bare = True
                yield self._set(self.argument, argument)
            else:
                yield argument

    @staticmethod
    def _set(key: str, value: str) -> str:
        """As Hydra reads it: the value is a text, whatever it is; text keys are quoted later (kvframe.overrides)."""
        from kvframe.overrides import TEXT_KEYS, quoted

        return f"{key}={value if key in TEXT_KEYS else quoted(value)}"


COMMANDS = {
    command.name: command
    for command in (
        Command("generate", "kvframe.commands.generate:run"),
        Command("compare", "kvframe.commands.compare:run"),
        Command("list", "kvframe.commands.list:run", switches=("plugins",)),
        Command("simulate", "kvframe.commands.simulate:run"),
        Command("evaluate", "kvframe.commands.evaluate:run"),
        Command("plan", "kvframe.commands.plan:run"),
        Command("calibrate", "kvframe.commands.calibrate:run"),
        Command("inspect", "kvframe.commands.inspect:run"),
        Command("new", "kvframe.commands.new:run", argument="name", options=("kind", "out")),
    )
}

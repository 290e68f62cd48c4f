"""What a plugin must not get wrong in its hooks, found before anything of it is in use.

pluggy answers most of it late or never: an argument with a default is never given, a function without `@hookimpl` is
never called, a coroutine is never awaited.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pluggy

from kvframe import hookspecs
from kvframe.errors import PluginError

_PLAIN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PARSER = pluggy.PluginManager(hookspecs.PROJECT)


@functools.cache
def hook_arguments() -> dict[str, list[str]]:
    """Hook -> the arguments that it may take."""
    names = [name for name in vars(hookspecs) if name.startswith("kvframe_")]
    return {name: list(inspect.signature(getattr(hookspecs, name)).parameters) for name in names}


def check_hooks(plugin: Any) -> list[str]:
    """The hooks that a module or an object implements.

    Raises:
        PluginError: a hook that does not exist, is not marked, or takes what it is not given; names hook and argument.
    """
    if inspect.isclass(plugin):
        kind = plugin.__qualname__
        raise PluginError(f"it is the class {kind}; valid: a module, or an object with the hooks as methods")
    valid, found = hook_arguments(), []
    for name in dir(plugin):
        options = _PARSER.parse_hookimpl_opts(plugin, name)
        if options is None:
            if name in valid and inspect.isroutine(getattr(plugin, name)):
                raise PluginError(f"its hook {name} is not marked, so nobody would call it; write @hookimpl above it")
            continue
        hook = getattr(plugin, name)
        name = options.get("specname") or name
        if name not in valid:
            raise PluginError(f"it implements the hook {name!r}, which does not exist; hooks: {', '.join(valid)}")
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(f"its hook {name} is a wrapper; there is no result to wrap: write a plain @hookimpl")
        if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
            raise PluginError(f"its hook {name} is a coroutine or a generator, and hooks are plain functions")
        _check_arguments(name, hook, valid[name])
        found.append(name)
    return found


def _check_arguments(name: str, hook: Any, valid: list[str]) -> None:
    for argument in inspect.signature(hook).parameters.values():
        text = str(argument).partition(":")[0].partition("=")[0].strip()  # with its stars
        if argument.name not in valid or argument.kind not in _PLAIN:
            why = "which does not exist" if argument.name not in valid else "by keyword only"
            raise PluginError(
                f"its hook {name} takes the argument {text!r}, {why}; arguments: {', '.join(valid) or 'none'}"
            )
        if argument.default is not argument.empty:
            raise PluginError(f"its hook {name} has a default for the argument {text!r}, and would never be given it")

"""The built-in strategies, installed as `kvframe_plugins`: one folder each.

They arrive the way everybody's plugins do: an entry point in the group `kvframe` names this module, and the hook
below says where the configs are. Keep this module light: it is loaded at every start.
"""

from kvframe.hookspecs import hookimpl


@hookimpl
def kvframe_config_path() -> str:
    return "pkg://kvframe.conf"

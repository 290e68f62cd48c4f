"""kvframe-strided: a retention for kvframe."""

from kvframe.hookspecs import hookimpl

api = 1  # the version of kvframe's interfaces that this was written for


@hookimpl
def kvframe_config_path():
    return "pkg://kvframe_strided.conf"

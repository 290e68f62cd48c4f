"""The shadow that the contract suites use as well."""

from kvframe.testing.shadow import Shadow

__all__ = ["Shadow"]

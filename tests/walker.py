"""The walker that the contract suites use as well."""

from kvframe.testing.walked import Walked
from kvframe.testing.walker import Walker

__all__ = ["Walked", "Walker"]

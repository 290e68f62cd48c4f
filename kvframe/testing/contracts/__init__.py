"""Contract suites: what the interfaces promise, as tests for whoever writes a part or a cache.

    from kvframe.testing import CodecContract

    class TestMine(CodecContract):
        bound = 0.05                    # what the suite cannot know; see each class

        def make(self):
            return MyCodec(bits=4)

`pytest` then runs one test per promise. A failure names the promise and shows a small example. Several variants:

    class TestMine(CodecContract):
        @pytest.fixture(autouse=True, params=[2, 4])
        def bits(self, request):
            self.bits = request.param

Needs pytest and Hypothesis: `pip install "kvframe[testing]"`.
"""

from __future__ import annotations

import importlib
import importlib.util

_PUBLIC = {
    "CodecContract": "codec",
    "EvictionContract": "eviction",
    "IndexContract": "index",
    "KVCacheContract": "cache",
    "KernelContract": "kernel",
    "LayoutContract": "layout",
    "RetentionContract": "retention",
    "BrokenPromise": "promises",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    missing = [package for package in ("pytest", "hypothesis") if importlib.util.find_spec(package) is None]
    if missing:
        from kvframe.errors import MissingPackageError

        raise MissingPackageError(
            f"kvframe.testing.{name} needs what is not installed: {' and '.join(missing)}",
            fix='pip install "kvframe[testing]"',
        )
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)

"""For tests of kvframe and of packages that extend it: tiny models, the oracle REF, and contract suites.

    module = tiny_model("gemma2")
    model = wrap(module)                       # kvframe.hf.HFModel
    check_greedy(module, prompt, output)       # AssertionError where output differs from REF

    class TestMine(CodecContract):             # a test per promise of the interface; see kvframe.testing.contracts
        bound = 0.05
        def make(self):
            return MyCodec(bits=4)

Test runners must not collect names from here: nothing in this package is itself a test.
"""

from __future__ import annotations

_PUBLIC = {
    "ARCHS": "kvframe.testing.models",
    "REFUSED": "kvframe.testing.models",
    "tiny_model": "kvframe.testing.models",
    "check_greedy": "kvframe.testing.oracle",
    "teacher_logits": "kvframe.testing.oracle",
    "wrap": "kvframe.hf",
    "CodecContract": "kvframe.testing.contracts",
    "EvictionContract": "kvframe.testing.contracts",
    "IndexContract": "kvframe.testing.contracts",
    "KVCacheContract": "kvframe.testing.contracts",
    "KernelContract": "kvframe.testing.contracts",
    "LayoutContract": "kvframe.testing.contracts",
    "RetentionContract": "kvframe.testing.contracts",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    """What is asked for, imported then: a contract for a retention needs no torch, and no transformers."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)

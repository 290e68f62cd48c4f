"""For tests of kvframe and of packages that extend it: tiny models and the oracle REF.

    module = tiny_model("gemma2")
    model = wrap(module)                       # kvframe.hf.HFModel
    check_greedy(module, prompt, output)       # AssertionError where output differs from REF

Test runners must not collect names from here: nothing in this package is itself a test.
"""

from __future__ import annotations

from kvframe.hf import wrap
from kvframe.testing.models import ARCHS, REFUSED, tiny_model
from kvframe.testing.oracle import check_greedy, teacher_logits

__all__ = ["ARCHS", "REFUSED", "check_greedy", "teacher_logits", "tiny_model", "wrap"]

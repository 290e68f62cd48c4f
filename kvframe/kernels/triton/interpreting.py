"""Triton's interpreter, where it needs help.

Triton 3.6 reads the bounds of a loop by `int(array)` from arrays of one number, which numpy 2.4 and later refuse.
"""

from __future__ import annotations

import functools

from triton.runtime import interpreter


def mend() -> None:
    """Lets bounds of loops be read; may be called again."""
    given = interpreter._patch_lang_tensor
    if getattr(given, "mended", False):
        return

    @functools.wraps(given)
    def patch(tensor, scope):
        given(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.mended = True
    interpreter._patch_lang_tensor = patch

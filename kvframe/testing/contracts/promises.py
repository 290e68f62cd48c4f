"""Promises: a failed check becomes a sentence that says what was promised, and the smallest example that was found.

    @promise("decode answers the dtype that it was asked for")
    def test_dtypes(self):
        for dtype in ("float32", "bfloat16"):
            with example(dtype=dtype):
                ...

    BrokenPromise: decode answers the dtype that it was asked for
      example: dtype=bfloat16
      seen: it answered torch.float32

A check goes from small cases to large ones, or is shrunk by Hypothesis, so what it shows is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LINES = 24  # calls in a message
NOTE = "_kvframe_example"  # where an exception on its way up keeps the examples it came through


class BrokenPromise(AssertionError):
    """A part or a cache does not do what its interface promises.

    Attributes:
        promise: the sentence. seen: what was found instead. values: name -> value of the example.
    """

    def __init__(self, promise: str, seen: str, values: dict[str, Any]):
        super().__init__(promise)
        self.promise, self.seen = promise, seen
        setattr(self, NOTE, values)

    def __str__(self) -> str:
        values = getattr(self, NOTE)
        shown = ", ".join(f"{name}={brief(value)}" for name, value in values.items())
        return f"{self.promise}\n  example: {shown or 'any'}\n  seen: {self.seen}"


@contextmanager
def promise(sentence: str) -> Iterator[None]:
    """Whatever fails inside breaks this promise; of nested ones the innermost is named. Decorates methods as well."""
    __tracebackhide__ = True
    try:
        yield
    except BrokenPromise:
        raise
    except Exception as error:
        if type(error).__module__.startswith("hypothesis"):  # how Hypothesis steers
            raise
        seen = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise BrokenPromise(sentence, seen, getattr(error, NOTE, {})) from error


@contextmanager
def example(**values: Any) -> Iterator[None]:
    """What is at hand when something fails inside."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        setattr(error, NOTE, {**values, **getattr(error, NOTE, {})})
        raise


def brief(value: Any) -> str:
    """A value as one reads it in a message: long arrays by their shape, lists of calls line by line."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        size = 1
        for n in value.shape:
            size *= int(n)
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{value.tolist()}" if size <= 16 else f"<{dtype} {list(value.shape)}>"
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        before = [f"({len(value) - LINES} more before these)"] if len(value) > LINES else []
        return "".join(f"\n    {line}" for line in [*before, *value[-LINES:]])
    return str(value)


class Contract:
    """Base of the suites.

    A subclass that defines `make` is collected by pytest, whatever its name; what is imported from here is not. Parts
    are made anew for each check.
    """

    __test__ = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__test__" not in cls.__dict__:
            cls.__test__ = not cls.make.__module__.startswith(__package__)

    def make(self, *args: Any) -> Any:
        """The part or cache under test, a new one."""
        raise NotImplementedError(f"{type(self).__name__} has to define make()")


def differs(a: Any, b: Any) -> bool:
    """Are two tensors different in a single bit? All NaN are one NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    import torch

    if a.is_floating_point():
        a, b = (torch.where(x.isnan(), float("nan"), x) for x in (a, b))
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return not torch.equal(a, b)

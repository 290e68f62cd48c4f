"""The rows of a batch, as requests of a KVCache.

transformers counts columns: all rows are equally long, and padding fills them up. A cache counts tokens. With `x` for a
token and `.` for padding, three rows of 5 columns hold 5, 3 and 4 tokens:

    columns   x x x x x
              . . x x x
              x . x x x

A forward's tokens are committed when the next one begins, or when somebody asks. So taking back tokens of the last
forward (assisted decoding takes back what was guessed wrong) costs nothing, and a window has not let go yet of what
the query before them needs.

Shape legend: B rows, T columns of a forward, C columns that are held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvframe.errors import CapacityError, RequestError
from kvframe.hf.generate_cache.row import Row, unknown
from kvframe.interfaces import KVCache
from kvframe.types import StepPlan

SMALLER = "a shorter text, a larger cache.memory or cache.num_blocks"


class Rows:
    """The batch that a cache holds now.

    Args:
        cache: any KVCache. max_len: tokens of the longest row. max_batch: most rows. salt: see Request.salt.
    Attributes:
        columns: bool [B, C]; False is padding. Those of the last forward are not in it before `settle`.
        looked_up: the cache has an index, which goes by token ids.
    """

    def __init__(self, cache: KVCache, max_len: int, max_batch: int, salt: str = ""):
        self.cache, self.max_len, self.max_batch, self.salt = cache, max_len, max_batch, salt
        self.cuts_free = getattr(cache, "unit", 0) == 1  # nothing is sealed: a step's last tokens may go uncommitted
        self.looked_up = getattr(getattr(cache, "index", None), "keeps", True)
        self._forget()

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.columns = np.zeros((0, 0), dtype=bool)
        self.step: np.ndarray | None = None  # bool [B, T]: real tokens of a forward that is not committed
        self.finished = False  # that forward has run to its end
        self.lost = ""  # why the rows cannot go on

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """Columns, those of a forward that ran to its end included."""
        return self.columns.shape[1] + (self.step.shape[1] if self.step is not None and self.finished else 0)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B]: tokens of each row that are committed."""
        return self.columns.sum(axis=1)

    # -- a forward -------------------------------------------------------------------------------------------

    def begin(self, real: np.ndarray, tokens: np.ndarray | None) -> StepPlan | None:
        """The plan of a forward over `real` bool [B, T] columns; None: there is no token in it.

        Args:
            tokens: int [B, T] ids; None: not known.
        Raises: RequestError: another number of rows, or rows that are lost; CapacityError: no room. Rows then hold
            what they held before.
        """
        self.settle()
        self._usable()
        B = len(real)
        if len(self.rows) != B and not self.columns.size:  # nothing is held yet
            self.clear()
            self._room_for(B)
            self.rows, self.columns = [Row(self.salt) for _ in range(B)], np.zeros((B, 0), dtype=bool)
        if B != len(self.rows):
            raise RequestError(
                f"the cache holds a batch of {len(self.rows)} and is given one of {B}",
                fix="cache.reset() before another batch; batch_repeat_interleave(n) for n continuations of each row",
            )
        counts = real.sum(axis=1)
        longest = int((self.lengths + counts).max())
        if longest > self.max_len:
            raise CapacityError(
                f"a row of {longest} tokens is longer than max_len={self.max_len} of this cache",
                fix=f"KVFrameCache(..., max_len={1 << (longest - 1).bit_length()}), or a smaller max_new_tokens",
            )
        ids = self._ids(real.shape, tokens)
        batch = []
        self.step, self.finished = real, False
        try:
            for row, mask, new, n in zip(self.rows, real, ids, counts.tolist()):
                if n:
                    self._make_room(row, new[mask], n)
                    batch.append((row, n))
            return self.cache.plan(batch) if batch else None
        except BaseException:
            self._drop()
            raise

    def _ids(self, shape: tuple[int, int], tokens: np.ndarray | None) -> np.ndarray:
        """int32 [B, T]. Where nothing is ever looked up by them, any will do."""
        if not self.looked_up:
            return np.zeros(shape, dtype=np.int32)
        return unknown(shape) if tokens is None else np.asarray(tokens, dtype=np.int32)

    def _make_room(self, row: Row, new: np.ndarray, n: int) -> None:
        if not row.admitted:
            row.tokens = new[:1]  # of one token nothing can be cached: the forward computes them all anyway
            if self.cache.admit(row) is None:
                row.tokens = new[:0]
                raise self._full(n)
            row.admitted, row.tokens = True, new.copy()
        else:
            row.tokens = np.concatenate([row.tokens, new])
        if not self.cache.grow(row, n):
            raise self._full(len(row.tokens))

    def _full(self, n: int) -> CapacityError:
        held = int(self.lengths.sum())
        return CapacityError(
            f"no room for a row of {n} tokens beside {len(self.rows) - 1} other rows; {held} tokens are held, and the "
            f"longest row that fits alone has {self.cache.capacity()}",
            fix=f"{SMALLER}, or a smaller batch (or fewer beams)",
        )

    def settle(self, undo: int = 0) -> None:
        """Commits the last forward but its last `undo` columns. One that did not run to its end counts for nothing."""
        if self.step is None:
            return
        if not self.finished:
            self._drop()
            return
        kept = self.step[:, : self.step.shape[1] - undo]
        step, self.step, self.finished = self.step, None, False
        before = self.lengths
        self.columns = np.concatenate([self.columns, kept if self.cuts_free else step], axis=1)
        for row, n, stop in zip(self.rows, (self.lengths - before).tolist(), self.lengths.tolist()):
            row.tokens = row.tokens[:stop]
            if n:
                self.cache.commit(row, n)
        if not undo:
            return
        if self.cuts_free:
            self._give_back()
        else:
            self.cut(self.columns.shape[1] - undo)

    def _give_back(self) -> None:
        """Gives back blocks of tokens that are not to be. A fork would share them, and both rows would write there."""
        for row, length in zip(self.rows, self.lengths.tolist()):
            if row.admitted:
                kept = self.cache.truncate(row, length)
                assert kept == length, "a cut that cuts nothing took something away"

    def _drop(self) -> None:
        """The forward that has begun was never there."""
        ran, self.step, self.finished = self.step, None, False
        for row, length in zip(self.rows, self.lengths.tolist()):
            row.tokens = row.tokens[:length]
        if self.cuts_free:
            self._give_back()
        elif ran is not None:
            self.clear()
            self.lost = "a forward failed, and may have sealed a group of tokens that is not to be"

    def _usable(self) -> None:
        if self.lost:
            raise RequestError(f"what this cache held is lost: {self.lost}", fix="cache.reset(), and the whole text")

    def _room_for(self, n: int) -> None:
        if n > self.max_batch:
            raise CapacityError(
                f"{n} rows (texts x beams) are more than max_batch={self.max_batch} of this cache",
                fix=f"KVFrameCache(..., max_batch={n})",
            )

    # -- between forwards ------------------------------------------------------------------------------------

    def cut(self, length: int) -> None:
        """Keeps the first `length` columns.

        Raises: RequestError: something that the next query needs was given back already; the rows are lost then.
        """
        if self.step is not None:
            self.settle(undo=min(max(self.length - length, 0), self.step.shape[1]) if self.finished else 0)
        self._usable()
        if length >= self.columns.shape[1]:
            return
        columns = self.columns[:, :length]
        for row, now, wanted in zip(self.rows, self.lengths.tolist(), columns.sum(axis=1).tolist()):
            if wanted == now:
                continue
            kept = self.cache.truncate(row, wanted)
            row.tokens = row.tokens[:wanted]
            if kept < wanted:
                self.clear()
                self.lost = (
                    f"a row was to be cut to its first {wanted} tokens, and what a window let go of or a codec sealed "
                    f"allows {kept}"
                )
                self._usable()
        self.columns = columns

    def select(self, index: Sequence[int]) -> None:
        """Row i becomes what row `index[i]` is. Rows share what they have in common; the next write copies it."""
        self.settle()
        self._usable()
        self._room_for(len(index))
        if not self.rows:
            return
        used, taken = set(index), set()
        for i, row in enumerate(self.rows):
            if i not in used and row.admitted:
                self.cache.release(row)
        rows = []
        for i in index:
            rows.append(self._fork(self.rows[i]) if i in taken else self.rows[i])
            taken.add(i)
        self.rows, self.columns = rows, self.columns[list(index)]

    def _fork(self, parent: Row) -> Row:
        child = Row(parent.salt, parent.tokens)
        if parent.admitted:
            self.cache.fork(parent, child)
            child.admitted = True
        return child

    def match(self, real: np.ndarray, tokens: np.ndarray) -> int:
        """Begins a batch with what the cache's index has of it; answers how many columns need no compute.

        Args:
            real: bool [B, T]. tokens: int [B, T].
        """
        self.settle()
        self.clear()
        B, T = real.shape
        self._room_for(B)
        self.rows = [Row(self.salt, ids[mask].astype(np.int32)) for ids, mask in zip(tokens, real)]
        ends = []  # per row, columns that it need not compute
        for row, mask in zip(self.rows, real):
            hit = 0
            if len(row.tokens):
                hit = self.cache.admit(row)
                row.admitted, hit = hit is not None, hit or 0
            ends.append(int(np.flatnonzero(mask)[hit]) if hit else int(np.argmax(mask)) if mask.any() else T)
        length = min(min(ends), T - 1)
        self.columns = real[:, :length]
        for row, n in zip(self.rows, self.lengths.tolist()):
            kept = self.cache.truncate(row, n) if row.admitted else 0
            if kept < n or (row.admitted and not n):
                self.cache.release(row)
                row.admitted = False
            if kept < n:
                return self._without_hits()
            row.tokens = row.tokens[:n]
        return length

    def _without_hits(self) -> int:
        self.clear()
        return 0

    def clear(self) -> None:
        """Holds nothing; what the index has stays."""
        rows = self.rows
        self._forget()
        for row in rows:
            if row.admitted:
                self.cache.release(row)

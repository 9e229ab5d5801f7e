"""A pool of batch buffers that never writes into memory somebody still holds.

A slot is free when the reference count of each of its buffers is what it was when nobody held a view of it: any array,
slice, memoryview, torch tensor or DLPack capsule made from a batch keeps a reference to the buffer under it. Where
counts cannot be trusted (free-threaded builds) every slot is new. What cannot be seen is a bare address: with
JITLOADER_CHECK_BUFFERS=1 a slot is filled with garbage as soon as nobody holds it, and who wrote to it then is told.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

GARBAGE = 0xA5  # a float64 of -2e-129 or a float32 of -3e-16, an int64 of -6.5e18, a bool that is neither 0 nor 1
ALIGN = 64  # bytes: a cache line, and what JAX wants for taking a buffer without a copy


class Slot:
    """Room for some rows of every field: flat arrays over buffers of the slot's own."""

    __slots__ = ("_allocate", "_whole", "addresses", "baseline", "flat", "owners", "poisoned", "rows", "spans", "user")

    def __init__(
        self, rows: int, kinds: Sequence[tuple[np.dtype, int]], allocate: Callable[[int], np.ndarray] | None = None
    ) -> None:
        self.rows = rows
        self.user: Callable[[], Any] | None = None  # who fills it or hands it out, as a weak reference
        self._allocate = allocate or _memory
        self.owners: list[np.ndarray] = []
        self.flat: list[np.ndarray] = []
        self.addresses: list[int] = []
        self.baseline: list[int] = []
        self._whole: list[np.ndarray] | None = None
        self.spans: Any = None  # where rows that vary lie in it
        self.poisoned = False  # full of garbage since it became free
        for dtype, size in kinds:
            self._add(rows * size, dtype)

    def _add(self, items: int, dtype: np.dtype) -> None:
        nbytes = items * dtype.itemsize
        try:
            owner = self._allocate(nbytes + ALIGN)
        except MemoryError:
            raise MemoryError(
                f"no memory for a batch buffer of {nbytes:,} bytes ({self.rows:,} rows): use a smaller batch_size"
            ) from None
        skip = -owner.ctypes.data % ALIGN
        self.owners.append(owner)
        self.flat.append(owner[skip : skip + nbytes].view(dtype))
        self.addresses.append(self.flat[-1].ctypes.data)

    def reserve(self, k: int, items: int) -> None:
        """Make buffer k hold at least so many items, in fresh memory where it does not."""
        if self.flat[k].size >= items:
            return
        other = Slot(self.rows, [], self._allocate)
        other._add(items + items // 4, self.flat[k].dtype)
        self.owners[k], self.flat[k], self.addresses[k] = other.owners[0], other.flat[0], other.addresses[0]

    def shaped(self, outputs: Sequence[Any], shape: Callable[[Any, np.ndarray, int], np.ndarray]) -> list[np.ndarray]:
        """Give the buffers as the arrays of `rows` rows that users see: slices of these are what is handed out."""
        if self._whole is None:
            self.baseline = []
            self._whole = [shape(o, flat, self.rows) for o, flat in zip(outputs, self.flat, strict=True)]
        if not self.baseline:  # an interrupt may have come between
            self.settle()
        return self._whole

    def settle(self) -> Slot:
        """Note the counts of a slot that nobody holds; not in `__init__`, whose own names still refer to buffers."""
        self.baseline = _counts(self.owners)
        return self

    @property
    def busy(self) -> bool:
        """Whether who took it is still there and has not given it back: one that an interrupt made away with counts as gone."""
        return self.user is not None and self.user() is not None

    def poison(self) -> None:
        """Fill a free slot with garbage."""
        for owner in self.owners:
            owner[:] = GARBAGE
        self.poisoned = True

    def check(self) -> None:
        """Raise RuntimeError where somebody wrote to the garbage of a free slot."""
        self.poisoned = False
        for k, owner in enumerate(self.owners):
            written = np.flatnonzero(owner != GARBAGE)
            if written.size:
                at = self.addresses[k] - owner.ctypes.data
                raise RuntimeError(
                    f"{written.size} bytes of a batch buffer that nobody held were written, the first at byte "
                    f"{written[0] - at} of output {k}: something keeps the bare address of a batch it let go"
                )

    def give_back(self) -> None:
        """Let others take it as soon as nobody holds a view of it."""
        self.user = None

    @property
    def free(self) -> bool:
        """Whether nobody, inside or outside, uses the slot."""
        return not self.busy and _counts(self.owners) == self.baseline


def _memory(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def _counts(owners: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(owner) for owner in owners]


def counts_are_exact() -> bool:
    """Whether reference counts tell at once who holds an object: not on free-threaded builds, whose threads keep counts
    of their own, whether the GIL is on or off."""
    return "free-threading" not in sys.version and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class Pool:
    """Slots of one shape, reused when free; at most `keep` are kept, what users hold beyond that is theirs."""

    def __init__(self, make: Callable[[], Slot], keep: int) -> None:
        self._make, self._keep = make, keep
        self._slots: list[Slot] = []
        self._lock = threading.Lock()
        self._exact = counts_are_exact()
        self.made = 0  # slots allocated so far
        self.poison = os.environ.get("JITLOADER_CHECK_BUFFERS", "0") not in ("", "0")

    def take(self, user: Any) -> Slot:
        """Give a slot nobody uses to `user`, for as long as that lives or until it is given back."""
        with self._lock:
            if self._exact:
                for slot in self._slots if self.poison else ():
                    if slot.free and not slot.poisoned:
                        slot.poison()
                for slot in self._slots:
                    if slot.free:
                        slot.user = weakref.ref(user)
                        if slot.poisoned:
                            slot.check()
                        return slot
            slot = self._make().settle()
            slot.user = weakref.ref(user)
            self.made += 1
            if self._exact:
                held = [k for k, s in enumerate(self._slots) if not s.busy]
                if len(self._slots) >= self._keep and held:
                    del self._slots[held[0]]
                self._slots.append(slot)
            return slot

    def usage(self) -> tuple[int, int, int]:
        """Give how many slots there are, how many of them are in use, and the bytes of all."""
        with self._lock:
            held = sum(not slot.free for slot in self._slots)
            return len(self._slots), held, sum(owner.nbytes for slot in self._slots for owner in slot.owners)

"""What one loader spends: counted once a run of batches, so that a batch of a microsecond does not pay for it."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

KEPT = 4096  # runs of batches that a timeline remembers

clock = time.perf_counter


class Event(NamedTuple):
    """One thread's part of a run of batches: when the consumer asked for the run and got it, and when, how long (seconds) and
    in which thread the part was filled."""

    asked: float
    got: float
    begun: float
    seconds: float
    thread: int
    rows: int
    nbytes: int


class Tally:
    """What one iterator handed out: `rows` is set with every batch, all else once a run of them."""

    __slots__ = ("ends", "handed", "rows", "size")

    def __init__(self, size: int, ends: Any = None) -> None:
        self.size, self.ends, self.rows = size, ends, 0
        self.handed: float | None = None  # when the consumer got the run that it works on

    @property
    def batches(self) -> int:
        """How many batches that is: all but the last are whole, or end where `ends` says."""
        if self.ends is None:
            return -(-self.rows // self.size)
        return bisect.bisect_left(self.ends, self.rows) + 1 if self.rows else 0


class Meter:
    """Totals over the iterators of one loader, and the last runs of batches one by one."""

    def __init__(self) -> None:
        self.batches = self.rows = self.nbytes = self.threads = self.kernels = self.padding = self.elements = 0
        self.wait = self.work = self.fill = self.compile = 0.0
        self.runs: deque[tuple[float, float, Sequence[Any], int, int]] = deque(maxlen=KEPT)
        self.live: list[Tally] = []
        self.consumer = 0  # the thread that asked last

    def begin(self, size: int, threads: int, consumer: int, ends: Any = None) -> Tally:
        """Start to count for an iterator over batches of `size` rows, or that end before these rows."""
        tally = Tally(size, ends)
        self.live.append(tally)
        self.threads, self.consumer = threads, consumer
        return tally

    def asks(self, tally: Tally) -> float:
        """The consumer is done with a run and asks for the next: give the time."""
        now = clock()
        if tally.handed is not None:
            self.work += now - tally.handed
            tally.handed = None
        return now

    def gets(
        self, tally: Tally, asked: float, fills: Sequence[Any], rows: int, nbytes: int, padding: tuple[int, int] = (0, 0)
    ) -> None:
        """The consumer gets a run that was asked for at `asked` and filled as `fills` tell; of its padded fields so many
        elements are padding, of so many in all."""
        tally.handed = got = clock()
        self.wait += got - asked
        self.nbytes += nbytes
        self.padding += padding[0]
        self.elements += padding[1]
        for fill in fills:
            self.fill += fill.seconds
        self.runs.append((asked, got, fills, rows, nbytes))

    @property
    def events(self) -> list[Event]:
        """The last runs of batches, by the threads that filled them."""
        return [
            Event(asked, got, fill.begun, fill.seconds, fill.thread, fill.rows, nbytes * fill.rows // max(rows, 1))
            for asked, got, fills, rows, nbytes in self.runs
            for fill in fills
        ]

    def end(self, tally: Tally) -> None:
        """An iterator is exhausted or was left."""
        self.asks(tally)
        self.live.remove(tally)
        self.rows += tally.rows
        self.batches += tally.batches

    def totals(self) -> dict[str, float]:
        """Give the totals so far, of iterators that still live as well."""
        now, live = clock(), list(self.live)
        work = self.work + sum(now - t.handed for t in live if t.handed is not None)
        step = self.wait + work
        return {
            "batches": self.batches + sum(t.batches for t in live),
            "rows": self.rows + sum(t.rows for t in live),
            "bytes": self.nbytes,
            "padding_share": self.padding / self.elements if self.elements else 0.0,
            "wait_seconds": self.wait,
            "consumer_seconds": work,
            "wait_share": self.wait / step if step else 0.0,
            "fill_seconds": self.fill,
            "fill_bytes_per_second": self.nbytes / self.fill if self.fill else 0.0,
            "compile_seconds": self.compile,
            "threads": self.threads,
        }

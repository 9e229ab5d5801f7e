"""What threads are good for now: other work may hold the cores, and a consumer may be quicker than batches can be filled."""

from __future__ import annotations

import contextlib
import os
import time

ALONE = 0.05  # seconds that the consumer fills for itself where it does, then it is tried again; twice as long each time
LONGEST = 1.0  # up to this
SHARE = 4  # a consumer is quick that takes less than this part of the time it takes to fill, brisk that takes less than twice it
LARGE = 4 << 20  # bytes of a run: three of them still lie in a cache of 16 MB
QUICK, BRISK, SLOW = 0, 1, 2


class Cores:
    """Until when a loader takes the cores to be held by other work: meanwhile its consumer fills for itself.

    Beside other work threads do not speed a consumer up, and each hand-over costs it (measured: up to 1.2x the time).
    """

    def __init__(self) -> None:
        self.taken, self.pause, self.times = 0.0, ALONE, 0

    def looked(self, waited: bool) -> None:
        """Note whether a thread waited for a core; once says nothing, as 2 % of looks at an idle machine tell so."""
        if not waited:
            self.pause, self.times = ALONE, 0
            return
        self.times += 1
        if self.times > 1:
            self.taken = time.perf_counter() + self.pause
            self.pause = min(2 * self.pause, LONGEST)


class Waits:
    """How long the calling thread ran, and how long it was ready to run while other work held the cores, as Linux counts
    them; elsewhere it never waits."""

    def __init__(self) -> None:
        self.file = -1
        with contextlib.suppress(OSError):
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self.before = self._read()

    def _read(self) -> tuple[int, int]:
        try:
            ran, waited, _ = os.pread(self.file, 80, 0).split()  # nanoseconds
            return int(ran), int(waited)
        except (OSError, ValueError):
            return 0, 0

    def long(self) -> bool:
        """Whether since the last call it waited more than a quarter of the time that it ran."""
        before, self.before = self.before, self._read()
        ran, waited = self.before[0] - before[0], self.before[1] - before[1]
        return waited * 4 > ran > 0

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Pace:
    """How many runs of batches are worth filling ahead of a consumer, by how quick it is: `level` is QUICK, BRISK or SLOW.

    For a brisk one, one run ahead keeps all threads at work. Where a run is large, nothing is filled ahead of a quick one:
    that costs the time the consumer is away, and two buffers stay in a cache that three leave (batches of 6 MB: 755 and 911
    ns an image).
    """

    def __init__(self) -> None:
        self.level, self.others = SLOW, 0

    def told(self, away: float, fill: float, nbytes: int) -> None:
        """Note how long the consumer was away with a run of batches, how long all threads together take to fill it, and its size."""
        level = SLOW if away > 2 * fill else BRISK if away * SHARE > fill or nbytes < LARGE else QUICK
        self.others = 0 if level == self.level else self.others + 1
        if self.others > 1:  # one says little: an interrupt, a print
            self.level, self.others = level, 0

"""How many CPUs this process may use: its affinity, cut by the quota of its cgroup."""

from __future__ import annotations

import contextlib
import math
import os


def quota(text: str, allowed: int) -> int:
    """Give how many CPUs a cgroup v2 `cpu.max` line leaves of those allowed.

    >>> quota("max 100000", 16), quota("150000 100000", 16), quota("50000 100000", 16)
    (16, 2, 1)
    """
    share, _, period = text.strip().partition(" ")
    try:
        return (
            allowed if share in ("max", "-1") else max(1, min(allowed, math.ceil(int(share) / int(period or 100000))))
        )
    except (ValueError, ZeroDivisionError):
        return allowed


def available_cpus() -> int:
    """Give the number of CPUs this process may use: its affinity, cut by the quota of its cgroup."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        allowed = os.cpu_count() or 1
    for text in _quota_texts():
        allowed = quota(text, allowed)
    return max(1, allowed)


def _quota_texts() -> list[str]:
    texts = []
    try:
        own = [line.split(":", 2) for line in text_of("/proc/self/cgroup").splitlines()]
    except OSError:
        own = []
    for _, controllers, path in (line for line in own if len(line) == 3):
        if controllers == "":
            parts = [p for p in path.split("/") if p]
            for depth in range(len(parts), -1, -1):
                with contextlib.suppress(OSError):
                    texts.append(text_of("/sys/fs/cgroup", *parts[:depth], "cpu.max"))
        elif "cpu" in controllers.split(","):
            for place in (path.lstrip("/"), ""):
                with contextlib.suppress(OSError):
                    share, period = (
                        text_of("/sys/fs/cgroup", controllers, place, f"cpu.cfs_{name}_us").strip()
                        for name in ("quota", "period")
                    )
                    texts.append(f"{share} {period}")
    return texts


def text_of(*path: str) -> str:
    """Give the text of a small file of the system's."""
    with open(os.path.join(*path)) as file:
        return file.read()

"""The background threads of one iterator, each of which fills whole units."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections import deque
from typing import Any

from . import compose
from .cores import Cores, Waits
from .filling import Plan, Unit

LOOK = 0.005  # seconds of filling between looks at whether a thread waits for a core


def _work(jobs: queue.SimpleQueue[Unit | None], plan: Plan, cores: Cores | None) -> None:
    """The life of a background thread: fill units until told to stop. Holds no loader, iterator or idle slot."""
    worker: compose.Worker | None = None
    waits: Waits | None = None
    filled = 0.0
    try:
        while True:
            unit = jobs.get()
            if unit is None:
                return
            if not unit.take.acquire(blocking=False):
                continue  # the consumer fills it
            if not unit.cancelled:
                try:
                    worker = worker or plan.worker()
                    plan.fill(worker, unit)
                except BaseException as problem:  # no memory for the scratch, say: the consumer is told, never left waiting
                    unit.problem = problem
            unit.done = True
            if unit.cancelled:
                unit.slot.give_back()
            unit.ready.release()
            filled += unit.fill_seconds
            if cores is not None and waits is None:
                waits = Waits()
            if cores is not None and waits is not None and filled > LOOK:
                filled = 0.0
                cores.looked(waits.long())
            del unit
    finally:
        if waits is not None:
            waits.close()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


class Team:
    """The background threads of one iterator."""

    def __init__(self, plan: Plan, size: int, wide: int = 1, cores: Cores | None = None) -> None:
        self.plan, self.pid, self.wide = plan, os.getpid(), wide
        self.jobs: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.worker: Any = None
        self.closed = False  # by the loader, while its iterator may still be in somebody's hands
        for _ in range(size):
            thread = self._thread(cores)
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had: the consumer fills for itself
                break
            self.threads.append(thread)
        _teams.add(self)

    def _thread(self, cores: Cores | None) -> threading.Thread:
        return threading.Thread(target=_work, args=(self.jobs, self.plan, cores), name="jitloader", daemon=True)

    def submit(self, unit: Unit, alone: bool) -> None:
        """Fill a unit in the background, or at once where there is no thread; `alone`, it is left to who waits for it."""
        if self.plan.ahead is not None:
            self.plan.ahead.opens(unit.start)
        if not self.threads:
            self.fill_here(unit)
            return
        unit.ready, unit.take = threading.Lock(), threading.Lock()
        unit.ready.acquire()
        if not alone:
            self.jobs.put(unit)

    def fill_here(self, unit: Unit) -> None:
        """Fill a unit in the calling thread."""
        if self.worker is None:
            self.worker = self.plan.wide_worker(self.wide) if self.pid == os.getpid() else self.plan.worker()
        try:
            self.plan.fill(self.worker, unit)
        finally:
            unit.done = True

    def wait(self, units: deque[Unit]) -> Unit:
        """Give the first of some units, filled. Who would have to wait fills what no thread has begun, this one or a
        later one; after a fork, whose child has no threads, fills it here."""
        unit = units[0]
        if self.closed:
            raise ValueError("this loader is closed")
        if unit.done:
            return unit
        if self.pid != os.getpid():
            self.threads, self.pid, self.worker = [], os.getpid(), None
        if not self.threads:
            self.fill_here(unit)
            return unit
        if not self.plan.data.applies:  # Python functions run in the background alone
            for other in units:
                if unit.done:
                    return unit
                if other.take.acquire(blocking=False):
                    self.fill_here(other)
        while not unit.done and not unit.ready.acquire(timeout=1):
            if not any(thread.is_alive() for thread in self.threads):  # somebody ended them from outside
                self.threads = []
                if unit.take.acquire(blocking=False):
                    self.fill_here(unit)
                elif not unit.done:
                    unit.done, unit.problem = True, RuntimeError("the thread that was filling this batch was ended")
        return unit

    def stop(self, units: deque[Unit], join: bool = False, own: Any = os.getpid) -> None:
        """End the threads; what they were to fill goes back to the pool. It may be called when modules are gone already."""
        for unit in units:
            unit.cancelled = True
            if unit.done or self.pid != own():
                unit.slot.give_back()
        units.clear()
        if self.plan.ahead is not None:
            self.plan.ahead.close()
        if self.pid != own():
            return
        for _ in self.threads:
            self.jobs.put(None)
        if join:
            for thread in self.threads:
                if thread is not threading.current_thread():
                    thread.join()


@atexit.register
def _stop_all() -> None:
    """At the end of the process no thread may still write into memory that is going away."""
    for team in list(_teams):
        team.stop(deque(), join=True)

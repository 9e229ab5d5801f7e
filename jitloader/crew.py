"""The background threads of one iterator that share each unit's rows with the consumer, without the GIL (`sharing`)."""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from . import compose, jit, residency, sharing
from .cores import SLOW, Cores, Waits
from .filling import Fill, Plan, Unit
from .team import LOOK, Team

PATIENCE = 50_000  # nanoseconds that the consumer waits in a kernel for the rows that others still fill
SPIN = 100_000  # nanoseconds that a thread waits in its kernel for what a quick consumer posts: to wake it takes 30,000
LEAST = 32  # a thread takes this part of a unit at least: the last rows are waited for
SECOND = 1_000_000_000
TOLD = struct.Struct("=7q")  # of a record, from ROWS on


def shares(plan: Plan) -> bool:
    """Whether the units of a plan can be shared: by one kernel, over memory that is there."""
    program = plan.program
    return (
        isinstance(program, compose.Program)
        and not plan.data.applies
        and not residency.kept(program.grounds, program.bound)
        and not jit.disabled()
        and hasattr(time, "CLOCK_MONOTONIC")
    )


class Desk:
    """What the threads of a crew see: the desk itself, tokens that wake sleepers, and units they may still be writing to."""

    def __init__(self, plan: Plan, ring: int) -> None:
        points = sum(1 if output.form == "fixed" else 3 for output in plan.program.outputs)
        width = -(-(sharing.POINTS + 3 * points) // sharing.LINE) * sharing.LINE
        memory = np.zeros(sharing.DESK + ring * width + sharing.LINE, np.int64)
        skip = -memory.ctypes.data % 64 // 8
        self.words = memory[skip : skip + sharing.DESK + ring * width]
        self.words[sharing.WIDTH], self.words[sharing.RING], self.words[sharing.SPIN] = width, ring, -1
        self.width, self.ring, self.points = width, ring, points
        self.kernel = jit.load(sharing.share, sharing.SIGNATURE)
        self.tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.held: list[Unit] = []
        self.running = 0
        self._lock = threading.RLock()  # a thread that holds it may collect the iterator, which stops the crew

    def call(self, worker: compose.Worker, what: int, limit: int, record: np.ndarray) -> jit.Call:
        """Give one thread's part at the desk."""
        inner = worker.call
        return self.kernel.bind(what, 0, limit, inner.address, self.words, record, inner.words)

    def enters(self) -> None:
        """One thread more will be at the desk."""
        with self._lock:
            self.running += 1

    def leaves(self) -> None:
        """One is gone; after the last one nobody writes any more."""
        with self._lock:
            self.running -= 1
            if not self.running:
                for unit in self.held:
                    unit.slot.give_back()
                self.held.clear()


def _serve(desk: Desk, plan: Plan, cores: Cores | None) -> None:
    """The life of a background thread: fill rows until the desk is closed. Holds no loader or iterator."""
    waits = None
    try:
        try:
            worker = plan.worker()
        except Exception:  # no memory for its scratch, say: the consumer, who needs as much, tells
            return
        waits = None if cores is None else Waits()
        call = desk.call(worker, sharing.SERVE, int(LOOK * SECOND), np.zeros(1, np.int64))
        while True:
            why = call()
            if why == sharing.STOP:
                return
            if why == sharing.IDLE:
                desk.tokens.get()
            elif cores is not None and waits is not None:
                cores.looked(waits.long())
    finally:
        if waits is not None:
            waits.close()
        desk.leaves()


class Crew(Team):
    """Threads that fill the rows of a unit together with whoever waits for it."""

    def __init__(self, plan: Plan, size: int, ahead: int, cores: Cores | None = None) -> None:
        self.desk = Desk(plan, ahead + 2)
        self.size, self.ahead = size, ahead
        self.most = 0  # threads that are woken for a unit
        self.posted = self.faults = 0
        self.record = np.zeros(self.desk.width, np.int64)
        self.layout = struct.Struct(
            f"={8 * sharing.FAILED}xq{8 * (sharing.COUNT - sharing.FAILED - 1)}x{6 + 3 * self.desk.points}q"
        )
        self.call: jit.Call | None = None
        self.clock = time.perf_counter() - time.clock_gettime(time.CLOCK_MONOTONIC)
        super().__init__(plan, size, cores=cores)

    def _thread(self, cores: Cores | None) -> threading.Thread:
        self.desk.enters()
        return threading.Thread(target=_serve, args=(self.desk, self.plan, cores), name="jitloader", daemon=True)

    def meets(self, alone: bool, level: int) -> None:
        """Let threads sleep while the consumer fills alone, stay awake between the units of one who is soon back, or else be
        woken for each."""
        self.desk.words[sharing.SPIN] = -1 if alone else 0 if level == SLOW else SPIN
        self.most = 0 if alone else min(self.size, self.ahead) if level == SLOW else self.size

    def submit(self, unit: Unit, alone: bool) -> None:
        """Post a unit."""
        try:
            self._post(unit)
        except Exception as problem:
            unit.done, unit.problem = True, problem

    def _post(self, unit: Unit) -> None:
        plan, slot = self.plan, unit.slot
        (first, rows, _), *more = plan.pieces(unit)
        if more or not self.threads:
            return  # the consumer fills it
        plan.verify(time.perf_counter())
        if self.worker is None:
            self.worker = plan.worker()
            self.call = self.desk.call(self.worker, sharing.POST, 0, self.record)
            self.offsets = self.worker.call.kernel.offsets
        if plan.ahead is not None:
            _, self.faults = plan.ahead.before(unit.start, unit.start, rows, unit.start + rows)
        rows = plan.lay_out(self.worker, unit)
        points: list[int] = []
        for k, (place, output) in enumerate(plan.places):
            points += self.offsets[place], slot.addresses[k], slot.flat[k].size
            if output.form != "fixed":
                for at, (array, address) in enumerate((slot.spans.starts[k], slot.spans.extents[k]), place + 1):
                    points += self.offsets[at], address, array.size
        threads = len(self.threads)
        least = rows // (LEAST * threads) or 1
        told = rows, rows, first, plan.step, least, 2 * threads + 2, self.desk.points  # from FAILED on
        self.layout.pack_into(self.record.data, 0, *told, *points)
        unit.number = self.posted
        self.posted += 1
        for _ in range(self._run(sharing.POST, unit, self.most)):
            self.desk.tokens.put(None)

    def _run(self, what: int, unit: Unit, limit: int) -> int:
        assert self.call is not None
        self.call.head(what, unit.number, limit)
        return self.call()

    def wait(self, units: deque[Unit]) -> Unit:
        """Give the first of some units, filled by whoever is at the desk and by who waits."""
        unit = units[0]
        if self.closed:
            raise ValueError("this loader is closed")
        if unit.done:
            return unit
        if self.pid != os.getpid():  # a fork's child has no threads: what they had begun is filled again
            self.threads, self.pid, self.worker = [], os.getpid(), None
        if unit.number < 0 or not self.threads:
            self.fill_here(unit)
            return unit
        left = self._run(sharing.HELP, unit, PATIENCE)
        while left:  # a thread has rows still, and perhaps no core
            for other in units:
                if other.number > unit.number:
                    self._run(sharing.HELP, other, 0)
            time.sleep(PATIENCE / SECOND)
            left = self._run(sharing.HELP, unit, PATIENCE)
        self._finish(unit)
        return unit

    def _finish(self, unit: Unit) -> None:
        """Note what the desk tells of a unit that is done."""
        at = sharing.DESK + unit.number % self.desk.ring * self.desk.width
        told = TOLD.unpack_from(self.desk.words.data, 8 * (at + sharing.ROWS))
        others, own, others_took, own_took, others_begun, own_begun, failed = told
        if failed < others + own:  # which row, and why, this thread finds out
            self._fill_on(unit, failed, others + own)
        if own:
            unit.fills.append(Fill(own_begun / SECOND + self.clock, own_took / SECOND, threading.get_ident(), own))
        if others:
            thread = self.threads[0].ident or 0
            unit.fills.append(Fill(others_begun / SECOND + self.clock, others_took / SECOND, thread, others))
        if self.plan.ahead is not None:
            self.plan.ahead.after(self.faults)
        unit.done = True

    def _fill_on(self, unit: Unit, place: int, rows: int) -> None:
        """Fill from the row at `place` on, up to one that fails."""
        plan, worker = self.plan, self.worker
        for k, (at, _) in enumerate(plan.places):
            worker.call.point(at, unit.slot.flat[k], unit.slot.addresses[k])
            if unit.layouts and unit.layouts[k] is not None:
                worker.lay_out(k, rows, unit.slot.spans)
        ((first, *_),) = plan.pieces(unit)
        failed = worker.fill(first + place * plan.step, plan.step, rows - place, place)
        if failed is not None:
            unit.failed = failed._replace(done=place + failed.done)

    def stop(self, units: deque[Unit], join: bool = False, own: Any = os.getpid) -> None:
        """End the threads; what they may still write to goes back to the pool when they are gone."""
        mine = self.pid == own()
        with self.desk._lock if mine else contextlib.nullcontext():
            for unit in units:
                if unit.done or not mine or unit.number < 0 or not self.desk.running:
                    unit.slot.give_back()
                else:
                    self.desk.held.append(unit)
        units.clear()
        if self.plan.ahead is not None:
            self.plan.ahead.close()
        if not mine:
            return
        self.desk.words[sharing.STOPPED] = 1
        for _ in self.threads:
            self.desk.tokens.put(None)
        if join:
            for thread in self.threads:
                if thread is not threading.current_thread():
                    thread.join()

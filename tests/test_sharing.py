"""Units shared between threads: each row filled once, by whoever; what fails is told as one thread would tell it."""

import gc
import math
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitloader as jl
from jitloader import cores, jit, sharing
from jitloader import crew as crew_module
from jitloader import loader as loader_module
from jitloader.cores import Pace

pytestmark = pytest.mark.skipif(not hasattr(time, "CLOCK_MONOTONIC"), reason="a crew needs a clock that C has too")
N = jit.Array("int64", 1)


def count_rows(first, step, count, place, rows, error, seen, bad):
    """A kernel that counts how often each place is filled, and notes its position; position `bad` fails."""
    for i in range(count):
        position = first + i * step
        error[1], error[3] = position, i
        if position == bad:
            error[0], error[2] = 5, i
            return 1
        seen[place + i] += 1
        rows[place + i] = position
    return 0


KINDS = (jit.INT, jit.INT, jit.INT, jit.INT, N, N, N, jit.INT)


class Hand:
    """One thread's own arguments of `count_rows`, and its part at a desk."""

    def __init__(self, desk, record, plain, bad=-1):
        error = np.zeros(4, np.int64)
        none = np.zeros(0, np.int64)
        if plain:
            words = np.zeros(13, np.int64)  # as the kernel takes them: four numbers, four arrays, one number

            def entry(words):
                seen, rows = (self.arrays[int(words[at])] for at in (8, 4))
                return count_rows(*words[:4].tolist(), rows, error, seen, bad)

            self.run = lambda what, unit, limit: sharing.share(what, unit, limit, entry, desk, record, words)
        else:
            inner = jit.load(count_rows, KINDS).bind(0, 1, 0, 0, none, error, none, bad)
            call = jit.load(sharing.share, sharing.SIGNATURE).bind(0, 0, 0, inner.address, desk, record, inner.words)
            self.keep = inner

            def run(what, unit, limit):
                call.head(what, unit, limit)
                return call()

            self.run = run


def desk_for(ring):
    width = sharing.POINTS + 2 * 3 + 2
    desk = np.zeros(sharing.DESK + ring * width, np.int64)
    desk[sharing.WIDTH], desk[sharing.RING] = width, ring
    return desk, width


def record_of(width, count, least, parts, seen, rows, first=3, step=2):
    record = np.zeros(width, np.int64)
    record[sharing.FAILED] = count
    record[sharing.COUNT : sharing.POINTS] = count, first, step, least, parts, 2
    points = [8, seen.ctypes.data, count, 4, rows.ctypes.data, count]
    record[sharing.POINTS : sharing.POINTS + 6] = points
    return record


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    least=st.integers(1, 50),
    parts=st.integers(1, 9),
    threads=st.integers(0, 4),
    ring=st.integers(2, 4),
)
def test_each_row_is_filled_once(counts, least, parts, threads, ring):
    """Whatever the threads do, each row of each unit is filled once, for its own position, before the unit is done."""
    desk, width = desk_for(ring)
    desk[sharing.SPIN] = 10**9
    mine = np.zeros(width, np.int64)
    hand = Hand(desk, mine, plain=False)

    def serve():
        other = Hand(desk, np.zeros(1, np.int64), plain=False)
        while other.run(sharing.SERVE, 0, 10**6) != sharing.STOP:
            pass

    others = [threading.Thread(target=serve) for _ in range(threads)]
    for thread in others:
        thread.start()
    results = []
    for unit, count in enumerate(counts):
        seen, rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
        mine[:] = record_of(width, count, least, parts, seen, rows)
        assert hand.run(sharing.POST, unit, 0) == 0
        while hand.run(sharing.HELP, unit, 10**6):
            pass
        at = sharing.DESK + unit % ring * width
        assert desk[at + sharing.ROWS] + desk[at + sharing.ROWS + 1] == count
        results.append((seen, rows, seen.copy(), rows.copy()))
    desk[sharing.STOPPED] = 1
    for thread in others:
        thread.join()
    for seen, rows, then, those in results:
        assert (then == 1).all() and (those == 3 + 2 * np.arange(len(those))).all()
        assert (seen == then).all() and (rows == those).all()  # nor did anything come later


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 300), least=st.integers(1, 40), parts=st.integers(1, 9), bad=st.integers(-1, 400))
def test_compiled_as_in_plain_python(count, least, parts, bad):
    """One thread alone: the same rows, the same failure, the same desk but for its times, compiled or not."""
    told = []
    for plain in (True, False):
        desk, width = desk_for(2)
        seen, rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
        record = record_of(width, count, least, parts, seen, rows)
        if plain:
            record[[sharing.POINTS + 1, sharing.POINTS + 4]] = 0, 1
        hand = Hand(desk, record, plain, bad)
        hand.arrays = [seen, rows]
        assert hand.run(sharing.POST, 0, 4) == 0 and hand.run(sharing.HELP, 0, 0) == 0
        at = sharing.DESK
        kept = desk[at : at + sharing.POINTS].copy()
        kept[sharing.TIMES : sharing.FAILED] = 0
        told.append((seen.tolist(), rows.tolist(), kept.tolist()))
    assert told[0] == told[1]
    failing = (bad - 3) // 2 if bad >= 3 and (bad - 3) % 2 == 0 and (bad - 3) // 2 < count else count
    assert (told[0][2][sharing.FAILED] == count) == (failing == count) and told[0][2][sharing.FAILED] <= failing
    assert told[0][2][sharing.DONE] == count


def test_sleepers_are_woken_as_often_as_asked():
    """A thread without work goes to sleep, or that is to do none; posting takes as many off the desk as it may wake."""
    desk, width = desk_for(2)
    record = record_of(width, 1, 1, 1, *np.zeros((2, 1), np.int64))
    hands = [Hand(desk, np.zeros(1, np.int64), plain=False) for _ in range(3)]
    assert [hand.run(sharing.SERVE, 0, 0) for hand in hands] == [sharing.IDLE] * 3
    assert desk[sharing.ASLEEP] == 3
    poster = Hand(desk, record, plain=False)
    assert [poster.run(sharing.POST, unit, 2) for unit in range(3)] == [2, 1, 0]
    desk[sharing.SPIN] = -1  # nobody is to serve, though rows are there
    assert hands[0].run(sharing.SERVE, 0, 0) == sharing.IDLE
    desk[sharing.STOPPED] = 1
    assert hands[0].run(sharing.SERVE, 0, 0) == sharing.STOP


def ragged(n):
    offsets = np.concatenate([[0], np.cumsum(np.arange(n) % 7)])
    return jl.Dataset(x=jl.ragged(np.arange(offsets[-1]), offsets), i=np.arange(n)).map("x", jl.pad_to_longest())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", [ragged, lambda n: jl.Dataset(i=np.arange(n), x=np.arange(3 * n).reshape(n, 3))])
def test_a_crew_gives_what_one_thread_gives(make, threads, monkeypatch):
    """Fixed and padded rows, batches in runs of many sizes, several epochs."""
    monkeypatch.setattr(loader_module, "UNIT", 1 << 15)
    data = make(20_000)
    shared = jl.Loader(data, 48, shuffle=True, threads=threads, seed=4)
    alone = jl.Loader(data, 48, shuffle=True, threads=1, prefetch=0, seed=4)
    for _ in range(3):
        for one, other in zip(shared, alone, strict=True):
            assert all((a == b).all() for a, b in zip(one, other, strict=True))
    deadline = time.perf_counter() + 60  # on a busy machine the consumer may be through before others get a core
    while not {event.thread for event in shared.report().events} - {threading.get_ident()}:
        assert time.perf_counter() < deadline
        for _ in shared:
            time.sleep(1e-4)


@pytest.mark.parametrize("threads", [1, 4])
def test_of_rows_that_fail_the_first_is_told(threads):
    """Batches before it come, whichever thread met which of them."""
    data = jl.Dataset(i=np.arange(60_000)).map("i", jl.lookup(np.arange(51_234)))
    loader = jl.Loader(data, 100, threads=threads)
    for _ in range(10):
        loader.epoch = 0
        got = []
        with pytest.raises(jl.PipelineError, match="row 51234"):
            for batch in loader:
                got.append(batch.i.copy())
        assert (np.concatenate(got) == np.arange(51_200)).all()


@pytest.mark.parametrize("bad", [10, 5_000, 19_990])
def test_padded_rows_that_fail_come_up_to_the_first(bad, monkeypatch):
    """Where rows vary in length, too; and the batches before it are right."""
    monkeypatch.setattr(loader_module, "UNIT", 1 << 15)

    offsets = np.concatenate([[0], np.cumsum(1 + np.arange(20_000) % 7)])
    limit = int(offsets[bad])
    rows = jl.ragged(np.arange(offsets[-1]), offsets)
    data = jl.Dataset(x=rows).map("x", jl.lookup(np.arange(limit)), jl.pad_to_longest())
    loader, got = jl.Loader(data, 10, threads=2), 0
    with pytest.raises(jl.PipelineError, match=f"row {bad} "):
        for batch in loader:
            assert (batch.x[:, 0] == offsets[got : got + 10]).all()
            got += 10
    assert got == bad


def costly():
    """Give data that takes milliseconds a batch to fill."""
    return jl.Dataset(x=np.zeros((4_000, 1_500))).map("x", lambda v: math.exp(math.sin(v)))


def slow_row(src, dst, key):
    """Give the row as it is, after a millisecond or so."""
    total = 0.0
    for i in range(200_000):
        total += jl.uniform(key, i)
    dst[0] = src[0] + 0.0 * total


def test_threads_are_for_rows_that_take_long_not_for_large_ones_alone():
    """An epoch of few bytes has threads from its second run on, if that one tells that it will take long."""
    data = jl.Dataset(x=np.arange(400.0).reshape(400, 1))
    quick, slow = (jl.Loader(d, 20, threads=2) for d in (data, data.map("x", slow_row)))
    for loader in quick, slow:
        assert np.concatenate([batch.x for batch in loader]).ravel().tolist() == list(range(400))
    assert slow.stats()["threads"] == 2
    for _ in range(50):  # on a busy machine a fill may be cut short
        for _ in quick:
            pass
        if not quick.stats()["threads"]:
            break
    assert quick.stats()["threads"] == 0


def test_functions_of_few_rows_run_in_the_background_too():
    """What is linked by `apply` takes its time whatever the bytes."""
    data = jl.Dataset(x=np.arange(40.0)).apply(lambda batch: (time.sleep(0.01), batch)[1])
    loader = jl.Loader(data, 4, threads=1)
    assert np.concatenate([batch.x for batch in loader]).tolist() == list(range(40))
    here = threading.get_ident()
    assert [event.thread == here for event in loader.report().events] == [True] + [False] * 9


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"threads": 2}])
def test_a_batch_that_an_interrupt_keeps_back_is_not_received(options, monkeypatch):
    """The state goes on with it."""
    plain = loader_module.parts

    def interrupted(program, unit, good):
        for batch, end in zip(plain(program, unit, good), unit.ends, strict=True):
            if unit.start + end > 5_000:
                raise KeyboardInterrupt
            yield batch

    data = jl.Dataset(x=np.arange(10_000))
    loader, got = jl.Loader(data, 50, **options), []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loader_module, "parts", interrupted)
        patch.setattr(loader_module, "UNIT", 1 << 12)  # so that threads are at work
        for batch in loader:
            got += batch.x.tolist()
    assert loader.stats()["threads"] == options.get("threads", 0)
    assert len(got) == 5_000
    loader.load_state_dict(loader.state_dict())
    for batch in loader:
        got += batch.x.tolist()
    assert got == list(range(10_000))


def test_a_quick_consumer_has_two_buffers():
    """Where a batch takes long to fill and none to use, nothing is filled ahead: the one in hand, and the next."""
    loader = jl.Loader(costly(), 400, shuffle=True)
    for _ in range(3):
        for _ in loader:
            pass
    assert loader._pace.level == cores.QUICK
    loader._pool = None
    for _ in loader:
        pass
    assert loader.stats()["slots"] == 2


def test_a_slow_consumer_has_batches_filled_ahead():
    """While it is away the threads fill up to `prefetch` runs. It is known to be slow after two, and helps with the next
    two; from then on it fills none itself."""
    loader = jl.Loader(costly(), 400, prefetch=2, threads=2)
    for _ in loader:
        pass
    loader._meter.runs.clear()
    loader._pool = None
    for batches, _ in enumerate(loader, 1):
        (crew,) = loader._live
        deadline = time.perf_counter() + 60
        while undone(crew.desk.words) and time.perf_counter() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert batches < 3 or crew.posted == min(batches + 2, 10)
    assert loader._pace.level == cores.SLOW
    assert loader.stats()["slots"] == 4
    filled = [{thread for _, _, thread, _ in fills} for _, _, fills, *_ in loader._meter.runs]
    assert len(filled) == 10 and not any(threading.get_ident() in threads for threads in filled[5:])


def undone(desk):
    """Give how many rows are posted at a desk and not yet filled."""
    records = desk[sharing.DESK :].reshape(-1, desk[sharing.WIDTH])
    return (records[:, sharing.COUNT] - records[:, sharing.DONE]).sum()


def test_pace_changes_when_two_runs_tell_so():
    """A consumer is brisk that takes less than twice as long as the fill, here 0.5, quick that takes less than a quarter of
    a large one; one run alone says nothing."""
    pace, large = Pace(), cores.LARGE
    told = []
    for away in (2, 0.1, 2, 0.1, 0.1, 0.1, 2, 0.1, 2, 2, 0.124, 0.124, 0.126, 0.126):
        pace.told(away, 0.5, large)
        told.append(pace.level)
    assert told == [2, 2, 2, 2, 0, 0, 0, 0, 0, 2, 2, 0, 0, 1]
    for away, level in ((0.1, 1), (0.9, 1), (1.1, 2), (0.1, 1)):
        for _ in range(2):
            pace.told(away, 0.5, large - 1)
        assert pace.level == level


def test_no_thread_is_woken_while_other_work_holds_the_cores():
    """The consumer fills for itself until then; threads that were asked for are at work whatever else is."""
    left_out, chosen = jl.Loader(costly(), 400), jl.Loader(costly(), 400, threads=1)
    found = []
    for loader in left_out, chosen:
        loader._cores.taken = time.perf_counter() + 1000
        assert sum(len(batch.x) for batch in loader) == 4_000
        found.append({event.thread for event in loader.report().events})
    assert found[0] == {threading.get_ident()} and len(found[1]) == 2


@pytest.mark.parametrize("how", ["left", "closed", "dropped"])
def test_buffers_of_an_epoch_left_early_are_free_again(how):
    """Also those that a thread was writing to, when it is gone; and the threads end."""
    loader = jl.Loader(jl.Dataset(x=np.zeros((3_000, 3_000), np.uint8)).map("x", jl.cast("float64")), 100, threads=3)
    before = threading.active_count()
    for stop in range(12):
        run = iter(loader)
        for _ in range(stop):
            next(run)
        if how == "closed":
            run.close()
        elif how == "left":
            next(run)
        del run
    gc.collect()
    until = time.monotonic() + 20
    while time.monotonic() < until and (threading.active_count() > before or loader.stats()["slots_held"]):
        time.sleep(0.01)
    assert threading.active_count() <= before and loader.stats()["slots_held"] == 0
    assert sum(len(batch.x) for batch in loader) == 3_000


def test_a_thread_without_memory_for_its_scratch_is_done_without(monkeypatch):
    """The consumer fills all; where it has none either, it tells."""
    real, here = crew_module.Plan.worker, threading.get_ident()

    def no_memory(plan):
        if threading.get_ident() != here:
            raise MemoryError("no scratch")
        return real(plan)

    loader = jl.Loader(jl.Dataset(i=np.arange(500_000)), 100)
    monkeypatch.setattr(crew_module.Plan, "worker", no_memory)
    assert [int(batch.i[0]) for batch in loader] == list(range(0, 500_000, 100))
    assert {event.thread for event in loader.report().events} == {here}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_fills_what_threads_had_begun():
    """It has none of them; its epoch goes on where it was, as the parent's does."""
    loader = jl.Loader(jl.Dataset(i=np.arange(400_000)), 1000, threads=2)
    run = iter(loader)
    got = [int(next(run).i[0]) for _ in range(30)]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        rest = [int(batch.i[0]) for batch in run]
        os.write(writer, b"good" if rest == list(range(30_000, 400_000, 1000)) else b"bad")
        os._exit(0)
    got += [int(batch.i[0]) for batch in run]
    os.waitpid(child, 0)
    assert os.read(reader, 4) == b"good" and got == list(range(0, 400_000, 1000))


def test_bad_buffers_are_an_error_of_their_batch(monkeypatch):
    """What goes wrong as a unit is posted comes with it, and batches before it come whole."""
    real, calls = crew_module.Plan.lay_out, []

    def broken(plan, worker, unit):
        calls.append(unit.start)
        if len(calls) == 4:
            raise OSError("the disk is gone")
        return real(plan, worker, unit)

    monkeypatch.setattr(crew_module.Plan, "lay_out", broken)
    loader, got = jl.Loader(jl.Dataset(i=np.arange(1_000_000)), 100), 0
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in loader:
            assert batch.i[0] == got
            got += len(batch.i)
    assert got == calls[3]

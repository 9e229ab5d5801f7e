"""A loader in the life of a process: an interrupt, an event loop, children made in every way."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jitloader as jl

INTERRUPTED = """
import signal, sys, time
import numpy as np, jitloader as jl
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background has it ignored
data = jl.Dataset(x=np.zeros((20_000, 256), "f4"), i=np.arange(20_000))
loader = jl.Loader(data, 32, shuffle=True).warmup()
print("ready", flush=True)
try:
    while True:
        for batch in loader:
            pass
except KeyboardInterrupt:
    caught = time.time()
whole = np.sort(np.concatenate([batch.i for batch in loader]))
assert np.array_equal(whole, np.arange(20_000))
assert not any(slot.busy for slot in loader._pool._slots)
print(caught, flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("wait", [0.05, 0.2, 0.4])
def test_an_interrupt_ends_the_epoch_at_once(wait):
    """Ctrl-C in the middle reaches the consumer within a second; the next epoch is whole and the process ends by itself."""
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(wait)
    sent = time.time()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and not error, error
    assert float(out) - sent < 1.0


def test_an_event_loop_takes_batches_in_threads():
    """`asyncio.to_thread(next, batches)` gives every batch, several epochs at once, the loop never held up."""
    data = jl.Dataset(i=np.arange(3_000))

    async def epoch(loader):
        batches, rows = iter(loader), []
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            rows += batch.i.tolist()
        return rows

    async def both():
        return await asyncio.gather(*(epoch(jl.Loader(data, 100, shuffle=True, seed=s)) for s in range(3)))

    found = asyncio.run(both())
    assert all(sorted(rows) == list(range(3_000)) for rows in found) and found[0] != found[1]


def rows_in_child(loader, send):
    send.send([i for batch in loader for i in batch.i.tolist()])
    send.close()


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_children_made_in_every_way_go_on_from_the_loaders_state(method, tmp_path):
    """A loader handed to a child gives there what it would have given here."""
    np.save(tmp_path / "i.npy", np.arange(2_000))
    loader = jl.Loader(jl.Dataset(i=tmp_path / "i.npy").map("i", jl.clip(0, 5_000)), 64, shuffle=True, seed=4)
    batches = iter(loader)
    next(batches), next(batches)
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=rows_in_child, args=(loader, send))
    child.start()
    send.close()
    assert receive.recv() == [i for batch in batches for i in batch.i.tolist()]
    child.join(60)
    assert child.exitcode == 0

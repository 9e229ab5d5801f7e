"""What a loader tells of itself: exact counts, shares of time, the verdict, the timeline, the progress bar."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
import time

import numpy as np
import pytest

import jitloader as jl
from jitloader import bars
from jitloader import report as report_module
from jitloader.filling import Fill
from jitloader.meter import Meter
from jitloader.report import Report, covered, side_by_side

DATA = jl.Dataset(x=np.arange(4000.0).reshape(1000, 4))


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"threads": 1, "prefetch": 1}])
@pytest.mark.parametrize("taken", [0, 1, 7, 142, 143])
def test_counts_are_what_was_handed_out(options: dict[str, int], taken: int) -> None:
    """Batches and rows are exact in the middle of a run of batches, after a break, and at the end."""
    loader = jl.Loader(DATA, 7, **options)
    batches = iter(loader)
    rows = sum(len(batch.x) for batch in itertools.islice(batches, taken))
    live = loader.stats()
    del batches
    left = loader.stats()

    assert (live["batches"], live["rows"]) == (left["batches"], left["rows"]) == (taken, rows)


def test_iterators_side_by_side_are_all_counted() -> None:
    """Two live iterators and one that is over add up."""
    loader = jl.Loader(DATA, 10)
    assert len(list(loader)) == 100
    one, other = iter(loader), iter(loader)
    for _ in range(3):
        next(one), next(other)
    next(other)

    assert (loader.stats()["batches"], loader.stats()["rows"]) == (107, 1070)


def test_bytes_count_rows_that_vary() -> None:
    """Bytes are those of the batches: fixed fields, and others at the lengths they have."""
    values = np.arange(18, dtype="uint16")
    data = jl.Dataset(w=jl.ragged(values, np.cumsum([0, 3, 9, 1, 5])), y=np.arange(4))
    loader = jl.Loader(data, 2)
    list(loader)

    assert loader.stats()["bytes"] == 18 * 2 + 4 * 8


def test_time_goes_to_who_spent_it() -> None:
    """A slow consumer has the consumer's share, a slow function the loader's."""
    slow_consumer = jl.Loader(DATA, 100)
    for _ in slow_consumer:
        time.sleep(0.003)
    slow_loader = jl.Loader(DATA.apply(lambda batch: time.sleep(0.003) or batch), 100, prefetch=0)
    list(slow_loader)

    assert slow_consumer.stats()["consumer_seconds"] >= 0.03
    assert slow_consumer.stats()["wait_share"] < 0.5 < slow_loader.stats()["wait_share"] <= 1
    assert slow_loader.stats()["fill_seconds"] >= 0.03
    assert slow_loader.stats()["wait_seconds"] >= slow_loader.stats()["fill_seconds"]


def test_meter_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: waiting is asking to getting, work is getting to asking, one live run included."""
    now = iter([1.0, 3.0, 7.0, 8.0, 10.0])
    monkeypatch.setattr("jitloader.meter.clock", lambda: next(now))
    meter = Meter()
    tally = meter.begin(4, 2, 0)
    meter.gets(tally, meter.asks(tally), [Fill(1.5, 0.5, 5, 4), Fill(1.5, 0.5, 6, 4)], 8, 64)  # asked at 1, got at 3
    tally.rows = 8
    meter.gets(tally, meter.asks(tally), [Fill(2.5, 0.5, 5, 3)], 3, 24)  # asked at 7, got at 8
    tally.rows = 11
    found = meter.totals()  # at 10

    assert found == {
        "batches": 3, "rows": 11, "bytes": 88, "padding_share": 0.0, "wait_seconds": 3.0, "consumer_seconds": 6.0, "wait_share": 3 / 9,
        "fill_seconds": 1.5, "fill_bytes_per_second": 88 / 1.5, "compile_seconds": 0.0, "threads": 2,
    }  # fmt: skip
    assert [(e.asked, e.got, e.thread, e.rows, e.nbytes) for e in meter.events] == [
        (1.0, 3.0, 5, 4, 32),
        (1.0, 3.0, 6, 4, 32),
        (7.0, 8.0, 5, 3, 24),
    ]


def test_pool_and_threads() -> None:
    """Slots in use are those whose batches somebody holds."""
    loader = jl.Loader(DATA, 10, threads=2, prefetch=2)
    assert (loader.stats()["slots"], loader.stats()["pool_bytes"]) == (0, 0)
    held = next(iter(loader))
    found = loader.stats()

    assert 1 <= found["slots_held"] <= found["slots"] <= 4
    assert found["pool_bytes"] >= found["slots"] * held.x.nbytes
    del held
    assert loader.stats()["slots_held"] < found["slots_held"] or found["slots"] == 1


def test_compiling_is_told_apart() -> None:
    """Kernels made ready count as that, and not as waiting; one serves all constants and orders."""
    loader = jl.Loader(DATA.map("x", jl.clip(0.0, 0.5), jl.fill_nan(0.25), jl.clip(0.0, 0.4)), 10)
    assert loader.stats()["compile_seconds"] == 0
    loader.warmup()
    assert loader.stats()["compile_seconds"] > 0
    assert loader.stats()["wait_seconds"] == 0


def test_copies_count_from_zero() -> None:
    """A copied loader has totals of its own."""
    loader = jl.Loader(DATA, 10)
    list(loader)
    other = copy.deepcopy(loader)

    assert other.stats()["batches"] == 0
    assert len(list(other)) == other.stats()["batches"] == 100


def of(changes: dict[str, float], *, data: jl.Dataset = DATA, prefetch: int = 2, seconds: float = 1.0) -> Report:
    """Give the report of a loader whose one fill of 10 GB, read and written, took so long."""
    loader = jl.Loader(data, 10, prefetch=prefetch)
    loader._meter.begin(10, 1, 0)
    loader._meter.runs.append((0, 1, [Fill(0, seconds, 1, 10)], 10, 10_000_000_000))
    made = loader.report()
    made._read = 0
    made.stats.update(
        {"batches": 1, "rows": 10, "fill_seconds": 1, "wait_seconds": 0.5, "consumer_seconds": 0.5, "threads": 1}
    )
    made.stats.update(changes)
    return made


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict's text, case by case, on a machine whose memcpy moves 10 GB/s."""
    monkeypatch.setattr(report_module, "copy_rate", lambda: 10e9)
    half = {"wait_share": 0.5}
    staged, python = DATA.map("x", jl.cast("float32")), DATA.apply(lambda batch: batch)
    cases = {
        "no batch yet": of({"batches": 0}),
        "loader 2 % of the step: the consumer sets the pace": of({"wait_share": 0.02}),
        "loader 50 % of the step, of 2.0 ms in all: too short to say why": of(
            {**half, "wait_seconds": 0.001, "consumer_seconds": 0.001}
        ),
        "loader 50 % of the step; fill bound by memory at 6.7 GB/s of a memcpy's 10": of(half, seconds=1.5),
        "loader 50 % of the step; fill bound by reads of 0 bytes a row at 1 GB/s of a memcpy's 10": of(half, seconds=10),
        "loader 50 % of the step; fill bound by its stages at 1 GB/s of a memcpy's 10": of(half, seconds=10, data=staged),
        "loader 50 % of the step; fill bound by Python functions at 1 GB/s of a memcpy's 10": of(
            half, seconds=10, data=python
        ),
        "loader 90 % of the step; bound by hand-over: threads fill 10 % of the time": of(
            {"wait_share": 0.9, "fill_seconds": 0.1}
        ),
        "loader 50 % of the step; fill bound by memory at 10 GB/s of a memcpy's 10; prefetch=2 would fill while the "
        "consumer works": of({**half, "threads": 0}, prefetch=0),
    }  # fmt: skip
    for text, made in cases.items():
        assert made.verdict == text


def test_text_and_html() -> None:
    """A report prints five lines below its verdict; HTML says the same."""
    loader = jl.Loader(DATA, 10)
    list(loader)
    made = loader.report()
    lines = repr(made).splitlines()

    assert lines[0] == made.verdict
    assert [line.split()[0] for line in lines[1:]] == ["handed", "step", "fill", "kernels", "pool"]
    assert lines[1] == "  handed out  100 batches, 1,000 rows, 32.0 kB"
    html = made._repr_html_()
    assert all(part in html and told.replace("'", "&#x27;") in html for part, told in made.lines())


def test_a_memcpy_has_a_rate() -> None:
    """It is measured once, and is that of a memory."""
    assert 1e8 < report_module.copy_rate() < 1e13
    assert report_module.copy_rate() == report_module.copy_rate()


def test_spans_and_bins() -> None:
    """Lanes hold no overlaps and all spans; shares of bins agree with a count on a fine grid."""
    random = np.random.default_rng(0)
    spans = [(float(s), float(n)) for s, n in zip(random.uniform(0, 9, 40), random.uniform(0, 1, 40), strict=True)]
    lanes = side_by_side(spans)
    assert sorted(itertools.chain(*lanes)) == sorted(spans)
    grid = np.linspace(0, 10, 100_001)[:-1] + 5e-5
    for lane in lanes:
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(lane))
        inside = np.any([(grid >= s) & (grid < s + n) for s, n in lane], axis=0)
        assert np.allclose(covered(lane, np.linspace(0, 10, 6)), inside.reshape(5, -1).mean(axis=1), atol=1e-3)
    busiest = max(sum(s <= at < s + n for s, n in spans) for at, _ in spans)
    assert len(lanes) == busiest


def test_plot_needs_a_batch_and_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is said, with what to install."""
    loader = jl.Loader(DATA, 10)
    with pytest.raises(ValueError, match="^no batch yet: there is nothing to plot$"):
        loader.report().plot()
    list(loader)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^pictures need matplotlib: pip install 'jitloader\[plot\]'$"):
        loader.report().plot()


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}])
def test_plot_draws_every_lane(options: dict[str, int]) -> None:
    """The timeline has a lane a thread and one for the consumer, labelled axes, and comes as PNG where notebooks ask."""
    pytest.importorskip("matplotlib")
    loader = jl.Loader(DATA, 1, **options)
    for _ in range(3):
        list(loader)
    made = loader.report().plot()
    top, bottom = made.axes
    names = [label.get_text() for label in top.get_yticklabels()]

    assert names[-1] == "consumer" and all(name.startswith("thread") for name in names[:-1])
    assert bottom.get_ylabel() == "share of time, %" and bottom.get_xlabel().startswith("time since the first run, ")
    assert made._repr_png_()[:4] == b"\x89PNG"
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_progress_gives_the_epoch() -> None:
    """Every batch of the next epoch, those left after a resume, and state as without a bar."""
    loader = jl.Loader(DATA, 300, shuffle=True)
    wanted = [batch.x.tolist() for batch in jl.Loader(DATA, 300, shuffle=True)]
    assert [batch.x.tolist() for batch in loader.progress(disable=True)] == wanted
    state = jl.Loader(DATA, 300, shuffle=True)
    next(batches := iter(state))
    again = jl.Loader(DATA, 300, shuffle=True)
    again.load_state_dict(state.state_dict())
    assert [batch.x.tolist() for batch in again.progress(disable=True)] == wanted[1:]
    del batches


def test_progress_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """With tqdm: its bar, over the batches that are left, named by the epoch; options are tqdm's."""
    pytest.importorskip("tqdm")
    loader = jl.Loader(DATA, 300)
    bar = loader.progress()
    assert bar.total == 4
    assert [len(batch.x) for batch in bar] == [300, 300, 300, 100]
    assert "epoch 0: 100%" in capsys.readouterr().err
    assert len(list(loader.progress(desc="valid", leave=False))) == 4
    assert "valid:   0%" in capsys.readouterr().err


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tqdm the batches come bare."""
    find = importlib.util.find_spec
    monkeypatch.setattr(bars, "find_spec", lambda name: None if name == "tqdm" else find(name))
    assert len(list(jl.Loader(DATA, 300).progress(desc="x"))) == 4

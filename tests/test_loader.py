"""Loaders: every row when it should come, batches nobody overwrites, state exact, threads that end."""

import copy
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from test_orders import ORDERS

import jitloader as jl
from jitloader import cores as cores_module
from jitloader import crew, filling, sharing
from jitloader import loader as loader_module


def rows(loader):
    return [b.i.tolist() for b in loader]


def data_of(n):
    return jl.Dataset(i=np.arange(n), x=np.arange(2.0 * n).reshape(n, 2))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_row_once_in_the_order_of_the_seed(threads, prefetch):
    """Threads and prefetch change nothing that comes."""
    reference = jl.Loader(data_of(1000), 7, shuffle=True, seed=5, prefetch=0, threads=1)
    loader = jl.Loader(data_of(1000), 7, shuffle=True, seed=5, prefetch=prefetch, threads=threads)
    for _ in range(3):
        found = rows(loader)
        assert found == rows(reference)
        assert sorted(itertools.chain(*found)) == list(range(1000))


def test_batches_have_the_sizes_asked_for():
    """The short last batch comes unless drop_last; len tells."""
    assert [len(b) for b in rows(jl.Loader(data_of(10), 4))] == [4, 4, 2]
    assert [len(b) for b in rows(jl.Loader(data_of(10), 4, drop_last=True))] == [4, 4]
    assert len(jl.Loader(data_of(10), 4)) == 3 and len(jl.Loader(data_of(10), 4, drop_last=True)) == 2
    assert rows(jl.Loader(data_of(3), 5)) == [[0, 1, 2]]


def test_drop_last_that_leaves_nothing_says_so():
    """An empty loader is never silent."""
    with pytest.warns(UserWarning, match="3 rows are fewer than batch_size 5"):
        loader = jl.Loader(data_of(3), 5, drop_last=True)
    assert rows(loader) == [] and len(loader) == 0


def test_buffers_are_used_again():
    """Epochs after the first allocate no batch memory."""
    loader = jl.Loader(data_of(4000), 8, shuffle=True)
    for _ in range(2):
        for _ in loader:
            pass
    made = loader._pool.made
    for _ in range(20):
        for _ in loader:
            pass

    assert loader._pool.made == made <= loader.prefetch + 2


def test_batches_are_private_and_writable():
    """Writing to a batch leaves the data as it was."""
    x = np.arange(6.0)
    x.flags.writeable = False
    for batch in jl.Loader(jl.Dataset(x=x), 2):
        assert batch.x.flags.writeable and type(batch.x) is np.ndarray
        batch.x[:] = 9
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_buffers_lie_on_cache_lines():
    """Whole buffers start at multiples of 64 bytes, so that frameworks take them without a copy."""
    batch = next(iter(jl.Loader(data_of(100), 50)))
    assert batch.x.ctypes.data % 64 == 0


def test_iterators_are_independent():
    """Nested loops, zip and an inner break leave each other alone."""
    loader = jl.Loader(data_of(10), 4)
    assert all((a.i == b.i).all() for a, b in zip(loader, loader, strict=True))
    assert sum(1 for _ in loader for _ in loader) == 9
    seen = []
    for batch in loader:
        seen.append(batch.i)
        for _ in loader:
            break
    assert np.concatenate(seen).tolist() == list(range(10))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_part_the_rows(world, shuffle):
    """Ranks together see each row once, sizes differ by one at most; drop and wrap give equal sizes."""
    for n in (1, 3, 10, 23):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = {
                tail: [
                    list(
                        itertools.chain(
                            *rows(jl.Loader(data_of(n), 2, shuffle=shuffle, rank=r, world_size=world, tail=tail))
                        )
                    )
                    for r in range(world)
                ]
                for tail in ("keep", "drop", "wrap")
            }
        assert sorted(itertools.chain(*made["keep"])) == list(range(n))
        assert max(map(len, made["keep"])) - min(map(len, made["keep"])) <= 1
        assert {len(r) for r in made["drop"]} == {n // world} and {len(r) for r in made["wrap"]} == {-(-n // world)}
        assert set(itertools.chain(*made["wrap"])) == set(range(n))


def test_unequal_ranks_are_told():
    """Where ranks get different numbers of batches, training in step would hang: a warning says so."""
    with pytest.warns(UserWarning, match="different numbers of batches"):
        jl.Loader(data_of(9), 4, rank=0, world_size=2)


def test_rank_from_the_environment(monkeypatch):
    """RANK and WORLD_SIZE are taken where neither is given; what is given wins."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(itertools.chain(*rows(jl.Loader(data_of(8), 4)))) == [1, 3, 5, 7]
    assert len(rows(jl.Loader(data_of(8), 4, rank=0, world_size=1))) == 2


@pytest.mark.parametrize("cut", range(1, 14))
def test_resume_is_exact(cut):
    """For every stop point: the batches before and after are together the uninterrupted run, epochs included."""
    options = {"shuffle": True, "seed": 7, "prefetch": 3}

    def flow(loader):
        while True:
            yield from (b.i.tolist() for b in loader)

    whole = list(itertools.islice(flow(jl.Loader(data_of(23), 4, **options)), 20))
    first = jl.Loader(data_of(23), 4, **options)
    head = list(itertools.islice(flow(first), cut))
    state = json.loads(json.dumps(first.state_dict()))
    second = jl.Loader(data_of(23), 4, **options)
    second.load_state_dict(state)

    assert head + list(itertools.islice(flow(second), 20 - cut)) == whole


ANY_ORDER = [p.values[0] for p in ORDERS if p.id != "stratified"]  # which is laid out for the batches of each loader


class Resuming(RuleBasedStateMachine):
    """A run in any order that is stopped and taken up again with other batch sizes, threads, prefetch and ranks, or as it
    was from a pickle, at any time delivers the rows of one order."""

    @initialize(n=st.integers(1, 60), seed=st.integers(0, 3), order=st.sampled_from(ANY_ORDER))
    def start(self, n, seed, order):
        self.n, self.seed, self.order = n, seed, order(n)
        self.state, self.epoch, self.seen, self.loaders = None, 0, [], []
        whole = jl.Loader(data_of(n), n, order=self.order, seed=seed)
        self.full = [[int(i) for b in whole for i in b.i] for _ in range(3)]

    def made(self, batch, threads, prefetch, world):
        found = []
        for rank in range(world):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loader = jl.Loader(
                    data_of(self.n), batch, order=self.order, seed=self.seed, threads=threads, prefetch=prefetch, rank=rank,
                    world_size=world,
                )  # fmt: skip
            if self.state is not None:
                loader.load_state_dict(self.state)
            found.append(loader)
        return found

    @rule(
        batch=st.integers(1, 9),
        threads=st.integers(1, 3),
        prefetch=st.integers(0, 3),
        world=st.integers(1, 4),
        take=st.integers(0, 5),
        pickled=st.booleans(),
    )
    def run(self, batch, threads, prefetch, world, take, pickled):
        if self.epoch >= 3:
            return
        if pickled and self.loaders:
            self.loaders = [pickle.loads(pickle.dumps(loader)) for loader in self.loaders]
        else:
            self.loaders = self.made(batch, threads, prefetch, world)
        made = [(loader, iter(loader)) for loader in self.loaders]
        for _ in range(take):  # all ranks take a batch each, in step
            batches = [next(it, None) for _, it in made]
            lengths = {0 if b is None else len(b.i) for b in batches}
            if None in batches and any(b is not None for b in batches) or len(lengths) > 1:
                self.finish(made, batches)
                return
            if batches[0] is None:
                self.state, self.epoch = made[0][0].state_dict(), self.epoch + 1
                self.check_epoch()
                return
            self.seen += [int(b.i[k]) for k in range(len(batches[0].i)) for b in batches]
        self.state = made[0][0].state_dict()
        if self.state["epoch"] > self.epoch:
            self.epoch += 1
            self.check_epoch()

    def finish(self, made, batches):
        """The uneven end of an epoch: rows of the ranks in turn, then the next epoch from its start."""
        left = [[] if b is None else list(b.i) for b in batches]
        for k, (_, it) in enumerate(made):
            left[k] += [int(i) for b in it for i in b.i]
        self.seen += [int(r[k]) for k in range(max(map(len, left))) for r in left if k < len(r)]
        self.epoch += 1
        self.check_epoch()
        self.state = made[0][0].state_dict()
        assert (self.state["epoch"], self.state["position"]) == (self.epoch, 0)

    def check_epoch(self):
        assert self.seen == self.full[self.epoch - 1]
        self.seen = []


TestResuming = Resuming.TestCase
TestResuming.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize(
    "change, part",
    [
        ({"version": 99}, "version"),
        ({"order": "sequential"}, "order"),
        ({"rows": 24}, "rows"),
        ({"fingerprint": "0" * 16}, "fingerprint"),
        ({"seed": 8}, "seed"),
        ({"position": -1}, "position"),
        ({"position": 24}, "position"),
        ({"epoch": 1.5}, "epoch"),
    ],
)
def test_a_state_that_does_not_belong_is_refused(change, part):
    """Other data, order, seed or version, or numbers edited by hand: an error that names the part."""
    loader = jl.Loader(data_of(23), 4, shuffle=True, seed=7)
    with pytest.raises(jl.StateError, match=part):
        loader.load_state_dict({**loader.state_dict(), **change})
    cut = loader.state_dict()
    del cut["epoch"]
    with pytest.raises(jl.StateError, match="epoch"):
        loader.load_state_dict(cut)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"version": 99}, "the state has another version: 99, this loader has 1"),
        ({"order": "sequential"}, "the state has another order: 'sequential', this loader has 'shuffled'"),
        ({"rows": 24}, "the state has another rows: 24, this loader has 23"),
        ({"seed": 8}, "the state has another seed: 8, this loader has 7"),
        ({"position": -1}, "the state has position -1: a whole number of at least 0, at most 23"),
        ({"position": 24}, "the state has position 24: a whole number of at least 0, at most 23"),
        ({"position": True}, "the state has position True: a whole number of at least 0, at most 23"),
        ({"epoch": "1"}, "the state has epoch '1': a whole number of at least 0"),
        ({"epoch": 10**30}, f"the state has epoch {10**30}: a whole number of at least 0"),
        ({"rows": np.arange(2)}, "the state has another rows: array([0, 1]), this loader has 23"),
        ({"order": None}, "the state has another order: None, this loader has 'shuffled'"),
    ],
)
def test_an_edited_state_is_told_in_words(change, says):
    """The exact message for each part; the loader stays where it was."""
    loader = jl.Loader(data_of(23), 4, shuffle=True, seed=7)
    before = loader.state_dict()
    with pytest.raises(jl.StateError) as error:
        loader.load_state_dict({**before, **change})
    assert str(error.value) == says and loader.state_dict() == before
    with pytest.raises(jl.StateError) as error:
        loader.load_state_dict({k: v for k, v in before.items() if k not in ("seed", "rows")})
    assert str(error.value) == "the state lacks 'rows', 'seed': it was cut or is not a loader's"
    with pytest.raises(jl.StateError, match="^a state is a dict, got list$"):
        loader.load_state_dict([before])


def test_a_state_may_be_loaded_at_any_time():
    """Twice, before and after iter, while an iterator is live, from the end of an epoch, into later epochs."""
    loader = jl.Loader(data_of(23), 4, shuffle=True, seed=7)
    first, second = rows(loader), rows(loader)
    end = loader.state_dict()
    loader.epoch = 0
    it = iter(loader)
    head = [next(it).i.tolist() for _ in range(2)]
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    again = iter(loader)
    assert [b.i.tolist() for b in it] == first[2:]  # the live one goes on as it was
    assert head + [b.i.tolist() for b in again] == first and rows(loader) == second
    loader.load_state_dict(end)
    third = rows(loader)
    assert (end["epoch"], end["position"]) == (2, 0) and third not in (first, second)
    loader.load_state_dict({**end, "epoch": 0, "position": 23})
    assert rows(loader) == second
    loader.load_state_dict(end)
    assert rows(loader) == third


def worst_share(batches, labels):
    """The largest distance of a class's count in any batch from its share of the batch."""
    shares = {c: (labels == c).mean() for c in set(labels.tolist())}
    return max(abs((labels[b] == c).sum() - share * len(b)) for b in batches for c, share in shares.items() if len(b))


@pytest.mark.parametrize(
    "n, batch, world", [(1000, 32, 1), (1000, 32, 2), (1003, 7, 3), (97, 64, 2), (10, 8, 2), (3, 2, 4), (600, 60, 5)]
)
def test_stratified_is_laid_out_for_the_batches_of_its_loader(n, batch, world):
    """Each rank's batches have the shares to within one row; the short last ones of several ranks to within two."""
    labels = np.minimum(np.random.default_rng(n).geometric(0.4, n), 6)
    order = jl.stratified(labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = [jl.Loader(data_of(n), batch, order=order, seed=1, rank=r, world_size=world) for r in range(world)]
    made = [list(rows(loader)) for loader in loaders]
    assert sorted(itertools.chain(*itertools.chain(*made))) == list(range(n))
    assert (
        worst_share([b for r in made for b in r if len(b) == batch] or [[]], labels) < 1 if n >= batch * world else True
    )
    assert worst_share([b for r in made for b in r], labels) < (1 if world == 1 else 2)
    assert rows(loaders[0]) != made[0] or n < 5


def test_a_stratified_epoch_ends_as_it_was_begun():
    """With another batch size the rest of the epoch comes in the order it was laid out; the next is laid out anew."""
    labels = np.arange(300) % 7
    order = jl.stratified(labels)
    first = jl.Loader(data_of(300), 30, order=order)
    whole = list(itertools.chain(*rows(jl.Loader(data_of(300), 30, order=order))))
    it = iter(first)
    seen = [i for _ in range(3) for i in next(it).i.tolist()]
    other = jl.Loader(data_of(300), 14, order=jl.stratified(labels), threads=1)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    between = iter(other)
    seen += next(between).i.tolist()
    third = pickle.loads(pickle.dumps(other))
    assert other.state_dict()["order"].endswith("@30x1")
    assert seen + list(itertools.chain(*rows(third))) == whole
    assert worst_share(rows(third), labels) < 1 and third.state_dict()["order"].endswith("@14x1")
    with pytest.raises(jl.StateError, match="the state has another order"):
        other.load_state_dict({**other.state_dict(), "order": "stratified(0, 0)@14x1"})
    for layout in ("@0x1", f"@{10**30}x1", f"@{10**17}x{10**17}", "@" + "9" * 5000 + "x1"):
        with pytest.raises(jl.StateError, match="the state has another order"):
            other.load_state_dict({**other.state_dict(), "order": other.state_dict()["order"].replace("@30x1", layout)})


def test_a_state_of_other_rows_is_refused():
    """Another selection of as many rows is other data."""
    a, b = data_of(30).select(np.arange(10)), data_of(30).select(np.arange(10, 20))
    with pytest.raises(jl.StateError, match="fingerprint"):
        jl.Loader(b, 2).load_state_dict(jl.Loader(a, 2).state_dict())


def test_deepcopy_goes_on_at_the_same_place():
    """A copy of a half-used loader gives the very next batch; a live iterator cannot be copied."""
    loader = jl.Loader(data_of(23), 4, shuffle=True, seed=7)
    it = iter(loader)
    next(it), next(it)
    other = copy.deepcopy(loader)

    assert rows(other) == [b.i.tolist() for b in it]
    with pytest.raises(TypeError):
        copy.deepcopy(iter(loader))


def test_a_batch_by_number():
    """loader[b] is batch b of the epoch that runs, and of the next where none does."""
    loader = jl.Loader(data_of(23), 4, shuffle=True, seed=1)
    ahead = loader[2].i.tolist()
    found = []
    for k, batch in enumerate(loader):
        found.append(batch.i.tolist())
        assert loader[k].i.tolist() == found[-1]
    assert found[2] == ahead
    with pytest.raises(IndexError, match="batch 6 is out of range: an epoch has 6 batches"):
        loader[6]


def test_epoch_chooses_the_order():
    """Setting epoch gives that epoch's order, whatever was run before."""
    loader = jl.Loader(data_of(50), 10, shuffle=True)
    first, second = rows(loader), rows(loader)
    loader.epoch = 1
    assert rows(loader) == second != first


def test_an_error_reaches_the_consumer_once_after_the_good_batches():
    """Batches before the row that fails come; then one short error names stage, field, row and line; then a new epoch."""

    @jl.stage
    def picky(src, dst, key):
        if src[0] == 57:
            raise ValueError("bad pixel")
        dst[0] = src[0]

    loader = jl.Loader(jl.Dataset(i=np.arange(100).reshape(100, 1)).map("i", picky), 4)
    seen = []
    with pytest.raises(
        jl.PipelineError, match="stage 0 'picky' on field 'i', row 57, epoch 0: ValueError: bad pixel"
    ) as raised:
        for batch in loader:
            seen.append(batch.i)
    assert np.concatenate(seen).ravel().tolist() == list(range(56))
    assert len(str(raised.value).splitlines()) <= 5 and __file__ in str(raised.value)
    assert len(next(iter(loader)).i) == 4


def test_threads_end_with_their_iterator():
    """After a break, an error or garbage collection no thread is left."""
    before = threading.active_count()
    loader = jl.Loader(data_of(100_000), 8, prefetch=4)
    for _ in range(10):
        next(iter(loader))
    del loader
    gc.collect()
    deadline = time.time() + 5
    while threading.active_count() > before and time.time() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_a_closed_loader_says_so_and_its_iterators_end():
    """close is idempotent, held batches stay valid, live iterators do not hang."""
    loader = jl.Loader(data_of(100_000), 8, prefetch=2)
    it = iter(loader)
    batch = next(it)
    loader.close()
    loader.close()

    assert batch.i.tolist() == list(range(8))
    with pytest.raises(ValueError, match="this loader is closed"):
        iter(loader)
    with pytest.raises(ValueError, match="this loader is closed"):
        for _ in it:
            pass


def test_an_iterator_can_change_threads():
    """Half of an epoch taken in one thread, the rest in another."""
    it = iter(jl.Loader(data_of(100), 9, shuffle=True, prefetch=1))
    seen = [next(it).i]
    thread = threading.Thread(target=lambda: seen.extend(b.i for b in it))
    thread.start()
    thread.join(30)
    assert sorted(np.concatenate(seen)) == list(range(100))


def test_many_loaders_in_many_threads():
    """Eight threads, a loader each and one shared: all get whole epochs."""
    shared = jl.Loader(data_of(3000), 16, shuffle=True)
    failures = []

    def work(own):
        try:
            for loader in (own, shared, own):
                assert sorted(np.concatenate([b.i for b in loader])) == list(range(3000))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(jl.Loader(data_of(3000), 16, shuffle=True),)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forking is what is tested")
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_fork_in_the_middle(layer):
    """A child goes on with a half-used iterator and starts epochs of its own, for each threading layer."""
    code = """
import os, sys, numpy as np, jitloader as jl
loader = jl.Loader(jl.Dataset(i=np.arange(50000)), 8, shuffle=True, threads=2)
it = iter(loader); head = next(it).i.copy()
child = os.fork()
rest = np.concatenate([head] + [b.i for b in it])
again = np.concatenate([b.i for b in loader])
good = sorted(rest) == sorted(again) == list(range(50000))
if child == 0:
    os._exit(0 if good else 3)
print(good, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "NUMBA_THREADING_LAYER": layer},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "True 0"), done.stderr


def test_the_process_ends_with_a_live_iterator():
    """Leaving in the middle of an epoch ends the process at once and cleanly."""
    code = """
import numpy as np, jitloader as jl, time
it = iter(jl.Loader(jl.Dataset(x=np.zeros((100000, 64))), 1024, shuffle=True)); next(it)
print(time.time())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert time.time() - float(done.stdout) < 2


def test_state_counts_what_was_received(monkeypatch):
    """Prefetched batches do not count."""
    monkeypatch.setattr(loader_module, "UNIT", 1)
    loader = jl.Loader(data_of(1000), 10, prefetch=5)
    it = iter(loader)
    next(it)
    time.sleep(0.05)
    assert loader.state_dict()["position"] == 10


def test_printing_a_loader_tells_the_plan():
    """repr names rows, order, specs at every arrow, bytes and threads."""
    text = repr(jl.Loader(data_of(10).map("x", jl.normalize(0, 1)), 4, shuffle=True, threads=2))
    assert text.splitlines()[:2] == [
        "Loader: 3 batches of 4 from 10 rows, shuffled, seed 0",
        "  i: records int64 ()",
    ]
    assert "x: records float64 (2,) -> normalize -> float64 (2,)" in text and "2 threads, prefetch 2" in text


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_the_parallel_form_gives_the_same_bits(layer):
    """A large batch filled by a prange loop is the one that background threads fill; a bad row is told as ever."""
    code = """
import numpy as np, jitloader as jl
x = np.random.default_rng(0).integers(0, 256, (600, 32, 32, 3), dtype="u1")
data = jl.Dataset(x=x, i=np.arange(600)).map("x", jl.random_crop(32, padding=4), jl.random_flip(), jl.normalize(9, 3))
wide = list(jl.Loader(data, 256, shuffle=True, prefetch=0, threads=2))
apart = list(jl.Loader(data, 256, shuffle=True, prefetch=2, threads=2))
print(all((a.x == b.x).all() and (a.i == b.i).all() for a, b in zip(wide, apart, strict=True)))
print([e.name for e in jl.compile_events])
y = np.zeros((600, 1000)); y[400] = 999
try:
    list(jl.Loader(jl.Dataset(y=y).map("y", jl.cast("uint8"), jl.cast("float64")), 300, prefetch=0, threads=2))
except jl.PipelineError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "NUMBA_THREADING_LAYER": layer},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "True" and "fill_wide" in lines[1], done.stdout + done.stderr
    assert "row 400" in lines[2], lines


def test_a_file_cut_under_its_map_is_an_error(tmp_path):
    """Truncation is noticed before the rows are read, which would end the process; a replaced file is a warning."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100_000.0))
    loader = jl.Loader(jl.Dataset(x=path), 10)
    next(iter(loader))
    os.truncate(path, 1000)
    with pytest.raises(jl.DataError, match="800128 bytes expected, 1000 found"):
        next(iter(loader))

    np.save(path, np.arange(100))
    loader = jl.Loader(jl.Dataset(x=path), 10)
    np.save(tmp_path / "y.npy", np.zeros(100))
    os.replace(tmp_path / "y.npy", path)
    with pytest.warns(UserWarning, match="now another file"):
        assert sum(b.x.sum() for b in loader) == 4950


def test_no_thread_fills_while_another_still_looks_at_the_files(monkeypatch):
    """A look that is under way vouches for nothing: each thread that comes meanwhile looks for itself."""
    plan = jl.Loader(data_of(4), 2)._plan(0, 0)
    plan.verified -= 2 * filling.AGAIN
    both, problems = threading.Barrier(2), []
    monkeypatch.setattr(jl.Dataset, "verify", lambda data: both.wait(10))
    monkeypatch.setattr(filling.Plan, "_fill", lambda plan, worker, unit: None)

    def fill():
        unit = filling.Unit(types.SimpleNamespace(take=lambda unit: None), 0, 2, [2])
        plan.fill(None, unit)
        problems.append(unit.problem)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [None, None]


@pytest.mark.parametrize("place", [4, 10**7, -5])
def test_a_user_stage_that_leaves_its_array_is_an_error_of_its_row(place):
    """Compiled code of users is bounds-checked: never another row's memory, never the end of the process."""

    @jl.stage
    def stray(src, dst, key):
        for i in range(4):
            dst[i] = src[i]
        if src[0] == 3.0:
            dst[place] = 1.0

    x = np.repeat(np.arange(10.0), 4).reshape(10, 4)
    data = jl.Dataset(x=x).map("x", stray)
    assert (data[:3].x == x[:3]).all()
    with pytest.raises(jl.PipelineError, match="stage 0 'stray' on field 'x', row 3, epoch 0: IndexError"):
        list(jl.Loader(data, 2))


def test_python_inside_a_kernel_is_refused():
    """print would wait for ever for the GIL, and np.random could not be repeated."""

    def talks(v):
        print(v)
        return v

    def rolls(v):
        return v + np.random.random()

    data = jl.Dataset(x=np.zeros(10))
    for function, text in ((talks, "talks: a kernel runs without Python"), (rolls, "rolls: np.random in a kernel")):
        with pytest.raises(jl.PipelineError, match=text):
            data.map("x", function)[:]


def test_a_thread_that_cannot_start_its_work_tells(monkeypatch):
    """What goes wrong in a background thread before it fills anything reaches the consumer; the loader stays usable."""
    loader = jl.Loader(data_of(100_000), 8)
    first = next(iter(loader)).i.tolist()

    def no_memory(self):
        raise MemoryError("no scratch")

    with monkeypatch.context() as patched:
        patched.setattr(filling.Plan, "worker", no_memory)
        with pytest.raises(MemoryError, match="no scratch"):
            list(loader)
    assert next(iter(loader)).i.tolist() == first


def test_no_memory_for_the_buffers(monkeypatch):
    """A batch that does not fit in memory is a MemoryError naming sizes and what to change; then all goes on."""
    real = np.empty

    def small(shape, *args, **kwargs):
        if np.prod(shape) > 100_000:
            raise MemoryError
        return real(shape, *args, **kwargs)

    loader = jl.Loader(jl.Dataset(x=np.zeros((100, 10_000))), 50)
    with monkeypatch.context() as patched:
        patched.setattr(np, "empty", small)
        with pytest.raises(
            MemoryError, match=r"no memory for a batch buffer of 4,000,000 bytes \(50 rows\): use a smaller"
        ):
            next(iter(loader))
    assert next(iter(loader)).x.shape == (50, 10_000)


def test_no_more_threads_to_be_had(monkeypatch):
    """Where the system gives no thread the consumer fills for itself, Python functions too: every batch comes."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")

    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    data = jl.Dataset(i=np.arange(40))
    for made in (data, data.apply(lambda batch: {"i": batch.i})):
        loader = jl.Loader(made, 8, threads=2, prefetch=2)
        for _ in range(2):
            assert [i for batch in loader for i in batch.i.tolist()] == list(range(40))


def test_who_waits_fills_along(monkeypatch):
    """A consumer that would wait fills what no thread has begun: three units while the one thread is held up in its own."""
    monkeypatch.setattr(loader_module, "shares", lambda plan: False)
    held, helped, along = threading.Event(), threading.Event(), []
    real = filling.Plan.fill

    def slow(plan, worker, unit):
        if threading.current_thread().name == "jitloader":
            held.set()
            assert helped.wait(60)
        else:
            assert held.wait(60)  # the units are small: the consumer would have filled them all before the thread woke
            along.append(unit.start)
        real(plan, worker, unit)
        if len(along) == 3:
            helped.set()

    monkeypatch.setattr(filling.Plan, "fill", slow)
    monkeypatch.setattr(loader_module, "UNIT", 1 << 10)
    loader = jl.Loader(data_of(4_000), 8, threads=1, prefetch=3)
    assert [i for batch in loader for i in batch.i.tolist()] == list(range(4_000))
    assert len(along) >= 3


def test_a_consumer_fills_alone_while_other_work_holds_the_cores(monkeypatch):
    """Until then nothing is handed to threads; afterwards it is again. Threads that were asked for are always at work."""
    monkeypatch.setattr(loader_module, "shares", lambda plan: False)
    monkeypatch.setattr(loader_module, "UNIT", 1 << 10)
    here = threading.get_ident()

    def fillers(loader):
        loader._meter.runs.clear()
        assert [i for batch in loader for i in batch.i.tolist()] == list(range(4_000))
        return {event.thread for event in loader.report().events}

    def slow(plan, worker, unit):
        time.sleep(0.0005)
        real(plan, worker, unit)

    real = filling.Plan.fill
    monkeypatch.setattr(filling.Plan, "fill", slow)
    left_out, chosen = jl.Loader(data_of(4_000), 8), jl.Loader(data_of(4_000), 8, threads=1)
    for loader in left_out, chosen:
        loader._cores.taken = time.perf_counter() + 1000
    assert fillers(left_out) == {here} and len(fillers(chosen)) == 2
    left_out._cores.taken = 0.0
    assert len(fillers(left_out)) == 2


def test_cores_are_held_when_a_thread_waited_twice(monkeypatch):
    """One look says nothing; each further one doubles the pause up to a second, and one good look forgets them."""
    now = 100.0
    monkeypatch.setattr(cores_module.time, "perf_counter", lambda: now)
    cores = cores_module.Cores()
    pauses = []
    for waited in [True, False, True, True, True, True, True, True, True, True, False, True, True]:
        cores.looked(waited)
        pauses.append(round(cores.taken - now, 3) if waited and cores.times > 1 else 0)
    assert pauses == [0, 0, 0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0, 0, 0.05]


def test_waiting_for_a_core_is_read_from_the_system(monkeypatch):
    """A thread waited long where that was more than a quarter of its running time; where nothing is told, it never did."""
    waits = cores_module.Waits()
    waits.before = (0, 0)
    for told, long in [(b"1000 10 1", False), (b"2000 250 2", False), (b"3000 501 3", True), (b"broken", False)]:
        monkeypatch.setattr(cores_module.os, "pread", lambda *_, told=told: told)
        assert waits.long() is long, told
    waits.close()
    monkeypatch.undo()

    def no_file(*_):
        raise FileNotFoundError

    monkeypatch.setattr(cores_module.os, "open", no_file)
    nothing = cores_module.Waits()
    assert not nothing.long() and not nothing.long()
    nothing.close()


@pytest.mark.parametrize("shared", [True, False])
def test_ctrl_c_while_filling_along(monkeypatch, shared):
    """An interrupt that meets the consumer in a kernel ends the epoch there; no buffer is lost, the next epoch is whole."""
    monkeypatch.setattr(loader_module, "UNIT", 1 << 10)
    monkeypatch.setattr(loader_module, "shares", lambda plan: shared)
    loader = jl.Loader(data_of(4_000), 8, threads=1, prefetch=3)
    kind, name = (crew.Crew, "_run") if shared else (filling.Plan, "fill")
    real, hit = getattr(kind, name), []

    def interrupted(self, what, unit, *rest):
        if threading.current_thread().name != "jitloader" and what != sharing.POST and len(hit) < 5:
            hit.append(unit.start)
            raise KeyboardInterrupt
        return real(self, what, unit, *rest)

    monkeypatch.setattr(kind, name, interrupted)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            while True:
                for _ in loader:
                    pass
    for _ in range(3):
        assert [i for batch in loader for i in batch.i.tolist()] == list(range(4_000))
    gc.collect()
    assert len(hit) == 5
    until = time.monotonic() + 10
    while any(slot.busy for slot in loader._pool._slots) and time.monotonic() < until:
        time.sleep(0.01)  # threads may still be on their way out
    assert not any(slot.busy for slot in loader._pool._slots)


@pytest.mark.parametrize("how", ["break", "error", "closed"])
def test_epochs_left_early_lose_no_buffer(how):
    """However an epoch ends, the next ones find the pool as it was: no slot stays marked, none is made anew."""
    data = data_of(40_000)
    if how == "error":
        data = data.map("i", jl.lookup(np.arange(39_000)))
    loader = jl.Loader(data, 1000, threads=2)
    for _ in range(12):
        batches = iter(loader)
        if how == "error":
            with pytest.raises(jl.PipelineError):
                for _ in batches:
                    pass
        else:
            next(batches)
        if how == "closed":
            batches.close()
        del batches
        for _ in range(100):
            if not any(slot.busy for slot in loader._pool._slots):
                break
            time.sleep(0.01)  # a thread gives back what it was filling
        assert not any(slot.busy for slot in loader._pool._slots)
    assert loader._pool.made <= 5


def test_a_batch_larger_than_the_data_takes_no_more_memory():
    """The buffer is as large as the rows that there are."""
    loader = jl.Loader(data_of(10), 10**12, shuffle=True)
    (batch,) = loader
    assert len(batch.i) == 10 and loader._pool._slots[0].rows == 10 and len(loader[0].i) == 10


@pytest.mark.parametrize(
    "name, value",
    [("batch_size", 5), ("seed", 1), ("shuffle", True), ("drop_last", True), ("max_resident", 1), ("rank", 1)],
)
def test_a_loader_keeps_what_it_was_made_with(name, value):
    """Setting an argument afterwards would change the next epoch by halves: it is refused, and can be read."""
    loader = jl.Loader(jl.Dataset(x=np.arange(10)), 4)
    before = getattr(loader, name)

    with pytest.raises(AttributeError, match=rf"a loader keeps its {name}: make another, as .*{name}={value!r}\)"):
        setattr(loader, name, value)

    assert getattr(loader, name) == before
    for other in ("order", "data"):
        with pytest.raises(AttributeError, match=f"a loader keeps its {other}: make another, as jl.Loader"):
            setattr(loader, other, getattr(loader, other))
    assert getattr(pickle.loads(pickle.dumps(loader)), name) == getattr(copy.copy(loader), name) == before


def test_a_loader_of_a_class_below_keeps_what_that_adds():
    """Attributes of its own travel with it."""
    loader = Named(jl.Dataset(x=np.arange(10)), 4)
    loader.name = "train"
    for back in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(back) is Named and back.name == "train" and back.batch_size == 4


class Named(jl.Loader):
    name = ""


@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy])
def test_iterators_neither_pickle_nor_copy(again):
    """The message says what does."""
    batches = iter(jl.Loader(data_of(4), 2))
    next(batches)
    with pytest.raises(
        TypeError, match=r"keep loader\.state_dict\(\), or pickle the loader, which goes on at this place$"
    ):
        again(batches)
    assert next(batches).i.tolist() == [2, 3] and list(batches) == []


def test_names_that_do_nothing_are_refused():
    """On what is immutable, and on rings and memories, which have few attributes that may be set."""
    data, ring = jl.Dataset(x=np.arange(10)), jl.ring(10, x="int64")
    memory = jl.prioritized(10)
    for thing in (data, jl.live(ring), ring, memory, jl.Replay(ring, memory), jl.mix((data, 1)), jl.sequential):
        with pytest.raises(AttributeError):
            thing.seed = 5
    with pytest.raises(AttributeError, match="has no attribute 'batchsize'"):
        jl.Loader(data, 2).batchsize = 5
    memory.beta = 0.7
    assert memory.state_dict()["beta"] == 0.7

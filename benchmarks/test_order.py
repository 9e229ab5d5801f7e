"""What an order costs: a block of rows, the start of an epoch, a draw by weight; beside NumPy and torch.

Compilation and tables that are built once lie outside the timed part, and each result is checked.
"""

import numpy as np
import pytest

from jitloader import jit, orders

BLOCK, BLOCKS = 256, 400
HUGE, MILLION, MANY = 10**8, 10**6, 10**7


def _blocks(kernel, names):
    """Make the loop that a fused kernel has around an order: block after block into the same 256 rows."""
    scope = {"kernel": kernel}
    given = "".join(f", {name}" for name in names)
    exec(
        f"def blocks(first, step, out, rows{given}):\n"
        f"    for done in range(0, out.size, rows.size):\n"
        f"        kernel(first + done * step, step, rows{given})\n"
        f"        for j in range(rows.size):\n"
        f"            out[done + j] = rows[j]\n",
        scope,
    )
    return scope["blocks"]


def many_rows(order, count, first=0, step=1, size=BLOCK * BLOCKS):
    """Give a compiled call that fills `size` rows, 256 at a time, and the array they go to."""
    positions = order.plan(count, 0, 1)
    out, rows = np.empty(size, np.int64), np.empty(min(size, BLOCK), np.int64)
    values = (first, step, out, rows, *positions.params)
    function = _blocks(positions.kernel, [f"p{k}" for k in range(len(positions.params))])
    call = jit.load(function, tuple(jit.typeof(v) for v in values)).bind(*values)
    call()
    return call, out


def distinct(rows, count):
    assert np.unique(rows).size == rows.size and rows.min() >= 0 and rows.max() < count


@pytest.mark.parametrize("step", [1, 2], ids=["one-rank", "two-ranks"])
def test_shuffled_rows(benchmark, step):
    """102,400 rows of a full shuffle of 10**8, in blocks of 256: divide by 102,400 for the time of a row."""
    call, out = many_rows(orders.shuffled, HUGE, step=step)
    benchmark.extra_info.update(rows=out.size)
    benchmark(call)

    distinct(out, HUGE)


OTHERS = [
    pytest.param(lambda: orders.shuffled, 65_536, id="shuffled-table"),
    pytest.param(lambda: orders.blocks(64, 1024), HUGE, id="blocks"),
    pytest.param(lambda: orders.stratified(np.arange(MILLION) % 1000), MILLION, id="stratified"),
    pytest.param(lambda: orders.stratified(np.arange(MILLION) % 1000, 256), MILLION, id="stratified-batches"),
    pytest.param(lambda: orders.mixed([MILLION, MILLION // 10], [0.7, 0.3], "never"), MILLION // 10 * 11, id="mixed"),
]


@pytest.mark.parametrize("make, count", OTHERS)
def test_other_rows(benchmark, make, count):
    """51,200 rows of the other orders that give each row once, in blocks of 256."""
    call, out = many_rows(make(), count, size=BLOCK * BLOCKS // 2)
    benchmark.extra_info.update(rows=out.size)
    benchmark(call)

    distinct(out, count)


@pytest.mark.parametrize("count", [65_536, MILLION, HUGE])
def test_first_block_of_an_epoch(benchmark, count):
    """From seed and epoch to the first 256 rows, or to 256 rows in the middle: a resume costs the same."""
    rows = np.empty(BLOCK, np.int64)
    positions = orders.shuffled.plan(count, 0, 0)
    kernel = jit.load(positions.kernel, tuple(jit.typeof(v) for v in (0, 1, rows, *positions.params)))
    epoch = iter(range(1, 10**9))

    def start():
        kernel(count // 2, 1, rows, *orders.shuffled.plan(count, 0, next(epoch)).params)
        return rows

    distinct(benchmark(start), count)


def test_first_block_numpy_million(benchmark):
    """The same by numpy.random.Generator.permutation, of 10**6."""
    generator = np.random.default_rng(0)
    distinct(benchmark(lambda: generator.permutation(MILLION)[:BLOCK]), MILLION)


def test_first_block_numpy_huge(benchmark):
    """The same by numpy.random.Generator.permutation, of 10**8: once, it takes seconds."""
    generator = np.random.default_rng(0)
    rows = benchmark.pedantic(lambda: generator.permutation(HUGE)[:BLOCK].copy(), rounds=1)
    distinct(rows, HUGE)


@pytest.mark.parametrize("count", [MILLION, HUGE])
def test_first_block_torch(benchmark, count):
    """The same by torch.randperm."""
    torch = pytest.importorskip("torch")
    rows = benchmark.pedantic(lambda: torch.randperm(count)[:BLOCK].numpy().copy(), rounds=1 if count == HUGE else 5)
    distinct(rows, count)


@pytest.fixture(scope="module")
def weights():
    """One row in two has no weight, the others have weights from 0 to 1."""
    array = np.random.default_rng(1).random(MANY)
    array[::2] = 0
    return array


@pytest.fixture(scope="module")
def alias(weights):
    return orders.weighted(weights)


def drawn(rows, weights):
    assert rows.size == BLOCK and (weights[rows] > 0).all()


def test_weighted_draw(benchmark, alias, weights):
    """256 draws by weight out of 10**7, at other positions each time, with the table built before."""
    rows = np.empty(BLOCK, np.int64)
    positions = alias.plan(MANY, 0, 0)
    values = (0, 1, rows, *positions.params)
    call = jit.load(positions.kernel, tuple(jit.typeof(v) for v in values)).bind(*values)
    first = iter(range(0, 10**12, 7919 * BLOCK))

    def draw():
        call.set(0, next(first) % (MANY - BLOCK))
        call()
        return rows

    drawn(benchmark(draw), weights)


def test_weighted_draw_numpy(benchmark, weights):
    """The same by searchsorted on cumulated weights, which are summed up before."""
    ends = np.cumsum(weights)
    generator = np.random.default_rng(2)
    drawn(benchmark(lambda: np.searchsorted(ends, generator.random(BLOCK) * ends[-1], side="right")), weights)


def test_weighted_draw_torch(benchmark, weights):
    """The same by torch.multinomial."""
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(weights)
    rows = benchmark.pedantic(lambda: torch.multinomial(tensor, BLOCK, replacement=True).numpy(), rounds=5)
    drawn(rows, weights)


def test_weighted_table(benchmark, weights):
    """Checking 10**7 weights, hashing them for the token, and building the table: once an order, not once an epoch."""
    orders.weighted(weights[:1000] + 1).plan(1000, 0, 0)
    positions = benchmark.pedantic(lambda: orders.weighted(weights).plan(MANY, 0, 0), rounds=1)

    table = positions.params[-1]
    assert table.size == 2 * MANY and (weights[table[1::2][table[::2] < 2**53]] > 0).all()

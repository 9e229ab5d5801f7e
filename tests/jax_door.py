"""The door to JAX: the same batches as jax.Arrays, never written over, and parted over devices (run by test_jax.py)."""

import doctest
import gc
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import jitloader as jl

jax = pytest.importorskip("jax")
door = pytest.importorskip("jitloader.jax")


def data_of(n=100):
    return jl.Dataset(x=np.arange(n * 3, dtype="f4").reshape(n, 3), y=np.arange(n))


def loader_of(n=100, batch=16, **settings):
    return jl.Loader(data_of(n), batch, shuffle=True, seed=3, **settings)


def test_arrays_are_the_batches():
    """The same values and order, as a NamedTuple of jax.Arrays, which is a pytree; 64-bit integers come as 32-bit."""
    wrapped = door.arrays(loader_of())
    assert len(wrapped) == 7
    for want, got in zip(loader_of(), wrapped, strict=True):
        assert isinstance(got.x, jax.Array) and got.x.dtype == np.float32 and got.y.dtype == np.int32
        assert np.array_equal(got.x, want.x) and np.array_equal(got.y, want.y)
        assert len(jax.tree.leaves(got)) == 2


def test_held_arrays_are_never_written_over():
    """An array keeps its values, whether JAX copied or lies over our memory, whatever is loaded meanwhile."""
    loader, held = loader_of(40_000, 64), []
    for epoch in range(2):
        for k, batch in enumerate(door.arrays(loader)):
            if k % 7 == epoch:
                held.append((batch.x, np.array(batch.x)))
            del batch
    gc.collect()
    assert len(held) > 150 and all(np.array_equal(array, was) for array, was in held)


def test_arrays_go_to_a_device():
    """With a device each array is put there."""
    device = jax.devices()[0]
    (batch, *_) = door.arrays(loader_of(), device=device)
    assert batch.x.devices() == {device} and np.array_equal(batch.x, next(iter(loader_of())).x)


def test_state_goes_through():
    """Its state is the loader's: exact in the middle of an epoch."""
    wrapped = door.arrays(loader_of())
    batches = iter(wrapped)
    next(batches), next(batches)
    saved = json.loads(json.dumps(wrapped.state_dict()))
    rest = [batch.y.tolist() for batch in batches]
    again = door.arrays(loader_of())
    again.load_state_dict(saved)
    assert [batch.y.tolist() for batch in again] == rest


def test_ragged_and_applied_batches():
    """Ragged fields come as arrays of values and offsets; of what apply gives the arrays are converted."""
    rows = jl.Dataset(x=jl.ragged([[1, 2], [3], [4, 5, 6]]))
    (batch,) = door.arrays(jl.Loader(rows, 3))
    assert batch.x.values.tolist() == [1, 2, 3, 4, 5, 6] and isinstance(batch.x.offsets, jax.Array)
    (made,) = door.arrays(jl.Loader(data_of(4).apply(lambda b: {"twice": b.y * 2, "name": "n"}), 4))
    assert made.twice.tolist() == [0, 2, 4, 6] and made.name == "n"


def test_training_reaches_the_same_weights():
    """A small training over the door ends where one over NumPy batches does."""

    @jax.jit
    def step(w, x, y):
        return w - 1e-6 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w)

    def train(batches):
        w = jax.numpy.zeros(3)
        for _ in range(3):
            for x, y in batches:
                w = step(w, x, y.astype("f4"))
        return w

    assert np.array_equal(train(loader_of()), train(door.arrays(loader_of())))


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: door.arrays(data_of()), TypeError, "arrays takes a jl.Loader, got Dataset"),
        (lambda: door.arrays(loader_of(), device=1, sharding=2), ValueError, "give device or sharding, not both"),
        (
            lambda: door.arrays(jl.Loader(jl.Dataset(when=np.zeros(3, "M8[s]")), 2)),
            TypeError,
            "field 'when' is datetime64[s], which JAX cannot hold: leave it out: data.drop('when')",
        ),
        (
            lambda: list(door.arrays(jl.Loader(jl.Dataset(id=np.array([1, 1 << 40])), 2))),
            OverflowError,
            "field 'id' holds 1099511627776, and JAX keeps 32 bits of it: jax.config.update('jax_enable_x64', True), "
            "or link jl.cast",
        ),
    ],
)
def test_what_does_not_go_through(make, kind, text):
    """It is told in one line."""
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == text


PARTED = """
import numpy as np, jax, jitloader as jl, jitloader.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sharding = NamedSharding(Mesh(jax.devices(), ("rows",)), PartitionSpec("rows"))
data = jl.Dataset(x=np.arange(24.0, dtype="f4").reshape(12, 2), y=np.arange(12))
loader = jl.Loader(data, 4, shuffle=True)
for want, got in zip(jl.Loader(data, 4, shuffle=True), jl.jax.arrays(loader, sharding=sharding), strict=True):
    assert np.array_equal(got.x, want.x) and len(got.x.addressable_shards) == 4
    assert [len(shard.data) for shard in got.x.addressable_shards] == [1, 1, 1, 1]
try:
    list(jl.jax.arrays(jl.Loader(data, 5), sharding=sharding))
except ValueError as error:
    print(error)
"""


def test_batches_part_over_devices():
    """Over four devices each holds a quarter of the rows; a batch that does not part is told."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", PARTED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "a batch of 5 rows does not part evenly over 4 devices: use a batch_size that does, and drop_last=True"
    )


def test_data_sets_show_the_memory_of_arrays():
    """A JAX array on the CPU becomes a field without a copy, bfloat16 too."""
    for x in (jax.numpy.arange(12.0).reshape(4, 3), jax.numpy.arange(4, dtype="bfloat16")):
        data = jl.Dataset(x=x)
        assert data.sources["x"].parts[0].array.ctypes.data == x.unsafe_buffer_pointer()
        assert (np.asarray(data[:].x) == np.asarray(x)).all()


def test_importing_the_library_leaves_jax_alone():
    """Neither `import jitloader` nor loading a batch imports JAX."""
    code = "import sys, numpy as np, jitloader as jl; next(iter(jl.Loader(jl.Dataset(x=np.arange(9)), 4))); "
    code += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_docstring_examples_run():
    """The examples in the door's docstrings."""
    assert doctest.testmod(door).failed == 0

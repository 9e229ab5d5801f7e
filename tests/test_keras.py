"""Keras 3 and scikit-learn take batches as they are: small trainings, in processes of their own (JAX starts threads)."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

import jitloader as jl

SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import numpy as np, keras, jitloader as jl
x = np.random.default_rng(0).normal(size=(512, 3)).astype("f4")
data = jl.Dataset(x=x, y=(x @ [1.0, -2.0, 0.5]).astype("f4"))
loader = jl.Loader(data, 64, shuffle=True)

def trained(batches, steps):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model.fit(batches, epochs=4, steps_per_epoch=steps, verbose=0).history["loss"][-1]

def endless():
    while True:
        for batch in loader:
            yield batch.x, batch.y[:, None]

print(trained(endless(), len(loader)) < 1e-3)
if keras.backend.backend() == "torch":
    import jitloader.torch
    column = data.apply(lambda batch: {"y": batch.y[:, None]})
    print(trained(jl.torch.as_dataloader(jl.Loader(column, 64, shuffle=True)), None) < 1e-3)
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_fits(backend):
    """`fit` takes a generator of batches on both back ends, and the DataLoader on torch's."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    env = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True"] * (2 if backend == "torch" else 1)


def test_scikit_learn_learns_batch_by_batch():
    """`partial_fit` takes batches as they are."""
    linear = pytest.importorskip("sklearn.linear_model")
    x = np.random.default_rng(0).normal(size=(2_000, 5)).astype("f4")
    data = jl.Dataset(x=x, y=(x[:, 0] + x[:, 1] > 0).astype("i8"))
    model = linear.SGDClassifier(random_state=0)
    loader = jl.Loader(data, 100, shuffle=True)
    for _ in range(3):
        for batch in loader:
            model.partial_fit(batch.x, batch.y, classes=[0, 1])
    assert model.score(x, data[:].y) > 0.95

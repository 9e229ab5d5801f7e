"""The command line: `python -m jitloader demo`, `inspect PATH`, `bench PATH` and `convert SOURCE FOLDER`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jitloader as jl

from . import storage
from .tables import size_of, text_table

ROUNDS = 5
BATCH = 64  # of the demo
MOST = 1 << 30  # bytes of rows that one round of `bench` goes through


class Failure(Exception):
    """What ends a command with exit code 2: its text is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser("python -m jitloader", description=jl.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | inspect | bench | convert")
    demo = commands.add_parser("demo", help="train a digit classifier through the loader, and through plain NumPy")
    demo.add_argument("--epochs", type=positive, default=30, help="epochs to train (default: %(default)s)")
    look = commands.add_parser("inspect", help="show the fields, dtypes, shapes and sizes of a data set")
    look.add_argument("path", metavar="PATH", help="a .npy file, a folder of them, or what else jl.open reads")
    look.add_argument("--values", action="store_true", help="read all rows, and show counts, moments and histograms")
    rate = commands.add_parser("bench", help="time a shuffled epoch beside np.take and a memcpy of the same bytes")
    rate.add_argument("path", metavar="PATH", help="as for inspect")
    rate.add_argument("--batch-size", type=positive, default=1024, help="rows a batch (default: %(default)s)")
    copy = commands.add_parser("convert", help="write what a path or URL holds to a folder of .npy files")
    copy.add_argument("path", metavar="SOURCE", help="as for inspect, or a URL")
    copy.add_argument("folder", metavar="FOLDER", help="replaced as a whole, at the end; a stopped run goes on")
    given = parser.parse_args(arguments)
    try:
        if given.command == "demo":
            run_demo(given.epochs)
        elif given.command == "inspect":
            inspect(given.path, given.values)
        elif given.command == "convert":
            convert(given.path, given.folder)
        else:
            bench(given.path, given.batch_size)
    except Failure as error:
        print(f"jitloader {given.command}: {error}", file=sys.stderr)
        return 2
    return 0


def positive(text: str) -> int:
    """Give a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def opened(path: str) -> jl.Dataset:
    """Open a data set; what is wrong with the file is the user's to read, in one line."""
    try:
        return jl.open(path)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise Failure(" ".join(str(error).split())) from None


# ---------------------------------------------------------------------------------------------------------------------
# inspect


def inspect(path: str, values: bool = False) -> None:
    """Print a line for each field: its name, dtype, shape of a row and size; and what its numbers are."""
    data = opened(path)
    lines = [("field", "dtype", "row", "bytes a row", "size")]
    total = 0
    for name, samples in data.sources.items():
        spec = samples.spec
        row = "varies" if spec.ragged else f"{spec.nbytes:,}"
        lines.append((name, str(spec.dtype), str(spec).partition(" ")[2], row, size_of(samples.nbytes)))
        total += samples.nbytes
    print(f"{path}: {len(data):,} rows, {len(data.fields)} fields, {size_of(total)}")
    print(text_table(lines))
    if values:
        print(data.describe())


# ---------------------------------------------------------------------------------------------------------------------
# convert


def convert(path: str, folder: str) -> None:
    """Write a data set to a folder, and show what it is there."""
    data = opened(path)
    try:
        jl.convert(data, folder)
    except (OSError, ValueError, TypeError) as error:
        raise Failure(" ".join(str(error).split())) from None
    inspect(folder)


# ---------------------------------------------------------------------------------------------------------------------
# bench


def bench(path: str, batch_size: int) -> None:
    """Print rows/s and GB/s of a shuffled epoch, of np.take over a permutation, and of a memcpy of as many bytes."""
    data = opened(path)
    if not len(data):
        raise Failure(f"{path} has no rows")
    row = sum(spec.nbytes for spec in data.spec.values())
    if any(spec.ragged for spec in data.spec.values()) or not row:
        raise Failure(f"{path}: bench takes rows of one fixed size")
    count, rows = len(data), min(len(data), max(batch_size, MOST // row))
    data = data.take(rows)
    loader = jl.Loader(data, batch_size, shuffle=True)
    ways: dict[str, Callable[[], None]] = {"jitloader": lambda: drain(loader)}
    arrays = [samples.parts[0].array for samples in data.sources.values() if len(samples.parts) == 1]
    if len(arrays) == len(data.fields) and not any(map(storage.is_chunked, arrays)):
        ways["np.take(out=, mode='clip')"] = numpy_epoch([a[:rows] for a in arrays], batch_size)
    ways["memcpy, one thread"] = copy_epoch(rows * row, batch_size * row)
    print(f"{path}: {rows:,} of {count:,} rows, {row:,} bytes each, in batches of {batch_size:,}")
    start = time.perf_counter()
    next(iter(loader))
    print(f"first batch after {time.perf_counter() - start:.2f} s; medians of {ROUNDS} interleaved rounds:")
    medians = interleaved(ways, ROUNDS)
    width = max(map(len, ways))
    for name, seconds in medians.items():
        print(f"  {name.ljust(width)}  {rows / seconds:14,.0f} rows/s  {rows * row / seconds / 1e9:7.2f} GB/s")
    print(f"  {loader.report().verdict}")


def drain(batches: Any) -> None:
    """Go through one epoch and do nothing with it."""
    for _ in batches:
        pass


def numpy_epoch(arrays: list[np.ndarray], batch_size: int) -> Callable[[], None]:
    """Give the epoch that careful NumPy runs: a permutation, and np.take into buffers that are used again."""
    buffers = [np.empty((batch_size, *a.shape[1:]), a.dtype) for a in arrays]

    def epoch() -> None:
        order = np.random.default_rng(0).permutation(len(arrays[0]))
        for low in range(0, len(order), batch_size):
            index = order[low : low + batch_size]
            for array, buffer in zip(arrays, buffers, strict=True):
                np.take(array, index, axis=0, out=buffer[: len(index)], mode="clip")

    return epoch


def copy_epoch(total: int, batch: int) -> Callable[[], None]:
    """Give a memcpy of `total` bytes in runs of `batch` bytes, from memory larger than the caches to one buffer."""
    batch = max(1, min(batch, total))
    source = np.ones(max(batch, min(total, 1 << 28)), np.uint8)
    buffer = np.empty(batch, np.uint8)

    def epoch() -> None:
        left, at = total, 0
        while left > 0:
            count = min(batch, left)
            if at + count > len(source):
                at = 0
            np.copyto(buffer[:count], source[at : at + count])
            at, left = at + count, left - count

    return epoch


def interleaved(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Run all ways in turn, round after round, and give the median seconds of each: drift of the machine hits all."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in taken.items()}


# ---------------------------------------------------------------------------------------------------------------------
# demo


class Run(NamedTuple):
    """What came of one training run."""

    accuracy: float
    first: float  # seconds to the first batch
    loading: float  # seconds spent waiting for the batches after it
    total: float  # and in all, from it on
    rows: int  # after it


def run_demo(epochs: int) -> None:
    """Train on scikit-learn's digits with random shifts, once through the loader and once through plain NumPy."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise Failure("the demo's digits come with scikit-learn: pip install 'jitloader[demo]'") from None
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "digits")
        images = digits.images.astype(np.uint8)[..., np.newaxis]  # (1797, 8, 8, 1), 0 to 16
        jl.Dataset(image=images, label=digits.target).save(path)
        print("scikit-learn's digits, saved as .npy and mapped:")
        inspect(str(path))
        data = jl.open(path)
        train, held_out = data.split(0.8, 0.2, seed=0)
        mean, std, *_ = train.statistics("image")
        augmented = train.map("image", jl.random_crop(8, padding=1), jl.normalize(mean, std), jl.flatten())
        plain = held_out.map("image", jl.normalize(mean, std), jl.flatten())
        loader = jl.Loader(augmented, BATCH, shuffle=True, seed=0)
        print(f"\n{loader}\n")
        test, before = plain[:], len(jl.compile_events)
        ours = train_net(lambda: iter(loader), test, epochs)
        for event in jl.compile_events[before:]:
            print(f"kernel: {'taken from disk' if event.origin == 'disk' else 'compiled'} in {event.seconds:.2f} s")
        raw, random = train[:], np.random.default_rng(0)
        theirs = train_net(lambda: numpy_batches(raw, float(mean[0]), float(std[0]), random), test, epochs)
        for name, run in (("jitloader", ours), ("plain NumPy", theirs)):
            print(
                f"{name.ljust(11)}  accuracy {run.accuracy:.1%} on {len(held_out)} held-out rows, "
                f"first batch {run.first:.3f} s, {run.rows / run.loading:,.0f} samples/s loading, "
                f"{run.rows / run.total:,.0f} samples/s training"
            )


def numpy_batches(raw: Any, mean: float, std: float, random: np.random.Generator) -> Iterator[Any]:
    """The same batches by hand: pad once an epoch, cut windows by fancy indexing, normalise in place."""
    padded = np.pad(raw.image[..., 0], ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    order = random.permutation(len(padded))
    for low in range(0, len(order), BATCH):
        index = order[low : low + BATCH]
        y, x = random.integers(0, 3, (2, len(index)))
        image = windows[index, y, x].astype(np.float32)
        image -= np.float32(mean)
        image *= np.float32(1 / std)
        yield image.reshape(len(index), 64), raw.label[index]


def train_net(batches: Callable[[], Iterator[Any]], test: Any, epochs: int) -> Run:
    """Train a net with one hidden layer by stochastic gradient descent with momentum, in NumPy."""
    random = np.random.default_rng(0)
    shapes = (64, 128), (128,), (128, 10), (10,)
    weights = [random.normal(0, 0.1, s).astype(np.float32) if len(s) == 2 else np.zeros(s, np.float32) for s in shapes]
    speeds = [np.zeros_like(w) for w in weights]
    clock, rows, loading, first = time.perf_counter, 0, 0.0, 0.0
    begin = clock()
    for epoch in range(epochs):
        source, rate = batches(), 0.05 * (1 - epoch / epochs)
        while True:
            asked = clock()
            batch = next(source, None)
            if first:
                loading += clock() - asked
            if batch is None:
                break
            image, label = batch
            rows += len(label) if first else 0
            first = first or clock() - begin
            slopes = gradients(weights, image, label)
            for weight, speed, slope in zip(weights, speeds, slopes, strict=True):
                speed *= 0.9
                speed -= rate * slope
                weight += speed
    total = clock() - begin - first
    right = scores(weights, test.image)[1].argmax(axis=1) == test.label
    return Run(float(right.mean()), first, loading, total, rows)


def scores(weights: list[np.ndarray], image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the hidden layer and the class scores of a batch of images (n, 64)."""
    hidden = np.maximum(image @ weights[0] + weights[1], 0)
    return hidden, hidden @ weights[2] + weights[3]


def gradients(weights: list[np.ndarray], image: np.ndarray, label: np.ndarray) -> list[np.ndarray]:
    """Give the gradient of the mean cross-entropy for each of the weights."""
    hidden, raw = scores(weights, image)
    error = np.exp(raw - raw.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(label)), label] -= 1
    error /= np.float32(len(label))
    back = (error @ weights[2].T) * (hidden > 0)
    return [image.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


if __name__ == "__main__":
    sys.exit(main())

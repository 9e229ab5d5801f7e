"""A chosen point of a chain kept in a folder: made once, and known again by a fingerprint of each field's sources and stages.

The folder is one of `storage.folder`, whose protocol keeps it whole; its manifest's meta holds a fingerprint a field.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import compose, jit, kept, passes, storage
from .bars import bar
from .blame import Chain
from .errors import DataError, PipelineError
from .rng import epoch_key
from .samples import Samples
from .stages import Bound, Step

VERSION = 1  # of what fingerprints are made of, and of what kernels give
HASHED = 4 << 30  # bytes of a field in memory that are hashed to know it again: some seconds
PAUSE = 0.05  # seconds between looks at a folder to which another process writes
TRIES = 3  # times a cache is made that another process replaces at once


def cached(chain: Chain, path: storage.Path, seed: int | None, progress: bool) -> dict[str, Any]:
    """Give the fields that stages changed, over all rows, as maps of the files of a folder, ragged ones as a Ragged of two;
    what the folder lacks, or has of other sources or stages, is made first. Waits while another process writes there."""
    path = storage.target_path(path)
    names = tuple(name for name in chain.fields if any(name in step.outputs for step in chain.steps))
    if not names:
        return {}
    _check(chain, names, path, seed)
    wanted = fingerprints(chain, names, seed)
    ragged = {name for name in names if behind(chain, name)[0][-1][2].out.ragged}
    made = 0
    while True:
        _refuse_other(path)
        storage.tidy(path)
        there = {name: _known(path, name, wanted[name], name in ragged) for name in names}
        found = {name: array for name, array in there.items() if array is not None}
        lacking = tuple(name for name in names if name not in found)
        if not lacking:
            return found
        if made == TRIES:
            raise DataError(f"{path}: another process caches other data there; give each cache a folder of its own")
        try:
            _make(chain, path, lacking, found, wanted, seed, progress)
            made += 1
        except BlockingIOError:
            time.sleep(PAUSE)


def _make(
    chain: Chain,
    path: str,
    lacking: tuple[str, ...],
    known: Mapping[str, Any],
    wanted: Mapping[str, str],
    seed: int | None,
    progress: bool,
) -> None:
    """Write the lacking fields beside those kept, as one new version of the folder."""
    program = compose.compose(chain.sources, chain.steps, lacking, compose.only_row, (), chain.rows)
    program.load()  # what cannot be compiled is known before anything is written
    key, specs, varied = epoch_key(seed or 0, 0), {}, {}
    if program.measure is not None:
        varied = passes.lengths(program, chain.rows, key)
    for k, output in enumerate(program.outputs):
        rows, shape = (int(varied[k].sum()), output.spec.shape[1:]) if k in varied else (chain.rows, output.spec.shape)
        specs[output.name] = output.spec.dtype, (rows, *(int(n or 0) for n in shape))
        if k in varied:
            specs[output.name + kept.OFFSETS] = np.dtype(np.int64), (chain.rows + 1,)
    staying: dict[str, np.ndarray] = {}
    for name, array in known.items():
        ragged = isinstance(array, compose.Ragged)
        staying.update({name: array.values, name + kept.OFFSETS: array.offsets} if ragged else {name: array})
    with (
        storage.create_fields(path, specs, {"cache": wanted}, staying) as arrays,
        bar(f"cache {os.path.basename(path)}", chain.rows, progress) as tell,
    ):
        targets: list[Any] = [arrays[o.name] for o in program.outputs]
        for k, found in varied.items():
            offsets = arrays[program.outputs[k].name + kept.OFFSETS]
            np.cumsum(found, out=offsets[1:])
            targets[k] = compose.Ragged(targets[k], offsets)
        passes.store(program, chain.rows, key, targets, tell)


def _known(path: str, name: str, wanted: str, ragged: bool) -> Any:
    """Give a field of the folder, if it is there, can be read, and has this fingerprint."""
    parts = [name, name + kept.OFFSETS] if ragged else [name]
    try:
        arrays, meta = storage.open_folder(path, parts)
    except (FileNotFoundError, DataError):
        return None
    marks = meta.get("cache")
    if not isinstance(marks, dict) or marks.get(name) != wanted:
        return None
    return compose.Ragged(*(arrays[part] for part in parts)) if ragged else arrays[name]


def _refuse_other(path: str) -> None:
    """Refuse a folder that holds anything but a cache: what is cached would replace it."""
    if not os.path.exists(path):
        return
    there = sorted(name for name in os.listdir(path) if not name.startswith("."))
    if not there:
        return
    try:
        meta = storage.open_folder(path, [])[1]
    except DataError:
        if "manifest.json" in there:
            raise
        meta = {}
    if "cache" not in meta:
        raise DataError(f"{path}: holds {there[0]!r}, which no cache wrote; give the cache a folder of its own")


def _check(chain: Chain, names: tuple[str, ...], path: str, seed: int | None) -> None:
    """Refuse what a cache cannot keep, with the remedy."""
    for name in names:
        steps, sources = behind(chain, name)
        for number, step, bound in steps:
            if bound.random and seed is None:
                raise PipelineError(
                    f"cache: stage {number} {step.stage.name!r} on field {name!r} is random, and a cache would keep one draw "
                    f"for all epochs: link it after cache, or ask for that by cache(path, seed=0)"
                    + (f" [{step.stage.where}]" if step.stage.where else "")
                )
        spec = steps[-1][2].out
        if spec.ragged and (None in spec.shape[1:] or any(bound.closes for _, _, bound in steps)):
            raise PipelineError(
                f"cache takes fields of one shape, or ragged; {name!r} is {spec}, padded in each batch: pad it by "
                "pad_rows(length), or link its stages after cache"
            )
        if spec.ragged and name + kept.OFFSETS in names:
            raise PipelineError(
                f"cache: field {name!r} is kept with an array {name + kept.OFFSETS!r}, and a field is called that"
            )
        for source in sources:
            for part in chain.sources[source].parts:
                place = storage.mapping(part.array)
                if (
                    place is not None
                    and place.path
                    and os.path.realpath(os.path.dirname(place.path)) == os.path.realpath(path)
                ):
                    raise DataError(f"{path}: field {source!r} lies there itself; give the cache a folder of its own")


def behind(chain: Chain, name: str) -> tuple[list[tuple[int, Step, Bound]], list[str]]:
    """Give the (number, step, bound) that a field comes from, in order, and the fields of the sources they read."""
    needed, found = {name}, []
    for number in reversed(range(len(chain.steps))):
        step = chain.steps[number]
        made = needed & set(step.outputs)
        for output in sorted(made, key=step.outputs.index, reverse=True):
            found.append((number, step, step.bound[step.outputs.index(output)]))
            if step.joint or output not in step.fields:
                needed = needed - {output} | set(step.fields)
    return found[::-1], sorted(needed & set(chain.sources))


def fingerprints(chain: Chain, names: tuple[str, ...], seed: int | None) -> dict[str, str]:
    """Give a hash a field of all that its values depend on: sources, rows, stages, and the seed where one draws.

    User functions go in with all they refer to (`jit.fingerprint`), arrays in memory by content, mapped ones by path,
    size and mtime of the file.
    """
    told: dict[str, Any] = {}
    made = {}
    for name in names:
        steps, sources = behind(chain, name)
        for source in sources:
            if source not in told:
                told[source] = _source(source, chain.sources[source])
        random = any(bound.random for _, _, bound in steps)
        stages = [
            (step.fields, step.outputs, step.before, _bound(bound), step.salt if bound.random else 0)
            for _, step, bound in steps
        ]
        parts = (VERSION, chain.rows, [(s, told[s]) for s in sources], stages, seed if random else None)
        made[name] = jit.fingerprint(parts)
    return made


def _bound(bound: Bound) -> Any:
    """Give a bound stage without the linking code in it, which computes nothing any more."""
    choices = tuple(_bound(inner) for _, inner in bound.choices)
    beside = tuple((name, _bound(inner)) for name, inner in bound.beside)
    return tuple(bound._replace(choices=choices, beside=beside))


def _source(field: str, samples: Samples) -> Any:
    """Give what tells a source from another."""
    rows = samples.rows
    arrays = [part.array for part in samples.parts] + ([] if rows.table is None else [rows.table])
    arrays += [p for p in samples.params if isinstance(p, np.ndarray)]
    params = tuple(p for p in samples.params if not isinstance(p, np.ndarray))
    kernels = (samples.locate, samples.length, samples.low, samples.high)
    whole = (
        samples.name,
        str(samples.dtype),
        samples.shape,
        samples.fill,
        samples.ring,
        rows.count,
        rows.start,
        rows.step,
    )
    return (whole, params, kernels, [_array(field, array) for array in arrays])


def _array(field: str, array: np.ndarray) -> Any:
    """Give what tells an array from another: where its file lies and what that was, else a hash of its bytes."""
    place = storage.locate(array)
    kind = (array.dtype.str, array.shape)
    if place is not None:
        with contextlib.suppress(OSError):
            return (
                *kind,
                place.path,
                place.size,
                os.stat(place.path).st_mtime_ns,
                place.offset,
                place.strides,
                *([] if place.dataset is None else [place.dataset]),
            )
    if array.nbytes > HASHED:
        raise PipelineError(
            f"cache: field {field!r} is {array.nbytes / 1e9:.1f} GB in memory, more than the {HASHED / 1e9:.1f} GB that are "
            "hashed to know it again: np.save it, and give Dataset the path of the file"
        )
    import hashlib

    digest = hashlib.sha256()
    for block in storage.blocks(array):
        digest.update(block)
    return (*kind, digest.hexdigest())

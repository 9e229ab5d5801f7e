"""Batch stages: user code that sees the whole batch while it writes a row of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import jit
from ..spec import Spec
from .checks import settled
from .stage import Bound, Misfit, Stage, arity, called, numeric, source_of, with_defaults, writable, written_in_python


def batch_stage(function: Callable[..., Any] | None = None, /) -> Any:
    """Make a stage of a function that sees the whole batch: `function(j, *batches, *targets, key)`, called for each row.

    `data.map(("image", "label"), f)` calls `f(j, images, labels, image, label, key)` for each place j of a batch.
    `images` is the batch as it came, (rows, *shape), to be read only; `image`, of shape (*shape) or (1,) for a scalar,
    is row j of a fresh batch of the same dtype, of which every element must be written. `key` is mixed from (seed,
    epoch, row, stage). Compiled and bounds-checked, run in the thread that fills, without the GIL. What comes out
    depends on which rows are in the batch, so on batch size and ranks too, but not on threads or prefetch, and a resumed
    run gives the same; `data[i]` is a batch of one. It comes last in the chain: only other batch stages and `apply` may
    follow. Raises PipelineError, where it is linked, if Numba cannot type it; one naming the row if it fails on one.

    >>> import numpy as np, jitloader as jl
    >>> @jl.batch_stage
    ... def centre(j, xs, x, key):
    ...     total = 0.0
    ...     for i in range(len(xs)):
    ...         total += xs[i]
    ...     x[0] = xs[j] - total / len(xs)
    >>> jl.Dataset(x=np.array([1.0, 3.0, 8.0])).map("x", centre)[:2].x
    array([-1.,  1.])
    """
    if function is None:
        return batch_stage
    count = arity(function) - 2 if callable(function) else 0
    if count < 2 or count % 2:
        wanted = "(j, a batch for each field, a target for each field, key)"
        more = with_defaults(function) if callable(function) else ""
        raise TypeError(f"batch_stage takes a function {wanted}, got {called(function)}{more}")
    made = written_in_python(function)
    name = getattr(function, "__name__", "batch_stage")

    def join(specs: tuple[Spec, ...]) -> tuple[Bound, ...]:
        if len(specs) != count // 2:
            raise Misfit(f"{name} takes {count // 2} field(s) at once")
        for spec in specs:
            settled(spec, name)
            numeric(spec, name)
            writable(spec.dtype, name)
        now = jit.captured(made)
        if not jit.disabled():
            whole = [jit.Array(s.dtype.name, len(s.shape) + 1) for s in specs]
            rows = [jit.Array(s.dtype.name, max(len(s.shape), 1)) for s in specs]
            jit.infer(now, ("int64", *whole, *rows, "uint64"), 1 + len(specs))
        return tuple(Bound("batch", spec, now, random=True) for spec in specs)

    return Stage(name, lambda spec: join((spec,))[0], True, source_of(made), join)

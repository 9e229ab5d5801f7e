"""What a stage is: one step A -> B of a pipeline, a plain value made by a factory function.

Three kinds fuse into one loop nest. A *value* stage maps one element: `kernel(x, *elements, *params)`, with x an
int64, uint64, float64 or bool; what it gives is stored in the dtype of the stage's spec. An *index* stage says which
source element lands where: `kernel(key, size, limit, offset, sign, *params)` writes, for each axis it touches, an
offset and a direction: out[i] = in[offset + sign * i], `fill` outside. A *sample* stage is anything:
`kernel(src, dst, key, *params)` over arrays of one sample. Built-in stages have no privileges.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import jit, rng
from ..dtypes import NATIVE
from ..spec import Spec

Kernel = Callable[..., Any]


class Misfit(Exception):
    """Why a stage cannot take a spec: what it takes instead, in the user's terms."""


class Bound(NamedTuple):
    """A stage made ready for one spec: the spec that leaves it, and the function that does the work."""

    kind: str  # "value", "index", "sample", "shape", "choice", "pair" (sample, over a row and its partner); of a field made beside another: "mask" or "length"
    out: Spec
    kernel: Kernel
    params: tuple[Any, ...] = ()  # numbers and arrays handed to the kernel whole
    elements: tuple[np.ndarray, ...] = ()  # value: float64 arrays that broadcast against the sample, an element each
    random: bool = False
    valid: Kernel | None = None  # value, sample: whether an element may come in, `valid(x, *elements, *params)`
    fill: float | None = None  # index: the value outside the source
    order: tuple[int, ...] | None = None  # index: axes of the input, in their order in the output
    touches: tuple[int, ...] = ()  # index: output axes whose offset or sign may change
    scratch: tuple[tuple[str, int], ...] = ()  # sample: dtype and size of buffers handed to the kernel after the key
    length: Kernel | None = None  # index, on a ragged first axis: its new length, `length(n, *params)`
    closes: str = ""  # index, on a ragged first axis: "longest" gives rows the length of the longest in their batch
    multiple: int = 1  # and that length is rounded up to a multiple of this
    beside: tuple[tuple[str, Any], ...] = ()  # index: fields made beside it, name and Bound of kind "mask" or "length"
    choices: tuple[tuple[Any, Any], ...] = ()  # index, choice: (Stage, Bound), of which `kernel(key)` picks one


class Stage(NamedTuple):
    """One step of a pipeline: what it is called, and `bind(spec)`, which checks a spec and makes the step ready for it."""

    name: str
    bind: Callable[[Spec], Bound]
    user: bool = False  # the kernel is the user's own code
    where: str = ""  # the user's file and line
    join: Callable[[tuple[Spec, ...]], tuple[Bound, ...]] | None = (
        None  # over several fields at once: their specs to what it makes
    )

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        return self

    def __call__(self, array: Any, key: int = 0) -> np.ndarray:
        """Apply the stage to one plain sample, to try it out; random stages draw by `key`.

        >>> import jitloader as jl
        >>> jl.clip(0, 2)([1, 2, 3])
        array([1, 2, 2])
        """
        from ..compose import eager

        return eager(self, np.asarray(array), key)


class Step(NamedTuple):
    """A stage linked to fields of a data set: what comes, what leaves, and the salt of its draws."""

    stage: Stage
    fields: tuple[str, ...]
    salt: int
    before: tuple[Spec, ...]
    bound: tuple[Bound, ...]  # one for each of the outputs
    outputs: tuple[str, ...]  # the fields themselves, then those made beside; of a joint step, what it makes
    joint: bool = False  # one kernel over all fields at once


def floating(dtype: np.dtype) -> np.dtype:
    """Give the float dtype that numbers of a dtype are computed to: float64 stays, all else becomes float32."""
    return dtype if dtype == np.float64 else np.dtype(np.float32)


REMEDIES = {
    "M": ": give the dates' count of units, array.view('int64')",
    "m": ": give the times' count of units, array.view('int64')",
    "c": ": give array.real and array.imag as fields",
    "f": ": give array.astype('float64')",
    "S": ": give text as codes, np.unique(array, return_inverse=True)[1]",
    "U": ": give text as codes, np.unique(array, return_inverse=True)[1]",
}  # by the kind of what is no such number


def numeric(spec: Spec, name: str) -> None:
    """Refuse a spec that is not of numbers."""
    if spec.dtype.kind not in "biuf" or spec.dtype.itemsize > 8:
        remedy = REMEDIES.get(spec.dtype.kind, "")
        raise Misfit(f"{name} takes numbers of at most 64 bits{remedy}")


def writable(dtype: np.dtype, name: str) -> np.dtype:
    """Refuse a dtype that kernels cannot compute into."""
    if dtype.name not in NATIVE or not dtype.isnative:
        every = "bool, int8 to int64, uint8 to uint64, float32, float64"
        raise TypeError(f"{name}: a kernel cannot write {dtype}; it can write {every}")
    return dtype


def gives_value(function: Kernel) -> bool:
    """Whether some path of a function returns anything but None."""
    before = None
    for here in dis.get_instructions(jit.plain_function(function)):
        if here.opname == "RETURN_CONST" and here.argval is not None:
            return True
        if here.opname == "RETURN_VALUE" and (
            before is None or before.opname != "LOAD_CONST" or before.argval is not None
        ):
            return True
        before = here
    return False


def caller() -> str:
    """Give the file and line of the first frame outside this package."""
    frame, _ = jit.outside()
    return f"{frame.f_code.co_filename} line {frame.f_lineno}"


def source_of(function: Kernel) -> str:
    """Give the file and line where a function was written; for one that Numba knows, nothing."""
    code = jit.plain_function(function).__code__
    if code.co_filename == BUILTIN:
        return ""
    return f"{code.co_filename} line {code.co_firstlineno}"


def wide(dtype: np.dtype) -> str:
    """Give the dtype name in which elements of a dtype reach a value kernel."""
    if dtype.kind in "iu":
        return "uint64" if dtype == np.uint64 else "int64"
    return "bool" if dtype.kind == "b" else "float64"


BUILTIN = __file__ + " built-in"  # the file name of functions made round those of Python and NumPy


def written_in_python(function: Kernel) -> Kernel:
    """Give a function that Numba can read: one of Python's or NumPy's own (math.sqrt, np.exp, float) is called by it.

    Raises TypeError for what has no code of its own: methods, partials, objects that can be called.
    """
    name = getattr(function, "__name__", "")
    if isinstance(jit.plain_function(function), types.FunctionType):
        return function
    if isinstance(function, (types.BuiltinFunctionType, np.ufunc, type)) and name.isidentifier():
        inside = f"{function.__module__}_{name}".replace(".", "_")
        given = ", ".join("xyz"[: arity(function)])
        scope: dict[str, Any] = {inside: function}
        exec(compile(f"def {name}({given}):\n    return {inside}({given})", BUILTIN, "exec"), scope)
        return scope[name]
    kind = type(function).__name__
    raise TypeError(f"a stage is made of a plain function, got an object of type {kind}: wrap it in def or lambda")


def arity(function: Kernel) -> int:
    """Give the number of positional parameters of a function, TypeError where it has others; of one of Python's or NumPy's
    own, of those it needs."""
    if kind := jit.suspends(function):
        raise TypeError(
            f"{called(function)} is {kind}, and a stage gives its result when it is called: write a plain def"
        )
    if isinstance(function, np.ufunc):
        return function.nin
    if isinstance(function, (types.BuiltinFunctionType, type)):
        try:
            every = inspect.signature(function).parameters.values()
        except ValueError:
            return 1
        return max(1, sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in every))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(jit.plain_function(function)).parameters.values()
    for parameter in parameters:
        if parameter.kind not in kinds:
            raise TypeError(
                f"{called(function)} takes {str(parameter)!r}, and a stage function has positional arguments alone: "
                "let it stand in the closure"
            )
    return len(parameters)


def with_defaults(function: Kernel) -> str:
    """Say of a function that is taken for one of more arguments which of them have a default; "" where none has."""
    if not isinstance(jit.plain_function(function), types.FunctionType):
        return ""
    every = inspect.signature(jit.plain_function(function)).parameters.values()
    some = ", ".join(repr(p.name) for p in every if p.default is not p.empty)
    return f"; {some}, with a default, counts too: let it stand in the closure" if some else ""


def called(value: Any) -> str:
    """Name a value in a message: a function by its name, anything else as it is written."""
    name = getattr(value, "__name__", None)
    return name if callable(value) and isinstance(name, str) else repr(value)


def draws(function: Kernel) -> bool:
    """Whether a sample kernel may read its key, the last of its parameters: its code names it."""
    code = jit.plain_function(function).__code__
    key = code.co_varnames[code.co_argcount - 1]
    named = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return key in code.co_cellvars or any(key in names for names in named)


def elementwise(function: Kernel | None = None, /, *, dtype: Any = None) -> Any:
    """Make a stage of a function of one number: (...) of any dtype to (...) of `dtype`, element by element.

    The number comes as a Python int, float (float64) or bool. Where `dtype` is not given it is the field's own if the
    function gives a number of the same kind, float32 for a float from an integer, else what the function gives. Values
    that the function needs are taken from its closure or its globals, as they are on the line that links it: what is set
    later counts where it is linked again. A function of two or three numbers
    takes as many fields of one shape: `data.map(("a", "b"), f)`. Those of Python and NumPy (`math.sqrt`, `np.exp`) will do. Linking it raises PipelineError where Numba cannot type
    it; a result that does not fit an integer dtype is a PipelineError naming the row; integers past 64 bits wrap, an integer
    to a negative power is 0 (`x**-1` is refused: write `1 / x`), and `//` and `%` by a plain number take a uint64 above 2**63 as signed.

    >>> import numpy as np, jitloader as jl
    >>> @jl.elementwise
    ... def half(x):
    ...     return x * 0.5
    >>> jl.Dataset(x=np.arange(3)).map("x", half)[0:3].x
    array([0. , 0.5, 1. ], dtype=float32)
    """
    if function is None:
        return lambda f: elementwise(f, dtype=dtype)
    if not callable(function) or not 1 <= arity(function) <= 3:
        more = with_defaults(function) if callable(function) else ""
        raise TypeError(f"elementwise takes a function of one to three numbers, got {called(function)}{more}")
    function = written_in_python(function)
    name = getattr(function, "__name__", "elementwise")
    fixed = None if dtype is None else writable(np.dtype(dtype), name)
    written = source_of(function)

    def out(function: Kernel, specs: tuple[Spec, ...]) -> Spec:
        for spec in specs:
            numeric(spec, name)
        given = np.dtype(jit.infer(function, tuple(wide(s.dtype) for s in specs)).replace("none", "O"))
        if given.kind not in "biuf":
            raise Misfit(f"{name} must return a number")
        spec = specs[0]
        if fixed is not None:
            return Spec(fixed, spec.shape)
        if given.kind == spec.dtype.kind or (given.kind in "iu" and spec.dtype.kind in "iu"):
            return spec
        return Spec(np.dtype(np.float32) if given.kind == "f" else given, spec.shape)

    def bind(spec: Spec) -> Bound:
        now = jit.captured(function)
        return Bound("value", out(now, (spec,)), now)

    if arity(function) == 1:
        return Stage(name, bind, True, written)

    def join(specs: tuple[Spec, ...]) -> tuple[Bound, ...]:
        if len(specs) != arity(function) or len({s.shape for s in specs}) > 1 or specs[0].ragged:
            raise Misfit(f"{name} takes {arity(function)} fields of one shape{with_defaults(function)}")
        now = jit.captured(function)
        return (Bound("sample", out(now, specs), _over(now, tuple(s.dtype for s in specs))),)

    return Stage(name, _alone(name, arity(function)), True, written, join)


def _alone(name: str, count: int) -> Callable[[Spec], Bound]:
    def bind(spec: Spec) -> Bound:
        raise Misfit(f'{name} takes {count} fields at once, as map(("a", "b"), {name})')

    return bind


def _over(function: Kernel, dtypes: tuple[np.dtype, ...]) -> Kernel:
    """Give the loop of a function over the elements of two or three samples."""
    kinds = {"int64": rng.i64, "uint64": rng.u64, "float64": np.float64, "bool": bool}
    a, b, c = (kinds[wide(d)] for d in (*dtypes, *dtypes)[:3])

    def two(x, y, dst, key):  # type: ignore[no-untyped-def]
        x, y, d = jit.flat(x), jit.flat(y), jit.flat(dst)
        for i in range(d.size):
            d[i] = function(a(x[i]), b(y[i]))

    def three(x, y, z, dst, key):  # type: ignore[no-untyped-def]
        x, y, z, d = jit.flat(x), jit.flat(y), jit.flat(z), jit.flat(dst)
        for i in range(d.size):
            d[i] = function(a(x[i]), b(y[i]), c(z[i]))

    return two if len(dtypes) == 2 else three


def stage(
    function: Kernel | None = None, /, *, shape: Any = None, dtype: Any = None, out: Any = None, inputs: int = 1
) -> Any:
    """Make a stage of a function over one sample, `function(src, dst, key)`, that writes every element of `dst`.

    `src` and `dst` are C-contiguous arrays of one row (a number is an array of one element); `key` is the row's own
    random key (`jl.uniform(key, k)`, ...). `src` may be the data itself and is only read. `dst` has the shape and dtype of `src` unless `shape` or `dtype` are given,
    or `out(spec) -> Spec` computes them. With `inputs=2` (or more) the function takes as many sources, then its targets,
    then the key; `out` gets all specs and gives a Spec for each target.

    Compiled integers have 64 bits, whatever the dtype of `src`; past them they wrap, and a `dst` that is smaller keeps
    the low bits, both without an error. Of a uint64 above 2**63, `//` and `%` by a plain number take the bits as signed.
    Plain Python (`data[i]`) computes with NumPy's numbers, which wrap at the dtype of `src` or raise: `int(src[i])` is
    wide in both, and `loader.check()` tells where they differ. Globals and closures are taken as `elementwise` does.

    >>> import numpy as np, jitloader as jl
    >>> @jl.stage(shape=(2,))
    ... def ends(src, dst, key):
    ...     dst[0], dst[1] = src[0], src[-1]
    >>> jl.Dataset(x=np.arange(12).reshape(3, 4)).map("x", ends)[1].x
    array([4, 7])
    """
    if function is None:
        return lambda f: stage(f, shape=shape, dtype=dtype, out=out, inputs=inputs)
    targets = arity(function) - inputs - 1 if callable(function) else 0
    if targets < 1 or (inputs == 1 and targets != 1):
        wanted = "(src, dst, key)" if inputs == 1 else f"({inputs} sources, targets, key)"
        more = with_defaults(function) if callable(function) else ""
        raise TypeError(f"stage takes a function {wanted}, got {called(function)}{more}")
    function = written_in_python(function)
    name = getattr(function, "__name__", "stage")
    if gives_value(function):
        raise TypeError(f"{name} returns a value, which nobody would see: a stage writes every element of its target")
    size = None if shape is None else _sizes(shape, name)
    kind = None if dtype is None else writable(np.dtype(dtype), name)

    def made(specs: tuple[Spec, ...]) -> tuple[Bound, ...]:
        if len(specs) != inputs:
            raise Misfit(f"{name} takes {inputs} fields at once")
        sources = specs
        for spec in sources:
            numeric(spec, name)
        if out is not None:
            specs = _given(out(*specs), name)
            if len(specs) != targets:
                raise Misfit(f"{name} writes {targets} field(s), and out gives {len(specs)} specs")
        elif targets > len(specs):
            raise Misfit(f"{name} makes {targets} fields of {len(specs)}: give out=, their specs")
        else:
            kept = specs[:targets]
            specs = tuple(Spec(s.dtype if kind is None else kind, s.shape if size is None else size) for s in kept)
        if any(s.ragged for s in specs):
            raise Misfit(
                f"{name} makes samples of one shape: give shape=, or close ragged rows by pad_rows(length) before it"
            )
        now = jit.captured(function)
        if not jit.disabled():
            arrays = [jit.Array(s.dtype.name, max(len(s.shape), 1)) for s in (*sources, *specs)]
            jit.infer(now, (*arrays, "uint64"), len(sources))
        return tuple(Bound("sample", s, now, random=draws(now)) for s in specs)

    written = source_of(function)
    if inputs == 1:
        return Stage(name, lambda spec: made((spec,))[0], True, written)
    return Stage(name, _alone(name, inputs), True, written, made)


def _sizes(shape: Any, name: str) -> tuple[int, ...]:
    """Give a shape that a user named, or refuse it."""
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if not isinstance(sizes, (tuple, list)) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in sizes
    ):
        raise TypeError(f"{name}: shape must be whole numbers of at least 0, got {shape!r}")
    return tuple(int(n) for n in sizes)


def _given(found: Any, name: str) -> tuple[Spec, ...]:
    """Give the specs that a user's `out` computed, or refuse them."""
    try:
        one = isinstance(found, Spec) or (len(found) == 2 and not isinstance(found[0], tuple))
        return tuple(Spec(writable(np.dtype(d), name), _sizes(s, name)) for d, s in ([found] if one else found))
    except (TypeError, ValueError) as error:
        wanted = f"{name}: out must give a jl.Spec for each target, got {found!r}"
        raise Misfit(str(error) if str(error).startswith(name) else wanted) from None

"""Compile a function behind one C entry point over words, and give its object code."""

from __future__ import annotations

import contextlib
import inspect
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import rng
from .depends import GENERATED, helpers, ours, plain_function
from .kinds import FLOAT, Array, Type
from .refuse import REFUSED, CompileError, reason_of, users
from .words import (
    ROOM,
    array_at,
    as_bytes,
    atomic_add,
    atomic_get,
    atomic_set,
    atomic_swap,
    bits_of,
    copy_items,
    find_rows,
    flat,
    float32_of,
    float64_of,
    nanoseconds,
    prefetch,
    room,
    run_kernel,
    shaped,
)


def undefined(code: bytes) -> list[str]:
    """List the symbols that an ELF object needs from elsewhere (an empty list for other formats)."""
    if code[:6] != b"\x7fELF\x02\x01":
        return ["NRT_Allocate_External"]  # another platform: let Numba register all it has first
    (offset,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", code, offset + i * size) for i in range(count)]
    names = []
    for kind in (s for s in sections if s[1] == 2):  # SHT_SYMTAB
        strings = sections[kind[6]]
        for at in range(kind[4] + 24, kind[4] + kind[5], 24):
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0 and name:
                start = strings[4] + name
                names.append(code[start : code.index(b"\0", start)].decode())
    return names


def compile_function(
    function: Callable[..., Any], signature: tuple[Type, ...], parallel: bool
) -> tuple[dict[str, Any], bytes]:
    """Compile a function behind an entry point over words, and give its description and object code."""
    from numba.core import compiler, registry

    nt = numba_types()

    register(function, parallel)
    intrinsics = _intrinsics()
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.nrt = flags.release_gil = True
    flags.enable_looplift = flags.enable_pyobject = flags.force_pyobject = False
    flags.error_model = "numpy"
    target = registry.cpu_target
    lines, names, at = [], [], 0
    scope: dict[str, Any] = {"function": function, **intrinsics}
    for i, kind in enumerate(signature):
        names.append(f"a{i}")
        if isinstance(kind, Array):
            shape = "".join(f"words[{at + 1 + k}]," for k in range(kind.ndim))
            scope[f"t{i}"] = numba_type(kind.dtype)
            flat_table = f"table(words[{at}], words[{at + 1}], t{i})"
            made = flat_table if kind.ndim == 1 else f"carray(pointer(words[{at}], t{i}), ({shape}))"
            lines.append(f"a{i} = {made if kind.aligned else f'loose({made})'}")
            at += 1 + kind.ndim
        else:
            lines.append(f"a{i} = {'real' if kind == FLOAT else ''}(words[{at}])")
            at += 1
    body = [*lines, f"result = function({', '.join(names)})"]
    text = "def entry(words):\n    " + "\n    ".join(body) + "\n    return word(result)"
    exec(compile(text, GENERATED, "exec"), scope)
    try:
        with _apart():
            result = compiler.compile_extra(
                target.typing_context,
                target.target_context,
                scope["entry"],
                (nt.Array(nt.int64, 1, "C"),),
                nt.int64,
                flags,
                {},
            )
    except Exception as error:  # Numba's own have no common base
        what, place = reason_of(error)
        raise CompileError(what, place or users(function)[1]) from None
    code = result.library._get_compiled_object()
    externals = undefined(code)
    for symbol, reason in REFUSED.items():
        if symbol in externals and not parallel:  # a parallel loop asks for the GIL itself, and holds no user code
            name, place = users(function)
            raise CompileError(f"{name}: {reason}", place)
    return {"symbol": result.fndesc.llvm_func_name, "externals": externals, "parallel": parallel}, code


APART = "fill_apart"  # in the name of a function whose array arguments never overlap where one is written


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Tell LLVM that the arrays of a function named so do not overlap: without that it checks each short loop, or does
    not vectorise it. Numba has the flag, but no option for functions called from others."""
    from numba.core.callconv import CPUCallConv

    before = CPUCallConv.decorate_function

    def decorate(self: Any, fn: Any, args: Any, types_: Any, noalias: bool = False) -> Any:
        return before(self, fn, args, types_, noalias=noalias or APART in fn.name)

    CPUCallConv.decorate_function = decorate
    try:
        yield
    finally:
        CPUCallConv.decorate_function = before


def numba_types() -> Any:
    """Give Numba's types, most of which it makes as it is imported."""
    from numba.core import types as numba_types

    return numba_types


def numba_type(dtype: str) -> Any:
    from numba import from_dtype

    return from_dtype(np.dtype(dtype))


_registered: dict[int, Any] = {}
_ATOMIC = (atomic_get, atomic_set, atomic_add, atomic_swap, nanoseconds, run_kernel)
_LOWERED = (rng.u64, rng.i64, prefetch, find_rows, copy_items, room, *_ATOMIC)


def register(function: Callable[..., Any], parallel: bool = False) -> None:
    """Let Numba call the plain functions that a kernel refers to; `parallel` is said of the function itself."""
    from numba.extending import register_jitable

    _intrinsics()
    for helper in [*helpers(function), plain_function(function)]:
        if id(helper) not in _registered and helper not in _LOWERED:
            # A user's loop may leave its array: that must be an error of the row, never other rows' memory.
            # Nobody calls it but the kernel: wrappers for Python and C would be compiled for nothing.
            options: dict[str, Any] = {
                "boundscheck": not ours(helper),
                "no_cpython_wrapper": True,
                "no_cfunc_wrapper": True,
            }
            if parallel and helper is plain_function(function):
                options["parallel"] = True
            register_jitable(error_model="numpy", **options)(helper)
            _registered[id(helper)] = helper


_tools: dict[str, Any] = {}


def _intrinsics() -> dict[str, Any]:
    """Make the few things that Python cannot say to Numba: pointers, bit casts, 64-bit casts, prefetch."""
    if _tools:
        return _tools
    from llvmlite import ir
    from numba import carray
    from numba.core import cgutils
    from numba.extending import intrinsic, overload

    nt = numba_types()

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def pointer(context, address, dtype):  # type: ignore[no-untyped-def]
        result = nt.CPointer(dtype.dtype if hasattr(dtype, "dtype") else dtype.instance_type)

        def lower(target, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], target.get_value_type(result))

        return result(address, dtype), lower

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def real(context, bits):  # type: ignore[no-untyped-def]
        return nt.float64(nt.int64), lambda target, builder, signature, args: builder.bitcast(args[0], ir.DoubleType())

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def raw(context, x):  # type: ignore[no-untyped-def]
        return nt.int64(nt.float64), lambda target, builder, signature, args: builder.bitcast(args[0], ir.IntType(64))

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def short(context, bits):  # type: ignore[no-untyped-def]
        return nt.float32(nt.uint32), lambda target, builder, signature, args: builder.bitcast(args[0], ir.FloatType())

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def table(context, address, size, dtype):  # type: ignore[no-untyped-def]
        item = dtype.dtype if hasattr(dtype, "dtype") else dtype.instance_type
        result = nt.Array(item, 1, "C")

        def lower(target, builder, signature, args):  # type: ignore[no-untyped-def]
            data = builder.inttoptr(args[0], target.get_data_type(item).as_pointer())
            return array_over(target, builder, result, data, args[1])

        return result(nt.int64, nt.int64, dtype), lower

    def array_over(target, builder, kind, data, size):  # type: ignore[no-untyped-def]
        nbytes = ir.Constant(ir.IntType(64), target.get_abi_sizeof(target.get_data_type(kind.dtype)))
        array = target.make_array(kind)(target, builder)
        array.meminfo = array.parent = ir.Constant(ir.IntType(8).as_pointer(), None)
        array.nitems, array.itemsize, array.data = size, nbytes, data
        array.shape, array.strides = (cgutils.pack_array(builder, [n]) for n in (size, nbytes))
        return array._getvalue()

    def stack(target, builder, signature, args):  # type: ignore[no-untyped-def]
        size = ir.Constant(ir.IntType(64), ROOM)
        data = cgutils.alloca_once(builder, ir.IntType(64), size=size)
        return array_over(target, builder, signature.return_type, data, size)

    def touch(target, builder, signature, args):  # type: ignore[no-untyped-def]
        data = target.make_array(signature.args[0])(target, builder, args[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = builder.bitcast(builder.gep(data, [args[1]]), byte)
        # To read, into L2, data. Into L1 a core waits for its few miss registers (Zen 4: rows of 256 bytes 45 ns, so 30).
        builder.call(function, [place, *(ir.Constant(number, n) for n in (0, 2, 1))])
        return target.get_dummy_value()

    def find(target, builder, signature, args):  # type: ignore[no-untyped-def]
        words, rows = (target.make_array(signature.args[k])(target, builder, args[k]) for k in (1, 4))
        word = ir.IntType(64)
        for k, value in enumerate((args[2], args[3], builder.ptrtoint(rows.data, word), rows.nitems)):
            builder.store(value, builder.gep(words.data, [ir.Constant(word, k)]))
        good, _ = entered(builder, args[0], words)
        return builder.select(good, ir.Constant(word, 0), ir.Constant(word, 1))

    def entered(builder, address, words):  # type: ignore[no-untyped-def]
        """Call the kernel at an address: Numba's own calling convention, as in kernel.Call."""
        word, byte = ir.IntType(64), ir.IntType(8).as_pointer()
        result, reason = cgutils.alloca_once(builder, word), cgutils.alloca_once(builder, byte)
        pointer, nothing, eight = word.as_pointer(), ir.Constant(byte, None), ir.Constant(word, 8)
        kinds = [result.type, reason.type, byte, byte, word, word, pointer, word, word]
        entry = builder.inttoptr(address, ir.FunctionType(ir.IntType(32), kinds).as_pointer())
        given = [result, reason, nothing, nothing, words.nitems, eight, words.data, words.nitems, eight]
        status = builder.call(entry, given)
        good = builder.or_(*(builder.icmp_signed("==", status, ir.Constant(status.type, n)) for n in (0, -2)))
        return good, builder.load(result)

    def enter(target, builder, signature, args):  # type: ignore[no-untyped-def]
        good, result = entered(builder, args[0], target.make_array(signature.args[1])(target, builder, args[1]))
        return builder.select(good, result, ir.Constant(result.type, 2))

    def item_at(target, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.gep(target.make_array(signature.args[0])(target, builder, args[0]).data, [args[1]])

    def get(target, builder, *called):  # type: ignore[no-untyped-def]
        return builder.load_atomic(item_at(target, builder, *called), "seq_cst", 8)

    def put(target, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[2], item_at(target, builder, signature, args), "seq_cst", 8)
        return target.get_dummy_value()

    def add(target, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", item_at(target, builder, signature, args), args[2], "seq_cst")

    def swap(target, builder, signature, args):  # type: ignore[no-untyped-def]
        at = item_at(target, builder, signature, args)
        done = builder.extract_value(builder.cmpxchg(at, args[2], args[3], "seq_cst", "seq_cst"), 1)
        return builder.zext(done, ir.IntType(64))

    def tell(target, builder, signature, args):  # type: ignore[no-untyped-def]
        word, number = ir.IntType(64), ir.IntType(32)
        pair = cgutils.alloca_once(builder, word, size=ir.Constant(word, 2))
        kind = ir.FunctionType(number, [number, word.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(number, time.CLOCK_MONOTONIC), pair])
        seconds, rest = builder.load(pair), builder.load(builder.gep(pair, [ir.Constant(word, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(word, 10**9)), rest)

    def move(target, builder, signature, args):  # type: ignore[no-untyped-def]
        to, source = (target.make_array(signature.args[k])(target, builder, args[k]).data for k in (0, 2))
        size = target.get_abi_sizeof(target.get_data_type(signature.args[0].dtype))
        length = builder.mul(args[4], ir.Constant(ir.IntType(64), size))
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, byte, ir.IntType(64), ir.IntType(1)])
        function = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)], kind)
        ends = (builder.bitcast(builder.gep(p, [i]), byte) for p, i in ((to, args[1]), (source, args[3])))
        builder.call(function, [*ends, length, ir.Constant(ir.IntType(1), 0)])
        return target.get_dummy_value()

    n = nt.int64
    _in_place(rng.u64, lambda x: nt.uint64(x) if isinstance(x, (nt.Number, nt.Boolean)) else None, _cast)
    _in_place(rng.i64, lambda x: n(x) if isinstance(x, (nt.Number, nt.Boolean)) else None, _cast)
    _in_place(prefetch, lambda array, index: nt.void(array, n), touch)
    _in_place(find_rows, lambda find, words, first, step, rows: n(n, words, n, n, rows), find)
    _in_place(_word, lambda x: n(x), _cast)
    _in_place(room, lambda: nt.Array(n, 1, "C"), stack)
    _in_place(run_kernel, lambda entry, words: n(n, words), enter)
    _in_place(atomic_get, lambda array, index: n(array, n), get)
    _in_place(atomic_set, lambda array, index, value: nt.void(array, n, n), put)
    _in_place(atomic_add, lambda array, index, value: n(array, n, n), add)
    _in_place(atomic_swap, lambda array, index, before, after: n(array, n, n, n), swap)
    _in_place(nanoseconds, lambda: n(), tell)
    _in_place(copy_items, lambda target, at, source, start, count: nt.void(target, n, source, n, n), move)

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def item(context, array, index):  # type: ignore[no-untyped-def]
        def lower(target, builder, signature, args):  # type: ignore[no-untyped-def]
            data = target.make_array(signature.args[0])(target, builder, args[0]).data
            return builder.gep(data, [args[1]])

        return nt.CPointer(array.dtype)(array, nt.int64), lower

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def loose(context, array):  # type: ignore[no-untyped-def]
        result = nt.Array(array.dtype, array.ndim, array.layout, aligned=False)
        return result(array), lambda target, builder, signature, args: args[0]

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def first_byte(context, array):  # type: ignore[no-untyped-def]
        def lower(target, builder, signature, args):  # type: ignore[no-untyped-def]
            data = target.make_array(signature.args[0])(target, builder, args[0]).data
            return builder.bitcast(data, ir.IntType(8).as_pointer())

        return nt.CPointer(nt.uint8)(array), lower

    @overload(as_bytes)  # type: ignore[untyped-decorator, unused-ignore]
    def bytes_of(array):  # type: ignore[no-untyped-def]
        return lambda array: carray(first_byte(array), (array.size * array.itemsize,))

    @overload(flat)  # type: ignore[untyped-decorator, unused-ignore]
    def flattened(array):  # type: ignore[no-untyped-def]
        return lambda array: carray(item(array, 0), (array.size,))

    @overload(shaped)  # type: ignore[untyped-decorator, unused-ignore]
    def reshaped(array, at, shape):  # type: ignore[no-untyped-def]
        return lambda array, at, shape: carray(item(array, at), shape)

    @overload(array_at)  # type: ignore[untyped-decorator, unused-ignore]
    def at(address, size, like):  # type: ignore[no-untyped-def]
        item = like.dtype
        if not like.aligned:
            return lambda address, size, like: loose(carray(pointer(address, item), (size,)))
        return lambda address, size, like: carray(pointer(address, item), (size,))

    @overload(bits_of)  # type: ignore[untyped-decorator, unused-ignore]
    def bits(x):  # type: ignore[no-untyped-def]
        return lambda x: raw(np.float64(x))

    @overload(float64_of)  # type: ignore[untyped-decorator, unused-ignore]
    def double(bits):  # type: ignore[no-untyped-def]
        return lambda bits: real(np.int64(bits))

    @overload(float32_of)  # type: ignore[untyped-decorator, unused-ignore]
    def single(bits):  # type: ignore[no-untyped-def]
        return lambda bits: short(np.uint32(bits))

    _tools.update(pointer=pointer, table=table, real=real, carray=carray, loose=loose, word=_word)
    return _tools


def _in_place(function: Callable[..., Any], typer: Callable[..., Any], lower: Callable[..., Any]) -> None:
    """Let a function of ours be lowered where it is called: an overload would be compiled, once for each set of types."""
    from numba.extending import lower_builtin, type_callable

    @type_callable(function)  # type: ignore[untyped-decorator, unused-ignore]
    def typed(context):  # type: ignore[no-untyped-def]
        return typer

    lower_builtin(function, *[numba_types().Any] * len(inspect.signature(function).parameters))(lower)


def _cast(target: Any, builder: Any, signature: Any, args: Any) -> Any:
    if isinstance(signature.args[0], numba_types().NoneType):
        return target.get_constant(signature.return_type, 0)
    return target.cast(builder, args[0], signature.args[0], signature.return_type)


def _word(x: Any) -> int:
    return int(x or 0)

"""Type a function without compiling it, on the line that links it."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

from .build import numba_type, numba_types, register
from .depends import fingerprint, plain_function
from .kinds import Array
from .refuse import NEGATIVE, READ_ONLY, CompileError, reason_of, refuse
from .store import cache_folder, platform, read, write


def infer(function: Callable[..., Any], kinds: Sequence[str | Array], sources: int = 0) -> str:
    """Give the dtype name that a function returns ("none" where it is no number), by type inference alone, remembered on disk.

    `kinds` are the dtype names of numbers, or Arrays, the first `sources` of which may only be read: they can be the
    user's own file. Raises CompileError with the user's own file and line; Refused for
    what no kernel may do.
    """
    key = fingerprint(function, tuple(kinds), sources, "typing, powers", platform())
    folder = cache_folder()
    file = os.path.join(folder, f"{key[:40]}.type") if folder else None
    if key in _inferred:
        return _inferred[key]
    found = read(file) if file else None
    if found:
        return _inferred.setdefault(key, str(found[0]["dtype"]))
    refuse(function)
    from numba.core import registry
    from numba.np.numpy_support import as_dtype

    nt = numba_types()
    register(function)
    target = registry.cpu_target
    target.target_context.refresh()
    target.typing_context.refresh()
    arguments = [
        nt.Array(numba_type(k.dtype), k.ndim, "C", readonly=i < sources) if isinstance(k, Array) else numba_type(k)
        for i, k in enumerate(kinds)
    ]
    typing = _typing()
    try:
        result = typing(plain_function(function), arguments)
    except Exception as error:  # Numba's own have no common base
        reason, where = reason_of(error)
        if not sources or reason == READ_ONLY:
            raise CompileError(reason, where) from None
        try:  # a function of one signature, say, takes no array that is read-only
            result = typing(
                plain_function(function), [a.copy(readonly=False) if hasattr(a, "ndim") else a for a in arguments]
            )
        except Exception:
            raise CompileError(reason, where) from None
    dtype = "none"
    with contextlib.suppress(Exception):  # a string, a tuple: no number
        dtype = as_dtype(nt.unliteral(result)).name
    if file:
        write(file, {"dtype": dtype}, b"")
    return _inferred.setdefault(key, dtype)


_inferred: dict[str, str] = {}


@functools.cache
def _typing() -> Any:
    """Give Numba's compiler cut off after type inference: what it accepts is what a whole compilation would type."""
    from numba.core import compiler, errors, registry
    from numba.core.compiler_machinery import AnalysisPass, PassManager, register_pass
    from numba.core.typed_passes import NoPythonSupportedFeatureValidation, NopythonTypeInference

    nt = numba_types()

    @register_pass(mutates_CFG=False, analysis_only=True)  # type: ignore[untyped-decorator, unused-ignore]
    class Typed(AnalysisPass):  # type: ignore[misc, unused-ignore]
        _name = "jitloader_typed"

        def __init__(self) -> None:
            super().__init__()

        def run_pass(self, state: Any) -> bool:
            for kind in state.typemap.values():  # methods that write, which Numba lets pass
                writes = isinstance(kind, nt.BoundFunction) and kind.typing_key in ("array.sort", "array.fill")
                if writes and not getattr(kind.this, "mutable", True):
                    raise errors.TypingError("Cannot modify readonly array", loc=state.func_ir.loc)
            for block in state.func_ir.blocks.values():
                for expr in block.find_exprs("binop"):
                    base, power = (state.typemap[side.name] for side in (expr.lhs, expr.rhs))
                    below = isinstance(power, nt.IntegerLiteral) and power.literal_value < 0
                    if expr.fn is operator.pow and below and isinstance(base, (nt.Integer, nt.Boolean)):
                        raise errors.TypingError(NEGATIVE, loc=expr.loc)
            raise compiler._EarlyPipelineCompletion(state.return_type)

    class Typing(compiler.CompilerBase):  # type: ignore[misc, unused-ignore]
        def define_pipelines(self) -> list[Any]:
            passes = PassManager("jitloader typing")
            passes.passes.extend(compiler.DefaultPassBuilder.define_untyped_pipeline(self.state).passes)
            passes.add_pass(NopythonTypeInference, "typing")
            passes.add_pass(NoPythonSupportedFeatureValidation, "features")
            passes.add_pass(Typed, "typed")
            passes.finalize()
            return [passes]

    flags = compiler.Flags()
    flags.nrt, flags.error_model = True, "numpy"
    flags.enable_looplift = flags.enable_pyobject = flags.force_pyobject = False

    def run(function: Any, arguments: Sequence[Any]) -> Any:
        target = registry.cpu_target
        contexts = target.typing_context, target.target_context
        return compiler.compile_extra(*contexts, function, arguments, None, flags, {}, pipeline_class=Typing)

    return run

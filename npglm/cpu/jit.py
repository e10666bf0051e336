"""How kernels are compiled, and one cache rule for all of them.

inner    called by other kernels only; LLVM may inline it
entry    called by Python
kernel   compiled once and called by address, so that what calls it is not compiled with it: `.address` compiles it at first use,
         or loads it. Takes int64, returns nothing; an error in it is printed by Numba and sets no exception.

Numba's cache looks at the file of the function alone; here a change in any file of this package makes all entries stale.
"""

import contextlib
import gc
import hashlib
from functools import cached_property
from pathlib import Path

from numba import njit, types
from numba.core import caching

SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _stamped(locator):
    return type(locator.__name__, (locator,), {"get_source_stamp": lambda self: SOURCES})


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [_stamped(c) for c in caching.CompileResultCacheImpl._locator_classes]  # noqa: RUF012


class _Cache(caching.FunctionCache):
    _impl_class = _CacheImpl


def _cache(function):
    try:
        return _Cache(function)
    except RuntimeError:  # no folder to write to: compile in every process
        return caching.NullCache()


@contextlib.contextmanager
def collection_paused():
    """Compiling makes millions of objects that stay: Python's search for garbage among them would be a twelfth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def entry(function, parallel=False):
    """See the module's docstring."""
    dispatcher = njit(error_model="numpy", no_cfunc_wrapper=True, parallel=parallel)(function)
    dispatcher._cache = _cache(function)
    return dispatcher


def compile_entry(dispatcher) -> None:
    """Compile or load an entry before it is called. Its arguments are int64, but for those named eps and scale."""
    names = dispatcher.py_func.__code__.co_varnames[: dispatcher.py_func.__code__.co_argcount]
    dispatcher.compile(tuple(types.float64 if name in ("eps", "scale") else types.int64 for name in names))


class kernel:
    """See the module's docstring."""

    def __init__(self, function):
        self.function, self.__doc__ = function, function.__doc__

    @cached_property
    def compiled(self):
        from numba.core.ccallback import CFunc

        n_args = self.function.__code__.co_argcount
        signature = ((types.int64,) * n_args, types.void)
        made = CFunc(self.function, signature, locals={}, options={"error_model": "numpy"})
        made._cache = _cache(self.function)
        made.compile()
        return made

    @property
    def address(self) -> int:
        return self.compiled.address

"""The door to the native kernels: finds or builds the library, and calls it.

    load() ── NativeLibrary ── kernel("gemm", GemmArgs) ── NativeKernel: pack fields into bytes, call, check the status
                   └────────── NativeContext: one engine's threads, scratch memory and instruction set

A kernel takes one pointer to a plain C struct. Its Python mirror is a ctypes.Structure, checked against the C size when
the kernel is looked up; a call packs the fields into a fresh immutable bytes object, so that it needs no shared buffer,
is safe from any thread, and can be recorded and replayed (tape.py). Only backends/cpu talks to this file.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings
import weakref
from pathlib import Path

from octavo.backends.cpu import native_build
from octavo.backends.cpu.tape import Calls, Tape
from octavo.core.base.errors import BackendUnavailable, ConfigError, OctavoError

ISAS = ("avx512", "avx2", "neon", "portable")
ISA_VARIABLE = "OCTAVO_CPU_ISA"
MAX_THREADS = 1024

_STATUS_TEXT = {1: "an argument is out of range", 2: "out of memory", 3: "no such kernel"}
_STRUCT_CODES: dict[type, str] = {
    ctypes.c_void_p: "P",
    ctypes.c_int64: "q",
    ctypes.c_int32: "i",
    ctypes.c_float: "f",
}


class NativeError(OctavoError):
    """A kernel refused its arguments or found no memory: a bug in its caller, or a machine in trouble."""


class NativeKernel:
    """One kernel, called with its struct's fields in order (pointers as ints, 0 for NULL).

    Attributes:
        name: without the octavo_ prefix.
        address: for a recorded call.
    """

    __slots__ = ("_call", "_pack", "_tape", "address", "name")

    def __init__(self, name: str, address: int, args: type[ctypes.Structure], tape: Tape | None = None) -> None:
        self.name = name
        self.address = address
        self._tape = tape if tape is not None else Tape()
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(address)
        codes = "".join(_STRUCT_CODES[field[1]] for field in args._fields_)
        self._pack = struct.Struct("@" + codes + "0q").pack

    def __call__(self, *fields: float) -> None:
        """Run the kernel; raises NativeError when it says no."""
        args = self._pack(*fields)
        status = self._call(args)
        if status:
            raise NativeError(f"octavo_{self.name}: {_STATUS_TEXT.get(status, f'status {status}')}")
        if self._tape.is_on:
            self._tape.put((self.address, args))

    def record(self, *fields: float) -> tuple[int, bytes]:
        """The call as (address, argument bytes), for NativeLibrary.replay()."""
        return self.address, self._pack(*fields)


class NativeLibrary:
    """The loaded shared library.

    Attributes:
        source_hash: of the sources and flags that it was compiled from, as its file is named.
        compiler: that did it, with its version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source_hash = path.name.split(".")[1]
        library = ctypes.CDLL(str(path))
        self.compiler: str = _prototype(library.octavo_compiler, ctypes.c_char_p)().decode()
        self._kernel_address = _prototype(library.octavo_kernel, ctypes.c_void_p, ctypes.c_char_p)
        self._args_bytes = _prototype(library.octavo_args_bytes, ctypes.c_int64, ctypes.c_char_p)
        self._isa_supported = _prototype(library.octavo_isa_supported, ctypes.c_int, ctypes.c_char_p)
        self._replay = _prototype(library.octavo_replay, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
        self.create_context = _prototype(library.octavo_context_create, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
        self.destroy_context = _prototype(library.octavo_context_destroy, None, ctypes.c_void_p)
        self.context_isa = _prototype(library.octavo_context_isa, ctypes.c_char_p, ctypes.c_void_p)

    def kernel(self, name: str, args: type[ctypes.Structure], tape: Tape | None = None) -> NativeKernel:
        """Look a kernel up by name; args mirrors its C struct.

        Args:
            tape: what its calls are taken down on, when somebody does.

        Raises:
            NativeError: there is none, or the mirror's size is not the struct's.
        """
        address = self._kernel_address(name.encode())
        size_bytes = self._args_bytes(name.encode())
        if address is None or size_bytes != ctypes.sizeof(args):
            raise NativeError(
                f"octavo_{name} takes {size_bytes} bytes; its mirror {args.__name__} has {ctypes.sizeof(args)}"
            )
        return NativeKernel(name, address, args, tape)

    def supported_isas(self) -> list[str]:
        """Instruction sets whose kernels run on this machine, best first."""
        return [isa for isa in ISAS if self._isa_supported(isa.encode())]

    def replay(self, calls: Calls) -> None:
        """Run recorded calls in order without returning to Python; raises NativeError at the first failure."""
        status = self._replay(ctypes.addressof(calls), len(calls))
        if status:
            raise NativeError(f"replay: {_STATUS_TEXT.get(status, f'status {status}')}")


class NativeContext:
    """Threads, scratch memory and instruction set of one engine; contexts don't disturb each other.

    Attributes:
        handle: the address every Args struct begins with.
        isa: instruction set of its kernels.
        num_threads: the calling thread included.
        tape: takes down what its kernels do, when somebody asks for it.
    """

    def __init__(self, library: NativeLibrary, num_threads: int, isa: str | None = None) -> None:
        """Make a context; its threads start with the first parallel call.

        Args:
            isa: one of ISAS; None takes $OCTAVO_CPU_ISA, or else the best that the machine runs.

        Raises:
            ConfigError: num_threads is outside 1..1024, or the instruction set can't run here.
        """
        if not 1 <= num_threads <= MAX_THREADS:
            raise ConfigError(f"num_threads is {num_threads}; give 1 to {MAX_THREADS}", field="num_threads")
        isa = isa or os.environ.get(ISA_VARIABLE) or None
        supported = library.supported_isas()
        if isa is not None and isa not in supported:
            raise ConfigError(
                f"{ISA_VARIABLE} is {isa!r}; this machine runs {', '.join(supported)}", field=ISA_VARIABLE
            )
        self.library = library
        self.handle: int = library.create_context(num_threads, isa.encode() if isa else None)
        if not self.handle:
            raise NativeError("octavo_context_create: out of memory")
        self.num_threads = num_threads
        self.tape = Tape()
        self.isa: str = library.context_isa(self.handle).decode()
        self._finalizer = weakref.finalize(self, library.destroy_context, self.handle)
        self._finalizer.atexit = False  # at exit the system takes the threads; a kernel may still be running

    def kernel(self, name: str, args: type[ctypes.Structure]) -> NativeKernel:
        """A kernel whose calls the tape sees; see NativeLibrary.kernel."""
        return self.library.kernel(name, args, self.tape)

    def close(self) -> None:
        """Join the threads and free the scratch memory; no kernel may be running. Idempotent."""
        self._finalizer()


@functools.cache
def load() -> NativeLibrary | None:
    """The library, built first if need be; None, with one warning, on a machine that has neither library nor compiler.

    Raises:
        BackendUnavailable: the compiler is there and fails, or the library can't be written or loaded.
    """
    try:
        return NativeLibrary(native_build.build())
    except native_build.CompilerMissing as missing:
        warnings.warn(
            f"Octavo's CPU kernels are not built ({missing}); slow reference operations run instead. "
            "Install a C++ compiler (Debian: apt install g++) and start again.",
            stacklevel=2,
        )
        return None
    except native_build.CompileFailed as failed:
        raise BackendUnavailable(f"the CPU kernels don't compile: {failed.first_error}") from failed
    except OSError as error:
        raise BackendUnavailable(f"the CPU kernels can't be built or loaded: {error}") from error


def _prototype(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function.restype = result
    function.argtypes = arguments
    return function

"""Compiles the CPU kernels: the one place that knows their sources, flags and file name.

    native/*.{h,inc,cpp} ──hash──> native/build/liboctavo_cpu.<hash>.so

The hash covers every source and flag, so a library that doesn't match its sources is never loaded: it has another name.
Each instruction set is one translation unit; they compile side by side in a few seconds. Used by setup.py at install
time and by native.py at first use in an uninstalled tree, so this file imports the standard library only and nothing of
Octavo.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent / "native"
BUILD_DIR = SOURCE_DIR / "build"
LOCK_NAME = ".lock"

COMPILE_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-ffp-contract=off",  # a multiply and an add fuse only where the source says so: same bits on every target
    "-fno-math-errno",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # gcc 12's AVX-512 headers trip the last two
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread", "-static-libgcc", "-lm")
GNU_LINK_FLAGS = ("-static-libstdc++",)


class CompilerMissing(Exception):
    """No C++ compiler was found."""


class CompileFailed(Exception):
    """The compiler ran and refused; the message holds the command and its output.

    Attributes:
        first_error: the first line of the output that speaks of an error.
    """

    def __init__(self, command: list[str], output: str) -> None:
        super().__init__(f"{' '.join(command)}\n{output}")
        lines = output.splitlines() or [f"{command[0]} failed without a word"]
        self.first_error = next((line for line in lines if "error" in line), lines[0])


def find_compiler() -> str | None:
    """The C++ compiler to use: $CXX if set, else the first of g++, c++, clang++ on the PATH; None without one."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    return None


def source_hash(source_dir: Path = SOURCE_DIR) -> str:
    """Twelve hex digits over names and contents of all sources, and the flags."""
    digest = hashlib.sha256(repr((COMPILE_FLAGS, LINK_FLAGS)).encode())
    for path in sorted(p for p in source_dir.iterdir() if p.suffix in {".h", ".inc", ".cpp"}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def library_name(source_dir: Path = SOURCE_DIR) -> str:
    """File name of the library that matches the sources."""
    return f"liboctavo_cpu.{source_hash(source_dir)}.so"


def build(out_dir: Path = BUILD_DIR, source_dir: Path = SOURCE_DIR) -> Path:
    """The matching library in out_dir, compiled if it isn't there; stale ones are removed.

    Safe against concurrent builds: a lock file lets one process compile while the others wait, and the library appears
    by rename.

    Raises:
        CompilerMissing: nothing was compiled, nothing changed.
        CompileFailed: with the compiler's output.
    """
    library = out_dir / library_name(source_dir)
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise CompilerMissing("no C++ compiler: neither $CXX nor g++, c++ or clang++ on the PATH")
    out_dir.mkdir(parents=True, exist_ok=True)
    with _locked(out_dir / LOCK_NAME):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=out_dir, prefix="tmp-") as work:
                compiled = _compile(compiler, source_dir, Path(work), library.name)
                if library_name(source_dir) == library.name:
                    compiled.rename(library)
    if not library.exists():  # a source changed under the compiler's hands
        return build(out_dir, source_dir)
    for stale in out_dir.glob("liboctavo_cpu.*.so"):
        if stale != library:
            stale.unlink(missing_ok=True)
    return library


def _compile(compiler: str, source_dir: Path, work: Path, name: str) -> Path:
    """Compile all translation units side by side, link them, and return the library in `work`."""
    sources = sorted(source_dir.glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *COMPILE_FLAGS, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise CompileFailed(command, output)
    gnu = () if "clang" in Path(compiler).name else GNU_LINK_FLAGS
    link = [compiler, *map(str, objects), *LINK_FLAGS, *gnu, "-o", str(work / name)]
    linked = subprocess.run(link, capture_output=True, text=True)
    if linked.returncode != 0:
        raise CompileFailed(link, linked.stdout + linked.stderr)
    return work / name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, across processes."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

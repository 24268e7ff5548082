"""Building and loading the kernels: named by their sources, built once, and clear about what is missing."""

import ctypes
import threading
import warnings

import pytest

from octavo.backends.cpu import native, native_build
from octavo.backends.cpu.gemm import GemmArgs
from octavo.core.base.errors import BackendUnavailable

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def sources(tmp_path):
    """A source folder with one small translation unit."""
    if native_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE % 1)
    return folder


def answer(library):
    return ctypes.CDLL(str(library)).answer()


def test_a_library_is_built_once_and_rebuilt_when_a_source_changes(sources, tmp_path):
    out = tmp_path / "build"
    first = native_build.build(out, sources)
    assert answer(first) == 1
    built = first.stat().st_mtime_ns
    assert native_build.build(out, sources) == first
    assert first.stat().st_mtime_ns == built
    (sources / "answer.cpp").write_text(SOURCE % 2)
    second = native_build.build(out, sources)
    assert second != first
    assert answer(second) == 2
    assert [path.name for path in out.glob("*.so")] == [second.name]  # the stale one is gone


def test_every_source_counts_in_the_name(sources):
    names = {native_build.library_name(sources)}
    for name in ("a.h", "b.inc", "c.cpp"):
        (sources / name).write_text("// new\n")
        names.add(native_build.library_name(sources))
    (sources / "notes.md").write_text("not a source\n")
    names.add(native_build.library_name(sources))
    assert len(names) == 4


def test_a_built_library_needs_no_compiler(sources, tmp_path, monkeypatch):
    library = native_build.build(tmp_path / "build", sources)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native_build.build(tmp_path / "build", sources) == library


def test_concurrent_builds_give_one_library(sources, tmp_path):
    out = tmp_path / "build"
    results = []
    builders = [threading.Thread(target=lambda: results.append(native_build.build(out, sources))) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert {path.name for path in out.iterdir()} == {results[0].name, native_build.LOCK_NAME}


def test_no_compiler_is_said_and_changes_nothing(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native_build.CompilerMissing, match="no C"):
        native_build.build(tmp_path / "build", sources)
    assert not (tmp_path / "build").exists()


def test_a_failing_compiler_stops_the_build(sources, tmp_path):
    (sources / "answer.cpp").write_text("int answer( { }\n")
    with pytest.raises(native_build.CompileFailed) as failed:
        native_build.build(tmp_path / "build", sources)
    assert "answer.cpp" in failed.value.first_error
    assert not list((tmp_path / "build").glob("*.so"))


def test_loading_without_a_compiler_warns_and_gives_nothing(monkeypatch):
    def missing():
        raise native_build.CompilerMissing("no C++ compiler")

    monkeypatch.setattr(native_build, "build", missing)
    with pytest.warns(UserWarning, match="Install a C"):
        assert native.load.__wrapped__() is None


def test_loading_with_a_failing_compiler_says_its_first_error(monkeypatch):
    def failing():
        raise native_build.CompileFailed(["g++", "x.cpp"], "x.cpp: In function f\nx.cpp:3: error: no\n")

    monkeypatch.setattr(native_build, "build", failing)
    with pytest.raises(BackendUnavailable, match=r"x\.cpp:3: error: no"):
        native.load.__wrapped__()


def test_loading_twice_gives_one_library(library):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load() is library


def test_a_mirror_of_the_wrong_size_is_refused(library):
    class Short(ctypes.Structure):
        _fields_ = GemmArgs._fields_[:-2]

    with pytest.raises(native.NativeError, match="mirror"):
        library.kernel("gemm", Short)
    with pytest.raises(native.NativeError, match="octavo_gemmm"):
        library.kernel("gemmm", GemmArgs)

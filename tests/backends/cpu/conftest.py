"""The native library, and contexts that are closed when a test ends."""

import pytest

from octavo.backends.cpu import native

LIBRARY = native.load()
ISAS = LIBRARY.supported_isas() if LIBRARY else []


@pytest.fixture(scope="session")
def library():
    if LIBRARY is None:
        pytest.skip("no C++ compiler: the kernels are not built")
    return LIBRARY


@pytest.fixture(params=ISAS or [None])
def isa(request):
    """Each instruction set that this machine runs."""
    return request.param


@pytest.fixture
def make_context(library):
    """(num_threads, isa) -> a NativeContext."""
    contexts = []

    def make(num_threads=2, isa=None):
        contexts.append(native.NativeContext(library, num_threads, isa))
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()

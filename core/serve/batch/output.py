"""The file that a batch writes: whole or not there; what an interrupted run has done is kept beside it.

    out.jsonl.part   one line appended as each request ends, by one process at a time (flock)
         │ finish(): fsync, rename
    out.jsonl

With `resume` the part file is read again: lines with an answer of status 200 are kept, all others (failed, torn,
double) are dropped, and their requests are asked again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.core.base.errors import ConfigError
from octavo.core.serve.batch.lines import fingerprint


class BatchOutput:
    """Owns the part file from here to `finish` or `close`.

    Args:
        path: of the file to write.
        resume: go on from what an earlier run left.

    Attributes:
        done: fingerprints of the custom_ids that are answered already.

    Raises:
        ConfigError: there is something at `path` that is no file, an earlier run left its part and `resume` is not
            given, another process writes it, or it can't be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path.resolve()  # a link stays one, and leads to the new file
        self.part_path = self._path.with_name(self._path.name + ".part")
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(f"{path} is no file; give a file to write", field="output_file")
        self.done: set[int] = set()
        self._file = self._open(resume)
        try:
            self._keep_answers()
        except OSError as error:
            self._file.close()
            raise ConfigError(f"{self.part_path}: {error.strerror}", field="output_file") from error

    def write(self, line: bytes) -> None:
        """Append one line.

        Raises:
            ConfigError: it can't be written.
        """
        try:
            self._file.write(line)
        except OSError as error:
            raise ConfigError(f"{self.part_path}: {error.strerror}; what was written is kept") from error

    def finish(self) -> None:
        """Every line is there: give the file its name."""
        os.fsync(self._file.fileno())
        os.replace(self.part_path, self._path)
        self._file.close()

    def close(self) -> None:
        """Leave the part as it is; after `finish` nothing happens. An empty part is of no use and goes."""
        if self._file.closed:
            return
        if not os.fstat(self._file.fileno()).st_size:
            self.part_path.unlink(missing_ok=True)
        self._file.close()

    def _open(self, resume: bool) -> BinaryIO:
        try:
            # Unbuffered: a line is with the kernel before the next begins, whatever becomes of this process.
            file = open(self.part_path, "r+b" if self.part_path.exists() else "x+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{self.part_path}: {error.strerror}; give --output-file", field="output_file") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(f"another process writes {self.part_path}", field="output_file") from error
        if not resume and os.fstat(file.fileno()).st_size:
            file.close()
            raise ConfigError(
                f"{self.part_path} holds what an earlier run has done; go on from it with --resume, or remove it",
                field="output_file",
            )
        return file

    def _keep_answers(self) -> None:
        """Move the lines to keep together at the front. Each is written whole before its old place is overwritten."""
        end = 0
        with open(self.part_path, "rb") as reader:
            for line in reader:
                mark = _answered(line)
                if mark is not None and mark not in self.done:
                    self.done.add(mark)
                    self._file.seek(end)
                    self._file.write(line)
                    end += len(line)
        self._file.truncate(end)
        self._file.seek(end)


def _answered(line: bytes) -> int | None:
    """The fingerprint of an answered request's custom_id; None for any other line."""
    if not line.endswith(b"\n"):
        return None
    try:
        content = msgspec.json.decode(line)
        return fingerprint(content["custom_id"]) if content["response"]["status_code"] == 200 else None
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return None

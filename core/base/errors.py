"""The error tree. Every error a user can cause names the field, the limit and the fix, in one line.

OctavoError
├── UserError                 the caller can fix it: exit code 2 on the command line, HTTP 4xx
│   ├── ConfigError           a flag, config key or environment variable            (exit 2)
│   ├── BackendUnavailable    the named backend can't run here, with the reason     (exit 2)
│   ├── CheckpointError       a model directory or file that can't be loaded        (exit 2)
│   ├── ModelNotFound         no such model, locally or on the hub                  (exit 2, HTTP 404)
│   └── InvalidRequest        one request is wrong; the engine goes on              (HTTP 400)
│       └── NeverFits         the request can never fit the KV pool or the context, however long it waits
├── UnsupportedOp             a backend was asked for an op it said it doesn't support
├── RankLost                  a rank of a group ended or did not answer; its communicator is of no more use
├── RequestFailed             one request failed while running (NaN logits, …); the engine goes on
└── EngineDead                the engine stopped; carries the root cause
"""

from __future__ import annotations


class OctavoError(Exception):
    """Root of all errors that Octavo raises on purpose."""


class UserError(OctavoError):
    """An error its caller can fix.

    Attributes:
        field: the argument, flag, key or file at fault; None when there is no single one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(UserError):
    """A flag, config key or environment variable is unknown or out of range."""


class BackendUnavailable(UserError):
    """The chosen backend can't run here; the message carries its probe's reason."""


class CheckpointError(UserError):
    """A model directory or file is missing, truncated, foreign or inconsistent."""


class ModelNotFound(UserError):
    """No model of that name, locally or on the hub."""


class InvalidRequest(UserError):
    """One request is malformed or out of limits; nothing else is affected."""


class NeverFits(InvalidRequest):
    """The request needs more KV blocks than the pool has in all, or more tokens than the context."""


class UnsupportedOp(OctavoError):
    """An op was called with a spec for which `supports()` answered Unsupported."""


class RankLost(OctavoError):
    """Another rank of the group ended or did not answer in time; the message names the collective."""


class RequestFailed(OctavoError):
    """One request failed while running; the engine and its neighbours go on."""


class EngineDead(OctavoError):
    """The engine stopped; the message holds the root cause."""

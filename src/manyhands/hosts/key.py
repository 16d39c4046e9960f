"""The run's key: a secret that every process of a run on several hosts is given.

From it each process makes the same certificate authority (see transport/tls.py). It comes from the variable
MANYHANDS_KEY or from a file that nobody else can read; never from a command line, which every user of a
host can see. It is in no log, no error and no file of the run.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from manyhands.errors import UsageError

VARIABLE = "MANYHANDS_KEY"
MIN_CHARACTERS = 16
"""A shorter one can be guessed; `manyhands key` prints 64."""


def fresh_key() -> str:
    return secrets.token_hex(32)


def read_key(key_file: Path | None) -> str | None:
    """Read the key of this process, from a file or else the environment; None if there is none."""
    if key_file is not None:
        return _checked(_from_file(key_file), f"The file {key_file}")
    text = os.environ.get(VARIABLE)
    return None if not text else _checked(text, VARIABLE)


def _from_file(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise UsageError(
                    f"--key-file {path} has mode {mode:04o}, and others could read it. Type: "
                    f"chmod 600 {path}"
                )
            return file.read(10_000)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(
            f"--key-file {path} can't be read: {reason}. Make one: "
            f"(umask 077; manyhands key > {path})"
        ) from None


def _checked(text: str, where: str) -> str:
    """Strip and check a key. Errors contain its length and nothing else of it."""
    text = text.strip()
    if len(text) < MIN_CHARACTERS or not text.isprintable():
        raise UsageError(
            f"{where} holds {len(text)} characters; a key has at least {MIN_CHARACTERS}, all of them "
            "printable. Make one with  manyhands key."
        )
    return text


def no_key(source: str, command: str = "train ... --on env") -> UsageError:
    """Return the error if a key is required and missing. `command`: what is run on every host."""
    line = f"manyhands {command} --key-file run.key"
    return UsageError(
        f"{source} may name other hosts, and no key was given, so anyone in the network could "
        "join. Make one, and give the same to every process:\n"
        f"    {'(umask 077; manyhands key > run.key)':{len(line)}}  once\n"
        f"    {line}  on every host\n"
        f"or set {VARIABLE} to what  manyhands key  prints."
    )

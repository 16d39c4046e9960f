"""The run's key: where it may come from, and that no error shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.errors import UsageError
from manyhands.hosts.key import fresh_key, read_key


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "run.key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_new_keys_differ_and_are_accepted(tmp_path: Path) -> None:
    first, second = fresh_key(), fresh_key()
    assert first != second
    assert read_key(key_file(tmp_path, first + "\n")) == first


def test_the_file_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_KEY", "e" * 32)
    assert read_key(None) == "e" * 32
    assert read_key(key_file(tmp_path, "f" * 32)) == "f" * 32


def test_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_KEY", raising=False)
    assert read_key(None) is None
    monkeypatch.setenv("MANYHANDS_KEY", "")
    assert read_key(None) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o777])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, "s" * 32, mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}.*chmod 600") as caught:
        read_key(path)
    assert "s" * 32 not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"), [("tooshort", "8 characters"), ("", "0 characters"), ("x" * 20 + "\0", "21")]
)
def test_an_invalid_key_is_refused_without_showing_it(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read_key(key_file(tmp_path, text))
    assert not text or text not in str(caught.value)


def test_a_key_file_that_is_missing_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*manyhands key >"):
        read_key(tmp_path / "none")
    path = key_file(tmp_path, "")
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(UsageError, match="not text"):
        read_key(path)

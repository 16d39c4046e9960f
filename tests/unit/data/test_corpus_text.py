"""Text: words are counted once however the file is divided, and the ids represent the text."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.data import text_files
from manyhands.data.corpus_files import prepare
from manyhands.data.text import Corpus, Vocabulary, count_words, encode
from manyhands.data.text_scan import WordTable, alias_table
from manyhands.errors import DataError, UsageError

SPACES = " \t\n\r\v\f\x1c\x85\u00a0\u1680\u2003\u2028\u202f\u205f\u3000"
texts = st.text(
    alphabet=st.one_of(st.sampled_from("ab" + SPACES), st.characters(exclude_categories=["Cs"])),
    max_size=60,
).map(lambda text: text.replace("\0", "b"))


def write(folder: Path, text: str, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, st.data())
def test_ranges_count_every_word_once(tmp_path: Path, text: str, data: st.DataObject) -> None:
    path = write(tmp_path, text + "x")
    size = path.stat().st_size
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    total: Counter[str] = Counter()
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        total.update(count_words(path, start, stop))
    assert total == Counter((text + "x").split())


def test_words_may_cross_block_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 7)
    text = "eins zwei drei vierundzwanzig f\u00fcnf\u2003sechs\nsieben acht " * 9
    path = write(tmp_path, text)
    assert count_words(path) == Counter(text.split())
    vocabulary = Vocabulary.of(count_words(path), min_count=1)
    encode(path, vocabulary, tmp_path / "ids")
    ids = np.fromfile(tmp_path / "ids", np.int32)
    assert [vocabulary.words[i] for i in ids if i >= 0] == text.split()
    assert np.count_nonzero(ids == -1) == 9  # the last line has no newline, but has words


def test_a_table_grows_and_keeps_its_counts() -> None:
    words = [f"w{number}" for number in range(20_000)]
    table = WordTable.of(words)
    text = np.frombuffer((" ".join(words[::2]) + " ").encode(), np.uint8)
    table.count(text, 0, len(text), ended=True)
    assert [word.decode() for word in table.words()] == words
    assert table.entries.counts[: len(words)].tolist() == [2, 1] * 10_000


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_compressed_files_are_the_same_text(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"text.{suffix}"
    path.write_bytes(pack.compress(b"a b a\nc a b\n"))  # type: ignore[attr-defined]
    assert count_words(path) == {"a": 3, "b": 2, "c": 1}
    with pytest.raises(UsageError, match=r"unpack it first: \w+ -k"):
        count_words(path, 0, 5)
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"truncated|can't be read as"):
        count_words(path)


def pairs(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    return list(zip(vocabulary.words, vocabulary.counts.tolist(), strict=True))


def test_the_order_of_a_vocabulary_is_fixed() -> None:
    counts = {"b": 3, "a": 3, "rare": 1, "c": 9, "d": 2}
    vocabulary = Vocabulary.of(counts, min_count=2, max_words=3)
    assert vocabulary.words == ("c", "a", "b")
    assert vocabulary.counts.tolist() == [9, 3, 3]
    assert vocabulary.ids == {"c": 0, "a": 1, "b": 2}
    reordered = Vocabulary.of(dict(reversed(counts.items())), min_count=2, max_words=3)
    assert pairs(reordered) == pairs(vocabulary)


def test_a_vocabulary_survives_saving(tmp_path: Path) -> None:
    vocabulary = Vocabulary.of({"f\u00fcr": 7, "a\x1cb": 2, "x": 2}, min_count=1)
    vocabulary.save(tmp_path / "words.txt")
    assert pairs(Vocabulary.load(tmp_path / "words.txt")) == pairs(vocabulary)
    (tmp_path / "words.txt").write_text("good 3\nbad\n")
    with pytest.raises(DataError, match="line 2: expected a word, a blank and a count"):
        Vocabulary.load(tmp_path / "words.txt")


def test_frequent_words_are_subsampled_by_the_formula() -> None:
    vocabulary = Vocabulary(("the", "of", "cat"), np.array([9_000, 900, 100]))
    keep = vocabulary.keep_probability(0.01)
    # sample * total is 100: (sqrt(90) + 1) / 90, (sqrt(9) + 1) / 9, and no more than 1.
    assert keep == pytest.approx([0.116520, 0.444444, 1.0], rel=1e-4)
    assert vocabulary.keep_probability(0).tolist() == [1, 1, 1]


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=40))
def test_an_alias_table_represents_its_weights(weights: list[float]) -> None:
    table = alias_table(np.array(weights))
    own = (table >> np.uint64(32)).astype(np.float64) / 2**32
    held = own.copy()
    np.add.at(held, (table & np.uint64(0xFFFFFFFF)).astype(int), 1 - own)
    assert held / len(weights) == pytest.approx(np.array(weights) / sum(weights), abs=1e-7)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a b a c\n", [0, 1, 0, 2]),  # one line has no sentence ends
        ("a b\na c", [0, 1, -1, 0, 2]),
        ("\n\na\n\n \nb zz\nzz\na\n", [0, -1, 1, -1, 0]),  # none for empty or unknown lines
    ],
)
def test_sentences_end_between_lines_with_words(tmp_path: Path, text: str, ids: list[int]) -> None:
    vocabulary = Vocabulary(("a", "b", "c"), np.array([3, 2, 1]))
    count = encode(write(tmp_path, text), vocabulary, tmp_path / "ids")
    found = np.fromfile(tmp_path / "ids", np.int32)
    assert found.tolist() == ids
    assert count == sum(number >= 0 for number in ids)
    assert not list(tmp_path.glob(".*"))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-1, 5), min_size=1, max_size=300), st.integers(4, 40))
def test_the_samples_of_a_corpus_are_the_whole_text(
    tmp_path: Path, ids: list[int], chunk: int
) -> None:
    np.array(ids, np.int32).tofile(tmp_path / "ids")
    corpus = Corpus(tmp_path / "ids", chunk=chunk)
    samples = [corpus[i] for i in range(len(corpus))]
    assert np.concatenate(samples).tolist() == ids
    assert all(0 < len(sample) <= 2 * chunk for sample in samples)
    again = pickle.loads(pickle.dumps(corpus))
    assert again[0].equal(samples[0])
    assert corpus.num_words == sum(number >= 0 for number in ids)


def test_a_corpus_is_cut_at_a_sentence_end_nearby(tmp_path: Path) -> None:
    ids = np.zeros(400, np.int32)
    ids[110] = ids[290] = -1
    ids.tofile(tmp_path / "ids")
    corpus = Corpus(tmp_path / "ids", chunk=100)
    assert [len(corpus[i]) for i in range(len(corpus))] == [111, 89, 100, 100]
    with pytest.raises(IndexError):
        corpus[4]
    assert len(pickle.dumps(corpus)) < 1_000


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_processes_prepare_a_text_together(tmp_path: Path, name: str) -> None:
    """Three at once, one of which is killed: the others get the same complete result."""
    text = ("the cat sat on the mat\n" * 40_000 + "dogs sit too\n" * 3).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    alone = prepare(path, tmp_path / "alone", min_count=2)
    code = (
        "import sys; from manyhands.data import corpus_files as c; c.PIECE_BYTES = 1 << 16\n"
        "vocabulary, file = c.prepare(sys.argv[1], sys.argv[2], min_count=2)\n"
        "print(len(vocabulary), file)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    while not list((tmp_path / "cache").glob("*/.counts-0.lock")):
        time.sleep(0.01)
    processes[0].kill()
    for process in processes[1:]:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        count, _, file = out.strip().partition(" ")
        assert int(count) == len(alone[0])
        assert Path(file).read_bytes() == alone[1].read_bytes()
        assert pairs(Vocabulary.load(Path(file).with_name("vocabulary.txt"))) == pairs(alone[0])
    processes[0].communicate(timeout=10)


def test_prepared_text_is_reused_unless_something_changed(tmp_path: Path) -> None:
    path = write(tmp_path, "a b a b c c\n")
    _, first = prepare(path, tmp_path / "cache", min_count=1)
    made = first.stat().st_mtime_ns
    _, again = prepare(path, tmp_path / "cache", min_count=1)
    assert again == first
    assert again.stat().st_mtime_ns == made
    assert prepare(path, tmp_path / "cache", min_count=2)[1] != first
    path.write_text("a b a b d d\n")
    os.utime(path, ns=(1, 1))
    vocabulary, changed = prepare(path, tmp_path / "cache", min_count=1)
    assert changed != first
    assert "d" in vocabulary.ids


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty: 0 bytes"),
        (b" \n\t ", "no words"),
        (b"\x7fELF\0\0 binary", "is binary, not text: byte 4 is zero"),
        (b"same same same", r"1 distinct word\(s\) \('same'\)"),
        ("caf\u00e9 au lait".encode("latin1"), "not UTF-8.*iconv -f latin1"),
        (b"x" * 1_100_000, "a word of more than"),
    ],
)
def test_files_that_are_not_text_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        prepare(path, tmp_path / "cache", min_count=1)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        prepare(tmp_path / "none.txt", tmp_path / "cache")
    with pytest.raises(DataError, match="is a folder"):
        prepare(tmp_path, tmp_path / "cache")
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = write(tmp_path, "a b")
    path.chmod(0)
    with pytest.raises(DataError, match=r"permission denied. Allow it: chmod u\+r"):
        prepare(path, tmp_path / "cache")


def test_settings_that_leave_no_words_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a a a b b c")
    says = (
        "the most frequent occurs 3 times, the second 2 times. Use a smaller one: --set min_count=2"
    )
    with pytest.raises(UsageError, match=says):
        prepare(path, tmp_path / "cache", min_count=50)
    with pytest.raises(UsageError, match="max_words=1 is not possible"):
        prepare(path, tmp_path / "cache", min_count=1, max_words=1)

"""Vectors: nearest words, and files that gensim reads too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.errors import DataError, UsageError
from manyhands.word2vec.vectors import Vectors

PEER = Path(__file__).parents[3] / "benchmarks" / ".venvs" / "gensim" / "bin" / "python"
"""gensim wants other versions than we do: it has an environment of its own, made by the benchmark."""

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda word: word.split() == [word] and "\0" not in word
)


def test_the_nearest_words_of_a_sum(royals: Vectors) -> None:
    assert royals.most_similar(["king", "woman"], ["man"], count=1)[0][0] == "queen"
    near = royals.most_similar("apple", count=99)
    assert near[0][0] == "pear"
    assert len(near) == 5  # all but itself
    assert [score for _, score in near] == sorted((score for _, score in near), reverse=True)
    assert near[0][1] == pytest.approx(royals.similarity("apple", "pear"))


def test_similarity_is_the_cosine(royals: Vectors) -> None:
    assert royals.similarity("man", "woman") == pytest.approx(1 / np.sqrt(2))
    assert royals.similarity("man", "man") == pytest.approx(1)
    nothing = Vectors(["a", "b"], np.array([[0, 0], [1, 1]], np.float32))
    assert nothing.similarity("a", "b") == 0


def test_an_unknown_word_suggests_similar_ones(royals: Vectors) -> None:
    with pytest.raises(UsageError, match=r"'Quen' is not among the 6 words; the closest .*'queen'"):
        royals.similarity("king", "Quen")
    with pytest.raises(UsageError, match="nothing is similar to it"):
        royals.most_similar("zzzzzzz")
    with pytest.raises(UsageError, match="given no word"):
        royals.most_similar([])


@pytest.mark.parametrize("binary", [True, False])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(words, min_size=1, max_size=6, unique=True), st.integers(1, 5), st.integers(0, 9))
def test_a_saved_file_loads_bit_for_bit(
    tmp_path: Path, binary: bool, words: list[str], width: int, seed: int
) -> None:
    matrix = np.random.default_rng(seed).normal(size=(len(words), width)).astype(np.float32)
    Vectors(words, matrix).save(tmp_path / "file", binary=binary)
    for told in (binary, None):
        again = Vectors.load(tmp_path / "file", binary=told)
        assert again.words == tuple(words)
        assert again.matrix.tobytes() == matrix.tobytes()


def test_the_suffix_chooses_the_format(tmp_path: Path, royals: Vectors) -> None:
    royals.save(tmp_path / "v.bin")
    royals.save(tmp_path / "v.txt")
    assert (tmp_path / "v.txt").read_text().splitlines()[:2] == ["6 3", "man 1.0 0.0 0.0"]
    assert len((tmp_path / "v.bin").read_bytes()) == 4 + sum(len(w) + 2 + 12 for w in royals.words)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected a first line"),
        (b"king 0.1 0.2\n", "expected a first line"),
        (b"2 2\na 1 2\nb 1\n", "line 3: expected a word and 2 numbers, and found 2 fields"),
        (b"2 2\na 1 2\nb 1 x\n", "line 3: could not convert"),
        (b"3 2\nabc \1\2\3\4\5\6\7\x08", "ends in number 2"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=says):
        Vectors.load(tmp_path / "file")


def test_invalid_vectors_are_refused(tmp_path: Path, royals: Vectors) -> None:
    with pytest.raises(UsageError, match="one row per word"):
        Vectors(["a"], np.zeros((2, 3), np.float32))
    with pytest.raises(UsageError, match="occur twice"):
        Vectors(["a", "a"], np.zeros((2, 3), np.float32))
    with pytest.raises(UsageError, match="has a space in it"):
        Vectors(["a b"], np.zeros((1, 3), np.float32)).save(tmp_path / "x")
    with pytest.raises(DataError, match="can't be read: No such file"):
        Vectors.load(tmp_path / "none")


BY_GENSIM = """
import json, sys
from gensim.models import KeyedVectors
folder = sys.argv[1]
found = {}
for name, binary in (("ours.txt", False), ("ours.bin", True)):
    vectors = KeyedVectors.load_word2vec_format(f"{folder}/{name}", binary=binary)
    vectors.save_word2vec_format(f"{folder}/theirs.{name}", binary=binary)
    nearest = vectors.most_similar(positive=["king", "woman"], negative=["man"], topn=3)
    found[name] = [vectors.index_to_key, vectors.vectors.tolist(), nearest]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="no gensim: benchmarks/word2vec.py installs it")
def test_gensim_reads_and_writes_the_same_files(tmp_path: Path, royals: Vectors) -> None:
    royals.save(tmp_path / "ours.txt")
    royals.save(tmp_path / "ours.bin")
    answer = subprocess.run(
        [str(PEER), "-c", BY_GENSIM, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    for name, (words, matrix, nearest) in json.loads(answer.stdout).items():
        assert tuple(words) == royals.words
        assert np.array_equal(np.array(matrix, np.float32), royals.matrix)
        ours = royals.most_similar(["king", "woman"], ["man"], count=3)
        assert [word for word, _ in nearest] == [word for word, _ in ours]
        assert [score for _, score in nearest] == pytest.approx(
            [score for _, score in ours], abs=1e-5
        )
        again = Vectors.load(tmp_path / f"theirs.{name}")
        assert again.words == royals.words
        assert np.array_equal(again.matrix, royals.matrix)


def test_importing_the_package_does_not_import_numba() -> None:
    code = "import sys, manyhands.word2vec; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

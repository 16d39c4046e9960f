"""Evaluations give the figures of gensim and scipy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import DataError
from manyhands.word2vec.evaluation import AnalogyCounts, analogies, pairs, ranks, spearman
from manyhands.word2vec.vectors import Vectors

QUESTIONS = """: royals
man king Woman Queen
man woman king queen
: gram1-fruit
man king woman pear
apple pear king nobody
"""


def test_analogies_by_section_and_kind(tmp_path: Path, royals: Vectors) -> None:
    (tmp_path / "q.txt").write_text(QUESTIONS)
    score = analogies(royals, tmp_path / "q.txt")
    assert score.sections == {"royals": AnalogyCounts(2, 2), "gram1-fruit": AnalogyCounts(0, 1)}
    assert score.left_out == 1
    assert score.semantic == AnalogyCounts(2, 2)
    assert score.syntactic == AnalogyCounts(0, 1)
    assert score.accuracy == pytest.approx(2 / 3)


def test_only_the_most_frequent_words_count(tmp_path: Path, royals: Vectors) -> None:
    (tmp_path / "q.txt").write_text(QUESTIONS)
    score = analogies(royals, tmp_path / "q.txt", restrict=3)
    assert score.total == AnalogyCounts(0, 0)
    assert score.left_out == 4
    assert score.accuracy == 0


def test_the_given_words_are_excluded_from_answers(tmp_path: Path) -> None:
    """Nearest to b - a + c is c itself; the next one counts."""
    vectors = Vectors(
        ["a", "b", "c", "D"], np.array([[1, 0], [1, 0], [0, 1], [0.1, 1]], np.float32)
    )
    (tmp_path / "q.txt").write_text(": s\na b c d\n")
    assert analogies(vectors, tmp_path / "q.txt").accuracy == 1


@pytest.mark.parametrize(
    "text",
    [
        "apple\tpear\t10\nman\twoman\t7\nman\tapple\t1\nman\tghost\t3\n",
        "# Some words\n# word 1\tword 2\tmean\napple\tpear\t10\nMan\twoman\t7\nman\tapple\t1\nx\ty\t1\n",
        "word1,word2,score\napple,pear,10\nman,woman,7\nman,apple,1\nx,y,2\n",
        "apple pear 10\nman woman 7\n\nman apple 1\nx y 1\n",
    ],
)
def test_pairs_in_all_their_formats(tmp_path: Path, royals: Vectors, text: str) -> None:
    (tmp_path / "pairs").write_text(text)
    correlation, found, asked = pairs(royals, tmp_path / "pairs")
    assert (found, asked) == (3, 4)
    assert correlation == pytest.approx(1)


def test_malformed_files_are_refused(tmp_path: Path, royals: Vectors) -> None:
    (tmp_path / "x").write_text("one two three four\n")
    with pytest.raises(DataError, match="line 1: expected ': section' or four words"):
        analogies(royals, tmp_path / "x")
    (tmp_path / "x").write_text(": empty\n")
    with pytest.raises(DataError, match="no analogies"):
        analogies(royals, tmp_path / "x")
    (tmp_path / "x").write_text("man woman 1\nking queen much\n")
    with pytest.raises(
        DataError, match="line 2: expected a number after two words, and found 'much'"
    ):
        pairs(royals, tmp_path / "x")
    with pytest.raises(DataError, match="No such file"):
        pairs(royals, tmp_path / "none")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_spearman_with_ties_matches_scipy(values: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    x, y = np.array(values, float).T
    assert ranks(x).tolist() == stats.rankdata(x).tolist()
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    else:
        assert np.isnan(spearman(x, y))

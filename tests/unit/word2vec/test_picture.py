"""The picture is well-formed, names all words, and no label covers another."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import numpy as np
import pytest

from manyhands.errors import UsageError
from manyhands.word2vec import picture
from manyhands.word2vec.picture import HEIGHT, WIDTH, Dot, _labels, neighbourhood
from manyhands.word2vec.vectors import Vectors

SVG = "{http://www.w3.org/2000/svg}"


def crowd(size: int, width: int = 8) -> Vectors:
    random = np.random.default_rng(0)
    words = [f"word{'x' * (number % 9)}{number}" for number in range(size)]
    return Vectors(words, random.normal(size=(size, width)).astype(np.float32))


def test_all_words_are_labelled_in_their_colours(royals: Vectors) -> None:
    root = ElementTree.fromstring(neighbourhood(royals, ["king", "apple"], count=2))
    labels = {text.text: text.get("class") for text in root.iter(f"{SVG}text")}
    assert labels["king"] == "g0"
    assert labels["apple"] == "g1"
    assert labels["pear"] == "g1"
    assert labels["queen"] == "g0"
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_words_are_escaped() -> None:
    words = ["<b>&", '"x"', "日本"]
    svg = neighbourhood(Vectors(words, np.eye(3, dtype=np.float32)), ["<b>&"])
    found = {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert set(words) <= found


@pytest.mark.parametrize(("asked", "count"), [(1, 8), (6, 8), (10, 6)])
def test_no_label_covers_another_or_a_dot(asked: int, count: int) -> None:
    vectors = crowd(400)
    svg = neighbourhood(vectors, vectors.words[:asked], count=count)
    root = ElementTree.fromstring(svg)
    circles = list(root.iter(f"{SVG}circle"))
    dots = [
        Dot(
            text.text or "",
            float(c.get("cx") or 0),
            float(c.get("cy") or 0),
            0,
            text.get("font-weight") == "700",
        )
        for c, text in zip(circles, list(root.iter(f"{SVG}text"))[:-1], strict=True)
    ]
    assert len({dot.word for dot in dots}) == len(dots) > count
    boxes = _labels(dots)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].meets(pair[1])]
    for box in boxes:
        assert 0 <= box.left < box.right <= WIDTH
        assert 0 <= box.top < box.bottom <= HEIGHT
        assert not any(
            box.left < dot.x < box.right and box.top < dot.y < box.bottom for dot in dots
        )


def test_the_same_vectors_give_the_same_picture(royals: Vectors) -> None:
    assert neighbourhood(royals, "king") == neighbourhood(royals, ["king", "king"])


def test_impossible_pictures_are_refused(royals: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="0 words with 8 neighbours"):
        neighbourhood(royals, [])
    with pytest.raises(UsageError, match="'kingg' is not among"):
        neighbourhood(royals, ["kingg"])
    for name, size in (("WIDTH", 240), ("HEIGHT", 160), ("MARGIN", 30)):
        monkeypatch.setattr(picture, name, size)
    with pytest.raises(UsageError, match="too full for the label"):
        neighbourhood(crowd(400), crowd(400).words[:10], count=8)


def test_long_words_are_cut_and_many_are_counted() -> None:
    vectors = Vectors(["w" * 500, *"abcdefghi"], np.eye(10, dtype=np.float32))
    root = ElementTree.fromstring(neighbourhood(vectors, vectors.words, count=2))
    labels = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "w" * 31 + "…" in labels
    assert "e and 4 more" in labels[-1]

"""Draws words and their nearest neighbours in the plane, as an SVG.

The normalized vectors are projected on their first two principal components. Each query word has a colour,
which its neighbours share; thin lines connect them. Labels are placed one after another, query words first,
each at the nearest free place around its dot: no label covers another label or a dot. Colours follow the
light or dark background of the reader.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import UsageError
from manyhands.word2vec.vectors import Vectors

WIDTH, HEIGHT, MARGIN = 960, 640, 70
FOOT = 34
"""Pixels below the dots, for the caption."""
DOT = 4.0
SMALL, BIG = 13, 17
"""Font sizes of labels: of a neighbour, of a query word."""
LONGEST = 32
"""Maximum letters of a label; the rest is cut off."""
NAMED = 6
"""Maximum number of query words in the caption."""
LIGHT = ("#1f5fa8", "#b3401f", "#2c7a3d", "#7a3fa0", "#94640a", "#0f7479", "#a82c66", "#55606b")
DARK = ("#7db4f0", "#f39b7d", "#86cf95", "#c9a0ea", "#e3bd63", "#6fcdd2", "#ee94bb", "#b4bec8")


@dataclass(frozen=True)
class Box:
    """A rectangle on the page."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        across = max(self.left, other.left) < min(self.right, other.right)
        return across and max(self.top, other.top) < min(self.bottom, other.bottom)

    def within_page(self) -> bool:
        right, bottom = WIDTH - 2, HEIGHT - FOOT
        return min(self.left, self.top) >= 2 and self.right <= right and self.bottom <= bottom


@dataclass(frozen=True)
class Dot:
    word: str
    x: float
    y: float
    group: int
    """The query word that it belongs to."""
    asked: bool


def neighbourhood(vectors: Vectors, words: Iterable[str], count: int = 8) -> str:
    """Return an SVG of words and the `count` nearest words of each."""
    asked = list(dict.fromkeys([words] if isinstance(words, str) else words))
    if not asked or count < 1:
        raise UsageError(
            f"neighbourhood: {len(asked)} words with {count} neighbours each can't be drawn: give at "
            'least one of both, as neighbourhood(vectors, ["king", "paris"], count=8).'
        )
    groups = {word: number for number, word in enumerate(asked)}
    near = {word: vectors.most_similar(word, count=count) for word in asked}
    for word in asked:
        for other, _ in near[word]:
            groups.setdefault(other, groups[word])
    chosen = list(groups)
    places, share = _plane(vectors.unit[[vectors.id_of(word) for word in chosen]])
    dots = [
        Dot(word, float(x), float(y), groups[word], word in near)
        for word, (x, y) in zip(chosen, places, strict=True)
    ]
    return _svg(dots, asked, share)


def _plane(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
    """Return positions by two principal components, and their share of the variance."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    flat = np.zeros((len(rows), 2))
    flat[:, : min(2, len(sizes))] = left[:, :2] * sizes[:2]
    # The sign of a component is arbitrary: fix it, so that the same vectors give the same picture.
    flat *= np.where(flat[np.abs(flat).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    low, high = flat.min(axis=0), flat.max(axis=0)
    room = np.array([WIDTH - 2 * MARGIN, HEIGHT - FOOT - 2 * MARGIN])
    # One scale for both axes preserves distances.
    scale = float(np.min(room / np.maximum(high - low, 1e-9)))
    middle = np.array([WIDTH / 2, (HEIGHT - FOOT) / 2])
    places: NDArray[np.float64] = (flat - (low + high) / 2) * scale + middle
    total = float((sizes**2).sum())
    return places, float((sizes[:2] ** 2).sum()) / total if total else 1.0


def _svg(dots: Sequence[Dot], asked: Sequence[str], share: float) -> str:
    queries = {dot.group: dot for dot in dots if dot.asked}
    # Query words get the best places.
    order = sorted(dots, key=lambda dot: (not dot.asked, dot.word))
    labels = _labels(order)
    more = f" and {len(asked) - NAMED} more" if len(asked) > NAMED else ""
    title = escape("Nearest words of " + ", ".join(map(_label, asked[:NAMED])) + more)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="system-ui, sans-serif">',
        f"<title>{title}</title>",
        f"<style>{_style(len(asked))}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for dot in dots:
        query = queries[dot.group]
        if not dot.asked:
            lines.append(_line("tie", query.x, query.y, dot.x, dot.y, dot.group))
    for dot, box in zip(order, labels, strict=True):
        near_x = min(max(dot.x, box.left), box.right)
        near_y = min(max(dot.y, box.top), box.bottom)
        if math.hypot(near_x - dot.x, near_y - dot.y) > 3 * DOT:
            lines.append(_line("lead", dot.x, dot.y, near_x, near_y, dot.group))
    for dot, box in zip(order, labels, strict=True):
        size = BIG if dot.asked else SMALL
        radius = 1.5 * DOT if dot.asked else DOT
        weight = ' font-weight="700"' if dot.asked else ""
        lines.append(
            f'<circle class="g{dot.group}" cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="{radius:g}"/>'
        )
        lines.append(
            f'<text class="g{dot.group}" x="{box.left:.1f}" y="{box.bottom - 0.28 * size:.1f}" '
            f'font-size="{size}"{weight}>{escape(_label(dot.word))}</text>'
        )
    caption = f"{title}: two principal components, {share:.0%} of the variance."
    lines.append(f'<text class="note" x="16" y="{HEIGHT - 12}" font-size="12">{caption}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float, group: int) -> str:
    return (
        f'<line class="{kind} s{group}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    )


def _style(num_groups: int) -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(
            f".g{i}{{fill:{palette[i % len(palette)]}}}.s{i}{{stroke:{palette[i % len(palette)]}}}"
            for i in range(num_groups)
        )

    light = ".page{fill:#ffffff}.note{fill:#55606b}" + colours(LIGHT)
    dark = ".page{fill:#14181d}.note{fill:#b4bec8}" + colours(DARK)
    lines = ".tie{stroke-width:1;opacity:.22}.lead{stroke-width:1;opacity:.7}"
    return f"{lines}{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _labels(dots: Sequence[Dot]) -> list[Box]:
    """Return a box for the label of each dot; none overlaps another or a dot."""
    taken = [
        Box(dot.x - 1.5 * DOT, dot.y - 1.5 * DOT, dot.x + 1.5 * DOT, dot.y + 1.5 * DOT)
        for dot in dots
    ]
    for dot in dots:
        size = BIG if dot.asked else SMALL
        width = _length(_label(dot.word)) * size * (1.16 if dot.asked else 1.03)
        box = next(
            box
            for box in _candidates(dot, width, size)
            if box.within_page() and not any(box.meets(other) for other in taken)
        )
        taken.append(box)
    return taken[len(dots) :]


def _candidates(dot: Dot, width: float, size: int) -> Iterator[Box]:
    """Yield places around a dot, at growing distance."""
    height = 1.25 * size
    for ring in range(60):
        gap = 1.5 * DOT + 2 + 7 * ring
        steps = 8 + 4 * ring
        for step in range(steps):
            angle = 2 * math.pi * step / steps
            x, y = math.cos(angle), math.sin(angle)
            # The side of the box that faces the dot touches the ring.
            middle_x = dot.x + x * gap + (x > 0.3) * width / 2 - (x < -0.3) * width / 2
            middle_y = dot.y + y * gap + (y > 0.3) * height / 2 - (y < -0.3) * height / 2
            left, top = middle_x - width / 2, middle_y - height / 2
            yield Box(left, top, left + width, top + height)
    raise UsageError(
        f"The picture is too full for the label {dot.word!r}: ask for fewer words or fewer neighbours."
    )


def _label(word: str) -> str:
    return word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"


def _length(word: str) -> float:
    """Estimate the length of a word, in units of its font size."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in word)
    slim = sum(letter in "iljtfr.,'|!" for letter in word)
    return 0.60 * (len(word) - wide - slim) + 0.36 * slim + 1.0 * wide + 0.2

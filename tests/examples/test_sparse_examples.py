"""The sparse examples as people run them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.compute.evaluation import EvalSamples, evaluate
from manyhands.job import load_job
from manyhands.testing import harness

EXAMPLES = Path(__file__).parents[2] / "examples"
TOPICS = [[f"{topic}{i}" for i in range(12)] for topic in ("sea", "wood", "town", "star")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences about one topic each, with neutral words in between."""
    draw = random.Random(3)
    lines = []
    for _ in range(9000):
        topic = draw.choice(TOPICS)
        words = [
            draw.choice(topic) if draw.random() < 0.7 else f"any{draw.randrange(30)}"
            for _ in range(12)
        ]
        lines.append(" ".join(words))
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n".join(lines))
    return path


def run(*arguments: str, folder: Path, cache: Path) -> harness.Finished:
    with harness.command(*arguments, run=folder, environ={"XDG_CACHE_HOME": str(cache)}) as running:
        return running.wait()


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        pytest.param("ps:async", (), marks=pytest.mark.long),
        pytest.param("ps:async", ("cbow=true",), marks=pytest.mark.long),
        pytest.param("ps:async(transport=tcp)", (), marks=pytest.mark.long),
        pytest.param("allreduce", ("direct=false",), marks=pytest.mark.long),
        pytest.param("allreduce(tables=shared)", (), marks=pytest.mark.long),
    ],
)
def test_related_words_are_neighbours(
    strategy: str, fields: tuple[str, ...], text: Path, tmp_path: Path
) -> None:
    job, folder = str(EXAMPLES / "word2vec.py"), tmp_path / "run"
    settings = [f"text={text}", "dim=16", "sample=0", "epochs=6", "batch_size=8", *fields]
    flags = [word for setting in settings for word in ("--set", setting)]
    done = run(
        *("train", job, "--strategy", strategy, "--workers", "2", "--run-dir", str(folder)),
        *flags,
        folder=folder,
        cache=tmp_path,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    if "direct=false" in fields:
        assert done.losses[-1] < 0.8 * done.losses[0]
        return
    assert "words/s" in done.out
    if strategy == "ps:async":
        assert {len(step["shares"]) for step in done.steps} == {1}, "a batch is one worker's"
    right = 0
    for topic in TOPICS:
        told = run(
            *("words", str(folder), "--similar", topic[0], "--count", "8"),
            folder=folder,
            cache=tmp_path,
        )
        assert told.code == 0, told.err
        neighbours = [line.split()[1] for line in told.out.splitlines()[1:]]
        assert len(neighbours) == 8
        right += sum(word in topic for word in neighbours)
    assert right >= 26, "of 32 neighbours"


def test_vectors_are_saved_evaluated_and_drawn(text: Path, tmp_path: Path) -> None:
    job, folder = str(EXAMPLES / "word2vec.py"), tmp_path / "run"
    done = run(
        *("train", job, "--strategy", "single", "--run-dir", str(folder), "--set", f"text={text}"),
        *("--set", "epochs=1", "--set", "dim=8"),
        folder=folder,
        cache=tmp_path,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("sea0\tsea1\t9\nsea0\ttown1\t1\nwood2\twood3\t8\nstar1\twood1\t2\n")
    analogies = tmp_path / "analogies.txt"
    analogies.write_text(": seas\nsea0 sea1 sea2 sea3\n")
    picture, saved = tmp_path / "words.svg", tmp_path / "vectors.bin"
    told = run(
        *("words", str(folder), "--pairs", str(pairs), "--analogies", str(analogies)),
        *("--picture", "sea0,star0", "--out", str(picture), "--save", str(saved)),
        folder=folder,
        cache=tmp_path,
    )
    assert told.code == 0, told.err
    assert "4 of 4 pairs" in told.out
    assert "1 questions" in told.out
    assert picture.read_text().startswith("<svg")
    model = mh.load(folder)
    assert isinstance(model, mh.words.WordModel)
    number = list(model.vocabulary.words).index("sea0")
    rows = model.look_up("inputs", torch.tensor([number]))
    assert mh.words.Vectors.load(saved)["sea0"] == pytest.approx(rows[0].numpy())
    again = run("words", str(saved), "--similar", "sea0,sea1,-sea2", folder=folder, cache=tmp_path)
    assert again.code == 0, again.err
    assert len(again.out.splitlines()) == 11
    wrong = run("words", str(saved), "--similar", "see0", folder=folder, cache=tmp_path)
    assert wrong.code == 2
    assert "sea0" in wrong.err
    assert "Traceback" not in wrong.err


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (None, [], "word2vec needs a text"),
        (b"", [], "empty"),
        (bytes(range(256)) * 64, [], "binary"),
        (b"one " * 100, [], "1 distinct word"),
        (b"a b c d e f", [], "min_count=5 leaves 0"),
        (b"a b " * 100, ["dim=0"], "dim"),
    ],
    ids=["none", "empty", "binary", "one word", "rare words", "no dimensions"],
)
def test_bad_texts_are_named(
    content: bytes | None, settings: list[str], words: str, tmp_path: Path
) -> None:
    path, folder = tmp_path / "text", tmp_path / "run"
    if content is not None:
        path.write_bytes(content)
        settings = [f"text={path}", *settings]
    flags = [word for setting in settings for word in ("--set", setting)]
    job = str(EXAMPLES / "word2vec.py")
    done = run(
        *("train", job, "--strategy", "single", "--run-dir", str(folder), *flags),
        folder=folder,
        cache=tmp_path,
    )
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err
    assert not folder.exists(), "nothing was trained: no folder to wonder about"


@pytest.mark.long
def test_clicks_approaches_the_true_rates(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(
        *("train", str(EXAMPLES / "clicks.py"), "--strategy", "ps:async", "--workers", "2"),
        *("--run-dir", str(folder), "--set", "samples=60000"),
        folder=folder,
        cache=tmp_path,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    last = done.of("Evaluated")[-1]["metrics"]
    assert last["loss"] < 0.597, "whoever always says how often people click has 0.607"
    model = mh.load(folder, step="last")
    job = load_job(str(EXAMPLES / "clicks.py"), {"samples": "60000"})
    found = evaluate(job, model, EvalSamples(job.eval_data()), device="cpu")["sums"]
    assert {name: value / weight for name, (value, weight) in found.items()} == pytest.approx(last)

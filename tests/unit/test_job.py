"""Job files: common mistakes are explained, with what to write instead."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import JobError, UsageError
from manyhands.job import Job, check_fields, load_job

GOOD = '''
from dataclasses import dataclass
import manyhands as mh

@dataclass
class Digits(mh.Job):
    """Digits."""
    lr: float = 0.1
    hidden: int = 32
    fast: bool = False
    name: str = "x"
    decay: float | None = None
    cycles: int | float = 3
    layers: tuple = (1, 2)

    def model(self): ...
    def optimizer(self, params): ...
    def data(self): ...
    def loss(self, output, batch): ...
'''
Write = Callable[..., str]
_number = itertools.count()


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Return a function that writes job files with unique names; unload their modules afterwards."""
    modules, path = set(sys.modules), list(sys.path)

    def write_file(text: str = GOOD, name: str | None = None) -> str:
        file = tmp_path / (name or f"job_{next(_number)}.py")
        file.write_text(text)
        return str(file)

    yield write_file
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("manyhands_job_", "helper_")):
            del sys.modules[name]


def refused(reference: str, says: str, **settings: str) -> str:
    with pytest.raises(UsageError, match=says) as caught:
        load_job(reference, settings)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_complete_job_loads(write: Write) -> None:
    job = load_job(write(), {"lr": "0.5"})
    assert type(job).__name__ == "Digits"
    assert job.fields()["lr"] == 0.5
    assert (job.fields()["hidden"], job.batch_size, job.epochs) == (32, 32, 1)


def test_a_missing_job_file_is_reported(tmp_path: Path) -> None:
    refused(str(tmp_path / "none.py"), r"There is no file .*none\.py\.$")
    refused(str(tmp_path / "none"), r"There is no file .*none \(a job is a Python file: path\.py")
    refused(str(tmp_path), "A job is a Python file, path.py or path.py:Name")
    (tmp_path / "notes.txt").touch()
    refused(str(tmp_path / "notes.txt"), "A job is a Python file")


def test_a_file_without_a_job(write: Write) -> None:
    message = refused(write("x = 1\n"), "has no Job. Write one")
    assert "class MyJob(mh.Job):" in message
    refused(write("from manyhands import Job\n"), "has no Job")


def test_one_of_several(write: Write) -> None:
    text = GOOD + "\n@dataclass\nclass Letters(Digits):\n    lr: float = 7.0\n"
    path = write(text)
    assert type(load_job(path)).__name__ == "Digits"
    assert load_job(f"{path}:Letters").fields()["lr"] == 7.0
    refused(f"{path}:Lettres", "no Job called 'Lettres'; did you mean 'Letters'. It has: Digits, L")
    refused(f"{path}:Zzz", r"no Job called 'Zzz'\. It has: Digits, Letters")
    refused(f"{write('x = 1')}:Zzz", r"no Job called 'Zzz'\. It has: none")


@pytest.mark.parametrize("method", ["model", "optimizer", "data", "loss"])
def test_a_missing_method(write: Write, method: str) -> None:
    lines = [line for line in GOOD.splitlines() if f"def {method}(" not in line]
    message = refused(write("\n".join(lines)), rf"Digits in .*\.py lacks {method}\(\)\.")
    assert "must have model(), optimizer(), data(), loss()" in message


def test_fields_without_a_dataclass(write: Write) -> None:
    text = GOOD.replace("@dataclass\n", "")
    refused(write(text), r"has fields \(lr, hidden, .*\) but is not a dataclass: write @dataclass")


def test_a_syntax_error_is_shown_in_its_line(write: Write) -> None:
    path = write("import manyhands\n\nclass Digits(manyhands.Job)\n    pass\n")
    message = refused(path, r"job_\d+\.py, line 3: expected ':'")
    _, shown, caret = message.splitlines()
    assert shown == "    class Digits(manyhands.Job)"
    assert caret.index("^") == len(shown)
    message = refused(write("def f():\n    return 1 +* 2\n"), "line 2: invalid syntax")
    _, shown, caret = message.splitlines()
    assert shown[caret.index("^")] == "*"
    refused(write("def f():\npass\n"), "line 2: expected an indented block")
    refused(write("x = '\n"), "line 1: unterminated string")


def test_a_syntax_error_in_a_neighbour(write: Write) -> None:
    write("def f(:\n", name="helper_broken.py")
    refused(write("import helper_broken\n"), r"helper_broken\.py, line 1: invalid syntax")


def test_an_import_that_is_missing(write: Write) -> None:
    says = r"job_\d+\.py, line 2: No module named 'nonesuch'. Install it: pip install nonesuch$"
    refused(write("import sys\nimport nonesuch\n"), says)
    # Of a package only the first name can be installed.
    refused(write("import nonesuch.deep.down\n"), "pip install nonesuch$")
    message = refused(write("from math import cosinus\n"), "line 1 can't be imported: ImportError")
    assert "pip" not in message


def test_any_other_error_names_its_line(write: Write) -> None:
    refused(write("x = 1\ny = x / 0\n"), r"line 2 can't be imported: ZeroDivisionError: division")
    path = write("x = 1 / 0\n")
    for _ in range(2):  # a failed import leaves nothing that a second try would find
        refused(path, "ZeroDivisionError")


def test_a_neighbour_can_be_imported(write: Write) -> None:
    write("WIDTH = 77\n", name="helper_fine.py")
    text = GOOD.replace("import manyhands as mh", "import manyhands as mh\nimport helper_fine")
    assert load_job(write(text.replace("= 32", "= helper_fine.WIDTH"))).fields()["hidden"] == 77


def test_a_misspelt_setting(write: Write) -> None:
    message = refused(
        write(), "--set hiden=3: .* no field 'hiden'; did you mean 'hidden'", hiden="3"
    )
    assert "batch_size" in message
    refused(write(), r"no field 'zzzzzz'\. Its fields: accumulate,", zzzzzz="3")
    refused(write(), "did you mean 'batch_size'", batchsize="3")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "1e-3", 1e-3),
        ("lr", "2", 2.0),
        ("hidden", "64", 64),
        ("fast", "Yes", True),
        ("fast", "0", False),
        ("name", "none", "none"),
        ("decay", "None", None),
        ("decay", "0.5", 0.5),
        ("cycles", "5", 5),
        ("cycles", "2.5", 2.5),
        ("clip_norm", "1", 1.0),
        ("patience", "null", None),
        ("patience", "3", 3),
    ],
)
def test_a_setting_gets_the_type_of_its_field(
    write: Write, name: str, text: str, value: Any
) -> None:
    got = load_job(write(), {name: text}).fields()[name]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("hidden", "3.5", "--set hidden=3.5: hidden is a whole number"),
        ("hidden", "many", "hidden is a whole number"),
        ("hidden", "", "hidden is a whole number"),
        ("lr", "fast", "--set lr=fast: lr is a number"),
        ("fast", "maybe", "fast is true or false"),
        ("fast", "2", "fast is true or false"),
        ("decay", "x", "decay is a number"),
        ("cycles", "x", "cycles is a number"),
        ("patience", "soon", "patience is a whole number"),
        ("layers", "1;2", "layers is written as in Python, such as  --set .layers=.64, 32."),
        ("batch_size", "0", "batch_size must be a whole number of at least 1, and is 0"),
        ("epochs", "-1", "epochs must be a whole number of at least 1"),
        ("accumulate", "0", "accumulate must be"),
        ("eval_every", "0", "eval_every must be"),
        ("patience", "-2", "patience must be a whole number of at least 1, or None, and is -2"),
        ("patience", "0", "patience must be"),
        ("clip_norm", "0", "clip_norm must be a number above 0, or None, and is 0.0"),
        ("clip_norm", "nan", "clip_norm must be"),
        ("loader_processes", "-1", "loader_processes must be a whole number, 0 or more"),
    ],
)
def test_a_wrong_value(write: Write, name: str, text: str, says: str) -> None:
    refused(write(), says, **{name: text})


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size": 2.5},
        {"batch_size": None},
        {"epochs": "3"},
        {"epochs": True},
        {"patience": "3"},
        {"patience": 1.5},
        {"clip_norm": "1"},
        {"loader_processes": None},
        {"seed": "x"},
        {"monitor": None},
    ],
    ids=str,
)
def test_a_wrong_value_in_the_file_itself(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(JobError, match=f"^{name} must be .*, and is {fields[name]!r}"):
        check_fields(Job(**fields))


def test_a_type_imported_for_type_checkers_only(write: Write) -> None:
    text = "from __future__ import annotations\n" + GOOD
    text = text.replace("layers: tuple", "layers: Nowhere")
    assert load_job(write(text)).batch_size == 32
    refused(write(text), "types of the fields of Digits.*'Nowhere' is not defined", lr="1")


def test_a_job_that_can_not_be_built(write: Write) -> None:
    text = GOOD + "\n    def __post_init__(self): raise ValueError('hidden and lr do not go')\n"
    refused(write(text), r"Digits in .*\.py can't be built: hidden and lr do not go")


def test_defaults_of_methods() -> None:
    job = Job()
    for method in (job.model, job.data):
        with pytest.raises(NotImplementedError):
            method()
    assert (job.eval_data(), job.schedule(None, 3), job.weight([1])) == (None, None, None)  # type: ignore[arg-type]
    assert (job.inputs(["x", "y"]), job.metrics(0, 0)) == ("x", {})
    assert [value.tolist() for value in job.collate([(1, 2.0), (3, 4.0)])] == [[1, 3], [2.0, 4.0]]

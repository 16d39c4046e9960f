"""Finding a job: a script, a file of a package, a module; and errors if there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.errors import JobError, RunFolderError
from manyhands.job import find_job, job_of_run

JOB = """
from dataclasses import dataclass
import manyhands as mh
{imports}

@dataclass
class Net(mh.Job):
    width: int = WIDTH
    def model(self): ...
    def optimizer(self, params): ...
    def data(self): ...
    def loss(self, output, batch): ...
"""


def package(root: Path, *, imports: str, with_init: bool = True) -> Path:
    """proj/pkg/jobs/net.py, proj/pkg/jobs/sizes.py, proj/pkg/common.py"""
    folder = root / "proj" / "pkg" / "jobs"
    folder.mkdir(parents=True)
    if with_init:
        (folder / "__init__.py").touch()
        (folder.parent / "__init__.py").touch()
    (folder / "sizes.py").write_text("WIDTH = 7\n")
    (folder.parent / "common.py").write_text("WIDTH = 8\n")
    (folder / "net.py").write_text(JOB.format(imports=imports))
    return root / "proj"


def load(reference: str, *, cwd: Path) -> str:
    """Return the width of the job, or the error, from another process, as a member loads it."""
    program = (
        "import sys\nfrom manyhands.errors import JobError\nfrom manyhands.job import load_job\n"
        "try: print(load_job(sys.argv[1]).width)\nexcept JobError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, reference]
    return subprocess.run(
        command, cwd=cwd, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize(
    ("imports", "width"),
    [
        ("from .sizes import WIDTH", 7),
        ("from ..common import WIDTH", 8),
        ("from pkg.common import WIDTH", 8),
        ("from sizes import WIDTH", 7),
    ],
)
def test_a_file_of_a_package(tmp_path: Path, imports: str, width: int) -> None:
    package(tmp_path, imports=imports)
    assert load("proj/pkg/jobs/net.py", cwd=tmp_path) == str(width)


def test_a_module_from_the_working_folder_and_from_elsewhere(tmp_path: Path) -> None:
    for with_init in (True, False):
        root = package(
            tmp_path / str(with_init), imports="from .sizes import WIDTH", with_init=with_init
        )
        assert load("pkg.jobs.net:Net", cwd=root) == "7"
        assert load("pkg.jobs.net", cwd=root) == "7"
        program = (
            "import sys; from manyhands.job import find_job; print(find_job(sys.argv[1]).anywhere)"
        )
        told = subprocess.run(
            [sys.executable, "-c", program, "pkg.jobs.net:Net"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        assert load(told, cwd=tmp_path) == "7"


def test_finding_a_job_runs_none_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = package(tmp_path, imports="from .sizes import WIDTH")
    (root / "pkg" / "__init__.py").write_text("raise AssertionError\n")
    monkeypatch.chdir(root)
    found = find_job("pkg.jobs.net:Net")
    assert found == find_job("pkg/jobs/net.py:Net")
    assert (found.module, found.folder, found.title) == ("pkg.jobs.net", root.resolve(), "Net")
    assert find_job("pkg.jobs").title == "jobs"


def test_a_run_finds_its_job_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(tmp_path, imports="from .sizes import WIDTH", with_init=False)
    monkeypatch.chdir(root)
    found = find_job("pkg.jobs.net:Net")
    noted = {"reference": "pkg.jobs.net:Net", "anywhere": found.anywhere, "file": str(found.path)}
    old = {"reference": "pkg/jobs/net.py:Net", "file": str(found.path)}
    monkeypatch.chdir(tmp_path)
    assert job_of_run(json.loads(json.dumps({"job": noted})), Path("r")) == found
    assert job_of_run({"job": old}, Path("r")).path == found.path
    root.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert job_of_run({"job": noted}, Path("r")).path == Path("pkg/jobs/net.py").resolve()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match="is gone"):
        job_of_run({"job": noted}, Path("r"))


def test_missing_modules_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package(tmp_path, imports=""))
    for reference, says in (
        (
            "nonesuch.jobs:Net",
            "no module 'nonesuch', neither in .*proj nor installed",
        ),
        ("nonesuch", r"There is no file nonesuch \(a job is a Python file: path.py"),
        (
            "pkg.jobs.nett:Net",
            "no module pkg.jobs.nett; did you mean 'net'. pkg.jobs has: net, sizes",
        ),
        ("pkg.jobs.net.Net", "pkg.jobs.net is a module, .* Write pkg.jobs.net:Net"),
        ("pkg/jobs/net:Net", "There is no file pkg/jobs/net. Did you mean pkg/jobs/net.py?"),
        ("pkg/jobs", "A job is a Python file"),
    ):
        with pytest.raises(JobError, match=says):
            find_job(reference)


def test_imports_that_need_a_package_are_explained(tmp_path: Path) -> None:
    folder = package(tmp_path, imports="from .sizes import WIDTH", with_init=False) / "pkg" / "jobs"
    says = load(str(folder / "net.py"), cwd=tmp_path)
    assert "net.py, line 4: attempted relative import" in says
    assert f"put an empty __init__.py into {folder}, or" in says
    (folder / "net.py").write_text(JOB.format(imports="from pkg.jobs.sizes import WIDTH"))
    says = load(str(folder / "net.py"), cwd=tmp_path)
    assert f"the name of the job's own folder, {folder.parent}: put an empty __init__.py" in says
    for init in (folder, folder.parent):
        (init / "__init__.py").touch()
    (folder / "net.py").write_text(JOB.format(imports="from .size import WIDTH"))
    says = load(str(folder / "net.py"), cwd=tmp_path)
    assert "No module named 'pkg.jobs.size'" in says
    assert "pip install" not in says


def test_a_folder_with_the_name_of_a_loaded_module_is_no_package(tmp_path: Path) -> None:
    folder = tmp_path / "json"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "net.py").write_text(JOB.format(imports="import json; WIDTH = json.loads('3')"))
    assert load(str(folder / "net.py"), cwd=tmp_path.parent) == "3"

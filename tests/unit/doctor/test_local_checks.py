"""The doctor's checks: what is true here, and what each says when the machine really lacks something."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from manyhands.doctor import Check, Finding, checks, machine, network, software
from manyhands.doctor.finding import good
from manyhands.hosts import cgroup
from manyhands.hosts.cgroup import MemoryLimit

CHILD_S = 60.0
GB = 10**9


def in_child(*lines: str, prefix: tuple[str, ...] = ()) -> Finding:
    """The finding that a fresh Python prints, after `lines` have changed what it has."""
    program = "\n".join(["import json", *lines, "print(json.dumps(vars(found)))"])
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program], capture_output=True, text=True, timeout=CHILD_S
    )
    assert done.returncode == 0, done.stderr
    return Finding(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("version", "ok"),
    [("3.10.9", False), ("3.11.0", True), ("3.12.9", True), ("3.13.0", False), ("4.11.0", False)],
)
def test_python_in_and_out_of_the_range(version: str, ok: bool) -> None:
    found = software.check_python(version)
    assert found.ok is ok
    assert version in found.detail
    assert ok or ("3.11 to 3.12" in found.detail and "venv" in found.remedy)


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("2.10.1", False),
        ("2.11.0+cu130", True),
        ("2.13.1", True),
        ("2.14.0a0", False),
        ("?", False),
    ],
)
def test_torch_in_and_out_of_the_range(version: str, ok: bool) -> None:
    found = software.judge_torch(version)
    assert found.ok is ok
    assert ok or found.remedy == 'pip install "torch>=2.11,<2.14"'


def test_without_torch_one_check_fails_and_those_that_need_it_are_skipped() -> None:
    hidden = "import sys; sys.modules['torch'] = None"
    found = in_child(
        hidden,
        "from manyhands.doctor import Finding, checks",
        "by_name = {check.name: check for check in checks()}",
        "first = by_name['torch'].run()",
        "names = ('backends', 'devices', 'gloo group', 'nccl group')",
        "rest = [by_name[name].run() for name in names]",
        "found = Finding(first.remedy, first.ok, '; '.join(f'{f.ok} {f.detail}' for f in rest))",
    )
    assert found.ok is False
    assert found.name.startswith("pip install")
    assert found.detail.count("None not ") == 4
    assert found.detail.count("without torch") == 4


def test_looking_for_checks_does_not_import_torch() -> None:
    found = in_child(
        "import sys",
        "from manyhands.doctor import checks, Finding",
        "found = Finding('torch', 'torch' in sys.modules, str(len(checks())))",
    )
    assert found.ok is False
    assert int(found.detail) == len(checks())


def test_every_failed_check_has_a_name_and_a_remedy() -> None:
    for check in checks():
        if "group" not in check.name:  # these have tests of their own
            found = check.run()
            assert found.name == check.name
            assert found.detail
            assert "the check itself failed" not in found.detail
            assert found.ok is not False or found.remedy


def test_a_check_that_breaks_is_a_finding() -> None:
    found = Check("odd", lambda: Finding("odd", True, str(1 // 0))).run()
    assert (found.name, found.ok) == ("odd", False)
    assert "ZeroDivisionError" in found.detail
    assert found.remedy


def test_backends_that_are_needed() -> None:
    has = {"gloo": True, "nccl": False, "mpi": False}
    assert software.judge_backends(has, num_gpus=0).ok is True
    with_gpus = software.judge_backends(has, num_gpus=2)
    assert with_gpus.ok is False
    assert "nccl needed" in with_gpus.detail
    assert software.judge_backends({**has, "gloo": False}, num_gpus=0).ok is False


def test_a_missing_package_is_a_note_with_its_purpose_and_the_command() -> None:
    found = in_child(
        "import sys, importlib.abc",
        "from manyhands.doctor import software",
        "sys.path = [p for p in sys.path if 'site-packages' not in p]",
        "found = software.check_package('scikit-learn')",
    )
    assert found.ok is None
    assert "not installed (the data of examples/digits.py)" in found.detail
    assert found.remedy == 'pip install "scikit-learn>=1.4"'


def test_cores_fewer_than_the_machine_has() -> None:
    assert machine.judge_cores(8, 8, None) == good("8, all usable")
    assert machine.judge_cores(8, 8, 16.0).ok is True
    assert "2 of the machine's 8" in machine.judge_cores(2, 8, None).detail
    found = machine.judge_cores(64, 64, 4.0)
    assert (found.ok, found.remedy[-11:]) == (None, "--threads 2")
    masked = in_child(
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "from manyhands.doctor import machine",
        "found = machine.check_cores()",
    )
    assert masked.detail.startswith("1")


def test_the_strictest_control_group_counts_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("0::/outer/inner\n")
    (tmp_path / "one").write_text("5:memory,x:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n")
    root = tmp_path / "root"
    tree = {
        "memory.max": "max\n",
        "outer/memory.max": f"{4 * GB}\n",
        "outer/memory.current": f"{3 * GB}\n",
        "outer/memory.stat": f"anon 5\ninactive_file {GB}\n",
        "outer/cpu.max": "150000 100000\n",
        "outer/inner/memory.max": f"{8 * GB}\n",
        "outer/inner/cpu.max": "max 100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/job/memory.limit_in_bytes": f"{2 * GB}\n",
        "memory/job/memory.usage_in_bytes": f"{GB}\n",
        "cpu/job/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_quota_us": "200000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert cgroup.memory_limit(root, tmp_path / "two") == MemoryLimit(4 * GB, 2 * GB)
    assert cgroup.memory_limit(root, tmp_path / "one") == MemoryLimit(2 * GB, GB)
    assert cgroup.cpu_quota(root, tmp_path / "two") == 1.5
    assert cgroup.cpu_quota(root, tmp_path / "one") == 2.0
    assert cgroup.memory_limit(root, tmp_path / "absent") is None


def test_memory_is_what_the_container_leaves(tmp_path: Path) -> None:
    assert machine.judge_memory(64 * GB, 32 * GB, None).ok is True
    assert machine.judge_memory(64 * GB, 32 * GB, MemoryLimit(128 * GB, 0)).detail == (
        "32.0 GB available of 64.0 GB"
    )
    found = machine.judge_memory(64 * GB, 32 * GB, MemoryLimit(4 * GB, 7 * GB // 2))
    assert found.ok is False
    assert "500.0 MB available of a container's limit of 4.0 GB (machine: 64.0 GB)" in found.detail
    (tmp_path / "meminfo").write_text(
        "MemTotal: 900000 kB\nMemAvailable:  100000 kB\nHugePages: 0\n"
    )
    assert machine.check_memory(tmp_path / "meminfo").ok is False


@pytest.mark.parametrize(
    ("installed", "cuda", "visible", "ok", "word"),
    [
        (0, None, None, None, "on the CPU"),
        (2, "13.0", "", None, "hidden by CUDA_VISIBLE_DEVICES"),
        (2, None, None, False, "CPU only"),
        (1, "13.0", None, False, "sees none"),
    ],
)
def test_why_there_is_no_gpu(
    installed: int, cuda: str | None, visible: str | None, ok: bool | None, word: str
) -> None:
    found = machine.judge_no_gpu(installed, cuda_built=cuda, visible=visible)
    assert found.ok is ok
    assert word in found.detail
    assert bool(found.remedy) is bool(installed)


def test_small_shared_memory_really_mounted() -> None:
    small = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", small, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=CHILD_S).returncode:
        pytest.skip("this user may not mount")
    found = in_child(
        "from manyhands.doctor import machine",
        "found = machine.check_shared_memory()",
        prefix=prefix,
    )
    assert found.ok is False
    assert "of 67.1 MB in /dev/shm" in found.detail
    assert "--shm-size" in found.remedy


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    found = machine.check_shared_memory(tmp_path / "absent")
    assert (found.ok, found.detail) == (False, f"{tmp_path}/absent: No such file or directory")


def test_a_low_limit_of_open_files_really_set() -> None:
    found = in_child(
        "import resource",
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))",
        "from manyhands.doctor import machine",
        "found = machine.check_open_files()",
    )
    assert found.ok is False
    assert found.detail.startswith("200,")
    assert found.remedy.startswith("ulimit -n ")
    assert "limits.conf" in machine.judge_open_files(200, 500).remedy
    assert machine.judge_open_files(1024, resource.RLIM_INFINITY).ok is True
    assert machine.judge_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).ok is True


def test_the_run_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = machine.check_run_folder(tmp_path / "not" / "yet")
    assert found.ok is True
    assert "free in" in found.detail
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for place, word in ((tmp_path / "file" / "runs", "not a folder"), (Path("/sys/runs"), "can't")):
        found = machine.check_run_folder(place)
        assert found.ok is False
        assert word in found.detail
        assert "--run-dir" in found.remedy


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("no-such-host.invalid", "does not resolve"),
        ("x" * 64, "does not resolve"),
        ("192.0.2.1", "not an address of this host"),
    ],
)
def test_a_hostname_that_leads_nowhere(name: str, word: str) -> None:
    found = network.check_hostname(name)
    assert found.ok is False
    assert word in found.detail
    assert "/etc/hosts" in found.remedy
    assert network.check_hostname("127.0.0.1").ok is True


def test_failed_links_give_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    found = network.check_unix_sockets()
    assert found.ok is False
    assert "the kernel allows" in found.detail
    assert "TMPDIR" in found.remedy
    found = in_child(
        "import sys; sys.modules['cryptography'] = None",
        "from manyhands.doctor import network",
        "found = network.check_tls_links()",
    )
    assert found.ok is False
    assert found.remedy == 'pip install "cryptography>=42"'

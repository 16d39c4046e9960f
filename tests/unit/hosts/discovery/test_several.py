"""One of several processes: who says so, what to type then, and what is no sign of it."""

from __future__ import annotations

import json

import pytest

from manyhands.hosts.discovery import one_of_several

TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
SRUN = {**SALLOC, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NODEID": "0"}
PODS = {"JOB_COMPLETION_INDEX": "1", "MANYHANDS_PODS": "3", "MANYHANDS_COORDINATOR": "d-0.d:29600"}
ARGV = ["/usr/bin/manyhands", "train", "my job.py"]


def tf_config(tasks: int) -> dict[str, str]:
    cluster = {"worker": [f"w{n}:2222" for n in range(tasks)]}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}),
    }


@pytest.mark.parametrize(
    ("environ", "size", "line"),
    [
        (TORCHRUN, 2, "torchrun ... --no-python manyhands train 'my job.py' --on env"),
        (TORCH, 2, "manyhands train 'my job.py' --on env"),
        (SRUN, 4, "srun ... manyhands train 'my job.py' --on env"),
        ({**SRUN, "WORLD_SIZE": "4"}, 4, "srun ... manyhands train 'my job.py' --on env"),
        (tf_config(2), 2, "manyhands train 'my job.py' --on env"),
        (PODS, 3, "manyhands train 'my job.py' --on env"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            2,
            "mpirun ... sh -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
            "MASTER_ADDR=HOST MASTER_PORT=29500 exec manyhands train "
            "'\"'\"'my job.py'\"'\"' --on env'",
        ),
    ],
)
def test_signs_of_several_processes(environ: dict[str, str], size: int, line: str) -> None:
    several = one_of_several(environ)
    assert several is not None
    assert several.size == size
    assert several.line(ARGV) == line


def test_the_command_line_of_python_m() -> None:
    argv = ["/x/manyhands/__main__.py", "train", "job.py"]
    by_torchrun, by_hand = one_of_several(TORCHRUN), one_of_several(TORCH)
    assert by_torchrun is not None
    assert by_hand is not None
    assert by_torchrun.line(argv) == "torchrun ... -m manyhands train job.py --on env"
    assert by_hand.line(argv) == "python -m manyhands train job.py --on env"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},  # exported by a script, for later
        SALLOC,  # a notebook, say
        {**SALLOC, "SLURM_PROCID": "0"},  # the script of an sbatch
        {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # salloc's interactive step
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n 1 --pty bash
        tf_config(1),
        {"TF_CONFIG": '{"cluster": {}, "task": {}}'},
        {"JOB_COMPLETION_INDEX": "1"},  # one of a sweep
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_uncertain_signs_are_ignored(environ: dict[str, str]) -> None:
    assert one_of_several(environ) is None

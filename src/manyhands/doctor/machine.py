"""Resources that a process can use on this machine: cores, memory, devices, shared memory, files, disk.

Everything is read from the system, except that a file without a name is created where run folders go.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from pathlib import Path

from manyhands.doctor.finding import Finding, fix, good, note
from manyhands.events.units import plural, size
from manyhands.hosts import cgroup
from manyhands.hosts.cgroup import MemoryLimit
from manyhands.hosts.launchers.local import cores
from manyhands.hosts.machine import MEMINFO, machine_memory

LEAST_MEMORY_BYTES = 10**9
"""Python and torch of two workers take most of this, without any model."""
LEAST_SHARED_BYTES = 128 << 20
"""Containers get 64 MiB by default: too little for data loaders and NCCL."""
LEAST_FILES = 1024
"""The default of most systems; a member uses a handful, each loader or link some more."""
LEAST_DISK_BYTES = 10**9


def check_cores() -> Finding:
    return judge_cores(cores(), os.cpu_count() or 1, cgroup.cpu_quota())


def judge_cores(usable: int, total: int, quota: float | None) -> Finding:
    if quota is not None and quota < usable:
        # Torch counts cores, not time: its threads would be stopped for most of each period.
        threads = max(1, math.floor(quota / 2))
        return note(
            f"{usable} of {total}, with the time of {quota:g} (a container's quota)",
            f"manyhands train JOB --workers 2 --threads {threads}",
        )
    if usable < total:
        return note(f"{usable} of the machine's {total} (a CPU mask)")
    return good(f"{total}, all usable")


def check_memory(meminfo: Path = MEMINFO) -> Finding:
    return judge_memory(*machine_memory(meminfo), cgroup.memory_limit())


def judge_memory(total: int, available: int, limit: MemoryLimit | None) -> Finding:
    detail = f"{size(available)} available of {size(total)}"
    if limit is not None and limit.limit_bytes < total:
        available = min(available, max(0, limit.limit_bytes - limit.used_bytes))
        detail = (
            f"{size(available)} available of a container's limit of {size(limit.limit_bytes)} "
            f"(machine: {size(total)})"
        )
    if available < LEAST_MEMORY_BYTES:
        return fix(
            f"{detail}; two workers need {size(LEAST_MEMORY_BYTES)} for Python and torch alone",
            "End other programs, or give the container more:  docker run --memory 4g ...",
        )
    return good(detail)


def check_devices(driver: Path = Path("/proc/driver/nvidia/gpus")) -> Finding:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if gpus:
        names = [f"cuda:{i} {gpu.name} with {size(gpu.total_memory)}" for i, gpu in enumerate(gpus)]
        return good(", ".join(names))
    installed = len(list(driver.iterdir())) if driver.is_dir() else 0
    return judge_no_gpu(
        installed, cuda_built=torch.version.cuda, visible=os.environ.get("CUDA_VISIBLE_DEVICES")
    )


def judge_no_gpu(installed: int, *, cuda_built: str | None, visible: str | None) -> Finding:
    """Return why torch sees no GPU: there is none, it is hidden, or torch can't use it."""
    if not installed:
        return note("no GPU: workers compute on the CPU")
    there = f"{plural(installed, 'GPU')} in this machine"
    if visible is not None:
        detail = f"{there}, hidden by CUDA_VISIBLE_DEVICES={visible!r}: workers compute on the CPU"
        return note(detail, "unset CUDA_VISIBLE_DEVICES")
    if cuda_built is None:
        return fix(
            f"{there}, but this torch is built for the CPU only",
            'pip install --force-reinstall "torch>=2.11,<2.14"  (see pytorch.org for CUDA builds)',
        )
    return fix(
        f"{there}, but torch for CUDA {cuda_built} sees none",
        "nvidia-smi  tells whether the driver works; in a container:  docker run --gpus all ...",
    )


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        detail, total = f"{folder}: {error.strerror}", 0
    else:
        detail, total = f"{size(usage.free)} free of {size(usage.total)} in {folder}", usage.total
    if total < LEAST_SHARED_BYTES:
        return fix(
            detail,
            "In a container:  docker run --shm-size=1g ...   Otherwise:  "
            "sudo mount -o remount,size=1g /dev/shm",
        )
    return good(detail)


def check_open_files() -> Finding:
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return good("no limit")
    if soft < LEAST_FILES:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        remedy = f"ulimit -n {wanted}"
        if wanted < LEAST_FILES:
            remedy = (
                f"Only root can raise the hard limit of {hard}: a line  * hard nofile 65536  in "
                "/etc/security/limits.conf, or  docker run --ulimit nofile=65536 ..."
            )
        return fix(f"{soft}, {LEAST_FILES} are needed", remedy)
    return good(str(soft))


def check_run_folder(folder: Path) -> Finding:
    """Check that runs can be written to the folder, which need not exist yet, and its free space."""
    folder = folder.absolute()
    remedy = "manyhands train JOB --run-dir /another/folder/NAME"
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir():
        return fix(f"{folder}: {place} is not a folder", remedy)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return fix(f"{folder} can't be written: {error.strerror}", remedy)
    detail = f"{size(free)} free in {folder}"
    if free < LEAST_DISK_BYTES:
        return fix(f"{detail}: checkpoints need room", remedy)
    return good(detail)

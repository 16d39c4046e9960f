"""`ray job submit --working-dir FOLDER -- COMMAND` without Ray's dashboard, which needs `ray[default]`.

    python submit_job.py ADDRESS FOLDER COMMAND...

Ray's own job manager uploads the folder and runs the command on the head node. What the job prints is printed
here when it has ended; SIGTERM stops it, as `ray job stop` does.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import tempfile

import ray
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.dashboard.modules.job.job_manager import JobManager


async def follow(folder: str, words: list[str]) -> int:
    node = ray._private.worker.global_worker.node
    jobs = JobManager(ray._private.worker.global_worker.gcs_client, node.get_logs_dir_path())
    runtime_env = upload_working_dir_if_needed(
        {"working_dir": folder}, include_gitignore=True, scratch_dir=tempfile.mkdtemp()
    )
    job = await jobs.submit_job(entrypoint=shlex.join(words), runtime_env=runtime_env)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: jobs.stop_job(job))
    while True:
        status = await jobs.get_job_status(job)
        if status is not None and status.is_terminal():
            break
        await asyncio.sleep(0.1)
    print(jobs.get_job_logs(job), flush=True)
    print(f"the job is {status}", flush=True)
    return 0 if status == "SUCCEEDED" else 1


if __name__ == "__main__":
    address, folder, *words = sys.argv[1:]
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    sys.exit(asyncio.run(follow(folder, words)))

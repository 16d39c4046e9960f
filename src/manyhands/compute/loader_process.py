"""The program of a loader process: `python -m manyhands.compute.loader_process`, started by loaders.py.

Builds the job's data set, then loads the requested batches until the worker closes the socket.
"""

from __future__ import annotations

import faulthandler
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

import torch

from manyhands.compute.feed import gather
from manyhands.compute.loaders import BATCH, FAILED, receive, send
from manyhands.compute.seeds import seed_loading
from manyhands.hosts.member import die_with
from manyhands.job import Job, load_job


def main(link: socket.socket) -> None:
    reference, settings, parent, path = receive(link)
    die_with(parent)
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(1)
    built: tuple[Job, Any] | Exception
    try:
        job = load_job(reference, settings)
        seed_loading(job.seed, "data")
        built = (job, job.data())
    except Exception as error:
        built = error  # reported with the first batch
    while True:
        epoch, indices = receive(link)
        try:
            send(link, _answer(built, epoch, indices))
        except OSError:
            raise
        except Exception as error:  # the batch can't be pickled, and nothing of it was sent
            send(link, _failed(error))


def _answer(
    built: tuple[Job, Any] | Exception, epoch: int, indices: list[int]
) -> tuple[str, Any, str]:
    try:
        if isinstance(built, Exception):
            raise built
        return BATCH, gather(*built, torch.tensor(indices), epoch), ""
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> tuple[str, Any, str]:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FAILED, RuntimeError(f"{type(error).__name__}: {error}"), trace
    return FAILED, error, trace


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the worker has ended, or needs no more batches
        main(socket.socket(fileno=int(sys.argv[1])))

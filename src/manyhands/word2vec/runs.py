"""Loads the word vectors of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from manyhands.errors import RunFolderError
from manyhands.job import job_of_run, load_job
from manyhands.runs.checkpoints import newest
from manyhands.runs.folder import RunFolder
from manyhands.runs.saver import read_state
from manyhands.word2vec.model import WordModel
from manyhands.word2vec.vectors import Vectors


def vectors_of_run(folder: Path) -> Vectors:
    """Load the vectors from the newest checkpoint of a WordModel. The text of the run must still exist."""
    run = RunFolder.open(folder)
    config = run.config
    job_file = job_of_run(config, run.path)
    if (warning := run.owner_warning()) is not None:
        print(f"warning: {warning}: {job_file.path}", file=sys.stderr)
    job = load_job(job_file.anywhere, config["settings"])
    model = job.model()
    if not isinstance(model, WordModel):
        raise RunFolderError(
            f"{folder} trained {type(model).__name__}, which has no word vectors. Give a run of a "
            "manyhands.word2vec.WordModel, such as one of examples/word2vec.py."
        )
    manifest, complaints = newest(run.path)
    if manifest is None:
        why = f" ({complaints[0]})" if complaints else ""
        raise RunFolderError(f"{folder} has no checkpoint with vectors{why}.")
    saved = read_state(manifest.path)["tables"]["inputs"]
    matrix = np.zeros((len(model.vocabulary.words), model.tables["inputs"].dim), np.float32)
    matrix[saved["ids"].numpy()] = saved["rows"].numpy()
    return Vectors(model.vocabulary.words, matrix)

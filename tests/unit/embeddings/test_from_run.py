"""mh.load(): the trained model of a run folder, and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.compute.feed import Feed
from manyhands.compute.train_state import TrainState
from manyhands.contract import Context
from manyhands.control.messages import Portion
from manyhands.errors import CheckpointError, JobError, RunFolderError, UsageError
from manyhands.hosts.me import Me
from manyhands.job import load_job
from manyhands.runs.checkpoints import choose, commit
from manyhands.runs.files import file_digest
from manyhands.runs.folder import RunFolder
from manyhands.runs.saver import Saver
from manyhands.strategies.single import SingleLearner
from manyhands.testing.jobs import LookupModel, Sparse

JOB = """
from dataclasses import dataclass
from torch import nn
import manyhands as mh
from manyhands.testing.jobs import Sparse

@dataclass
class Small(Sparse):
    pass

@dataclass
class Rows(Sparse):
    def model(self):
        return nn.Sequential(mh.SparseEmbedding(None, 4, lr=0.1), nn.Flatten())
    def inputs(self, batch):
        return batch[2][:, :2]
    def loss(self, output, batch):
        return output.square().mean()
"""


class Trained:
    """A run of 4 steps, made without a process."""

    def __init__(self, folder: Path, reference: str = "job.py", width: int = 8) -> None:
        self.job_file = folder / "job.py"
        self.job_file.write_text(JOB)
        self.run = RunFolder.create("small", path=folder / "run")
        job = load_job(f"{folder}/{reference}", {"width": str(width)})
        self.train_state = TrainState.of(job, device="cpu", num_steps=10)
        learner = SingleLearner(Context(self.train_state, cast(Me, None)))
        feed = Feed(job, job.data(), device="cpu")
        outcomes: list[dict[str, Any]] = []
        saver = Saver(self.run.path, on_done=outcomes.append)
        self.outputs: dict[int, Tensor] = {}
        self.batch = feed.share(Portion(1, 0, 98, ((0, 98),))).batches[0][0]
        for step in (1, 2, 3, 4):
            # Ids of later steps are unknown to the earlier models: they must read the same initial rows.
            learner.step(feed.share(Portion(step, 0, 8, ((8 * step, 8 * step + 8),))))
            saver.start(step, self.train_state, learner.snapshot())
            saver.finish()
            best = {"metrics": {"loss": 1.0}, "step": min(step, 2), "waited": 0}
            given = {"files": [outcomes[-1]["files"]], "strategy": "single", "workers": 1}
            commit(self.run.path, step, training_plan={"best": best}, **given)
            self.outputs[step] = self.predict(self.train_state.model)
        shutil.rmtree(self.run.path / "checkpoints" / "step-1")
        self.note_job(reference)

    def note_job(self, reference: str) -> None:
        path = str(self.job_file)
        digest = file_digest(self.job_file)
        noted = {"reference": reference, "file": path, "sha256": digest}
        self.run.write_config({"job": noted, "settings": {"width": "8"}, "options": {}})

    def predict(self, model: nn.Module) -> Tensor:
        inputs = (self.batch[0], self.batch[2])
        with torch.no_grad():
            return model(*inputs) if isinstance(model, LookupModel) else model(inputs[1][:, :2])


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("once"))


@pytest.fixture
def trained(once: Trained, tmp_path: Path) -> Trained:
    """A copy to break."""
    mine = object.__new__(Trained)
    vars(mine).update(vars(once))
    shutil.copytree(once.job_file.parent, tmp_path, dirs_exist_ok=True)
    mine.run, mine.job_file = RunFolder(tmp_path / "run"), tmp_path / "job.py"
    mine.note_job("job.py")
    return mine


@pytest.mark.parametrize(("step", "number"), [("best", 2), ("last", 4), (3, 3), ("3", 3)])
def test_a_model_predicts_as_it_did_in_training(once: Trained, step: str, number: int) -> None:
    torch.manual_seed(77)
    drawn = torch.rand(1)
    torch.manual_seed(77)
    model = mh.load(once.run.path, step=step)
    assert torch.equal(torch.rand(1), drawn)  # nobody's random numbers are others by it
    assert not model.training
    assert torch.equal(once.predict(model), once.outputs[number])
    assert torch.equal(
        model.state_dict()["rows.rows"], mh.load(once.run.path, step=step).state_dict()["rows.rows"]
    )


def test_the_best_checkpoint_is_loaded_and_can_be_trained_further(once: Trained) -> None:
    model = mh.load(str(once.run.path))
    assert torch.equal(once.predict(model), once.outputs[2])
    before = model.state_dict()["rows.rows"].clone()
    with pytest.warns(
        UserWarning, match="does not learn"
    ):  # the other table has no rate of its own
        model.train()(once.batch[0], once.batch[2]).sum().backward()
    assert not torch.equal(model.state_dict()["rows.rows"][: len(before)], before)


def test_a_model_of_tables_only_is_loaded_unchanged(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "job.py:Rows")
    model = mh.load(trained.run.path, step="last")
    assert not list(model.parameters())
    assert torch.equal(trained.predict(model), trained.outputs[4])


def test_a_changed_or_missing_job_file_is_reported(trained: Trained) -> None:
    text = trained.job_file.read_text()
    trained.job_file.write_text(text + "# more\n")
    with pytest.warns(UserWarning, match=rf"{trained.job_file} has changed since"):
        mh.load(trained.run.path)
    config = trained.run.config
    del config["job"]["sha256"]
    trained.run.write_config(config)
    mh.load(trained.run.path)  # of such a run nothing is known
    moved = trained.job_file.rename(trained.job_file.with_name("moved.py"))
    with pytest.raises(RunFolderError, match=r'job\.py.*mh\.load\(.*, job="path\.py:Name"\)'):
        mh.load(trained.run.path)
    for job in (f"{moved}:Small", moved, Sparse(width=8)):
        model = mh.load(trained.run.path, job=job, step="last")
        assert torch.equal(trained.predict(model), trained.outputs[4])


def test_a_model_that_does_not_fit_lists_the_differing_names(trained: Trained) -> None:
    config = trained.run.config
    trained.run.write_config({**config, "settings": {"width": "9"}})
    with pytest.raises(CheckpointError, match=r"body\.0\.weight \(8x17 saved, 9x17 in the model\)"):
        mh.load(trained.run.path)

    class Other(Sparse):
        def model(self) -> nn.Module:
            return nn.ModuleDict({"rows": mh.SparseEmbedding(None, 5), "new": nn.Linear(2, 2)})

    with pytest.raises(CheckpointError) as refused:
        mh.load(trained.run.path, job=Other())
    told = str(refused.value)
    assert "missing parameters, which the model has: new.bias, new.weight" in told
    assert "unexpected parameters, which the model does not have: body.0.bias" in told
    assert "unexpected tables, which the model does not have: bags" in told
    assert "tables of another shape: rows (rows of 4 saved, rows of 5 in the model)" in told


def test_another_optimizer_of_a_table_does_not_matter(trained: Trained) -> None:
    model = mh.load(trained.run.path, job=Sparse(width=8, table_optim="adam"), step="last")
    assert torch.equal(trained.predict(model), trained.outputs[4])


def test_a_missing_job_is_an_error(once: Trained) -> None:
    with pytest.raises(JobError, match="no file"):
        mh.load(once.run.path, job="gone.py")


def test_a_missing_checkpoint_error_lists_the_existing_ones(
    trained: Trained, tmp_path: Path
) -> None:
    path = trained.run.path
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1.* steps 2, 3, 4"):
        mh.load(path, step=1)
    with pytest.raises(UsageError, match=r'"best", "last" or a number.* steps 2, 3, 4'):
        mh.load(path, step="newest")
    damaged = path / "checkpoints" / "step-4" / "table-0-0.npz"
    content = bytearray(damaged.read_bytes())
    content[-40] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged.* steps 2, 3, 4"):
        mh.load(path, step="last")
    assert choose(path, "best").step == 2
    shutil.rmtree(path / "checkpoints" / "step-2")
    with pytest.raises(CheckpointError, match=r"best.* step 2.* is gone.* steps 3, 4"):
        mh.load(path)
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        mh.load(path)
    with pytest.raises(RunFolderError, match="no run"):
        mh.load(tmp_path / "nowhere")

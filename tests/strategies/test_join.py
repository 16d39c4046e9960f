"""`mh.join()` in a person's own loop, alone and under a real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.testing.ports import reserve_port

SCRIPT = """
import json, sys
import torch
from torch import nn
import manyhands as mh

strategy, own_batches = sys.argv[1], sys.argv[2] == "own"
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(50, 4, generator=generator)
dataset = mh.data.Arrays(inputs, inputs.sum(dim=1, keepdim=True).sin())

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

with mh.join(strategy, device="cpu") as hands:
    torch.manual_seed(hands.rank)  # join() itself makes the workers start alike
    if hands.rank == 0 or strategy == "single":
        torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hands.prepare(model, optimizer, clip_norm=1.0)
    for epoch in range(3):
        if own_batches:  # of unequal sizes: 30 samples for rank 0, 20 for rank 1
            cut = slice(0, 30) if hands.rank == 0 else slice(30, 50)
            parts = [dataset.tensors[i][cut] if hands.world > 1 else dataset.tensors[i] for i in (0, 1)]
            hands.step(loss, parts)
        else:
            for batch in hands.batches(dataset, batch_size=16, epoch=epoch):
                hands.step(loss, batch)
    share = float(loss(model, dataset.tensors))
    weights = [p.double().sum().item() for p in model.parameters()]
    with open(f"{sys.argv[3]}/{hands.rank}.json", "w") as file:
        json.dump({"world": hands.world, "loss": hands.mean(share), "weights": weights}, file)
"""


def run(tmp_path: Path, strategy: str, batches: str, *, world: int) -> list[dict[str, object]]:
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    folder = tmp_path / f"{strategy}-{world}"
    folder.mkdir()
    start = [sys.executable]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*start, str(script), strategy, batches, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("batches", ["given", pytest.param("own", marks=pytest.mark.long)])
def test_two_workers_under_torchrun_equal_one(tmp_path: Path, batches: str) -> None:
    (alone,) = run(tmp_path, "single", batches, world=1)
    both = run(tmp_path, "allreduce", batches, world=2)
    assert [one["world"] for one in both] == [2, 2]
    assert both[0] == {**both[1]}
    assert both[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert both[0]["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-6)


@pytest.mark.long
def test_two_workers_under_srun_equal_one(tmp_path: Path) -> None:
    """With the variables that srun sets; what it would start is started here."""
    (alone,) = run(tmp_path, "single", "given", world=1)
    folder = tmp_path / "srun"
    folder.mkdir()
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    step |= {
        "SLURM_JOB_NODELIST": "here",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserve_port()),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "loop.py"), "allreduce", "given", str(folder)],
            env=os.environ
            | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            | step
            | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [task.wait(timeout=120) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert both[0] == both[1]
    assert both[0]["world"] == 2
    assert both[0]["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-6)


WITH_TABLES = """
import sys
import torch
from torch import nn
import manyhands as mh

torch.manual_seed(0)
ids = torch.randint(0, 9, (40, 2)) * 10**12
dataset = mh.data.Arrays(ids, (ids.sum(dim=1, keepdim=True) % 7).float())

def make():
    return nn.Sequential(mh.SparseEmbedding(None, 4, lr=0.1, init="normal(1)"), nn.Flatten(), nn.Linear(8, 1))

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def train(strategy, to, saved=None):
    with mh.join(strategy, device="cpu") as hands:
        torch.manual_seed(hands.rank)
        model = make()
        if saved and hands.rank == 0:  # the others get it from there
            model.load_state_dict(torch.load(saved))
        hands.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        with torch.no_grad():
            before = hands.mean(loss(model, dataset.tensors)), float(loss(model, dataset.tensors))
        for batch in hands.batches(dataset, batch_size=8):
            hands.step(loss, batch)
        hands.mean(0.0)  # waits for all: nobody changes shared rows any more
        with torch.no_grad():
            after = float(loss(model, dataset.tensors))
        if hands.rank == 0:
            torch.save(model.state_dict(), f"{sys.argv[1]}/{to}.pt")
        hands.mean(0.0)
        return before, after

first = train("allreduce", 1)
second = train("allreduce", 2, f"{sys.argv[1]}/1.pt")
assert abs(second[0][0] - first[1]) < 1e-6, (first, second)  # the mean over workers: both have the rows
assert abs(second[0][1] - first[1]) < 1e-6, (first, second)
third = train("allreduce(tables=shared)", 3, f"{sys.argv[1]}/1.pt")
assert abs(third[0][0] - first[1]) < 1e-6, (first, third)
torch.manual_seed(5)
plain = make()
plain.load_state_dict(torch.load(f"{sys.argv[1]}/3.pt"))
with torch.no_grad():
    found = float(loss(plain, dataset.tensors))
assert abs(found - third[1]) < 1e-6, (found, third)
print("fine")
"""


def test_rows_of_tables_are_saved_and_loaded(tmp_path: Path) -> None:
    """Loaded by the first worker alone, and all have them."""
    script = tmp_path / "loop.py"
    script.write_text(WITH_TABLES)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2  # two processes may write into one line


WITH_A_GROUP_OF_ITS_OWN = """
import os
import torch
import torch.distributed as dist
from torch import nn
import manyhands as mh

dist.init_process_group("gloo")
mine, rank = dist.distributed_c10d._get_default_group(), dist.get_rank()
total = torch.full((10_000,), float(rank + 1))
# The first worker begins before all that join() does, the second when all is over: any operation of join() in
# this group would meet the wrong one.
work = dist.all_reduce(total, async_op=True) if rank == 0 else None

inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
data = mh.data.Arrays(inputs, inputs.sum(dim=1, keepdim=True))
def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

for _ in range(2):
    with mh.join("allreduce", device="cpu") as hands:
        model = nn.Linear(4, 1)
        hands.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in hands.batches(data, batch_size=16):
            hands.step(loss, batch)
        hands.mean(rank)

work = work or dist.all_reduce(total, async_op=True)
work.wait()
assert total.unique().tolist() == [3.0], total
assert dist.distributed_c10d._get_default_group() is mine
weights = [torch.empty(4) for _ in range(2)]
dist.all_gather(weights, model.weight.detach().view(-1).contiguous())
assert torch.equal(*weights)
dist.destroy_process_group()
print("fine", flush=True)
# A thread of the user's gloo may still free a tensor, which aborts a process whose interpreter is ending.
os._exit(0)
"""


def test_a_default_group_of_the_user_stays_untouched(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(WITH_A_GROUP_OF_ITS_OWN)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2


def test_data_that_can_not_be_shared_out_is_refused() -> None:
    from torch.utils.data import IterableDataset

    from manyhands.api.own_loop import join
    from manyhands.errors import JobError

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    with join("single", device="cpu") as hands:
        with pytest.raises(
            JobError, match=r"map-style dataset \(len\(\) and \[\]\).*it got Endless"
        ):
            hands.batches(Endless(), batch_size=2)
        with pytest.raises(JobError, match="without samples"):
            hands.batches([], batch_size=2)


def test_a_strategy_that_needs_a_coordinator_is_refused() -> None:
    from manyhands.api.own_loop import join
    from manyhands.errors import SpecError

    with (
        pytest.raises(SpecError, match=r"Use  mh\.join\(.allreduce.\)  or  a Job"),
        join("ps:sync", device="cpu"),
    ):
        raise AssertionError("it should not have joined")


def test_an_optimizer_of_another_model_is_refused() -> None:
    import torch
    from torch import nn

    from manyhands.api.own_loop import join
    from manyhands.errors import UsageError

    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    with join("single", device="cpu") as hands:
        with pytest.raises(
            UsageError, match=r"2 parameters of shape \(2, 4\), \(2,\) that the model"
        ):
            hands.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
        with pytest.warns(UserWarning, match=r"leaves out 1 parameter of the model \(bias\)"):
            hands.prepare(model, torch.optim.SGD([model.weight], lr=0.1))


def test_servers_are_not_for_a_loop_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.api.own_loop import join
    from manyhands.errors import ClusterError

    cluster = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ClusterError, match="manyhands train JOB"), join("single", device="cpu"):
        raise AssertionError("it should not have joined")


def test_half_an_environment_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("import manyhands as mh\nwith mh.join() as hands: pass\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RANK": "0"},
    )
    assert done.returncode != 0
    assert "RANK or WORLD_SIZE is set, but WORLD_SIZE is not" in done.stderr

"""What can be checked on one GPU: a group of one worker over NCCL, strategies with a worker on the GPU, and
workers that share it.

    python3 -m pytest tests/gpu/test_on_gpu.py      skipped without a GPU
    python3 tests/gpu/on_gpu.py [NAME ...]          the same without pytest

The second form needs only torch, and `PYTHONPATH=src` where manyhands is not installed.

With one rank every sum is its only term, so this shows that NCCL gets the right tensors, sizes and orders of
calls from us, not that it sums.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.codecs.int8 import Int8
from manyhands.collectives.group import GroupCut, GroupLimits, TorchGroup
from manyhands.collectives.reducer import Reducer
from manyhands.testing import harness
from manyhands.testing.harness import Finished

DEVICE, BACKEND = "cuda:0", "nccl"
LIMITS = GroupLimits(gather_s=30.0, connect_s=30.0, collective_s=60.0)
EXTRA = Path(__file__).parents[1] / "strategies" / "extra"
REDUCED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
MOVED = (*REDUCED, torch.uint8, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)

Check = Callable[[Path], None]


# Groups -------------------------------------------------------------------------------------------


def group_of_one(folder: Path, name: str = "store") -> TorchGroup:
    if DEVICE.startswith("cuda"):
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(folder / name), 1)
    return TorchGroup(store, rank=0, size=1, backend=BACKEND, device=DEVICE, limits=LIMITS)


def numbers(dtype: torch.dtype, size: int = 6) -> torch.Tensor:
    return torch.arange(1, size + 1, device=DEVICE).to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bytes: torch does not compare all dtypes on a GPU."""
    assert found.device == expected.device == torch.device(DEVICE)
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), found


def every_operation_of_a_group(folder: Path) -> None:
    group = group_of_one(folder)
    for dtype in REDUCED:
        for op in ("sum", "min", "max"):
            tensor, into = numbers(dtype), torch.zeros(6, dtype=dtype, device=DEVICE)
            group.all_reduce(tensor, op=op)
            assert_same(tensor, numbers(dtype))
            group.reduce_scatter(tensor, into=into, op=op)
            assert_same(into, numbers(dtype))
    for dtype in MOVED:
        tensor = numbers(dtype)
        gathered, received, parts = (torch.zeros_like(tensor) for _ in range(3))
        group.all_gather(tensor, into=gathered)
        group.all_to_all(tensor, into=received)
        group.all_to_all(tensor, into=parts, send=[6], receive=[6])
        group.broadcast(tensor, source=0)
        for found in (tensor, gathered, received, parts):
            assert_same(found, numbers(dtype))
    many = [numbers(torch.float32, size) for size in (10, 100_000, 1)]
    for work in [group.all_reduce(tensor, async_op=True) for tensor in many]:
        work.wait()
    for tensor in many:
        assert_same(tensor, numbers(torch.float32, len(tensor)))
    group.barrier()
    assert group.gather_numbers([3, -(2**40)]) == [(3, -(2**40))]
    (alone,) = group.gather_uneven(numbers(torch.uint8, 5))
    assert_same(alone, numbers(torch.uint8, 5))
    assert group.describe() == BACKEND
    group.close()


def splits_and_cuts(folder: Path) -> None:
    group = group_of_one(folder)
    split = group.split([0])
    inner = split.split([0])
    for each in (group, split, inner):
        tensor = numbers(torch.float32)
        each.all_reduce(tensor)
        assert_same(tensor, numbers(torch.float32))
    group.cut()
    for each in (group, split, inner):
        try:
            each.all_reduce(numbers(torch.float32))
        except GroupCut:
            continue
        raise AssertionError("an operation of a group that was cut did not fail")
    group.close()
    again = group_of_one(folder, "again")
    again.barrier()
    again.close()


def meshes(folder: Path) -> None:
    for name in ("first", "second"):
        group = group_of_one(folder, name)
        mesh = group.device_mesh([1, 1], ["dp", "tp"], device=DEVICE)
        assert mesh.device_type == torch.device(DEVICE).type
        tensor = numbers(torch.float32)
        dist.all_reduce(tensor, group=mesh.get_group("tp"))
        assert_same(tensor, numbers(torch.float32))
        del mesh
        group.close()
        assert not dist.is_initialized()


def gradients_are_summed(folder: Path, *, codec: Codec, most: float) -> None:
    """`most`: how far from the exact sums they may be, in the norm of all."""
    group = group_of_one(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 301), nn.Tanh(), nn.Linear(301, 3)).to(DEVICE)
    inputs = torch.randn(8, 100, device=DEVICE)
    parameters = list(model.parameters())
    exact = torch.autograd.grad(model(inputs).square().mean(), parameters)
    reducer = Reducer(group, parameters, bucket_bytes=2000, codec=codec)
    assert len(reducer.buckets) > 1
    reducer.begin()
    reducer.note(8.0, 0.5)
    model(inputs).square().mean().backward()
    reducer.finish()
    assert reducer.sums.tolist() == [8.0, 0.5]
    found = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    expected = torch.cat([gradient.flatten() for gradient in exact])
    error = float((found - expected).norm() / expected.norm())
    assert error <= most, error
    assert codec.exact or error > 0, "the codec was not used"
    reducer.close()
    group.close()


# Strategies ---------------------------------------------------------------------------------------


def train(strategy: str, run: Path, *, workers: int = 1) -> Finished:
    """Train a job of the tests, whose processes know the strategies of tests/."""
    paths = [str(EXTRA), *filter(None, [os.environ.get("PYTHONPATH")])]
    device = ("--device", DEVICE.partition(":")[0])
    arguments = harness.train_arguments(
        *("Regression", run, *device), strategy=strategy, workers=workers
    )
    environ = {"PYTHONPATH": os.pathsep.join(paths)}
    with harness.command(*arguments, run=run, environ=environ) as running:
        done = running.wait(code=0)
    for ready in done.of("MemberReady"):
        assert ready["device"].startswith(DEVICE.partition(":")[0]), ready["device"]
    assert all(sorted(uses) == list(range(98)) for uses in done.uses_by_epoch().values())
    return done


@cache
def alone() -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Train with `single` on the GPU: the losses, the weights, and the evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        done = train("single", Path(folder) / "run")
        return done.losses, done.state()["model"], done.of("Evaluated")


def equals_single(folder: Path, *, strategy: str, workers: int = 1) -> None:
    done = train(strategy, folder / "run", workers=workers)
    losses, weights, evaluations = alone()
    torch.testing.assert_close(done.losses, losses, rtol=1e-5, atol=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(done.state()["model"][name], weight, rtol=1e-5, atol=1e-6)
    for found, expected in zip(done.of("Evaluated"), evaluations, strict=True):
        for name, value in expected["metrics"].items():
            assert math.isclose(found["metrics"][name], value, rel_tol=1e-4), name


def trains_on_a_shared_gpu(folder: Path, *, strategy: str) -> None:
    """Two workers share the GPU, so they exchange its tensors over gloo."""
    done = train(strategy, folder / "run", workers=2)
    (view,) = done.of("ViewChanged")
    assert view["transport"].startswith("gloo"), view["transport"]
    expected = alone()[2][-1]["metrics"]["loss"]
    assert done.of("Evaluated")[-1]["metrics"]["loss"] < 1.1 * expected


CHECKS: dict[str, Check] = {
    "every operation of a group": every_operation_of_a_group,
    "splits and cuts": splits_and_cuts,
    "meshes": meshes,
    "sums of gradients": partial(gradients_are_summed, codec=PLAIN, most=1e-6),
    "sums of gradients, int8": partial(gradients_are_summed, codec=Int8(), most=0.02),
    **{
        f"{strategy}, one worker": partial(equals_single, strategy=strategy)
        for strategy in ("allreduce", "allreduce + int8", "local(every=2)", "by-fsdp")
    },
    "allreduce, two workers": partial(equals_single, strategy="allreduce", workers=2),
    **{
        f"{strategy}, two workers": partial(trains_on_a_shared_gpu, strategy=strategy)
        for strategy in ("allreduce + int8", "local(every=2)")
    },
}
"""By name; each gets a folder of its own."""


def main(names: list[str]) -> int:
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        print(f"nothing was checked: torch {torch.__version__} sees no GPU here")
        return 1
    if unknown := set(names) - CHECKS.keys():
        print(f"no check is called {', '.join(sorted(unknown))}. There are: {', '.join(CHECKS)}")
        return 2
    where = torch.cuda.get_device_name(DEVICE) if DEVICE.startswith("cuda") else DEVICE
    print(f"{where}, torch {torch.__version__}", flush=True)
    failed = 0
    for name in names or CHECKS:
        began, error = time.monotonic(), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                CHECKS[name](Path(folder))
            except Exception:
                failed, error = failed + 1, traceback.format_exc()
        verdict = "FAILED" if error else "passed"
        print(
            f"{name:<32} {verdict} {time.monotonic() - began:6.1f} s\n{error}", end="", flush=True
        )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

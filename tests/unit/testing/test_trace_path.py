from __future__ import annotations

import pytest

from manyhands.testing.trace_path import trace


@pytest.mark.parametrize(("strategy", "most"), [("allreduce", 7), ("allreduce(transport=tcp)", 5)])
def test_the_path_of_a_gradient_with_allreduce_is_short(strategy: str, most: int) -> None:
    paths = trace(strategy, workers=2)
    assert sorted(paths) == ["worker-0", "worker-1"]
    for path in paths.values():
        files = [visit.file for visit in path if visit.counts]
        assert files[:2] == ["compute/gradients.py", "collectives/reducer.py"]
        assert {"strategies/allreduce.py", "compute/train_state.py"} <= set(files)
        assert len(files) <= most, files

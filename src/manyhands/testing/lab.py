"""A lab: several hosts on one machine, for tests of what happens between hosts.

    def test_it() -> None:
        if reason := Lab.unavailable():
            pytest.skip(reason)
        with Lab(hosts=3, bandwidth="1gbit") as lab:
            ...

The code is in `manyhands.lab`, which `manyhands lab` uses too.
"""

from manyhands.lab import Lab, LabHost, Traffic

__all__ = ["Lab", "LabHost", "Traffic"]

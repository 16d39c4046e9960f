"""A lab: several hosts on one machine, for tests of what happens between hosts.

    @pytest.mark.skipif(...)   # or:  if reason := Lab.unavailable(): pytest.skip(reason)
    def test_it() -> None:
        with Lab(hosts=3, bandwidth="1gbit") as lab:
            ...

It is made in `manyhands.lab`, which the command line uses, too.
"""

from manyhands.lab import Lab, LabHost, Traffic

__all__ = ["Lab", "LabHost", "Traffic"]

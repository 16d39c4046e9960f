"""Files that start a job on a cluster, as text that people read and edit: one file a scheduler. Pure."""

from manyhands.launch.kubernetes import KINDS, KubernetesJob
from manyhands.launch.shell import Flags
from manyhands.launch.slurm import SlurmJob

__all__ = ["KINDS", "Flags", "KubernetesJob", "SlurmJob"]

"""Files that start a job on a cluster, as text that people read and edit: one file a scheduler. Pure."""

from manyhands.cluster.launch_files.kubernetes import KINDS, KubernetesJob
from manyhands.cluster.launch_files.slurm import SlurmJob
from manyhands.cluster.launch_files.words import Flags

__all__ = ["KINDS", "Flags", "KubernetesJob", "SlurmJob"]

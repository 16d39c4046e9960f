"""Files that start a job on a cluster, as text to read and edit: a template for each scheduler. Pure."""

from manyhands.launch.kubernetes import KubernetesJob
from manyhands.launch.slurm import SlurmJob

__all__ = ["KubernetesJob", "SlurmJob"]

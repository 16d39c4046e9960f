"""A manifest for Kubernetes: an Indexed Job, a JobSet or a RayJob, with what they need. Pure.

Pod 0 coordinates and the other pods are its agents; they find it by its name in a headless service. All
pods mount one volume with the run folder. A preempted pod gets SIGTERM, saves a checkpoint and exits with
75, which does not count as a failure: Kubernetes starts it again, and it calls `manyhands resume`.
"""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import dataclass

from manyhands.errors import UsageError, closest
from manyhands.events.units import plural
from manyhands.hosts.spec import DEFAULT_PORT
from manyhands.launch.template import at_least, fill, matching, one_line, shell_lines

KINDS = {"job": "an Indexed Job", "jobset": "a JobSet", "rayjob": "a RayJob of KubeRay"}
LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?"
MAX_LABEL = 63
MAX_RAY_NAME = 47
"""KubeRay derives longer names from it, and refuses more than this."""


@dataclass(frozen=True)
class KubernetesJob:
    job: str
    """The job file, as a path in the image."""
    name: str
    image: str
    flags: tuple[str, ...] = ()
    """Passed on to `manyhands train`."""
    kind: str = "job"
    pods: int = 2
    slots: int = 1
    """Members per pod."""
    namespace: str | None = None
    cpus: str | None = None
    memory: str | None = None
    gpus: int = 0
    """Per pod."""
    gpu_resource: str = "nvidia.com/gpu"
    claim: str | None = None
    """An existing volume claim. None: the manifest has one."""
    storage: str = "20Gi"
    storage_class: str | None = None
    folder: str = "/runs"
    """Where pods mount the volume."""
    secret: str | None = None
    grace_s: int = 120
    """Time for a pod that must go to save a checkpoint."""
    retries: int = 10

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"--kind {self.kind}: it is one of {', '.join(KINDS)}{closest(self.kind, KINDS)}"
            )
        one_line("JOB", self.job)
        matching("--image", self.image, r"[\w.][\w.:/@-]*", "registry.example.org/train:1.0")
        for flag, value, least in (
            ("--pods", self.pods, 1),
            ("--slots", self.slots, 1),
            ("--gpus", self.gpus, 0),
            ("--grace", self.grace_s, 1),
            ("--retries", self.retries, 0),
        ):
            at_least(flag, value, least)
        for flag, text, pattern, example in (
            ("--name", self.name, LABEL, "digits-large: small letters, digits and -"),
            ("--namespace", self.namespace, LABEL, "team-a: small letters, digits and -"),
            ("--claim", self.claim, SUBDOMAIN, "team-runs"),
            ("--secret", self.secret, SUBDOMAIN, "digits-key"),
            ("--storage-class", self.storage_class, SUBDOMAIN, "nfs"),
            ("--cpus", self.cpus, r"[0-9]+(\.[0-9]+)?|[0-9]+m", "4, 0.5 or 500m"),
            ("--memory", self.memory, QUANTITY, "16Gi"),
            ("--storage", self.storage, QUANTITY, "20Gi"),
            ("--gpu-resource", self.gpu_resource, r"[a-z0-9.-]+/[\w.-]+", "nvidia.com/gpu"),
            ("--runs", self.folder, r"/[\w.-]+(/[\w.-]+)*", "/runs, a folder in the pods"),
        ):
            if text is not None:
                matching(flag, text, pattern, example)
        self._check_length()

    def _check_length(self) -> None:
        more = len(self._pod(self.pods - 1)) - len(self.name)
        most = MAX_RAY_NAME if self.kind == "rayjob" else MAX_LABEL - more
        if len(self.name) > most:
            raise UsageError(
                f"--name {self.name}: it has {len(self.name)} characters, and {most} are allowed, as "
                "longer names are made of it."
            )

    def manifest(self) -> str:
        values: dict[str, object] = {
            "job": self.job,
            "name": self.name,
            "image": self.image,
            "namespace": f'namespace: "{self.namespace}"' if self.namespace else "",
            "in_namespace": f" -n {self.namespace}" if self.namespace else "",
            "pods": self.pods,
            "pods_text": plural(self.pods, "pod"),
            "slots": self.slots,
            "coordinator": f"{self._pod(0)}.{self.name}",
            "port": DEFAULT_PORT,
            "secret": self.secret or f"{self.name}-key",
            "claim": self.claim or f"{self.name}-runs",
            "storage": self.storage,
            "storage_class": f'storageClassName: "{self.storage_class}"'
            if self.storage_class
            else "",
            "folder": self.folder,
            "grace_s": self.grace_s,
            "retries": self.retries,
            "subdomain": f'subdomain: "{self.name}"' if self.kind == "job" else "",
            "script": self._script("ray" if self.kind == "rayjob" else "env"),
            "resources": self._resources(gpus=self.gpus),
            "head_resources": self._resources(gpus=0),
        }
        values["claim_document"] = "" if self.claim else fill("claim.yaml", values)
        if self.kind != "rayjob":
            values["job_spec"] = fill("job_spec.yaml", values)
        return fill(f"{self.kind}.yaml", values)

    def _pod(self, index: int) -> str:
        """Return the host name of a pod."""
        return f"{self.name}-pods-0-{index}" if self.kind == "jobset" else f"{self.name}-{index}"

    def _script(self, place: str) -> str:
        flags = list(self.flags)
        if place == "ray" and not any(word.partition("=")[0] == "--workers" for word in flags):
            # With --on env every slot announces itself; Ray has to be asked for them.
            flags = ["--workers", str(self.pods * self.slots), *flags]
        script = fill(
            "start.sh",
            {
                "run": posixpath.join(self.folder, self.name),
                "only_first": '[ "$JOB_COMPLETION_INDEX" = 0 ] && ' if place == "env" else "",
                "place": place,
                "job": shlex.quote(self.job),
                "flags": "".join(f" \\\n  {line}" for line in shell_lines(flags)),
            },
        )
        # In arguments Kubernetes expands $(NAME) itself, and reads $$ as one dollar sign.
        return script if place == "ray" else script.replace("$", "$$")

    def _resources(self, *, gpus: int) -> str:
        amounts = {"cpu": self.cpus, "memory": self.memory}
        requests = [f'{name}: "{value}"' for name, value in amounts.items() if value is not None]
        limits = requests + ([f"{self.gpu_resource}: {gpus}"] if gpus else [])
        lines = {"requests": requests, "limits": limits}
        entries = [f"  {name}: {{{', '.join(line)}}}" for name, line in lines.items() if line]
        return "\n".join(["resources:", *entries]) if entries else ""

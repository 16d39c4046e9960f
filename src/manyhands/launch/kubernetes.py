"""A manifest for Kubernetes: an Indexed Job, a JobSet or a RayJob, with what they need. Pure.

Pod 0 coordinates and the other pods are its agents; they find it by its name in a headless service. All
pods mount one volume with the run folder. A preempted pod gets SIGTERM, saves a checkpoint and exits with
75, which does not count as a failure: Kubernetes starts it again, and it calls `manyhands resume`.
"""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import MISSING, dataclass
from functools import partial

from manyhands.errors import UsageError, check_choice
from manyhands.events.units import plural
from manyhands.hosts.spec import DEFAULT_PORT
from manyhands.launch.flags import check_fields, flag, matching, one_line
from manyhands.launch.template import fill, shell_lines

KINDS = {"job": "an Indexed Job", "jobset": "a JobSet", "rayjob": "a RayJob of KubeRay"}
LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
LETTERS = "lowercase letters, digits and -"
SUBDOMAIN = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
CPUS = r"[0-9]+(\.[0-9]+)?|[0-9]+m"
RESOURCE = r"[a-z0-9.-]+/[\w.-]+"
QUANTITY = r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?"
MAX_LABEL = 63
MAX_RAY_NAME = 47
"""KubeRay derives longer names from it, and refuses more than this."""


_resource = partial(flag, "resources")
_storage = partial(flag, "where the run folder is")
_start = partial(flag, "how it is started")


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    job: str
    """The job file, as a path in the image."""
    name: str
    flags: tuple[str, ...] = ()
    """Passed on to `manyhands train`."""
    kind: str = _resource(
        "--kind",
        "KIND",
        ", ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
        default="job",
    )
    image: str = _resource(
        "--image",
        "IMAGE",
        "container image with manyhands and the job file; JOB is a path in it",
        r"[\w.][\w.:/@-]*",
        "registry.example.org/train:1.0",
        default=MISSING,
    )
    namespace: str | None = _resource(
        "--namespace", "NAME", "namespace of all objects", LABEL, f"team-a: {LETTERS}"
    )
    pods: int = _resource("--pods", "N", "number of pods", default=2)
    cpus: str | None = _resource(
        "--cpus", "N", "CPUs per pod, such as 4 or 500m", CPUS, "4, 0.5 or 500m"
    )
    memory: str | None = _resource(
        "--memory", "SIZE", "memory per pod, such as 16Gi", QUANTITY, "16Gi"
    )
    gpus: int = _resource("--gpus", "N", "GPUs per pod", default=0, least=0)
    gpu_resource: str = _resource(
        "--gpu-resource",
        "NAME",
        "name of the GPU resource in the cluster",
        RESOURCE,
        default="nvidia.com/gpu",
    )
    slots: int | None = _resource("--slots", "N", "members per pod (default: its GPUs, or 1)")
    folder: str = _storage(
        "--runs",
        "DIR",
        "where pods mount the volume",
        r"/[\w.-]+(/[\w.-]+)*",
        "/runs, a folder in the pods",
        default="/runs",
    )
    claim: str | None = _storage(
        "--claim", "NAME", "use this volume claim instead of a new one", SUBDOMAIN, "team-runs"
    )
    storage: str = _storage("--storage", "SIZE", "size of the new volume", QUANTITY, default="20Gi")
    storage_class: str | None = _storage(
        "--storage-class", "NAME", "storage class of the new volume", SUBDOMAIN, "nfs"
    )
    secret: str | None = _start(
        "--secret",
        "NAME",
        "secret with the run's key (default: NAME-key); the file shows how to make it",
        SUBDOMAIN,
        "digits-key",
    )
    grace_s: int = _start(
        "--grace", "SECONDS", "time for an evicted pod to save a checkpoint", default=120
    )
    retries: int = _start(
        "--retries",
        "N",
        "number of failed pods to replace; preempted ones don't count",
        default=10,
        least=0,
    )

    def __post_init__(self) -> None:
        check_choice("--kind", self.kind, KINDS)
        one_line("JOB", self.job)
        matching("--name", self.name, LABEL, f"digits-large: {LETTERS}")
        check_fields(self)
        self._check_length()

    @property
    def num_slots(self) -> int:
        return self.pods * self._slots_per_pod

    @property
    def _slots_per_pod(self) -> int:
        return max(1, self.gpus) if self.slots is None else self.slots

    def _check_length(self) -> None:
        more = len(self._pod(self.pods - 1)) - len(self.name)
        most = MAX_RAY_NAME if self.kind == "rayjob" else MAX_LABEL - more
        if len(self.name) > most:
            raise UsageError(
                f"--name {self.name}: it has {len(self.name)} characters, and {most} are allowed, as "
                "longer names are made of it."
            )

    def manifest(self) -> str:
        values: dict[str, object] = vars(self) | {
            "namespace": f'namespace: "{self.namespace}"' if self.namespace else "",
            "in_namespace": f" -n {self.namespace}" if self.namespace else "",
            "pods_text": plural(self.pods, "pod"),
            "slots": self._slots_per_pod,
            "coordinator": f"{self._pod(0)}.{self.name}",
            "port": DEFAULT_PORT,
            "secret": self.secret or f"{self.name}-key",
            "claim": self.claim or f"{self.name}-runs",
            "storage_class": f'storageClassName: "{self.storage_class}"'
            if self.storage_class
            else "",
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
            # With --on env every slot joins by itself; from Ray they have to be requested.
            flags = ["--workers", str(self.num_slots), *flags]
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

"""A manifest for Kubernetes: an Indexed Job, a JobSet or a RayJob, with what they need. Pure.

Pod 0 coordinates, the others serve it; they find it by its name in a headless service. All mount one
volume, where the run's folder is. A pod that is asked to go gets SIGTERM, saves a checkpoint and ends with
75, which counts as no failure: Kubernetes starts it again, and it goes on by `manyhands resume`.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from manyhands.errors import UsageError, closest
from manyhands.hosts.spec import DEFAULT_PORT
from manyhands.launch.shell import Flags, at_least, matching, one_line, quoted
from manyhands.launch.yaml import Flow, Script, render

KINDS = {"job": "an Indexed Job", "jobset": "a JobSet", "rayjob": "a RayJob of KubeRay"}
LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?"
MAX_LABEL = 63
MAX_RAY_NAME = 47
"""KubeRay makes longer names of it, and refuses others."""
MARK = "manyhands/run"
CODE = "/etc/manyhands"

Yaml = dict[str, Any]


@dataclass(frozen=True)
class KubernetesJob:
    job: str
    """The job file, as a path in the image."""
    name: str
    image: str
    flags: Flags = ()
    kind: str = "job"
    pods: int = 2
    slots: int = 1
    """Members that a pod takes."""
    namespace: str | None = None
    cpus: str | None = None
    memory: str | None = None
    gpus: int = 0
    """Of a pod."""
    gpu_resource: str = "nvidia.com/gpu"
    claim: str | None = None
    """A volume claim that is there already; None: one is written."""
    storage: str = "20Gi"
    storage_class: str | None = None
    folder: str = "/runs"
    """Where the volume is mounted."""
    secret: str | None = None
    grace_s: int = 120
    """How long a pod that is asked to go has for its checkpoint."""
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
        bodies = {"job": self._job, "jobset": self._job_set, "rayjob": self._ray_job}
        documents = [*self._claims(), *bodies[self.kind]()]
        return "---\n".join([self._head(), *(render(document) for document in documents)])

    # What all kinds have ----------------------------------------------------------------------

    @property
    def _secret(self) -> str:
        return self.secret or f"{self.name}-key"

    @property
    def _claim(self) -> str:
        return self.claim or f"{self.name}-runs"

    def _pod(self, index: int) -> str:
        """The host name of a pod."""
        return f"{self.name}-pods-0-{index}" if self.kind == "jobset" else f"{self.name}-{index}"

    def _head(self) -> str:
        space = "" if self.namespace is None else f" -n {self.namespace}"
        pods = f"{self.pods} pod{'s' * (self.pods > 1)}"
        logs = f"-l {MARK}={self.name},batch.kubernetes.io/job-completion-index=0"
        if self.kind == "rayjob":
            logs = f"-l job-name={self.name}"
        key = f"""\
# The run's key is in a secret and not in this file: whoever has it can take part in the run. Make it once:
#
#   manyhands key | tr -d '\\n' |
#     kubectl create secret generic {self._secret}{space} --from-file=key=/dev/stdin
#
# Then start the run, and follow it:
"""
        if self.kind == "rayjob":
            key = "# The run makes its key itself. Start it, and follow it:\n"
        return f"""\
# {self.job} on {pods}, as {KINDS[self.kind]}. Written by  manyhands launch kubernetes; it is yours to edit.
#
{key}#
#   kubectl apply{space} -f FILE
#   kubectl logs{space} -f {logs}
"""

    def _document(self, version: str, kind: str, name: str) -> Yaml:
        space = {} if self.namespace is None else {"namespace": self.namespace}
        labels = Flow({MARK: self.name})
        metadata = {"name": name, **space, "labels": labels}
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def _claims(self) -> Iterator[Yaml]:
        if self.claim is not None:
            return
        kind = {} if self.storage_class is None else {"storageClassName": self.storage_class}
        yield {
            "#": "The disk with the run's folder. All pods mount it, on whichever node they are: its class "
            "must allow ReadWriteMany.",
            **self._document("v1", "PersistentVolumeClaim", self._claim),
            "spec": {
                "accessModes": ["ReadWriteMany"],
                **kind,
                "resources": {"requests": Flow(storage=self.storage)},
            },
        }

    def _script(self, place: str) -> str:
        run = posixpath.join(self.folder, self.name)
        flags = "".join(f" \\\n  {words}" for words in quoted(self._flags(place)))
        first = '[ "$JOB_COMPLETION_INDEX" = 0 ] && ' if place == "env" else ""
        return f"""\
RUN={run}
# A second start goes on from the last checkpoint, with the flags that the run had.
if {first}[ -e "$RUN/config.json" ]; then
  exec manyhands resume "$RUN" --on {place}
fi
exec manyhands train {shlex.quote(self.job)} --on {place} --run-dir "$RUN"{flags}
"""

    def _flags(self, place: str) -> list[list[str]]:
        given = [list(words) for words in self.flags]
        if place == "env" or any(words[0] == "--workers" for words in given):
            return given
        # Elsewhere every slot announces itself; Ray has to be asked for them.
        return [["--workers", str(self.pods * self.slots)], *given]

    def _key(self) -> Yaml:
        where = Flow(secretKeyRef=Flow(name=self._secret, key="key"))
        return {"name": "MANYHANDS_KEY", "valueFrom": where}

    def _resources(self, *, gpus: int) -> Yaml:
        both = {"cpu": self.cpus, "memory": self.memory}
        requests = Flow({name: value for name, value in both.items() if value is not None})
        limits = Flow(requests | ({self.gpu_resource: gpus} if gpus else {}))
        named = {"requests": requests, "limits": limits}
        given = {name: values for name, values in named.items() if values}
        return {"resources": given} if given else {}

    def _mounts(self) -> list[Yaml]:
        return [
            Flow(name="runs", mountPath=self.folder),
            Flow(name="memory", mountPath="/dev/shm"),
        ]

    def _volumes(self) -> list[Yaml]:
        return [
            {"name": "runs", "persistentVolumeClaim": Flow(claimName=self._claim)},
            {
                "#": "Data loaders hand over batches in shared memory; a container has 64 MB by default.",
                "name": "memory",
                "emptyDir": Flow(medium="Memory"),
            },
        ]

    # An Indexed Job, alone or in a JobSet -----------------------------------------------------

    def _job(self) -> Iterator[Yaml]:
        yield {
            "#": f"Gives each pod a name that the others can find: {self._pod(0)}.{self.name} is the "
            "coordinator. Also those that are not ready, as nobody is before all have met.",
            **self._document("v1", "Service", self.name),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": Flow({MARK: self.name}),
                "ports": [Flow(name="coordinator", port=DEFAULT_PORT)],
            },
        }
        yield {**self._document("batch/v1", "Job", self.name), "spec": self._job_spec()}

    def _job_set(self) -> Iterator[Yaml]:
        yield {
            **self._document("jobset.x-k8s.io/v1alpha2", "JobSet", self.name),
            "spec": {
                "#1": f"Gives each pod a name that the others can find: {self._pod(0)}.{self.name} is the "
                "coordinator.",
                "network": {
                    "enableDNSHostnames": True,
                    "subdomain": self.name,
                    "publishNotReadyAddresses": True,
                },
                "#2": "Pods that end are started again below; this is for a job that has failed for good.",
                "failurePolicy": Flow(maxRestarts=0),
                "replicatedJobs": [
                    {"name": "pods", "replicas": 1, "template": {"spec": self._job_spec()}}
                ],
            },
        }

    def _job_spec(self) -> Yaml:
        subdomain = {"subdomain": self.name} if self.kind == "job" else {}
        return {
            "completionMode": "Indexed",
            "completions": self.pods,
            "parallelism": self.pods,
            "#1": "The run is done when the coordinator is. (From Kubernetes 1.31 on; for an older one take "
            "this out.)",
            "successPolicy": {"rules": [Flow(succeededIndexes="0")]},
            "backoffLimit": self.retries,
            "podFailurePolicy": {
                "rules": [
                    {
                        "#": "2: wrong use, such as a flag that does not exist. 65: the training has "
                        "diverged. Another start won't help.",
                        "action": "FailJob",
                        "onExitCodes": _codes(2, 65),
                    },
                    {
                        "#": "75: asked to go, and saved. 143: asked to go before there was anything to "
                        "save. Both are started again and go on.",
                        "action": "Ignore",
                        "onExitCodes": _codes(75, 143),
                    },
                    {
                        "#": "The node is drained, or somebody else needs it more.",
                        "action": "Ignore",
                        "onPodConditions": [Flow(type="DisruptionTarget", status="True")],
                    },
                ]
            },
            "template": {
                "metadata": {"labels": Flow({MARK: self.name})},
                "spec": {
                    **subdomain,
                    "#1": "What the policy for exit codes needs: pods are replaced, not restarted in place.",
                    "restartPolicy": "Never",
                    "#2": "A pod that is asked to go gets SIGTERM, and has so many seconds to save a "
                    "checkpoint. It needs no preStop hook: a second SIGTERM stops at once.",
                    "terminationGracePeriodSeconds": self.grace_s,
                    "containers": [self._container()],
                    "volumes": self._volumes(),
                },
            },
        }

    def _container(self) -> Yaml:
        first = f"{self._pod(0)}.{self.name}:{DEFAULT_PORT}"
        # In arguments Kubernetes takes $(NAME) for a variable of its own, and halves dollar signs.
        script = self._script("env").replace("$", "$$")
        return {
            "name": "manyhands",
            "image": self.image,
            "env": [
                self._key(),
                {
                    "#": "Who takes part; Kubernetes itself sets JOB_COMPLETION_INDEX.",
                    "name": "MANYHANDS_PODS",
                    "value": str(self.pods),
                },
                {"name": "MANYHANDS_COORDINATOR", "value": first},
                {"name": "MANYHANDS_SLOTS", "value": str(self.slots)},
            ],
            "#": "Two dollar signs are one: Kubernetes reads $(NAME) itself.",
            "command": ["/bin/sh", "-c"],
            "args": [Script(script)],
            **self._resources(gpus=self.gpus),
            "volumeMounts": self._mounts(),
        }

    # A RayJob ---------------------------------------------------------------------------------

    def _ray_job(self) -> Iterator[Yaml]:
        yield {
            "#": "What is started on the head, once the cluster is there.",
            **self._document("v1", "ConfigMap", f"{self.name}-start"),
            "data": {"start.sh": Script(self._script("ray"))},
        }
        yield {
            **self._document("ray.io/v1", "RayJob", self.name),
            "spec": {
                "entrypoint": f"sh {CODE}/start.sh",
                "shutdownAfterJobFinishes": True,
                "#": "A RayJob can't tell exit codes apart: each end but a good one is started again, "
                "so often, on a fresh cluster, and goes on from the last checkpoint.",
                "backoffLimit": self.retries,
                "rayClusterSpec": {
                    "headGroupSpec": {
                        "#": "The head coordinates; members run in the other pods.",
                        "rayStartParams": Flow({"num-cpus": "0"}),
                        "template": self._ray_pod("ray-head", gpus=0),
                    },
                    "workerGroupSpecs": [
                        {
                            "groupName": "pods",
                            "replicas": self.pods,
                            "minReplicas": self.pods,
                            "maxReplicas": self.pods,
                            "rayStartParams": Flow(),
                            "template": self._ray_pod("ray-worker", gpus=self.gpus),
                        }
                    ],
                },
            },
        }

    def _ray_pod(self, name: str, *, gpus: int) -> Yaml:
        script = {"name": "start", "configMap": Flow(name=f"{self.name}-start")}
        return {
            "metadata": {"labels": Flow({MARK: self.name})},
            "spec": {
                "terminationGracePeriodSeconds": self.grace_s,
                "containers": [
                    {
                        "name": name,
                        "image": self.image,
                        **self._resources(gpus=gpus),
                        "volumeMounts": [
                            *self._mounts(),
                            Flow(name="start", mountPath=CODE, readOnly=True),
                        ],
                    }
                ],
                "volumes": [*self._volumes(), script],
            },
        }


def _codes(*values: int) -> Flow:
    return Flow(containerName="manyhands", operator="In", values=list(values))

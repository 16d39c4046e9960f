"""The manifest for Kubernetes: valid by the published schemas, and what its pods would run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_validate import validate

from manyhands.errors import UsageError
from manyhands.hosts.discovery import detect
from manyhands.launch import KubernetesJob
from manyhands.launch.kubernetes import KINDS

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install manyhands[dev]")

AWKWARD = ["--set", 'text=it\'s a "$HOME" $(HOME) $$ `id` \\ : # é *']


def job(**more: Any) -> KubernetesJob:
    return KubernetesJob(
        **({"job": "my jobs/job.py:Large", "name": "digits", "image": "train:1.0"} | more)
    )


def documents(**more: Any) -> dict[str, dict[str, Any]]:
    """What is in the file, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(job(**more).manifest())}


def job_spec(kind: str, **more: Any) -> dict[str, Any]:
    """The specification of the Indexed Job, also inside a JobSet."""
    if kind == "job":
        return documents(kind=kind, **more)["Job"]["spec"]
    return documents(kind=kind, **more)["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def pods(kind: str, **more: Any) -> list[dict[str, Any]]:
    """The templates of all pods in the file."""
    if kind != "rayjob":
        return [job_spec(kind, **more)["template"]]
    spec = documents(kind=kind, **more)["RayJob"]["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]]


# The schemas --------------------------------------------------------------------------------------

ALL = {
    "pods": 3,
    "slots": 4,
    "gpus": 4,
    "cpus": "8",
    "memory": "16Gi",
    "namespace": "team-a",
    "storage_class": "nfs",
    "flags": ("--workers", "3", *AWKWARD),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, ALL, {"claim": "here", "secret": "mine"}])
def test_it_is_valid_by_the_published_schemas(kind: str, more: dict[str, Any]) -> None:
    """Those of Kubernetes itself; of what JobSet and KubeRay add, the jobs and pods inside."""
    checked = [
        document
        for name, document in documents(kind=kind, **more).items()
        if name not in ("JobSet", "RayJob")
    ]
    if kind == "jobset":
        inside = job_spec(kind, **more)
        checked.append({"apiVersion": "batch/v1", "kind": "Job", "spec": inside})
    checked += [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods(kind, **more)]
    for document in checked:
        for version in ("1.31", "1.34"):
            validate(document, version, strict=True)


# What the parts have to do with each other --------------------------------------------------------


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_each_pod_reads_the_cluster(kind: str) -> None:
    """By the variables of the file, as our own reader reads them."""
    spec = job_spec(kind, pods=3, slots=2)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    (container,) = spec["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    for index in range(3):
        cluster = detect(environ | {"JOB_COMPLETION_INDEX": str(index)}, hostname="pod")
        assert (cluster.me.rank, cluster.size, cluster.num_workers) == (index, 3, 6)
        assert cluster.port == 29600
    # An Indexed Job names its pods after itself and their index; in a JobSet it has a longer name.
    first = "digits-0.digits" if kind == "job" else "digits-pods-0-0.digits"
    assert cluster.host == first


def test_the_service_finds_the_pods() -> None:
    found = documents()
    service, template = found["Service"], found["Job"]["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()


def test_a_job_set_has_a_network_of_its_own() -> None:
    found = documents(kind="jobset")
    assert "Service" not in found
    assert found["JobSet"]["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "digits",
        "publishNotReadyAddresses": True,
    }


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_preempted_pod_is_restarted_and_a_usage_error_is_not(kind: str) -> None:
    spec = job_spec(kind, grace_s=300, retries=4)
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "the policy needs it"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 300
    assert spec["backoffLimit"] == 4
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    rules = spec["podFailurePolicy"]["rules"]
    codes = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert codes == {2: "FailJob", 65: "FailJob", 75: "Ignore", 143: "Ignore"}
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_key_comes_from_a_secret_and_is_not_in_the_file(kind: str) -> None:
    for pod in pods(kind):
        (container,) = pod["spec"]["containers"]
        (key,) = [entry for entry in container["env"] if entry["name"] == "MANYHANDS_KEY"]
        assert key["valueFrom"] == {"secretKeyRef": {"name": "digits-key", "key": "key"}}
    text = job(kind=kind, namespace="team-a").manifest()
    command = re.search(r"#   (manyhands key .*)\n#     (kubectl create secret .*)\n", text)
    assert command is not None
    assert command[2].split()[3:7] == ["generic", "digits-key", "-n", "team-a"]
    assert "literal" not in command[2], "a key on a command line can be seen by others"


@pytest.mark.parametrize("kind", KINDS)
def test_all_pods_mount_the_runs_and_every_mount_has_its_volume(kind: str) -> None:
    for pod in pods(kind, folder="/mnt/runs"):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert mounts["runs"] == "/mnt/runs"
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "digits-runs"}
    claim = documents(kind=kind)["PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "digits-runs"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_an_existing_claim_is_used() -> None:
    found = documents(claim="team-runs")
    assert "PersistentVolumeClaim" not in found
    volumes = found["Job"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "team-runs"}


def test_resources() -> None:
    (container,) = job_spec("job", cpus="500m", memory="16Gi", gpus=8)["template"]["spec"][
        "containers"
    ]
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "16Gi"},
        "limits": {"cpu": "500m", "memory": "16Gi", "nvidia.com/gpu": 8},
    }
    (plain,) = job_spec("job")["template"]["spec"]["containers"]
    assert "resources" not in plain
    head, worker = pods("rayjob", gpus=2)
    assert "resources" not in head["spec"]["containers"][0], "the head computes nothing"
    assert worker["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}}


# What the pods run --------------------------------------------------------------------------------


def kubernetes_reads(argument: str) -> str:
    """As Kubernetes replaces variables in arguments: $(NAME) by a value, $$ by one dollar sign."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else f"<{m[2]}>", argument)


def started(tmp_path: Path, words: list[str], **environ: str) -> list[str]:
    """What `manyhands` is asked by a command, with a program in its place that writes it down."""
    program = tmp_path / "manyhands"
    program.write_text(
        f"#!{sys.executable} -IS\nimport json, sys\n"
        f"json.dump(sys.argv[1:], open({str(tmp_path / 'argv')!r}, 'w'))"
    )
    program.chmod(0o755)
    subprocess.run(
        words, check=True, timeout=60, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environ
    )
    return json.loads((tmp_path / "argv").read_text())


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_pod_trains_and_the_first_resumes_on_its_second_start(kind: str, tmp_path: Path) -> None:
    spec = job_spec(kind, folder=str(tmp_path), flags=("--workers", "2", *AWKWARD, "--quiet"))
    (container,) = spec["template"]["spec"]["containers"]
    words = container["command"] + [kubernetes_reads(text) for text in container["args"]]
    run = str(tmp_path / "digits")
    train = ["train", "my jobs/job.py:Large", "--on", "env", "--run-dir", run, "--workers", "2"]
    train += [*AWKWARD, "--quiet"]
    for index in ("0", "1"):
        assert started(tmp_path, words, JOB_COMPLETION_INDEX=index) == train
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "config.json").touch()
    resume = ["resume", run, "--on", "env"]
    assert started(tmp_path, words, JOB_COMPLETION_INDEX="0") == resume
    assert started(tmp_path, words, JOB_COMPLETION_INDEX="1") == train


def test_a_ray_job_starts_its_script_on_the_head(tmp_path: Path) -> None:
    found = documents(kind="rayjob", pods=3, folder=str(tmp_path), flags=tuple(AWKWARD))
    spec, head = found["RayJob"]["spec"], pods("rayjob")[0]["spec"]
    (mount,) = [m for m in head["containers"][0]["volumeMounts"] if m["name"] == "start"]
    assert spec["entrypoint"] == f"sh {mount['mountPath']}/start.sh"
    (volume,) = [v for v in head["volumes"] if v["name"] == "start"]
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    assert spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3
    words = ["sh", "-c", found["ConfigMap"]["data"]["start.sh"]]
    wanted = ["train", "my jobs/job.py:Large", "--on", "ray", "--run-dir", str(tmp_path / "digits")]
    assert started(tmp_path, words) == [*wanted, "--workers", "3", *AWKWARD]


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"kind": "jobsett"},
            "--kind jobsett: it must be one of job, jobset, rayjob; did you mean 'jobset'?",
        ),
        ({"name": "Digits"}, "--name 'Digits': it must look like digits-large: lowercase letters"),
        ({"name": "my_job"}, "--name 'my_job'"),
        ({"name": "1st"}, "--name '1st'"),
        ({"name": "job-"}, "--name 'job-'"),
        ({"name": ""}, "--name ''"),
        ({"name": "x" * 62}, "it has 62 characters, and 61 are allowed"),
        ({"name": "x" * 60, "pods": 1000}, "it has 60 characters, and 59 are allowed"),
        ({"name": "x" * 56, "kind": "jobset"}, "it has 56 characters, and 54 are allowed"),
        ({"name": "x" * 48, "kind": "rayjob"}, "it has 48 characters, and 47 are allowed"),
        ({"namespace": "Team A"}, "--namespace 'Team A'"),
        ({"claim": "a/b"}, "--claim 'a/b'"),
        ({"secret": "A"}, "--secret 'A'"),
        ({"image": ""}, "--image ''"),
        ({"image": "train latest"}, "--image 'train latest'"),
        ({"pods": 0}, "--pods 0: it must be at least 1"),
        ({"pods": -1}, "--pods -1"),
        ({"slots": 0}, "--slots 0"),
        ({"gpus": -1}, "--gpus -1"),
        ({"grace_s": 0}, "--grace 0"),
        ({"retries": -1}, "--retries -1"),
        ({"cpus": "four"}, "--cpus 'four': it must look like 4, 0.5 or 500m"),
        ({"memory": "16 GB"}, "--memory '16 GB': it must look like 16Gi"),
        ({"storage": "-5Gi"}, "--storage '-5Gi'"),
        ({"storage_class": "a b"}, "--storage-class 'a b'"),
        ({"gpu_resource": "gpu"}, "--gpu-resource 'gpu'"),
        ({"folder": "runs"}, "--runs 'runs': it must look like /runs"),
        ({"job": "job.py\n"}, "line breaks and control characters"),
        ({"flags": ("--set", "a=b\nc")}, "The value 'a=b\\nc': line breaks"),
    ],
)
def test_invalid_values_are_refused(change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        job(**change).manifest()
    assert wanted in str(caught.value)


# The templates ------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=8)


@given(st.lists(TEXTS.filter(str.strip), min_size=1, max_size=5), st.sampled_from(sorted(KINDS)))
def test_any_printable_flags_are_read_back_from_the_yaml(values: list[str], kind: str) -> None:
    flags = [word for value in values for word in ("--set", f"a={value}")]
    found = documents(kind=kind, flags=tuple(flags))
    if kind == "rayjob":
        script = found["ConfigMap"]["data"]["start.sh"]
    else:
        (container,) = pods(kind, flags=tuple(flags))[0]["spec"]["containers"]
        script = kubernetes_reads(container["args"][0])
    line = script.partition("exec manyhands train ")[2].replace("\\\n", " ")
    assert shlex.split(line)[-len(flags) :] == flags


@pytest.mark.parametrize("word", ["true", "null", "on", "no", "y", "1e3", "0"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_that_look_like_other_types_stay_text(word: str, kind: str) -> None:
    name = word if word.isalpha() else "run"
    found = documents(kind=kind, name=name, namespace=name, secret=word, claim=word)
    for document in found.values():
        assert document["metadata"]["labels"] == {"manyhands/run": name}
        assert document["metadata"]["namespace"] == name
    for pod in pods(kind, name=name, claim=word):
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": word}


def test_a_value_that_looks_like_a_placeholder_stays_as_it_is() -> None:
    assert "--set 'a={{name}}'" in job(flags=("--set", "a={{name}}")).manifest()

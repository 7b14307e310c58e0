"""The files in examples/ for schedulers: their command lines are ours, their numbers agree."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent import exit_codes
from phalanx.cli import nodes, options

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
KUBERNETES = ROOT / "examples" / "kubernetes"
DOCS = (ROOT / "docs" / "schedulers.md").read_text()


# --- Slurm ---------------------------------------------------------------------------------------


def function(name: str) -> str:
    """A function of the batch script, as text."""
    found = re.search(rf"^{name}\(\) \{{.*?^\}}$", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    assert found, name
    return found[0]


def test_the_batch_script_is_bash() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True, timeout=30)


def test_the_agents_command_line(tmp_path: Path) -> None:
    script = f"""
        phalanx() {{ shift; printf '%s\\0' "$@" >{tmp_path}/words; }}
        script_lives() {{ true; }}
        {function("ended")}
        {function("agent")}
        agent train.py --epochs 3
    """
    env = {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "n1",
        "nodes": "2",
        "spares": "1",
        "workers": "4",
        "grace": "60",
        "epoch": "2",
        "endpoint": "n1:20017",
        "run": str(tmp_path),
    }
    subprocess.run(["bash", "-c", script], env=env, check=True, timeout=30)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    a = options.parse(words, {})
    assert [a.training_script, *a.training_script_args] == ["train.py", "--epochs", "3"]
    config = nodes.nodes_from(a)
    assert config is not None
    assert (config.least, config.most, config.spares, config.epoch) == (2, 2, 1, 2)
    assert config.endpoint == ("n1", 20017)
    assert config.token_file == f"{tmp_path}/token"
    assert (tmp_path / "done").exists()
    assert (tmp_path / "agent.n1").read_text().strip().isdigit()


def test_the_workers_time_to_save_is_less_than_the_warning() -> None:
    text = SBATCH.read_text()
    warning, grace = re.search(r"USR1@(\d+)", text), re.search(r"GRACE:-(\d+)", text)
    assert warning and grace
    assert int(grace[1]) < int(warning[1])
    assert f"less than the {warning[1]} s" in DOCS


def test_the_page_names_what_the_recipe_has() -> None:
    text = SBATCH.read_text()
    for line in re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE):
        if line.split("=")[0] not in ("--job-name", "--exclusive", "--open-mode"):
            assert line in DOCS, line
    for word in ("--kill-on-bad-exit=0", "--wait=0", "scontrol requeue", "--epoch"):
        assert word in text and word in DOCS, word


# --- Kubernetes ----------------------------------------------------------------------------------


def documents(name: str) -> dict[str, Any]:
    """The objects of a manifest, by their kind."""
    return {d["kind"]: d for d in yaml.safe_load_all((KUBERNETES / name).read_text())}


def jobs() -> dict[str, dict[str, Any]]:
    """The Job of each manifest: its own, or what the JobSet makes."""
    template = documents("jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]["template"]
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, **template}
    return {"indexed-job.yaml": documents("indexed-job.yaml")["Job"], "jobset.yaml": made}


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


def arguments(job: dict[str, Any]) -> options.RunArguments:
    """What its command line means, with its variables in place."""
    c = container(job)
    assert c["command"] == ["phalanx", "run"]
    names = {e["name"] for e in c["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(c["args"])))
    assert used == names
    return options.parse([re.sub(r"\$\(\w+\)", "3", word) for word in c["args"]], {})


MANIFESTS = sorted(jobs())


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_knows_every_field(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    objects = [jobs()[name]]
    if "Service" in documents(name):
        objects.append(documents(name)["Service"])
    for one in objects:
        validate.validate(one, validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_containers_command_line(name: str) -> None:
    job = jobs()[name]
    spec, a = job["spec"], arguments(job)
    config = nodes.nodes_from(a)
    assert config is not None
    assert spec["completions"] == spec["parallelism"] == config.most + config.spares
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > a.shutdown_timeout
    assert config.ports and config.ports[0] <= config.endpoint[1] <= config.ports[1]
    mounts = {m["mountPath"] for m in container(job)["volumeMounts"]}
    assert str(Path(config.token_file).parent) in mounts
    assert "/checkpoints" in mounts
    volumes = {v["name"] for v in spec["template"]["spec"]["volumes"]}
    assert {m["name"] for m in container(job)["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_probes_ask_where_the_agent_answers(name: str) -> None:
    job = jobs()[name]
    c, a = container(job), arguments(job)
    assert a.health_check_host == "0.0.0.0"
    ports = {p["name"]: p["containerPort"] for p in c["ports"]}
    for probe, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        get = c[f"{probe}Probe"]["httpGet"]
        assert (get["path"], ports[get["port"]]) == (path, int(a.health_check_port))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_that_is_to_be_made_again_is_no_failure(name: str) -> None:
    rules = jobs()[name]["spec"]["podFailurePolicy"]["rules"]
    assert [r["action"] for r in rules] == ["Ignore", "Count", "FailJob"]
    counted = set(rules[1]["onExitCodes"]["values"])
    own = {exit_codes.INTERNAL, exit_codes.RENDEZVOUS, exit_codes.KEEPER}
    assert counted == own | {128 + 9, 128 + 15}
    assert {r["onExitCodes"]["containerName"] for r in rules[1:]} == {
        container(jobs()[name])["name"]
    }


def test_the_endpoint_is_the_first_pod() -> None:
    files = {name: documents(name) for name in MANIFESTS}
    job, service = files["indexed-job.yaml"]["Job"], files["indexed-job.yaml"]["Service"]
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert arguments(job).rdzv_endpoint == f"{name}-0.{subdomain}:29400"
    jobset = files["jobset.yaml"]["JobSet"]
    name, only = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    network = jobset["spec"]["network"]
    assert network["enableDNSHostnames"] is network["publishNotReadyAddresses"] is True
    endpoint = arguments(jobs()["jobset.yaml"]).rdzv_endpoint
    assert endpoint == f"{name}-{only}-0-0.{network['subdomain']}:29400"


def test_both_manifests_run_the_same_pod() -> None:
    pods = []
    for job in jobs().values():
        pod = dict(job["spec"]["template"]["spec"])
        pod.pop("subdomain", None)
        text = yaml.safe_dump(pod)
        for own in ("jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-name"):
            text = text.replace(own, "LABEL")
        one = yaml.safe_load(text)
        c = one["containers"][0]
        del c["env"]
        c["args"] = [w for w in c["args"] if not w.startswith(("--rdzv-e", "--rdzv-id", "--epoch"))]
        pods.append(one)
    assert pods[0] == pods[1]


@pytest.mark.parametrize("text", re.findall(r"^sbatch .*$", DOCS, re.MULTILINE))
def test_the_commands_of_the_page_name_files_that_are_there(text: str) -> None:
    assert (ROOT / shlex.split(text)[1]).exists()

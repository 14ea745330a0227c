"""T9k's manifests, read as they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydroslurm.errors import SpecError, UntrustedFile
from hydroslurm.jobs.spec.reading import JobSpec, load, loads
from hydroslurm.jobs.spec.t9k import read_site_tables

MANIFEST = Path(__file__).resolve().parent.parent.parent.parent / "examples/t9k-manifest.yaml"


FULL = """
name: digits-ddp
labels: {team: vision}
replicaSpecs:
- replicas: 4
  restartPolicy: ExitCode
  template:
    command: [python]
    args: [dist_digits.py, --epochs, "2"]
    image: pytorch/pytorch:2.0.0-cuda11.7-cudnn8-devel
    env: {OMP_NUM_THREADS: "1"}
    resources: {cpus: 1, memory: 2Gi}
    init: [{name: prepare, command: [sh, -c, echo ready]}]
torchrunConfig:
  {enable: true, minNodes: 1, maxRestarts: 10, procPerNode: "1", extraOptions: [--log-dir, logs]}
runPolicy: {activeDeadlineSeconds: 1800}
scheduler: {partition: low}
tensorboard: {logDirectory: runs/log}
runMode: {debug: {replicaSpecs: [{command: [sleep, inf], skipInit: true}]}}
"""


def test_every_field_of_a_full_manifest() -> None:
    """What Slurm has something for is there, as in a job spec; the rest is listed."""
    spec = load(MANIFEST)
    assert spec.is_manifest
    assert spec.job == loads(FULL).job
    listed = "\n".join(spec.meaningless)
    for word in ("priority", "tensorboardSpec.image", "volumeMounts", "volumes", "initContainers"):
        assert word in listed
    assert len(spec.meaningless) == 5


def manifest(container: str, more: str = "") -> str:
    return f"""
apiVersion: batch.tensorstack.dev/v1beta1
kind: PyTorchTrainingJob
spec:
  replicaSpecs:
  - type: worker
    replicas: 4
    restartPolicy: OnFailure
    template:
      spec:
        containers:
        - {container}
{more}"""


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["only"], "only"),
        (["pytorch", "python"], "python"),
        (["sidecar", "pytorch"], "pytorch"),
        (["a", "b"], None),
    ],
)
def test_the_container_that_trains(names: list[str], wanted: str | None) -> None:
    """python before pytorch; of several that are called otherwise none is guessed."""
    one = "{{name: {0}, command: [{0}]}}"
    text = manifest("\n        - ".join(one.format(name) for name in names))
    if wanted is not None:
        assert loads(text).job.replica_specs[0].template.command == (wanted,)
        return
    with pytest.raises(SpecError) as caught:
        loads(text)
    assert "job.yaml:11: spec.replicaSpecs[0].template.spec.containers: " in str(caught.value)
    assert "of a, b; name the one that does python or pytorch" in str(caught.value)


TORCHRUN = "  torchrunConfig: {enabled: %s, %s}\n"
IN_ELASTIC = "elastic: {max: 2}\nreplicaSpecs: [{restartPolicy: Never, template: {command: [a]}}]"
SECRET = "{name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TORCHRUN % ("true", "rdzvBackend: c10d"), ""),
        (
            TORCHRUN % ("true", "rdzvBackend: etcd"),
            "spec.torchrunConfig.rdzvBackend (the agents meet by c10d",
        ),
        (
            TORCHRUN % ("false", "procPerNode: gpu"),
            "spec.torchrunConfig.procPerNode (gpu: counts with torchrun",
        ),
        (IN_ELASTIC, "replicaSpecs[0].restartPolicy (a member of an elastic job that fails "),
    ],
)
def test_what_has_no_effect_in_this_job_is_said(text: str, told: str) -> None:
    """A server of etcd, torchrun's number of ranks without torchrun, a restart policy where members
    are replaced."""
    found = loads(text if text == IN_ELASTIC else manifest("command: [a]", text)).meaningless
    assert len(found) == bool(told)
    assert "".join(found).startswith(told)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hydroslurm").mkdir()
    return tmp_path / "hydroslurm/config.yaml"


def scheduled(words: str, by: str = "t9kScheduler") -> JobSpec:
    return loads(manifest("command: [a]", f"  scheduler: {{{by}: {{{words}}}}}\n"))


def test_a_priority_is_what_the_table_says(table: Path) -> None:
    """A QOS, a nice, both or nothing; one that the table has not is an error that names it, and
    without a table it is listed with the places where one would be read."""
    (listed,) = scheduled("priority: 50").meaningless
    assert listed.startswith("spec.scheduler.t9kScheduler.priority (no table maps it to Slurm")
    assert str(table) in listed
    assert "/etc/hydroslurm/config.yaml" in listed
    table.write_text("priorities: {80: {qos: high}, 10: {nice: 1000}, 50: {}}\n")
    for priority, qos, nice in (("80", "high", 0), ("10", None, 1000), ("50", None, 0)):
        spec = scheduled(f"priority: {priority}")
        assert (spec.job.scheduler.qos, spec.job.scheduler.nice) == (qos, nice)
        assert spec.meaningless == ()
    with pytest.raises(SpecError) as caught:
        scheduled("priority: 60")
    assert "job.yaml:13: spec.scheduler.t9kScheduler.priority: '60' is not" in str(caught.value)
    assert f"{table} or /etc/hydroslurm/config.yaml, which has 80, 10, 50;" in str(caught.value)


def test_a_queue_is_the_partition_that_the_table_says(table: Path) -> None:
    """Or the default one, and without a row the partition of its name."""
    table.write_text("queues: {default: {partition: 'gpu,gpu-long'}, batch: {}}\n")
    for queue, partition in (("default", "gpu,gpu-long"), ("batch", None), ("cpu", "cpu")):
        for by in ("t9kScheduler", "volcanoScheduler"):
            spec = scheduled(f"queue: {queue}", by)
            assert (spec.job.scheduler.partition, spec.meaningless) == (partition, ())


def test_the_users_tables_count_above_the_sites(table: Path, tmp_path: Path) -> None:
    """Row by row; a table that others can write is not obeyed, and a wrong one has its line."""
    site, environ = tmp_path / "site.yaml", {"XDG_CONFIG_HOME": str(tmp_path)}
    site.write_text(
        "priorities: {1: {qos: a}, 2: {qos: b}}\nqueues: {q: {partition: a}, r: {partition: b}}\n"
    )
    table.write_text("priorities: {2: {nice: 5}}\nqueues: {r: {}}\n")
    found = read_site_tables(environ, site=site)
    assert [(one.qos, one.nice) for one in found.priorities.values()] == [("a", None), (None, 5)]
    assert {name: one.partition for name, one in found.queues.items()} == {"q": "a", "r": None}
    for text, where in (
        ("priorities:\n  2: {nice: -5}\n", "2: priorities.2.nice"),
        ("queues:\n  q: {partiton: a}\n", "2: queues.q.partiton"),
        ("queus:\n  q: {}\n", "1: queus"),
    ):
        table.write_text(text)
        with pytest.raises(SpecError, match=rf"config.yaml:{where}: .* wanted tables"):
            read_site_tables(environ, site=site)
    table.chmod(0o666)
    with pytest.raises(UntrustedFile):
        read_site_tables(environ, site=site)


def test_variables_are_written_out_as_kubernetes_does() -> None:
    """$(NAME) of a variable of the container; $$ is one $; everything else stays. One that comes
    from the cluster is not there: that is said."""
    spec = loads(
        manifest(
            "{command: [python, '$(A)/x', '$(B)', '$$(A)', '$(touch x)'], "
            f"env: [{{name: A, value: a}}, {{name: C, value: '$(A)c'}}, {SECRET}]}}"
        )
    )
    template = spec.job.replica_specs[0].template
    assert template.command[1:] == ("a/x", "$(B)", "$(A)", "$(touch x)")
    assert [(one.name, one.value) for one in template.env] == [("A", "a"), ("C", "ac")]
    (listed,) = spec.meaningless
    assert listed.endswith("env[2] (KEY comes from the Kubernetes cluster; export it yourself)")


NEWER = """
apiVersion: batch.tensorstack.dev/v1beta1
kind: PyTorchTrainingJob
metadata: {name: newer, namespace: demo, annotations: {a: b}}
spec:
  runMode:
    debug:
      enabled: true
    pause: {enabled: false, resumeSpecs: [{type: worker}]}
  runPolicy: {cleanUpPolicy: All, backoffLimit: 0}
  torchrunConfig: {enabled: true, procPerNode: gpu, rdzvBackend: c10d, extraOptions: []}
  elastic: {enabled: false, minReplicas: 1, maxReplicas: 4, expectedReplicas: 2}
  tensorboardSpec:
    resources: {limits: {cpu: 1}}
    trainingLogFilesets: ["t9k://minio/secret/bucket/log", "t9k://pvc/runs/a", "t9k://pvc/runs/b"]
  replicaSpecs:
  - type: master
    replicas: 1
    restartPolicy: ExitCode
    template:
      metadata: {labels: {a: b}}
      spec:
        nodeSelector: {gpu: a100}
        hostNetwork: true
        ephemeralContainers: []
        containers:
        - {name: sidecar, image: busybox, command: [sleep]}
        - name: pytorch
          args: [-m, training.module]
          workingDir: /data
          envFrom: [{configMapRef: {name: c}}]
          ports: [{containerPort: 1}]
          resources: {requests: {cpu: 2500m, memory: 2Gi, amd.com/gpu: "2"}, claims: []}
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
        volumes: [{name: shm, emptyDir: {medium: Memory}}]
  - type: worker
    replicas: 3
    restartPolicy: Never
    template:
      spec:
        containers:
        - command: [python]
          args: [train.py]
          resources: {limits: {nvidia.com/gpu: 1, nvidia.com/vgpu: 1, nvidia.com/gpu.shared: 1}}
status: {phase: Running}
"""


def test_the_newer_spellings_and_two_types() -> None:
    """enabled and cleanUpPolicy, master and worker, a module under torchrun without a command."""
    job = loads(NEWER).job
    master, worker = job.replica_specs
    assert (master.restart_policy, worker.replicas) == ("ExitCode", 3)
    assert (master.template.command, master.template.args[0]) == (("python",), "-m")
    assert (master.template.resources.cpus, master.template.resources.gpus) == (3, 2)
    assert (job.torchrun_config.enable, job.run_mode.debug.enable) == (True, True)
    assert job.run_policy.clean_policy == "All"


def test_everything_else_is_listed_once() -> None:
    """As high up as can be, with a reason where the name does not say it. A field of Kubernetes is
    no typo, however like one of ours it is spelt."""
    at = "spec.replicaSpecs[0].template.spec"
    limits = "spec.replicaSpecs[1].template.spec.containers[0].resources.limits"
    fileset = "TensorBoard shows one folder, on a file system of the nodes"
    assert sorted(loads(NEWER).meaningless) == sorted([
        "metadata.namespace",
        "metadata.annotations",
        "spec.runMode.pause (scontrol hold keeps a job from starting)",
        "spec.elastic (torchrunConfig.minNodes sets the fewest replicas that may train)",
        "spec.tensorboardSpec.resources",
        f"spec.tensorboardSpec.trainingLogFilesets[0] ({fileset})",
        f"spec.tensorboardSpec.trainingLogFilesets[2] ({fileset})",
        "spec.replicaSpecs[0].template.metadata",
        f"{at}.nodeSelector (in a job spec, use scheduler.options.constraint)",
        f"{at}.hostNetwork",
        f"{at}.ephemeralContainers",
        f"{at}.containers[0] (a replica runs one program, that of the container pytorch)",
        f"{at}.containers[1].resources.claims",
        f"{limits}.nvidia.com/vgpu",
        f"{limits}.nvidia.com/gpu.shared",
        f"{at}.containers[1].envFrom",
        f"{at}.containers[1].ports",
        f"{at}.containers[1].volumeMounts (a job sees the file systems of its nodes)",
        f"{at}.volumes (a job sees the file systems of its nodes)",
        "status",
    ])  # fmt: skip


def every_field(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all fields that Slurm has something for, and of what it has nothing for as a
    whole."""
    named = isinstance(value, dict)
    for step, one in value.items() if named else enumerate(value):
        if named:
            yield (*at, step)
        if isinstance(one, (dict, list)) and step not in ("labels", "volumes", "volumeMounts"):
            yield from every_field(one, (*at, step))


def misspelt(name: str) -> tuple[str, ...]:
    """With two letters swapped, and with one left out."""
    middle = max(2, len(name) // 2)
    swapped = name[middle - 1] + name[middle - 2]
    return name[: middle - 2] + swapped + name[middle:], name[:middle] + name[middle + 1 :]


WHOLE: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())


def test_a_misspelt_field_is_an_error_at_every_level() -> None:
    """Beside the right one, and in its place."""
    for path in every_field(WHOLE):
        for number, typo in enumerate(misspelt(str(path[-1]))):
            changed = copy.deepcopy(WHOLE)
            holder: Any = changed
            for step in path[:-1]:
                holder = holder[step]
            stays = number % 2 == 0 or path in (("apiVersion",), ("kind",))
            holder[typo] = {} if stays else holder.pop(path[-1])
            with pytest.raises(SpecError) as caught:
                loads(yaml.safe_dump(changed))
            assert re.search(rf"\b{typo}: there is no .*did you mean ", str(caught.value))


@pytest.mark.parametrize(
    ("container", "more", "message"),
    [
        ("{command: [a], args: [1]}", "", "12: .*containers[0].args[0]: wanted text, got 1"),
        ("[a]", "", "12: .*containers[0]: wanted fields with values"),
        ("{command: [a], resources: {limits: 3}}", "", "12: .*limits: wanted fields with"),
        ("args: [a]", "", "12: .*containers[0].command: is missing"),
        ("command: [a]", "  scheduler: {t9kScheduler: 3}", "13: .*t9kScheduler: wanted fields"),
        ("command: [a]", "  torchrunConfig: {enabled: 1}\n", "13: .*enabled: wanted true or false"),
    ],
)
def test_a_wrong_value_has_the_manifests_own_path_and_line(
    container: str, more: str, message: str
) -> None:
    """Nobody is told of a field that they have not written."""
    with pytest.raises(SpecError, match="job.yaml:" + message.replace("[", r"\[")):
        loads(manifest(container, more))

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
from hydroslurm.jobs.spec.reading import load, loads
from hydroslurm.jobs.spec.site_tables import read_site_tables

MANIFEST = Path(__file__).resolve().parent.parent.parent.parent / "examples/t9k-manifest.yaml"


def test_every_field_of_a_full_manifest() -> None:
    """What Slurm has something for is there; what it has nothing for is listed."""
    spec = load(MANIFEST)
    job = spec.job
    assert spec.is_manifest
    assert (job.name, job.labels) == ("digits-ddp", {"team": "vision"})
    (worker,) = job.replica_specs
    assert (worker.type, worker.replicas, worker.restart_policy) == ("worker", 4, "ExitCode")
    template = worker.template
    assert (*template.command, *template.args) == ("python", "dist_digits.py", "--epochs", "2")
    assert [(one.name, one.value) for one in template.env] == [("OMP_NUM_THREADS", "1")]
    assert (template.resources.cpus, template.resources.memory_mib) == (1, 2048)
    assert template.resources.gpus == 0
    assert template.init[0].command == ("sh", "-c", "echo ready")
    torchrun = job.torchrun_config
    assert torchrun.enable
    assert (torchrun.min_nodes, torchrun.max_restarts, torchrun.proc_per_node) == (1, 10, "1")
    assert torchrun.extra_options == ("--log-dir", "logs")
    policy = job.run_policy
    assert (policy.backoff_limit, policy.active_deadline_seconds) == (3, 1800)
    assert policy.clean_policy == "Unfinished"
    assert job.scheduler.partition == "low"
    assert job.tensorboard is not None
    assert job.tensorboard.log_directory == "runs/log"
    (debug,) = job.run_mode.debug.replica_specs
    assert (debug.type, debug.command, debug.skip_init) == ("worker", ("sleep", "inf"), True)
    assert not job.run_mode.debug.enable
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


def test_a_minimal_manifest() -> None:
    """A command, and nothing else."""
    spec = loads(manifest("command: [python, train.py]"))
    assert spec.job.replica_specs[0].replicas == 4
    assert spec.meaningless == ()


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


def test_what_has_no_effect_in_this_job_is_said() -> None:
    """A server of etcd, torchrun's number of ranks without torchrun, a restart policy where members
    are replaced."""
    torchrun = "  torchrunConfig: {enabled: true, rdzvBackend: etcd}\n"
    text = manifest("command: [python, train.py]", torchrun)
    assert loads(text.replace("etcd", "c10d")).meaningless == ()
    (told,) = loads(text).meaningless
    assert told.startswith("spec.torchrunConfig.rdzvBackend (the agents meet by c10d")
    torchrun = "  torchrunConfig: {enabled: false, procPerNode: gpu}\n"
    (told,) = loads(manifest("command: [python, train.py]", torchrun)).meaningless
    assert told.startswith("spec.torchrunConfig.procPerNode (gpu: counts with torchrun")
    elastic = "elastic: {max: 2}\nreplicaSpecs: [{restartPolicy: Never, template: {command: [a]}}]"
    (told,) = loads(elastic).meaningless
    assert told.startswith("replicaSpecs[0].restartPolicy (a member of an elastic job that fails ")


def prioritized(priority: str) -> str:
    scheduler = f"  scheduler: {{t9kScheduler: {{priority: {priority}}}}}\n"
    return manifest("command: [python, train.py]", scheduler)


def test_a_priority_is_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A QOS, a nice, both or nothing; one that the table has not is an error that names it, and
    without a table it is listed with the places where one would be read."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (listed,) = loads(prioritized("50")).meaningless
    table = tmp_path / "hydroslurm/config.yaml"
    assert listed.startswith("spec.scheduler.t9kScheduler.priority (no table maps it to Slurm")
    assert str(table) in listed
    assert "/etc/hydroslurm/config.yaml" in listed
    table.parent.mkdir()
    table.write_text("priorities: {80: {qos: high}, 10: {nice: 1000}, 50: {}}\n")
    for priority, qos, nice in (("80", "high", 0), ("10", None, 1000), ("50", None, 0)):
        spec = loads(prioritized(priority))
        assert (spec.job.scheduler.qos, spec.job.scheduler.nice) == (qos, nice)
        assert spec.meaningless == ()
    with pytest.raises(SpecError) as caught:
        loads(prioritized("60"))
    assert "job.yaml:13: spec.scheduler.t9kScheduler.priority: '60' is not" in str(caught.value)
    assert f"{table} or /etc/hydroslurm/config.yaml, which has 80, 10, 50;" in str(caught.value)


@pytest.mark.parametrize("scheduler", ["t9kScheduler", "volcanoScheduler"])
def test_a_queue_is_the_partition_that_the_table_says(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the default one, and without a row the partition of its name."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table = tmp_path / "hydroslurm/config.yaml"
    table.parent.mkdir()
    table.write_text("queues: {default: {partition: 'gpu,gpu-long'}, batch: {}}\n")
    for queue, partition in (("default", "gpu,gpu-long"), ("batch", None), ("cpu", "cpu")):
        spec = loads(
            manifest("command: [a]", f"  scheduler: {{{scheduler}: {{queue: {queue}}}}}\n")
        )
        assert (spec.job.scheduler.partition, spec.meaningless) == (partition, ())


def test_the_users_tables_count_above_the_sites(tmp_path: Path) -> None:
    """Row by row; a table that others can write is not obeyed, and a wrong one has its line."""
    site, environ = tmp_path / "site.yaml", {"XDG_CONFIG_HOME": str(tmp_path)}
    own = tmp_path / "hydroslurm/config.yaml"
    own.parent.mkdir()
    site.write_text(
        "priorities: {1: {qos: a}, 2: {qos: b}}\nqueues: {q: {partition: a}, r: {partition: b}}\n"
    )
    own.write_text("priorities: {2: {nice: 5}}\nqueues: {r: {}}\n")
    found = read_site_tables(environ, site=site)
    assert {name: (one.qos, one.nice) for name, one in found.priorities.items()} == {
        "1": ("a", None),
        "2": (None, 5),
    }
    assert {name: one.partition for name, one in found.queues.items()} == {"q": "a", "r": None}
    for text, where in (
        ("priorities:\n  2: {nice: -5}\n", "2: priorities.2.nice"),
        ("queues:\n  q: {partiton: a}\n", "2: queues.q.partiton"),
        ("queus:\n  q: {}\n", "1: queus"),
    ):
        own.write_text(text)
        with pytest.raises(SpecError, match=rf"config.yaml:{where}: .* wanted tables"):
            read_site_tables(environ, site=site)
    own.chmod(0o666)
    with pytest.raises(UntrustedFile):
        read_site_tables(environ, site=site)


def test_variables_are_written_out_as_kubernetes_does() -> None:
    """$(NAME) of a variable of the container; $$ is one $; everything else stays."""
    spec = loads(
        manifest(
            "{command: [python, '$(A)/x', '$(B)', '$$(A)', '$(touch x)'], "
            "env: [{name: A, value: a}, {name: C, value: '$(A)c'}]}"
        )
    )
    template = spec.job.replica_specs[0].template
    assert template.command[1:] == ("a/x", "$(B)", "$(A)", "$(touch x)")
    assert template.env[1].value == "ac"


@pytest.mark.parametrize(
    ("field", "listed"),
    [
        ("  unheardOf: {a: 1}", "spec.unheardOf"),
        ("  scheduler: {volcanoScheduler: {queue: q, minAvailable: 3}}", "minAvailable"),
        ("  torchrunConfig: {enable: true}\n  serviceAccount: me", "serviceAccount"),
    ],
)
def test_nothing_is_dropped_silently(field: str, listed: str) -> None:
    """A field that Slurm has nothing for is named."""
    spec = loads(manifest("command: [python, train.py]", field + "\n"))
    assert any(listed in one for one in spec.meaningless)


def test_secrets_of_kubernetes_are_named() -> None:
    """A variable that comes from the cluster is not there: that is said."""
    secret = "{name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}"
    spec = loads(manifest(f"{{command: [python, a.py], env: [{secret}, {{name: A, value: a}}]}}"))
    assert [one.name for one in spec.job.replica_specs[0].template.env] == ["A"]
    (listed,) = spec.meaningless
    assert listed.endswith("env[0] (KEY comes from the Kubernetes cluster; export it yourself)")


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
        containers:
        - {name: sidecar, image: busybox, command: [sleep]}
        - name: pytorch
          args: [-m, training.module]
          workingDir: /data
          envFrom: [{configMapRef: {name: c}}]
          ports: [{containerPort: 1}]
          resources: {requests: {cpu: 2500m, memory: 2Gi, amd.com/gpu: "2"}}
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
          resources: {limits: {nvidia.com/gpu: 1}}
status: {phase: Running}
"""


def test_the_newer_spellings_and_two_types() -> None:
    """enabled and cleanUpPolicy, master and worker, a module under torchrun without a command."""
    spec = loads(NEWER)
    job = spec.job
    master, worker = job.replica_specs
    assert (master.type, master.restart_policy, worker.replicas) == ("master", "ExitCode", 3)
    assert master.template.command == ("python",)
    assert master.template.args == ("-m", "training.module")
    assert master.template.working_directory == "/data"
    assert (master.template.resources.cpus, master.template.resources.gpus) == (3, 2)
    assert master.template.resources.memory_mib == 2048
    assert worker.template.resources.gpus == 1
    assert job.torchrun_config.enable
    assert job.run_mode.debug.enable
    assert (job.run_policy.clean_policy, job.run_policy.backoff_limit) == ("All", 0)
    assert job.tensorboard is not None
    assert job.tensorboard.log_directory == "runs/a"


def test_everything_else_is_listed_once() -> None:
    """As high up as can be, with a reason where the name does not say it."""
    at = "spec.replicaSpecs[0].template.spec"
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
        f"{at}.containers[0] (a replica runs one program, that of the container pytorch)",
        f"{at}.containers[1].envFrom",
        f"{at}.containers[1].ports",
        f"{at}.containers[1].volumeMounts (a job sees the file systems of its nodes)",
        f"{at}.volumes (a job sees the file systems of its nodes)",
        "status",
    ])  # fmt: skip


def every_field(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all fields that Slurm has something for, and of what it has nothing for as a
    whole."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield (*at, name)
            if name not in ("labels", "volumes", "volumeMounts"):
                yield from every_field(one, (*at, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from every_field(one, (*at, number))


def misspelt(name: str) -> tuple[str, ...]:
    """With two letters swapped, one left out, one doubled, and in other case."""
    middle = max(2, len(name) // 2)
    return (
        name[: middle - 2] + name[middle - 1] + name[middle - 2] + name[middle:],
        name[:middle] + name[middle + 1 :],
        name[:middle] + name[middle] + name[middle:],
        name.upper(),
    )


FULL: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())


def test_a_misspelt_field_is_an_error_at_every_level() -> None:
    """Beside the right one, and in its place."""
    for path in every_field(FULL):
        for number, typo in enumerate(misspelt(str(path[-1]))):
            changed = copy.deepcopy(FULL)
            holder: Any = changed
            for step in path[:-1]:
                holder = holder[step]
            stays = number % 2 == 0 or path in (("apiVersion",), ("kind",))
            holder[typo] = {} if stays else holder.pop(path[-1])
            with pytest.raises(SpecError) as caught:
                loads(yaml.safe_dump(changed))
            assert re.search(rf"\b{typo}: there is no .*did you mean ", str(caught.value))


KUBERNETES = {
    "metadata": "generateName namespace uid resourceVersion generation creationTimestamp "
    "annotations ownerReferences finalizers managedFields",
    "pod": "ephemeralContainers restartPolicy terminationGracePeriodSeconds activeDeadlineSeconds "
    "dnsPolicy serviceAccountName serviceAccount automountServiceAccountToken nodeName hostNetwork "
    "hostPID hostIPC shareProcessNamespace securityContext imagePullSecrets hostname subdomain "
    "affinity schedulerName tolerations hostAliases priorityClassName priority dnsConfig "
    "readinessGates runtimeClassName enableServiceLinks preemptionPolicy overhead resourceClaims "
    "topologySpreadConstraints setHostnameAsFQDN os hostUsers schedulingGates resources",
    "container": "ports envFrom resizePolicy volumeDevices livenessProbe readinessProbe tty stdin "
    "startupProbe lifecycle terminationMessagePath terminationMessagePolicy imagePullPolicy "
    "securityContext stdinOnce restartPolicy",
    "resources": "claims",
    "limits": "ephemeral-storage hugepages-2Mi nvidia.com/gpu.shared nvidia.com/mig-1g.5gb "
    "nvidia.com/gpumem nvidia.com/gpucores nvidia.com/vgpu rdma/hca huawei.com/Ascend910",
}
"""Source: the Kubernetes API reference of ObjectMeta, PodSpec and Container."""


def test_what_kubernetes_has_is_no_typo() -> None:
    """However like a field of ours it is spelt: it is listed, and the job is taken."""
    changed = copy.deepcopy(FULL)
    pod = changed["spec"]["replicaSpecs"][0]["template"]["spec"]
    container = pod["containers"][0]
    holders = {
        "metadata": changed["metadata"],
        "pod": pod,
        "container": container,
        "resources": container["resources"],
        "limits": container["resources"]["limits"],
    }
    for name, fields in KUBERNETES.items():
        holders[name].update(dict.fromkeys(fields.split(), "1"))
    listed = loads(yaml.safe_dump(changed)).meaningless
    for fields in KUBERNETES.values():
        for field in fields.split():
            assert any(one.endswith(f".{field}") for one in listed), field


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (manifest("command: python"), 12, "containers[0].command: wanted a list"),
        (manifest("{command: [a], args: [1]}"), 12, "containers[0].args[0]: wanted text, got 1"),
        (manifest("[a]"), 12, "containers[0]: wanted fields with values"),
        (
            manifest("a\n        initContainers: [{}]"),
            12,
            "containers[0]: wanted fields with values",
        ),
        (manifest("{command: [a], resources: {limits: 3}}"), 12, "limits: wanted fields with"),
        (manifest("command: [a]", "  scheduler: {t9kScheduler: 3}"), 13, "t9kScheduler: wanted f"),
        (manifest("command: [a]", "  runPolicy: {backoffLimit: few}\n"), 13, "backoffLimit"),
        (manifest("command: [a]", "  runPolicy: 3\n"), 13, "spec.runPolicy: wanted fields"),
        (manifest("command: [a]", "  scheduler: {t9kScheduler: {queue: a b}}\n"), 13, "queue: "),
        (manifest("command: [a]", "  torchrunConfig: {enabled: 1}\n"), 13, "enabled: wanted true"),
        (
            manifest("command: [a]", "  runMode: {debug: {replicaSpecs: [{type: b}]}}\n"),
            13,
            "spec.runMode.debug.replicaSpecs[0].type: there is no replica type 'b'",
        ),
        (manifest("args: [a]"), 12, "containers[0].command: is missing"),
        ("kind: PyTorchTrainingJob\nspec: {}\n", 1, "apiVersion: wanted"),
    ],
)
def test_a_wrong_value_has_the_manifests_own_path_and_line(
    text: str, line: int, message: str
) -> None:
    """Nobody is told of a field that they have not written."""
    with pytest.raises(SpecError) as caught:
        loads(text)
    told = str(caught.value)
    assert f"job.yaml:{line}: " in told
    assert message in told

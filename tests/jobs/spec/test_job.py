"""What a job spec becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.reading import dumps, load, loads

MINIMAL = """
replicaSpecs:
- replicas: 4
  restartPolicy: OnFailure
  template:
    command: [python, train.py]
"""


def test_a_minimal_spec(tmp_path: Path) -> None:
    """One command is enough: the job is called like its file, and starts in the folder of it."""
    path = tmp_path / "digits.yaml"
    path.write_text(MINIMAL)
    spec = load(path)
    assert (spec.job.name, spec.job.replica_specs[0].type) == ("digits", "worker")
    assert spec.folder == tmp_path


@pytest.mark.parametrize(
    ("amount", "bytes_"),
    [("512Mi", 512 << 20), ("2G", 2 * 10**9), (1024, 1024), ("1.5Gi", 3 << 29)],
)
def test_memory(amount: object, bytes_: int) -> None:
    """Kubernetes' suffixes: of 1024 with an i, of 1000 without."""
    text = MINIMAL + f"    resources: {{memory: {amount}}}\n"
    assert loads(text).job.replica_specs[0].template.resources.memory_bytes == bytes_


text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=60)
line = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)
count = st.integers(1, 2**31 - 1)
message = st.lists(text, max_size=3)
command = st.lists(text, min_size=1, max_size=3)
slurm_word = st.from_regex(r"[A-Za-z0-9_.,:@+*/=()\[\]|&-]{1,20}", fullmatch=True)
env_name = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
resources = st.fixed_dictionaries(
    {},
    optional={
        "cpus": st.integers(1, 999) | st.sampled_from(["500m", "1500m", "3", "2.5", 1.5]),
        "memory": st.integers(1, 2**60) | st.sampled_from(["8Gi", "512Mi", "2G", "1.5Gi", "1k"]),
        "gpus": st.integers(0, 1024),
    },
)
template = st.fixed_dictionaries(
    {"command": command},
    optional={
        "args": message,
        "env": st.dictionaries(env_name, text, max_size=3),
        "workingDirectory": text,
        "image": line,
        "resources": resources,
        "init": st.lists(
            st.fixed_dictionaries({"command": command}, optional={"name": line, "args": message}),
            max_size=2,
        ),
    },
)
replicas = st.fixed_dictionaries(
    {"template": template},
    optional={
        "replicas": st.integers(1, 10_000),
        "restartPolicy": st.sampled_from(["Never", "OnFailure", "Always", "ExitCode"]),
    },
)
jobs = st.fixed_dictionaries(
    {"replicaSpecs": replicas.map(lambda one: [one])},
    optional={
        "name": line,
        "labels": st.dictionaries(line, line, max_size=2),
        "torchrunConfig": st.fixed_dictionaries(
            {},
            optional={
                "enable": st.booleans(),
                "minNodes": st.just(1),
                "maxRestarts": count,
                "procPerNode": st.integers(1, 999) | st.sampled_from(["1", "8"]),
                "extraOptions": message.map(lambda found: [f"x{word}" for word in found]),
            },
        ),
        "runPolicy": st.fixed_dictionaries(
            {},
            optional={
                "backoffLimit": count,
                "preemptionLimit": count,
                "activeDeadlineSeconds": count,
                "cleanPolicy": st.sampled_from(["None", "All", "Unfinished"]),
            },
        ),
        "scheduler": st.fixed_dictionaries(
            {},
            optional={
                "partition": slurm_word,
                "qos": slurm_word,
                "account": slurm_word,
                "reservation": slurm_word,
                "nice": st.integers(0, 2147483645),
                "options": st.fixed_dictionaries(
                    {}, optional={"constraint": slurm_word, "exclusive": st.just(True)}
                ),
            },
        ),
        "tensorboard": st.fixed_dictionaries(
            {}, optional={"logDirectory": text, "port": st.integers(0, 65535), "host": line}
        ),
        "runMode": st.fixed_dictionaries(
            {
                "debug": st.fixed_dictionaries(
                    {"enable": st.booleans()},
                    optional={"replicaSpecs": command.map(lambda found: [{"command": found}])},
                )
            }
        ),
        "preemption": st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["pause", "requeue", "both"]),
                "warningSeconds": st.integers(1, 65535),
                "checkpointDirectory": text,
                "saveEverySeconds": count,
                "attemptsWithoutProgress": count,
            },
        ),
    },
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(value=jobs)
def test_every_job_comes_back_as_it_was(value: dict[str, Any]) -> None:
    """Quotes, newlines, $(...), every script of the world, every number: the resolved spec of a run
    folder is the job that was submitted."""
    job = TrainingJob.model_validate(value)
    assert loads(dumps(job)).job == job


@settings(deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["name", "replicaSpecs", "template", "command", "env", "resources", "memory", "kind",
             "apiVersion", "spec", "containers", "torchrunConfig", "scheduler", "options", "x"]
        ),
        inner, max_size=4,
    ),
    max_leaves=20,
))  # fmt: skip
def test_nothing_else_than_a_spec_error(value: object) -> None:
    """Whatever a file holds, it is a job or a SpecError: never a traceback."""
    import yaml

    for extra in (
        {},
        {"apiVersion": "batch.tensorstack.dev/v1beta1", "kind": "PyTorchTrainingJob"},
    ):
        whole = {**value, **extra} if isinstance(value, dict) else value
        try:
            loads(yaml.safe_dump(whole))
        except SpecError:
            pass


@pytest.mark.parametrize("option", ["--nnodes=2", "--rdzv_id", "--rdzv-end=x", "-m"])
def test_torchruns_options_that_are_ours(option: str) -> None:
    """Also abbreviated, as argparse would read them."""
    with pytest.raises(SpecError, match=r"job\.yaml:8: torchrunConfig\.extraOptions: .*set by"):
        loads(f"{MINIMAL}torchrunConfig:\n  extraOptions: ['{option}']\n")


def test_an_elastic_job_begins_with_the_replicas_or_with_the_most() -> None:
    """`size`, else more replicas than one, else `max`."""
    assert loads(MINIMAL + "elastic: {min: 2, max: 8}").job.members == 4
    assert loads(MINIMAL + "elastic: {min: 2, max: 8, size: 6}").job.members == 6
    one = MINIMAL.replace("replicas: 4", "replicas: 1")
    assert loads(one + "elastic: {min: 2, max: 8}").job.members == 8
    with pytest.raises(SpecError, match=r"replicas: 4 members to begin with, and elastic allows 5"):
        loads(MINIMAL + "elastic: {min: 5, max: 8}")

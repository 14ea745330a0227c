"""Read T9k's PyTorchTrainingJob unchanged: what each of its fields becomes on Slurm.

    metadata.name, .labels                    name, labels
    spec.replicaSpecs[].type, .replicas ...   the same
      .template.spec.containers[]             template: the one named python or pytorch
        command, args, env, workingDir        the same; $(NAME) is expanded as in Kubernetes
        resources.limits, else .requests      cpus, memory, gpus (nvidia.com/gpu, amd.com/gpu)
        image                                 image, where this cluster can run one
      .template.spec.initContainers[]         template.init, without their images
    spec.torchrunConfig                       the same; enabled is enable
    spec.runPolicy                            the same; cleanUpPolicy is cleanPolicy
    spec.scheduler.t9kScheduler.queue         scheduler.partition: see site_tables.py
      .priority                               scheduler.qos, .nice: the same
    spec.tensorboardSpec                      tensorboard: the path of its first fileset
    spec.runMode.debug                        the same; enabled is enable

Everything else in a manifest has no meaning on Slurm. It is listed, never dropped silently; what
looks like a typo of one of these fields is an error. Values of the wrong type are copied unchanged,
for the validation to report. Pure.

Source: the user manual of T9k's TensorStack, whose releases differ: ``enable`` became ``enabled``,
``cleanUpWorkers`` became ``cleanUpPolicy``. All of these are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hydroslurm.jobs.spec.site_tables import SiteTables
from hydroslurm.jobs.spec.source import KeyPath
from hydroslurm.jobs.spec.translation import Translation, Translator, nearest

API_VERSION = "batch.tensorstack.dev/v1beta1"
KIND = "PyTorchTrainingJob"

_MAIN_CONTAINERS = ("python", "pytorch")
"""T9k's torchrun takes ``python``, else the first; its own examples use ``pytorch``."""
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_ENV_FIELDS = ("name", "value", "valueFrom")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_FILESET = re.compile(r"t9k://pvc/(.+)")
_NO_TYPOS = ("claims", "ephemeralContainers", "nvidia.com/vgpu")
"""Fields of Kubernetes that Slurm has nothing for, spelt like one that it has something for."""
_OF_THE_POD = {
    "volumes": "a job sees the file systems of its nodes",
    "nodeSelector": "in a job spec, use scheduler.options.constraint",
}


def is_manifest(value: object) -> bool:
    """Whether a document claims to be T9k's."""
    return isinstance(value, dict) and (
        value.get("kind") == KIND
        or str(value.get("apiVersion", "")).startswith("batch.tensorstack")
    )


def translate(manifest: Mapping[str, Any], *, tables: SiteTables) -> Translation:
    """Translate a manifest into a job spec."""
    of = Translator(manifest, no_typos=_NO_TYPOS)
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if of.use((name,)) != wanted:
            of.put((name,), (name,), of.get((name,)))
    of.move(("name",), ("metadata", "name"))
    of.move(("labels",), ("metadata", "labels"))
    torchrun = _torchrun(of)
    for number in of.items(("replicaSpecs",), ("spec", "replicaSpecs")):
        _replicas(of, ("replicaSpecs", number), ("spec", "replicaSpecs", number), torchrun=torchrun)
    of.comes_from(("replicaSpecs",), ("spec", "replicaSpecs"))
    _run_policy(of)
    _scheduler(of, tables)
    _tensorboard(of)
    _debug(of)
    of.drop(("spec", "elastic"), "torchrunConfig.minNodes sets the fewest replicas that may train")
    return of.translation()


def _torchrun(of: Translator) -> bool:
    at, own = ("spec", "torchrunConfig"), ("torchrunConfig",)
    if not of.open(own, at):
        return False
    for name in ("enable", "enabled"):
        of.move((*own, "enable"), (*at, name))
    for name in ("minNodes", "maxRestarts", "procPerNode", "rdzvBackend", "extraOptions"):
        of.move((*own, name), (*at, name))
    return True in (of.get((*at, "enable")), of.get((*at, "enabled")))


def _run_policy(of: Translator) -> None:
    at, own = ("spec", "runPolicy"), ("runPolicy",)
    if of.open(own, at):
        for name in ("backoffLimit", "activeDeadlineSeconds"):
            of.move((*own, name), (*at, name))
        for name in ("cleanUpPolicy", "cleanUpWorkers", "cleanPodPolicy", "cleanPolicy"):
            of.move((*own, "cleanPolicy"), (*at, name))


def _scheduler(of: Translator, tables: SiteTables) -> None:
    at, own = ("spec", "scheduler"), ("scheduler",)
    if not of.open(own, at):
        return
    for name in ("t9kScheduler", "volcanoScheduler"):
        _queue(of, own, (*at, name, "queue"), tables)
        _priority(of, own, (*at, name, "priority"), tables)


def _queue(of: Translator, own: KeyPath, at: KeyPath, tables: SiteTables) -> None:
    row = tables.queues.get(str(of.get(at)))
    if row is None:
        of.move((*own, "partition"), at)
    else:
        of.put((*own, "partition"), at, row.partition)


def _priority(of: Translator, own: KeyPath, at: KeyPath, tables: SiteTables) -> None:
    value = of.get(at)
    if value is None:
        return
    if not tables.priorities:
        of.drop(at, f"no table maps it to Slurm; add one to {tables.where()}")
        return
    found = tables.priorities.get(str(value))
    if found is None:
        known = ", ".join(tables.priorities)
        of.refuse(
            at,
            f"{str(value)[:60]!r} is not in the table of {tables.where()}, which has {known}; "
            "choose one of these, add a line to the table, or leave the priority out",
        )
        return
    of.use(at)
    if found.qos is not None:
        of.put((*own, "qos"), at, found.qos)
    if found.nice is not None:
        of.put((*own, "nice"), at, found.nice)


def _tensorboard(of: Translator) -> None:
    at, own = ("spec", "tensorboardSpec"), ("tensorboard",)
    if not of.open(own, at):
        return
    of.drop((*at, "image"), "TensorBoard runs from this Python environment")
    filesets = of.get((*at, "trainingLogFilesets"))
    if not isinstance(filesets, list):
        of.move((*own, "logDirectory"), (*at, "trainingLogFilesets"))
        return
    shown = False
    for number, fileset in enumerate(filesets):
        path = (*at, "trainingLogFilesets", number)
        match = _FILESET.fullmatch(fileset) if isinstance(fileset, str) else None
        if shown or (match is None and isinstance(fileset, str) and "://" in fileset):
            of.drop(path, "TensorBoard shows one folder, on a file system of the nodes")
            continue
        of.put((*own, "logDirectory"), path, match[1] if match else fileset)
        shown = True


def _debug(of: Translator) -> None:
    of.drop(("spec", "runMode", "pause"), "scontrol hold keeps a job from starting")
    at, own = ("spec", "runMode", "debug"), ("runMode", "debug")
    if not (of.open(("runMode",), ("spec", "runMode")) and of.open(own, at)):
        return
    for name in ("enable", "enabled"):
        of.move((*own, "enable"), (*at, name))
    for number in of.items((*own, "replicaSpecs"), (*at, "replicaSpecs")):
        path, ours = (*at, "replicaSpecs", number), (*own, "replicaSpecs", number)
        if of.open(ours, path):
            of.move((*ours, "type"), (*path, "type"))
            of.move((*ours, "command"), (*path, "command"))
            of.move((*ours, "skipInit"), (*path, "skipInitContainer"))


def _replicas(of: Translator, own: KeyPath, at: KeyPath, *, torchrun: bool) -> None:
    if not of.open(own, at):
        return
    for name in ("type", "replicas", "restartPolicy"):
        of.move((*own, name), (*at, name))
    pod, template = (*at, "template", "spec"), (*own, "template")
    for name, why in _OF_THE_POD.items():
        of.drop((*pod, name), why)
    containers = of.get((*pod, "containers"))
    if not isinstance(containers, list) or not containers:
        of.comes_from(template, (*pod, "containers"))
        return
    names = [one.get("name") if isinstance(one, dict) else None for one in containers]
    main = next((names.index(name) for name in _MAIN_CONTAINERS if name in names), 0)
    if len(names) > 1 and names[main] not in _MAIN_CONTAINERS:
        of.refuse(
            (*pod, "containers"),
            f"cannot tell which container trains, of {', '.join(map(str, names))}; "
            "name the one that does python or pytorch",
        )
    for number in range(len(names)):
        if number != main:
            why = f"a replica runs one program, that of the container {names[main]}"
            of.drop((*pod, "containers", number), why)
    _container(of, template, (*pod, "containers", main), torchrun=torchrun)
    for number in of.items((*template, "init"), (*pod, "initContainers")):
        path, ours = (*pod, "initContainers", number), (*template, "init", number)
        if of.open(ours, path):
            for name in ("name", "command", "args"):
                of.move((*ours, name), (*path, name))
            of.drop((*path, "image"), "init steps run on the node, outside any container")


def _container(of: Translator, own: KeyPath, at: KeyPath, *, torchrun: bool) -> None:
    if not of.open(own, at):
        return
    of.use((*at, "name"))
    of.drop((*at, "volumeMounts"), _OF_THE_POD["volumes"])
    env = _environment(of, own, at)
    for name in ("command", "args"):
        if of.get((*at, name)) is not None:
            of.put((*own, name), (*at, name), _expanded(of.get((*at, name)), env))
    if torchrun and of.get((*at, "command")) is None and of.get((*at, "args")) is not None:
        of.put((*own, "command"), (*at, "command"), ["python"])  # T9k's torchrun reads args only
    of.move((*own, "image"), (*at, "image"))
    of.move((*own, "workingDirectory"), (*at, "workingDir"))
    if of.open((*own, "resources"), (*at, "resources")):
        _resources(of, (*own, "resources"), (*at, "resources"))


def _resources(of: Translator, own: KeyPath, at: KeyPath) -> None:
    for theirs, ours in (("cpu", "cpus"), ("memory", "memory"), *((gpu, "gpus") for gpu in _GPUS)):
        limit, request = (*at, "limits", theirs), (*at, "requests", theirs)
        path = limit if of.get(limit) is not None else request
        of.use(limit)
        value = of.use(request) if path == request else of.get(limit)
        of.use(request)
        if value is not None:
            is_number = theirs in _GPUS and isinstance(value, str) and value.isdecimal()
            of.put((*own, ours), path, int(value) if is_number else value)


def _environment(of: Translator, own: KeyPath, at: KeyPath) -> dict[str, str]:
    """Copy the environment variables.

    Returns:
        the variables that ``$(NAME)`` in the command may refer to.
    """
    known: dict[str, str] = {}
    number = 0
    for index in of.items((*own, "env"), (*at, "env")):
        path = (*at, "env", index)
        one = of.get(path)
        if isinstance(one, dict) and "valueFrom" in one:
            of.drop(
                path, f"{one.get('name')} comes from the Kubernetes cluster; export it yourself"
            )
            continue
        if isinstance(one, dict):
            one = {name: value for name, value in one.items() if value is not None}
            for name in [key for key in one if nearest(key, _ENV_FIELDS) == "valueFrom"]:
                of.refuse((*path, name), "there is no such field; did you mean 'valueFrom'?")
                del one[name]
        if isinstance(one, dict) and isinstance(one.get("value"), str):
            one["value"] = _expanded(one["value"], known)
            known[str(one.get("name"))] = one["value"]
        of.put((*own, "env", number), path, one)
        number += 1
    return known


def _expanded(value: Any, env: Mapping[str, str]) -> Any:
    """Expand ``$(NAME)`` of the container's variables, and ``$$`` to ``$``; the rest is unchanged.
    Source: the Kubernetes API reference on ``command`` and ``args`` of a container."""
    if isinstance(value, list):
        return [_expanded(word, env) for word in value]
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        return "$" if match[1] is None else env.get(match[1], match[0])

    return _REFERENCE.sub(one, value)

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
    spec.scheduler.t9kScheduler.queue         scheduler.partition: see SiteTables
      .priority                               scheduler.qos, .nice: the same
    spec.tensorboardSpec                      tensorboard: the path of its first fileset
    spec.runMode.debug                        the same; enabled is enable

Everything else in a manifest has no meaning on Slurm. It is listed, never dropped silently; what
looks like a typo of one of these fields is an error. Values of the wrong type are copied unchanged,
for the validation to report.

The tables below have a row for each field that is known: what is done with its value.

Source: the user manual of T9k's TensorStack, whose releases differ: ``enable`` became ``enabled``,
``cleanUpWorkers`` became ``cleanUpPolicy``. All of these are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.fields import Part, SlurmWord, nearest
from hydroslurm.jobs.spec.sections import Nice
from hydroslurm.jobs.spec.source import Complaint, KeyPath, path_text, read_source

SITE = Path("/etc/hydroslurm/config.yaml")

API_VERSION = "batch.tensorstack.dev/v1beta1"
KIND = "PyTorchTrainingJob"

_MAIN_CONTAINERS = ("python", "pytorch")
"""T9k's torchrun takes ``python``, else the first; its own examples use ``pytorch``."""
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_FILESET = re.compile(r"t9k://pvc/(.+)")
_NO_TYPOS = ("claims", "ephemeralContainers", "nvidia.com/vgpu")
"""Fields of Kubernetes that Slurm has nothing for, spelt like one that it has something for."""


class Queue(Part):
    """One row of the table of queues: the value for ``scheduler.partition``."""

    partition: SlurmWord | None = None


class Priority(Part):
    """One row of the table of priorities: the values for ``scheduler.qos`` and
    ``scheduler.nice``."""

    qos: SlurmWord | None = None
    nice: Nice | None = None


class _Config(Part):
    queues: dict[str, Queue] = Field(default_factory=dict)
    priorities: dict[str, Priority] = Field(default_factory=dict)


@dataclass(frozen=True)
class SiteTables:
    """The site's tables and the user's, which map a manifest's queue and priority to this Slurm.

        queues:                     # in config.yaml
          default: {partition: gpu}
          batch: {}                 # the default partition
        priorities:
          80: {qos: high}
          50: {}                    # like any other job
          10: {nice: 1000}

    A queue that is in no table is the partition of that name. A user cannot set a priority in
    Slurm; a QOS may raise it, and nice lowers it. Only the site knows which of them a number from 0
    to 100 should map to.

    Attributes:
        queues, priorities: a queue, a priority as the manifest spells it -> its row.
        places: the files that are read, the user's first; they need not exist.
    """

    queues: Mapping[str, Queue]
    priorities: Mapping[str, Priority]
    places: tuple[Path, ...]

    def where(self) -> str:
        """The files, for messages."""
        return " or ".join(map(str, self.places))


def read_site_tables(environ: Mapping[str, str], *, site: Path = SITE) -> SiteTables:
    """Read the site's tables and the user's, whose rows take precedence.

    Args:
        environ: XDG_CONFIG_HOME, HOME.

    Raises:
        SpecError: a file is not a valid configuration.
        UntrustedFile: other users could have written it.
    """
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    # the XDG Base Directory Specification: relative paths must be ignored
    own = [Path(home) / "hydroslurm/config.yaml"] if home.startswith("/") else []
    queues: dict[str, Queue] = {}
    priorities: dict[str, Priority] = {}
    for path in (site, *own):
        if path.exists():
            check_trusted(path, what="the configuration")
            config = _read(path)
            queues |= config.queues
            priorities |= config.priorities
    return SiteTables(queues, priorities, (*own, site))


def _read(path: Path) -> _Config:
    source = read_source(path)
    try:
        return _Config.model_validate({} if source.value is None else source.value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"{path}:{source.line_of(first['loc'])}: {path_text(first['loc'])}"
        raise SpecError(
            f"{where}: {first['msg']}; wanted tables such as "
            "queues: {default: {partition: gpu}}, priorities: {80: {qos: high}, 10: {nice: 1000}}"
        ) from None


@dataclass
class Translation:
    """A document in our own format.

    Attributes:
        value: for :class:`~hydroslurm.jobs.spec.job.TrainingJob`, not validated.
        origins: where in the document each part of ``value`` comes from, or would.
        meaningless: fields of the document with no equivalent in Slurm, with the reason where it is
            not obvious from the name.
        refusals: errors found before validation, such as what looks like a typo of a known field.
        is_torchrun: whether torchrun starts the ranks; T9k's reads a container's args only.
    """

    value: Any = field(default_factory=dict)
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    meaningless: list[str] = field(default_factory=list)
    refusals: list[Complaint] = field(default_factory=list)
    is_torchrun: bool = False

    def origin(self, path: KeyPath) -> KeyPath:
        """Where in the document a path of ``value`` comes from."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return (*self.origins[path[:end]], *path[end:])
        return path

    def put(self, own: KeyPath, at: KeyPath, value: Any) -> None:
        """Write a value, which comes from ``at``; what holds it is there."""
        here = self.value
        for step in own[:-1]:
            here = here[step]
        if isinstance(here, list):
            here.append(value)
        else:
            here[own[-1]] = value
        self.origins[own] = at

    def drop(self, at: KeyPath, why: str) -> None:
        """List a field that has no meaning here."""
        self.meaningless.append(path_text(at) + (f" ({why})" if why else ""))

    def refuse(self, at: KeyPath, message: str) -> None:
        """Report a field that cannot be honored: what was seen, and what was wanted."""
        self.refusals.append(Complaint(at, message))

    def walk(self, fields: Mapping[str, Any], rows: _Rows, at: KeyPath, own: KeyPath) -> None:
        """Do with each field what its row says. A field without one is listed, or is a typo."""
        for name, value in fields.items():
            where = (*at, name)
            # what two resources of a vendor have in common is the vendor
            cutoff = 0.91 if "/" in name else 0.66
            if name in rows:
                if value is not None:
                    rows[name](self, value, where, own)
            elif name in _NO_TYPOS or (meant := nearest(name, rows, cutoff=cutoff)) is None:
                self.drop(where, "")
            else:
                self.refuse(where, f"there is no such field; did you mean {meant!r}?")


def translate(manifest: Mapping[str, Any], *, tables: SiteTables) -> Translation:
    """Translate a manifest into a job spec."""
    of = Translation()
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(name) != wanted:
            of.put((name,), (name,), manifest.get(name))
    of.origins[("replicaSpecs",)] = ("spec", "replicaSpecs")
    spec = manifest.get("spec")
    torchrun = spec.get("torchrunConfig") if isinstance(spec, dict) else None
    of.is_torchrun = isinstance(torchrun, dict) and True in (
        torchrun.get("enable"),
        torchrun.get("enabled"),
    )
    of.walk(manifest, _manifest_rows(tables), (), ())
    return of


_Row = Callable[[Translation, Any, KeyPath, KeyPath], None]
"""What to do with a value: it stands ``at`` a path, in what becomes the part ``own`` of the job."""
_Rows = Mapping[str, _Row]


def _to(name: str) -> _Row:
    """Copy the value."""
    return lambda of, value, at, own: of.put((*own, name), at, value)


def _same(*names: str) -> _Rows:
    """Rows of values that are copied under their own names."""
    return {name: _to(name) for name in names}


def _nothing(why: str) -> _Row:
    """Slurm has nothing for it."""
    return lambda of, _value, at, _own: of.drop(at, why)


def _elsewhere(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    """It is looked at with another field, or needs not be."""


def _part(name: str | int, rows: _Rows) -> _Row:
    """Take the fields of a part of the job apart; anything but fields is copied."""

    def row(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
        is_fields = isinstance(value, Mapping)
        of.put((*own, name), at, {} if is_fields else value)
        if is_fields:
            of.walk(value, rows, at, (*own, name))

    return row


def _inside(rows: _Rows) -> _Row:
    """Take fields apart that belong to the part around them."""

    def row(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
        if isinstance(value, Mapping):
            of.walk(value, rows, at, own)
        else:
            of.refuse(at, "wanted fields with values (name: value)")

    return row


def _each(name: str, rows: _Rows, *, note: _Row = _elsewhere) -> _Row:
    """Take the items of a list apart; anything but a list is copied. ``note``: first done with each
    item."""

    def row(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
        of.put((*own, name), at, [] if isinstance(value, list) else value)
        for number, item in enumerate(value if isinstance(value, list) else ()):
            note(of, item, (*at, number), (*own, name, number))
            _part(number, rows)(of, item, (*at, number), (*own, name))

    return row


# --- rows of their own


def _queue(tables: SiteTables, of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    row = tables.queues.get(str(value))
    of.put((*own, "partition"), at, value if row is None else row.partition)


def _priority(tables: SiteTables, of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
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
    for name in found.model_fields_set:
        of.put((*own, name), at, getattr(found, name))


def _filesets(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    log_directory = (*own, "logDirectory")
    if not isinstance(value, list):
        of.put(log_directory, at, value)
        return
    for number, fileset in enumerate(value):
        path = (*at, number)
        match = _FILESET.fullmatch(fileset) if isinstance(fileset, str) else None
        is_elsewhere = match is None and isinstance(fileset, str) and "://" in fileset
        if is_elsewhere or log_directory in of.origins:
            of.drop(path, "TensorBoard shows one folder, on a file system of the nodes")
        else:
            of.put(log_directory, path, match[1] if match else fileset)


def _replica(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    if isinstance(value, Mapping):  # where a template that is missing would be
        template = (*own, "template")
        of.origins[template] = (*at, "template", "spec", "containers")


def _pod(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    pod = value if isinstance(value, Mapping) else {}
    containers = pod.get("containers")
    if not isinstance(containers, list) or not containers:
        typos = {name: one for name, one in pod.items() if name not in _POD}
        of.walk(typos, _POD, at, own)
        return
    names = [one.get("name") if isinstance(one, dict) else None for one in containers]
    main = next((names.index(name) for name in _MAIN_CONTAINERS if name in names), 0)
    if len(names) > 1 and names[main] not in _MAIN_CONTAINERS:
        of.refuse(
            (*at, "containers"),
            f"cannot tell which container trains, of {', '.join(map(str, names))}; "
            "name the one that does python or pytorch",
        )
    for number in range(len(names)):
        if number != main:
            why = f"a replica runs one program, that of the container {names[main]}"
            of.drop((*at, "containers", number), why)
    template, container, path = (*own, "template"), containers[main], (*at, "containers", main)
    of.put(template, path, {} if isinstance(container, Mapping) else container)
    if isinstance(container, Mapping):
        _container(of, container, path, template)
        of.walk(pod, _POD, at, template)


def _container(of: Translation, one: Mapping[str, Any], at: KeyPath, own: KeyPath) -> None:
    env = _environment(of, one.get("env"), (*at, "env"), (*own, "env"))
    for name in ("command", "args"):
        if one.get(name) is not None:
            of.put((*own, name), (*at, name), _expanded(one[name], env))
    if of.is_torchrun and one.get("command") is None and one.get("args") is not None:
        of.put((*own, "command"), (*at, "command"), ["python"])
    of.walk(one, _CONTAINER, at, own)


def _resources(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    _part("resources", {"limits": _elsewhere, "requests": _elsewhere})(of, value, at, own)
    if isinstance(value, Mapping):
        for name in ("requests", "limits"):  # a limit counts above a request
            if (amounts := value.get(name)) is not None:
                _inside(_AMOUNTS)(of, amounts, (*at, name), (*own, "resources"))


def _gpus(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> None:
    is_number = isinstance(value, str) and value.isdecimal()
    of.put((*own, "gpus"), at, int(value) if is_number else value)


def _backend(of: Translation, value: Any, at: KeyPath, _own: KeyPath) -> None:
    """What a manifest mostly says is what the agents do."""
    if value != "c10d":
        of.drop(at, "the agents meet by c10d, which needs no server")


def _environment(of: Translation, value: Any, at: KeyPath, own: KeyPath) -> dict[str, str]:
    """Copy the environment variables.

    Returns:
        the variables that ``$(NAME)`` in the command may refer to.
    """
    known: dict[str, str] = {}
    count = 0
    if value is not None:
        of.put(own, at, [] if isinstance(value, list) else value)
    for number, one in enumerate(value if isinstance(value, list) else ()):
        path, kept = (*at, number), one
        if isinstance(one, dict):
            if "valueFrom" in one:
                of.drop(
                    path, f"{one.get('name')} comes from the Kubernetes cluster; export it yourself"
                )
                continue
            kept = {name: text for name, text in one.items() if text is not None}
            for name in [key for key in kept if nearest(key, _ENV_FIELDS) == "valueFrom"]:
                of.refuse((*path, name), "there is no such field; did you mean 'valueFrom'?")
                del kept[name]
            if isinstance(kept.get("value"), str):
                kept["value"] = _expanded(kept["value"], known)
                known[str(kept.get("name"))] = kept["value"]
        of.put((*own, count), path, kept)
        count += 1
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


# --- the tables

_ENV_FIELDS = ("name", "value", "valueFrom")
_AMOUNTS: _Rows = {
    "cpu": _to("cpus"),
    "memory": _to("memory"),
    "nvidia.com/gpu": _gpus,
    "amd.com/gpu": _gpus,
}
_CONTAINER: _Rows = {
    **dict.fromkeys(("name", "command", "args", "env"), _elsewhere),
    "image": _to("image"),
    "workingDir": _to("workingDirectory"),
    "resources": _resources,
    "volumeMounts": _nothing("a job sees the file systems of its nodes"),
}
_INIT: _Rows = {
    **_same("name", "command", "args"),
    "image": _nothing("init steps run on the node, outside any container"),
}
_POD: _Rows = {
    "containers": _elsewhere,
    "initContainers": _each("init", _INIT),
    "volumes": _nothing("a job sees the file systems of its nodes"),
    "nodeSelector": _nothing("in a job spec, use scheduler.options.constraint"),
}
_REPLICA: _Rows = {
    **_same("type", "replicas", "restartPolicy"),
    "template": _inside({"spec": _pod}),
}
_DEBUG_REPLICA: _Rows = {**_same("type", "command"), "skipInitContainer": _to("skipInit")}
_DEBUG: _Rows = {
    "enable": _to("enable"),
    "enabled": _to("enable"),
    "replicaSpecs": _each("replicaSpecs", _DEBUG_REPLICA),
}
_TORCHRUN: _Rows = {
    **_same("enable", "minNodes", "maxRestarts", "procPerNode", "extraOptions"),
    "enabled": _to("enable"),
    "rdzvBackend": _backend,
}
_RUN_POLICY: _Rows = {
    **_same("backoffLimit", "activeDeadlineSeconds", "cleanPolicy"),
    **dict.fromkeys(("cleanUpPolicy", "cleanUpWorkers", "cleanPodPolicy"), _to("cleanPolicy")),
}


def _manifest_rows(tables: SiteTables) -> _Rows:
    """Of a whole manifest; queues and priorities are the site's."""
    scheduled = _inside({
        "queue": partial(_queue, tables),
        "priority": partial(_priority, tables),
    })  # fmt: skip
    board: _Rows = {
        "image": _nothing("TensorBoard runs from this Python environment"),
        "trainingLogFilesets": _filesets,
    }
    mode: _Rows = {
        "debug": _part("debug", _DEBUG),
        "pause": _nothing("scontrol hold keeps a job from starting"),
    }
    spec: _Rows = {
        "torchrunConfig": _part("torchrunConfig", _TORCHRUN),
        "replicaSpecs": _each("replicaSpecs", _REPLICA, note=_replica),
        "runPolicy": _part("runPolicy", _RUN_POLICY),
        "scheduler": _part("scheduler", {"t9kScheduler": scheduled, "volcanoScheduler": scheduled}),
        "tensorboardSpec": _part("tensorboard", board),
        "runMode": _part("runMode", mode),
        "elastic": _nothing("torchrunConfig.minNodes sets the fewest replicas that may train"),
    }
    return {
        **dict.fromkeys(("apiVersion", "kind"), _elsewhere),
        "metadata": _inside(_same("name", "labels")),
        "spec": _inside(spec),
    }

"""torchrun between Slurm and the ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator

from hydroslurm.jobs.spec.fields import Count, Line, Part, Whole, Words, unit

RDZV_BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
RESERVED = frozenset({
    "nnodes", "nproc-per-node", "max-restarts", "rdzv-backend", "rdzv-id",
    "node-rank", "master-addr", "master-port", "standalone", "module", "no-python", "run-path",
    "local-addr",
})  # fmt: skip
"""torchrun's options that a spec cannot pass on: hydroslurm sets them, or a field says them."""
ENDPOINT = "--rdzv-endpoint"
"""Where the server of etcd is; of the other backends hydroslurm knows it."""


def _number_as_text(value: object) -> object:
    """T9k's is text; people write a number."""
    return str(value) if type(value) is int else value


ProcPerNode = Annotated[
    str,
    BeforeValidator(_number_as_text),
    WithJsonSchema({
        "anyOf": [
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": "^(gpu|[0-9]+)$"},
        ]
    }),
]  # fmt: skip


class TorchrunConfig(Part):
    """torch's elastic launcher between Slurm and the ranks."""

    enable: bool = Field(
        default=False,
        description="true: one torchrun agent per replica, which starts procPerNode ranks. false: "
        "srun starts the ranks, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set "
        "for them. Default: false.",
    )
    min_nodes: Count | None = Field(
        default=None,
        description="Fewest replicas that may train together. Default: all of them.",
        json_schema_extra=unit("replicas"),
    )
    max_restarts: Whole = Field(
        default=0,
        description="How often an agent restarts its ranks by itself before its replica counts as "
        "failed. Default: 0.",
        json_schema_extra=unit("restarts"),
    )
    proc_per_node: ProcPerNode = Field(
        default="1",
        description="Ranks of a replica: a number, or gpu for one on each of its GPUs. Default: 1.",
        json_schema_extra=unit("ranks per replica"),
    )
    rdzv_backend: Annotated[Line, WithJsonSchema({"enum": list(RDZV_BACKENDS)})] = Field(
        default="c10d",
        description="How the agents find each other: c10d, static, etcd or etcd-v2. The last two "
        "need a server of yours, in extraOptions: [--rdzv-endpoint, HOST:PORT]. Default: c10d.",
    )
    extra_options: Words = Field(
        default=(),
        description="More options for torchrun, such as [--log-dir, logs]. Those that hydroslurm "
        "sets are refused. Default: [].",
    )

    @property
    def names_endpoint(self) -> bool:
        """Whether extraOptions say where the agents meet."""
        names = (word.partition("=")[0].replace("_", "-") for word in self.extra_options)
        return any(len(word) > len("--rdzv-") and ENDPOINT.startswith(word) for word in names)

    @property
    def has_own_server(self) -> bool:
        """Whether the agents meet at a server that is the user's."""
        return self.rdzv_backend.startswith("etcd")

    @field_validator("proc_per_node")
    @classmethod
    def _number_or_gpu(cls, value: str) -> str:
        is_number = value.isascii() and value.isdecimal() and len(value) < 5
        if value != "gpu" and not (is_number and int(value) > 0):
            raise ValueError(f"{value[:40]!r} is neither gpu nor a number from 1 to 9999")
        return value

    @field_validator("rdzv_backend")
    @classmethod
    def _known_backend(cls, value: str) -> str:
        if value not in RDZV_BACKENDS:
            raise ValueError(f"{value!r} is not one of {', '.join(RDZV_BACKENDS)}")
        return value

    @field_validator("extra_options")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if _is_reserved(word):
                raise ValueError(
                    f"{word[:60]!r} is set by hydroslurm; use minNodes, maxRestarts, procPerNode, "
                    "rdzvBackend or the command instead"
                )
        return value


def _is_reserved(word: str) -> bool:
    """argparse takes any unambiguous beginning of an option for the option."""
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    if not word.startswith("--"):
        return word in ("-m", "-r")
    return bool(name) and any(one.startswith(name) for one in RESERVED)

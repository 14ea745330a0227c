"""What Lightning knows of ours: strategies by name and a cluster environment, as HFAI has them.

    import hydroslurm.integrations.lightning
    environment = HydroslurmEnvironment()
    trainer = Trainer(
        strategy="hfreduce_bind_numa",
        plugins=[environment],
        num_nodes=environment.num_nodes,
        devices=environment.devices,
    )

``ddp_bind_numa`` and ``ddp_spawn_bind_numa`` are Lightning's DDP with each rank bound to the NUMA
node of its device; with ``hfreduce_`` in the place of ``ddp_`` gradients are reduced on the host.

Lightning comes as two packages, and each wants instances of its own classes. Both get everything,
each when it is imported, before this module or after it.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydroslurm.coordination.world import World
from hydroslurm.errors import UsageError
from hydroslurm.runtime import autoload
from hydroslurm.slurm.allocation import step_of
from hydroslurm.training.rank_group import warning

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = ("lightning.fabric", "lightning_fabric")
_NAMES = {
    "ddp_bind_numa": ("popen", False),
    "ddp_spawn_bind_numa": ("spawn", False),
    "hfreduce_bind_numa": ("popen", True),
    "hfreduce_spawn_bind_numa": ("spawn", True),
}
"""Name -> how it starts its ranks, and whether gradients are reduced on the host."""
_CLASSES = {
    "BindNumaStrategy": ("lightning.pytorch", False),
    "HostReduceStrategy": ("lightning.pytorch", True),
    "LegacyBindNumaStrategy": ("pytorch_lightning", False),
    "LegacyHostReduceStrategy": ("pytorch_lightning", True),
}
"""By these names ranks that are spawned find the class of the strategy that is handed to them."""


class LightningBase:
    """Base of a class that gets classes of Lightning's as further bases, see
    :func:`add_lightning_base`. Python takes them only beside another base than object."""


def add_lightning_base(kind: type[LightningBase], name: str) -> None:
    """Make a class one of Lightning's callbacks: of each package, once it is imported. Instances
    that exist by then are callbacks too."""

    def add(package: ModuleType) -> None:
        base = getattr(importlib.import_module(f"{package.__name__}.callbacks"), name)
        kind.__bases__ = (*kind.__bases__, base)

    for package in PACKAGES:
        autoload.when_imported(package, add)


def _register_strategies(package: ModuleType) -> None:
    registry = importlib.import_module(f"{package.__name__}.strategies").StrategyRegistry
    for name, (start_method, reduces) in _NAMES.items():
        registry.register(
            name,
            strategy_class(package.__name__, reduces=reduces),
            description=(
                "DDP, each rank on the NUMA node of its device"
                + (", gradients reduced on the host" if reduces else "")
            ),
            override=True,
            start_method=start_method,
        )


@functools.cache
def strategy_class(package: str, *, reduces: bool) -> Any:
    """The strategy for one of Lightning's two packages, whose classes are not each other's."""
    base: Any = importlib.import_module(f"{package}.strategies").DDPStrategy

    def setup_environment(self: Any) -> None:
        from hydroslurm.numa import bind, pci_of_rank

        environ, device = _environ_of(self), self.root_device
        bind(
            device=pci_of_rank(device.index or 0, environ) if device.type == "cuda" else None,
            environ=environ,
        )
        base.setup_environment(self)

    def setup_model(self: Any, model: Any) -> Any:
        from hydroslurm.parallel import host_reduce_hook

        wrapped = base._setup_model(self, model)
        wrapped.register_comm_hook(None, host_reduce_hook(environ=_environ_of(self)))
        return wrapped

    members: dict[str, Any] = {"setup_environment": setup_environment, "__module__": __name__}
    if reduces:
        members["_setup_model"] = setup_model
    name = next(name for name, kind in _CLASSES.items() if kind == (package, reduces))
    return type(name, (base,), members)


def _environ_of(strategy: Any) -> Mapping[str, str]:
    """What a launcher would have set: Lightning tells its ranks in its own way."""
    return {
        **os.environ,
        "RANK": str(strategy.node_rank * strategy.num_processes + strategy.local_rank),
        "WORLD_SIZE": str(strategy.num_nodes * strategy.num_processes),
        "LOCAL_RANK": str(strategy.local_rank),
        "LOCAL_WORLD_SIZE": str(strategy.num_processes),
        "GROUP_RANK": str(strategy.node_rank),
    }


class HydroslurmEnvironment:
    """The ranks of this attempt as Lightning's cluster environment: below srun, submitit, torchrun
    and ``hydroslurm agent``, with the address and the port of this attempt, and with another number
    of nodes in each. A process that was started by none of these trains alone.

    Attributes:
        num_nodes, devices: those of this attempt, for the Trainer.

    Raises:
        UsageError: this node has another number of ranks than the others.
    """

    def __init__(self) -> None:
        if not self.detect():
            warning(
                "HydroslurmEnvironment: no srun or torchrun started this process; it trains alone"
            )
            with socket.create_server(("127.0.0.1", 0)) as free:
                os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
        from hydroslurm.coordination.rendezvous import set_torch_environment

        set_torch_environment()
        self._world = World.from_environ(os.environ)
        here = self._world.local_world_size
        if self._world.world_size % here:
            raise UsageError(
                f"{self._world.world_size} ranks, {here} of them on this node: Lightning wants the "
                "same number on each. Ask for it with --ntasks-per-node"
            )
        self.devices = here
        self.num_nodes = self._world.world_size // here

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        environ = os.environ
        return bool(
            (environ.get("RANK") and environ.get("WORLD_SIZE"))
            or (step_of(environ) is not None and environ.get("SLURM_PROCID"))
        )

    def world_size(self) -> int:
        return self._world.world_size

    def set_world_size(self, size: int) -> None:
        """It is the launcher's."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """As the world's size."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        for name in ("GROUP_RANK", "SLURM_NODEID"):
            if os.environ.get(name, "").isdecimal():
                return int(os.environ[name])
        return self._world.rank // self._world.local_world_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if (num_devices, num_nodes) != (self.devices, self.num_nodes):
            raise UsageError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}), and this attempt has "
                f"{self.num_nodes} nodes with {self.devices} ranks each. Give the Trainer "
                "num_nodes=environment.num_nodes and devices=environment.devices, which are right "
                "in each attempt; for more ranks start more, with srun --nodes --ntasks-per-node"
            )

    def teardown(self) -> None:
        pass


def _register_environment(fabric: ModuleType) -> None:
    environments = importlib.import_module(f"{fabric.__name__}.plugins.environments")
    environments.ClusterEnvironment.register(HydroslurmEnvironment)


def __getattr__(name: str) -> Any:
    """The strategies' classes, for pickle."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package, reduces = _CLASSES[name]
    return strategy_class(package, reduces=reduces)


for _package in PACKAGES:
    autoload.when_imported(_package, _register_strategies)
for _fabric in _FABRICS:
    autoload.when_imported(_fabric, _register_environment)

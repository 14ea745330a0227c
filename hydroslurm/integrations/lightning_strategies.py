"""Lightning's strategies by name, and its cluster environment, as HFAI has them.

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
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from hydroslurm.coordination.rendezvous import set_torch_environment
from hydroslurm.coordination.world import World
from hydroslurm.errors import UsageError
from hydroslurm.slurm.allocation import step_of

_PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
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


def register_strategies() -> None:
    """Have Lightning know the strategies by name: that of each of its packages that is loaded."""
    for package in _PACKAGES:
        if package not in sys.modules:
            continue
        registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
        for name, (start_method, reduces) in _NAMES.items():
            if name not in registry:
                registry.register(
                    name,
                    strategy_class(package, reduces=reduces),
                    description=(
                        "DDP, each rank on the NUMA node of its device"
                        + (", gradients reduced on the host" if reduces else "")
                    ),
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


class _Environment:
    """The ranks of this attempt as Lightning's cluster environment: below srun, submitit, torchrun
    and ``hydroslurm agent``, with the address and the port of this attempt, and with another number
    of nodes in each.

    Attributes:
        num_nodes, devices: those of this attempt, for the Trainer.

    Raises:
        UsageError: this process was started by none of these, or its node has another number of
            ranks than the others.
    """

    def __init__(self) -> None:
        super().__init__()
        if not self.detect():
            raise UsageError(
                "HydroslurmEnvironment: this process is no task of srun's and no rank of "
                "torchrun's. Start it with one of them, or leave the environment out"
            )
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
                "in each attempt"
            )

    def teardown(self) -> None:
        pass


def __getattr__(name: str) -> Any:
    """``HydroslurmEnvironment``, of the package that is loaded, ``lightning`` if both are; and the
    strategies' classes."""
    if name in _CLASSES:
        package, reduces = _CLASSES[name]
        return strategy_class(package, reduces=reduces)
    if name != "HydroslurmEnvironment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded = next((one for one in _PACKAGES if one in sys.modules), "lightning.pytorch")
    return _environment_class(_PACKAGES[loaded])


@functools.cache
def _environment_class(fabric: str) -> Any:
    base: Any = importlib.import_module(f"{fabric}.plugins.environments").ClusterEnvironment
    # its metaclass would have the class be one of the module abc, where pickle does not find it
    within = {"__doc__": _Environment.__doc__, "__module__": __name__}
    return type("HydroslurmEnvironment", (_Environment, base), within)

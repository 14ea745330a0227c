"""``model = hydroslurm.od_execution_wrapper(model)``: one line makes a training script pausable."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hydroslurm.errors import UsageError
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller

if TYPE_CHECKING:
    import torch


class Engine:
    """A model together with the controller of its process.

    Calling it calls the model, and every attribute that is not named here is the model's own:
    parameters, state_dict, hooks, submodules. Methods that return the model itself (``to``,
    ``train``, ``half``) return the engine. Where ``isinstance`` matters (DistributedDataParallel,
    torch.compile) hand over :attr:`module`; pausing does not depend on the wrapper being called.
    """

    def __init__(self, module: torch.nn.Module, controller: Controller) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "controller", controller)

    module: torch.nn.Module
    controller: Controller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def pause(self, *, wait_s: float | None = None) -> None:
        """Park the process at its next operator; see :meth:`Controller.pause`."""
        self.controller.pause(wait_s=wait_s)

    def resume(self, *, wait_s: float | None = None) -> None:
        """Take that pause back; see :meth:`Controller.resume`."""
        self.controller.resume(wait_s=wait_s)

    def __getattr__(self, name: str) -> Any:
        # only reached for what the engine itself lacks; `module` is missing while unpickling and
        # copying
        if name in ("module", "controller"):
            raise AttributeError(name)
        value = getattr(self.module, name)
        if getattr(value, "__self__", None) is self.module:
            return self._returning_self(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        return f"Engine({self.module!r})"

    def _returning_self(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is self.module else result

        return call


def od_execution_wrapper(model: torch.nn.Module, **options: Any) -> Engine:
    """Wrap a model so that training can be paused at every operator and continued in place.

    Installs pausing in this process when that was not done yet (by ``hydroslurm submit`` it was); a
    second model only gets the wrapper.

    Args:
        model: the model; it is not copied or changed.
        options: for :func:`hydroslurm.install`, if that is still to be called.

    Raises:
        UsageError: not a module, an engine already, or options although pausing is installed.
        InstallError, GateError: as :func:`hydroslurm.install`.
    """
    import torch

    if isinstance(model, Engine):
        raise UsageError("the model is wrapped already; use the engine that you have")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module, got {type(model).__name__}; wrap the model, not the "
            "optimizer or its output"
        )
    if installation.is_installed() and not (options and installation.gives_way()):
        if options:
            raise UsageError(
                f"options {', '.join(sorted(options))} were given, but pausing is installed in "
                "this process already; "
                "give them to the first call, or call hydroslurm.uninstall() before"
            )
        return Engine(model, installation.controller())
    return Engine(model, installation.install(model=model, **options))

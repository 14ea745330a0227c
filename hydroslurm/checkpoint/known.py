"""Whose objects the census does not enter: a table, with the reason for each."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

_OWN_PROGRESS = "its framework saves it"
_OUTSIDE = "what it shows lies outside of this process"
_DATA = "data, which a training reads"
_POSITION = "its position is saved"
_CACHE = "caches and settings of a library"
ENTERED = ""
"""In the place of a reason: objects of this package are looked into."""

KNOWN: Mapping[str, str] = {
    "hydroslurm": "the run saves it",
    "torch": "a state_dict() has it, or it is none",
    "torch.utils.data": ENTERED,
    "torch.utils.data.dataloader._BaseDataLoaderIter": _POSITION,
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter": _POSITION,
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": _POSITION,
    "torch.utils.tensorboard": _OUTSIDE,
    "torchvision": ENTERED,
    "torchdata": ENTERED,
    "torchdata.stateful_dataloader": _POSITION,
    "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader": ENTERED,
    "accelerate": _OWN_PROGRESS,
    "accelerate.data_loader": ENTERED,
    "lightning": _OWN_PROGRESS,
    "lightning_fabric": _OWN_PROGRESS,
    "pytorch_lightning": _OWN_PROGRESS,
    "transformers": _OWN_PROGRESS,
    "transformers.data": ENTERED,
    "transformers.trainer_utils.RemoveColumnsCollator": ENTERED,
    "trl": _OWN_PROGRESS,
    "peft": _OWN_PROGRESS,
    "peft.tuners.adalora": ENTERED,
    "deepspeed": _OWN_PROGRESS,
    "torchmetrics": _OWN_PROGRESS,
    **dict.fromkeys(("datasets", "pyarrow", "pandas", "polars", "PIL", "h5py", "lmdb"), _DATA),
    **dict.fromkeys(("cv2", "av", "decord", "webdataset"), _DATA),
    **dict.fromkeys(("tokenizers", "sentencepiece", "sklearn", "scipy", "numba", "triton"), _CACHE),
    **dict.fromkeys(("omegaconf", "hydra", "matplotlib", "IPython", "pydantic", "jax"), _CACHE),
    **dict.fromkeys(("numpy", "_pytest", "pytest", "pluggy", "tensorflow"), _CACHE),
    **dict.fromkeys(("wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml"), _OUTSIDE),
    **dict.fromkeys(("neptune", "aim", "clearml", "swanlab", "loguru", "tqdm", "rich"), _OUTSIDE),
    **dict.fromkeys(("ray", "dask", "psutil", "pynvml", "fsspec", "boto3", "grpc"), _OUTSIDE),
    **dict.fromkeys(("requests", "urllib3", "httpx", "aiohttp", "zmq", "redis"), _OUTSIDE),
    **dict.fromkeys(sys.stdlib_module_names - {"__main__"}, _OUTSIDE),
}
"""A package, a module in it or a class -> why nothing in its objects is state of a training. The
longest name that fits counts."""

_ALWAYS: tuple[type, ...] = (
    types.FunctionType, types.MethodType, types.SimpleNamespace, functools.partial,
)  # fmt: skip


def reason(thing: Any, known: Mapping[str, str] = KNOWN) -> str:
    """Why an object, a class or a function is not looked into; empty if it is."""
    if isinstance(thing, types.FunctionType):
        return _of_name(f"{thing.__module__}.", known)
    kind = thing if isinstance(thing, type) else type(thing)
    is_sharded = kind.__name__.startswith("FSDP") and len(kind.__bases__) > 1
    if is_sharded or kind.__name__.startswith("Parametrized"):
        kind = kind.__bases__[-1]  # torch has put a class of its own before that of the script
    if kind.__module__ in ("builtins", "collections", "itertools") or issubclass(kind, _ALWAYS):
        return ""
    return _of_name(f"{kind.__module__}.{kind.__qualname__}", known)


def _of_name(name: str, known: Mapping[str, str]) -> str:
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return ""

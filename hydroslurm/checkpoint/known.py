"""Whose objects the census does not enter: a table, with the reason for each."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

ENTERED = ""
"""In the place of a reason: objects of this package are looked into."""

_TABLE = {
    "the run saves it": "hydroslurm",
    "a state_dict() has it, or it is none": "torch",
    "its framework saves it": (
        "accelerate lightning lightning_fabric pytorch_lightning transformers trl peft deepspeed "
        "torchmetrics"
    ),
    "its position is saved": ("torch.utils.data.dataloader torchdata.stateful_dataloader"),
    "data, which a training reads": (
        "datasets pyarrow pandas polars PIL h5py lmdb cv2 av decord webdataset"
    ),
    "caches and settings of a library": (
        "tokenizers sentencepiece sklearn scipy numba triton omegaconf hydra matplotlib IPython "
        "pydantic jax numpy _pytest pytest pluggy tensorflow"
    ),
    "what it shows lies outside of this process": (
        "torch.utils.tensorboard wandb tensorboard tensorboardX mlflow comet_ml neptune aim "
        "clearml swanlab loguru tqdm rich ray dask psutil pynvml fsspec boto3 grpc requests "
        f"urllib3 httpx aiohttp zmq redis {' '.join(sys.stdlib_module_names - {'__main__'})}"
    ),
    ENTERED: (
        "torch.utils.data torch.utils.data.dataloader.DataLoader torchvision torchdata "
        "accelerate.data_loader transformers.data "
        "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader "
        "transformers.trainer_utils.RemoveColumnsCollator peft.tuners.adalora queue"
    ),
}
KNOWN: Mapping[str, str] = {name: why for why, names in _TABLE.items() for name in names.split()}
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

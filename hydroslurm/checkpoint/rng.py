"""The random number generators of a process as a value that can be saved without pickling.

Covered are the *global* generators: ``random``, ``numpy.random`` (the legacy one), torch's on the
CPU, and torch's on every device of an accelerator that is initialised. Generators that a program
made for itself (``torch.Generator``, ``numpy.random.default_rng``) are saved where it registers
them; the ones that a DataLoader, its sampler or its data set holds are saved with its position
(``hydroslurm.data``). Both by :func:`state_of`.

Large integers and arrays go into tensors: tensors and plain values are all that a checkpoint may
hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hydroslurm.errors import StateMismatch, UnsavableState

FORMAT = 2
ON_CPU = ("python", "numpy", "torch")
"""In what :func:`capture` returns: the generators that every process has."""

Generator: TypeAlias = (
    "torch.Generator | random.Random | numpy.random.RandomState | numpy.random.Generator"
)
KINDS = (torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator)
"""Of generators that a program makes for itself. ``random.SystemRandom`` has no state."""


def global_generators() -> list[Any]:
    """Those whose state :func:`capture` reads, and which a script may hold under another name."""
    devices = [
        one for _, module in _initialised() for one in getattr(module, "default_generators", ())
    ]
    return [torch.default_generator, *devices, random._inst, numpy.random.mtrand._rand]


def capture() -> dict[str, Any]:
    """Read the state of every global generator; draws nothing.

    Raises:
        UnsavableState: numpy's global generator was replaced by one that is not MT19937.
    """
    if (kind := numpy.random.get_state(legacy=False)["bit_generator"]) != "MT19937":
        raise UnsavableState(
            f"numpy's global generator is {kind}, put there by numpy.random.set_bit_generator(); "
            "only its default, MT19937, can be saved"
        )
    return {
        "format": FORMAT,
        "python": state_of(random._inst),
        "numpy": state_of(numpy.random.mtrand._rand),
        "torch": torch.get_rng_state(),
        "devices": {
            f"{kind}:{index}": module.get_rng_state(index).cpu()
            for kind, module in _initialised()
            for index in range(module.device_count())
        },
    }


def restore(state: Mapping[str, Any]) -> None:
    """Put every global generator back to what :func:`capture` saw.

    Warns when a device of the state is not here, and when one that is in use here is not in the
    state: its random numbers will then differ from those of an uninterrupted run.

    Raises:
        StateMismatch: the state is not one of :func:`capture`, or is in a newer form.
    """
    _check(state)
    set_state(random._inst, state["python"])
    set_state(numpy.random.mtrand._rand, state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    _restore_devices(state["devices"])


@contextlib.contextmanager
def seeded(digest: bytes, *, devices: bool = True) -> Iterator[None]:
    """Seed all of them from 32 bytes, and put them back after the block.

    Args:
        devices: also those of accelerators in use.
    """
    seeds = struct.unpack("<QIQQ", digest[:28])
    modules = [module for _, module in _initialised()] if devices else []
    before = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    on_devices = [
        (module, index, module.get_rng_state(index))
        for module in modules
        for index in range(module.device_count())
    ]
    random.seed(seeds[0])
    numpy.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2] >> 1)
    for module in modules:
        module.manual_seed_all(seeds[3] >> 1)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
        for module, index, state in on_devices:
            module.set_rng_state(state, index)


def for_new_rank(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """A state for a rank that had no part in the save, made from that of another rank.

    The same each time, and no two ranks have the same one, nor one that was saved.

    Args:
        state: what :func:`capture` saw, of rank 0 by convention.
        rank: the new rank's number.

    Raises:
        StateMismatch: the state is not one of :func:`capture`, or is in a newer form.
    """
    _check(state)
    digest = digest_of([f"rank {rank}", *(state[key] for key in ON_CPU)])
    seeds = struct.unpack("<4Q", digest)
    legacy = numpy.random.RandomState(numpy.frombuffer(digest, numpy.uint32))
    return {
        "format": FORMAT,
        "python": state_of(random.Random(seeds[0])),
        "numpy": state_of(legacy),
        "torch": state_of(torch.Generator().manual_seed(seeds[1] >> 1)),
        "devices": {
            name: _device_state(name, one, seeds[2] >> 1) for name, one in state["devices"].items()
        },
    }


def state_of(generator: Generator) -> Any:
    """The state of one generator of a program's own, as a tensor or plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, internal, gauss = generator.getstate()
        words = torch.from_numpy(numpy.fromiter(internal, numpy.int64, len(internal)))
        return {"version": version, "state": words, "gauss": gauss}
    return _without_arrays(_numpy_state_of(generator))


def set_state(generator: Generator, state: Any) -> None:
    """Put one generator back.

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: the state is of another kind of generator.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return
    if isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["state"].tolist()), state["gauss"]))
        return
    found = _with_arrays(state, like=_numpy_state_of(generator))
    if isinstance(generator, numpy.random.RandomState):
        generator.set_state(found)
    else:
        generator.bit_generator.state = found


def made_from(kind: str, state: Any) -> Generator:
    """Another generator of a class of :data:`KINDS`, by its name: for a script that makes it when
    it draws for the first time.

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: as :func:`set_state`.
    """
    if kind == "Generator" and isinstance(state, dict):
        found: Any = numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())
    else:
        kinds = {
            "Generator": torch.Generator, "Random": random.Random,
            "RandomState": numpy.random.RandomState,
        }  # fmt: skip
        found = kinds[kind]()
    set_state(found, state)
    return found  # type: ignore[no-any-return]


def diverge(generator: Generator, rank: int) -> None:
    """Begin another stream, made from the generator's state and the number of a rank: the same each
    time, and another for each rank."""
    seed = int.from_bytes(digest_of([f"rank {rank}", state_of(generator)])[:8], "little") >> 1
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        kind = getattr(numpy.random, _numpy_state_of(generator)["bit_generator"])
        fresh = kind(seed)
        if isinstance(generator, numpy.random.Generator):
            generator.bit_generator.state = fresh.state
        else:
            generator.set_state(numpy.random.RandomState(fresh).get_state(legacy=False))


def digest_of(state: Any) -> bytes:
    """32 bytes that are made of a state, or of a list of states and words."""
    digest = hashlib.sha256()
    for part in tree_leaves(state):
        is_tensor = isinstance(part, torch.Tensor)
        digest.update(part.cpu().numpy().tobytes() if is_tensor else repr(part).encode())
    return digest.digest()


def _numpy_state_of(generator: numpy.random.RandomState | numpy.random.Generator) -> Any:
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _without_arrays(state: Any) -> Any:
    """Their bytes in tensors; the other values are numbers and words."""
    return tree_map_only(
        numpy.ndarray,
        lambda array: torch.from_numpy(numpy.frombuffer(array.tobytes(), numpy.uint8).copy()),
        state,
    )


def _with_arrays(state: Any, *, like: Any) -> Any:
    def put_back(here: Any, saved: Any) -> Any:
        if not isinstance(here, numpy.ndarray):
            return saved
        return numpy.frombuffer(saved.numpy().tobytes(), here.dtype).reshape(here.shape)

    return tree_map(put_back, like, state)


def _check(state: Mapping[str, Any]) -> None:
    wanted = {"format", *ON_CPU, "devices"}
    if missing := wanted - set(state):
        raise StateMismatch(
            f"a saved RNG state must have the keys {sorted(wanted)}, this one lacks "
            f"{sorted(missing)}; it was not made by hydroslurm.checkpoint.rng.capture()"
        )
    if state["format"] != FORMAT:
        raise StateMismatch(
            f"the saved RNG state has format {state['format']}, this hydroslurm reads {FORMAT}; "
            "use the hydroslurm that wrote it"
        )


def _device_state(name: str, state: torch.Tensor, seed: int) -> torch.Tensor:
    """Another state of the same form; ``seed`` and an offset, 8 bytes each, on CUDA (Philox)."""
    fresh = state.clone()
    index = int(name.rsplit(":", 1)[1])
    seeded = numpy.frombuffer(struct.pack("<Q", (seed + index) % 2**63), numpy.uint8).copy()
    fresh[: len(seeded)] = torch.from_numpy(seeded)[: len(fresh)]
    return fresh


def _initialised() -> Iterator[tuple[str, ModuleType]]:
    """The kinds of accelerator that this process already uses. One that is not initialised has
    drawn nothing, and asking it would initialise it."""
    for kind, module in _present():
        if module.is_initialized():
            yield kind, module


def _present() -> Iterator[tuple[str, Any]]:
    if torch.cuda.is_available():
        yield "cuda", torch.cuda
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is None or not accelerator.is_available():
        return
    kind = accelerator.current_accelerator().type
    module = getattr(torch, kind, None)
    # a backend from outside torch need not have all of the four
    needed = ("is_initialized", "device_count", "get_rng_state", "set_rng_state")
    if kind != "cuda" and all(hasattr(module, name) for name in needed):
        yield kind, module


def _restore_devices(states: Mapping[str, torch.Tensor]) -> None:
    here = {
        f"{kind}:{index}": (module, index)
        for kind, module in _present()
        for index in range(module.device_count())
    }
    for name in states.keys() & here.keys():
        module, index = here[name]
        module.set_rng_state(states[name].cpu(), index)
    in_use = {name for name, (module, _) in here.items() if module.is_initialized()}
    not_here, not_saved = sorted(states.keys() - here.keys()), sorted(in_use - states.keys())
    for names, what in (
        (not_here, f"is also for {', '.join(not_here)}, which this process cannot see"),
        (not_saved, f"has nothing for {', '.join(not_saved)}, in use here"),
    ):
        if names:
            warnings.warn(
                f"the saved RNG state {what}; the run goes on, but its random numbers will differ "
                "from an uninterrupted run's",
                stacklevel=3,
            )

"""accelerate: a loop of one's own keeps the whole promise, with two lines changed.

    from hydroslurm.integrations.accelerate import epochs, prepare

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
    for epoch in epochs(accelerator, 3):
        for batch in loader:
            with accelerator.accumulate(model):
                ...

:func:`prepare` stands in the place of ``accelerator.prepare()``, and resumes. A safe point lies
behind each batch at which accelerate has synchronised the gradients, where the loop asks for the
next one: what the loop did with the batch is done. A resumed loop goes on in its epoch behind the
last such batch; what follows the batches of an epoch is repeated if the attempt ended within it.

Several loaders may be trained from, in one loop: see
:mod:`hydroslurm.integrations.accelerate_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydroslurm.checkpoint import rng
from hydroslurm.errors import UsageError
from hydroslurm.integrations.accelerate_batches import Loaders
from hydroslurm.integrations.framework_run import FrameworkRun, directory_of_fit
from hydroslurm.integrations.known import environ_of
from hydroslurm.training.checks import Remedies
from hydroslurm.training.objects import Stateful, bare

_LOOP = "_hydroslurm_loop"

_GIVE = "Give it to prepare(accelerator, ..., {})."
_REGISTER = "accelerator.register_for_checkpointing({}) before prepare()"
_REMEDIES = Remedies(
    optimizer=_GIVE.format("optimizer"),
    scheduler=_GIVE.format("scheduler"),
    scaler=(
        'Accelerator(mixed_precision="fp16") has one that is saved; for one of your own: '
        f"{_REGISTER.format('scaler')}."
    ),
    weights=(
        "Give the module that has them to prepare(accelerator, ..., module); "
        "torch.nn.ParameterList([tensor]) for a tensor that belongs to none."
    ),
    batches=(
        "Give the loader to prepare(accelerator, ..., loader), and iterate what that returns."
    ),
    unchecked="prepare(accelerator, ..., check=False)",
)


def prepare(accelerator: Any, *objects: Any, check: bool = True, **options: Any) -> Any:
    """``accelerator.prepare()`` for a training that can be stopped, requeued and resumed, bit for
    bit. Returns the prepared objects in the same order; a single one by itself.

    Saved are all of them that have a state, the objects given to
    ``accelerator.register_for_checkpointing()`` before, the gradient scaler, the random numbers of
    each rank, and the position in the training data.

    The first step of each attempt is watched, as that of :meth:`hydroslurm.Run.batches`: the run
    ends there, with what to do, if it uses what is not saved.

    Args:
        objects: models, optimizers, schedulers and loaders; random generators of the script's own,
            which are handed back as they are. Each loader that is trained from has a position; one
            for validation begins anew each time, as the script iterates it.
        check: whether the first step is watched.
        options: those of :class:`hydroslurm.Run`: ``directory``, ``every_steps``, ``every_s``,
            ``keep``, ``on_save_error``, ``limits``, ``resume``.

    Raises:
        UsageError: no loader was given; an accelerator that was given before; a sharded model;
            tasks of Slurm that train alone each; no folder to save into.
        StateMismatch: what was saved does not fit these objects.
    """
    if hasattr(accelerator, _LOOP):
        raise UsageError(
            "prepare() was called for this accelerator before; give it all objects in one call"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UsageError(
            f"an Accelerator with {kind} cannot be made preemptible yet; wanted a single device or "
            "DistributedDataParallel"
        )
    loop = Loop(accelerator, check=check, options=options)
    setattr(accelerator, _LOOP, loop)
    return loop.prepare(objects)


def epochs(accelerator: Any, count: int) -> Iterator[int]:
    """The epochs that are left of ``count``, for a loop over the loader in each. The run is
    finished behind the last one; a loop that is left before that calls
    ``accelerator.end_training()``.

    Raises:
        UsageError: :func:`prepare` was not called for this accelerator.
    """
    return _loop_of(accelerator).epochs(count)


def completed_steps(accelerator: Any) -> int:
    """Optimizer steps that were made in all attempts: where a loop that counts them begins.

    Raises:
        UsageError: as :func:`epochs`.
    """
    return _loop_of(accelerator).run.step


class Loop:
    """The training of one accelerator; see the module.

    Attributes:
        run: the Run.
    """

    def __init__(self, accelerator: Any, *, check: bool, options: Mapping[str, Any]) -> None:
        self._accelerator = accelerator
        self._checks = check
        self._loaders: Loaders | None = None
        self._is_finished = False
        environ = environ_of(rank=accelerator.process_index, world_size=accelerator.num_processes)
        place = directory_of_fit(options.get("directory"), environ).root
        self.run = FrameworkRun(
            "accelerate", dict, environ=environ, **{**options, "directory": place}
        )
        self._models: list[Any] = []
        self.run.follow(lambda: self._models)

    def prepare(self, objects: tuple[Any, ...]) -> Any:
        for number, one in enumerate(one for one in objects if isinstance(one, rng.KINDS)):
            self.run.register(f"generator {number}", one)
        made = self._accelerator.prepare(*objects)
        prepared = list(made) if len(objects) > 1 else [made]
        places = [place for place, one in enumerate(prepared) if _is_loader(one)]
        if not places:
            raise UsageError("prepare() needs the loader that the training iterates; give it, too")
        self._share(prepared)
        self._models = [one for one in prepared if hasattr(one, "named_buffers")]
        generators = [one for one in objects if isinstance(one, rng.KINDS)]
        # the script's own, through which its data sets are found: in accelerate's stand ours
        loaders = [one[place] for place in places for one in (objects, prepared)]
        self.run.remember(dict, saved=lambda: [*loaders, *generators])
        self.run.resume()
        self._loaders = Loaders(self.run, self._accelerator, self._models, checks=self._checks)
        for place in places:
            prepared[place] = self._loaders.take(prepared[place])
        if self._checks:
            self.run.check_first_step(_REMEDIES)
        self._finish_at_end_training()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def epochs(self, count: int) -> Iterator[int]:
        assert self._loaders is not None
        for epoch in range(self.run.epoch, count):
            self._loaders.begin_epoch(epoch, is_last=epoch + 1 == count)
            yield epoch
        self.finish()

    def finish(self) -> None:
        """The training is done."""
        if not self._is_finished:
            self._is_finished = True
            if self._loaders is not None:
                self._loaders.leave_epochs()
            self.run.finish()

    def _finish_at_end_training(self) -> None:
        end_training = self._accelerator.end_training

        def end() -> None:
            self.finish()
            end_training()

        self._accelerator.end_training = end

    def _share(self, prepared: list[Any]) -> None:
        """All of them that have a state are the run's, in one order in all attempts."""
        extra = getattr(self._accelerator, "_custom_objects", [])
        scaler = getattr(self._accelerator, "scaler", None)
        found = [one for one in prepared if not _is_loader(one) and isinstance(one, Stateful)]
        things = [*found, *extra, *([] if scaler is None else [scaler])]
        for number, thing in enumerate(map(_unwrapped, things)):
            self.run.register(f"{number} {type(thing).__name__}", thing)


def _loop_of(accelerator: Any) -> Loop:
    loop: Loop | None = getattr(accelerator, _LOOP, None)
    if loop is None:
        raise UsageError(
            "there is no run of this accelerator: call hydroslurm.integrations.accelerate."
            "prepare(accelerator, model, optimizer, loader, ...) in place of accelerator.prepare()"
        )
    return loop


def _unwrapped(thing: Any) -> Any:
    """A scheduler of torch's shows whose it is, accelerate's around it does not."""
    return thing.scheduler if type(thing).__name__ == "AcceleratedScheduler" else bare(thing)


def _is_loader(thing: Any) -> bool:
    import torch

    return isinstance(thing, torch.utils.data.DataLoader)

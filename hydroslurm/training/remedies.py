"""What to write for each thing that a loop uses and its run lacks, in one kind of loop."""

from __future__ import annotations

from dataclasses import dataclass

_GIVE = 'Give it: Run({0}=...) for one, run.register("{0}_2", {0}) for each further one.'


@dataclass(frozen=True)
class Remedies:
    """Whole sentences.

    Attributes:
        weights: that an optimizer trains.
        average: of the weights, or another object with tensors; ``{name}`` is what the script calls
            it, ``{short}`` that without dots and brackets.
        generator: of random numbers, with the same two names.
        batches: from an iterator without a position.
        unchecked: how to write the loop so that nobody looks.
    """

    optimizer: str
    scheduler: str
    scaler: str
    weights: str
    average: str
    generator: str
    batches: str
    unchecked: str

    def of(self, kind: str, name: str) -> str:
        """``average`` or ``generator``, for the one that the script calls so."""
        words = "".join(one if one.isidentifier() or one.isdecimal() else " " for one in name)
        text: str = getattr(self, kind)
        return text.format(name=name, short=words.split()[-1])


def own_loop(unchecked: str) -> Remedies:
    """Of a loop over ``run.batches()`` or ``run.steps()``."""
    return Remedies(
        optimizer=_GIVE.format("optimizer"),
        scheduler=_GIVE.format("scheduler"),
        scaler=_GIVE.format("scaler"),
        weights=(
            'Give the module that has them: Run(model=...) for one, run.register("model_2", module)'
            " for each further one, torch.nn.ParameterList([tensor]) for a tensor that belongs to "
            "none."
        ),
        average=(
            'run.register("{short}", {name}), or an object around it with state_dict() and '
            "load_state_dict()."
        ),
        generator='Register it before the loop: run.register("{short}", {name}).',
        batches=(
            "Let the run hand them out: Run(loader=loader) and `for batch in "
            "run.batches(epochs=...)`; or have a get_batch(step) choose the samples by the number "
            "of the step."
        ),
        unchecked=unchecked,
    )

"""What differs between a run that was left alone and one that was stopped, and the likely cause.

Pure: lists of :class:`Update` in, findings out. Each attempt of the stopped run is first placed
within the whole one by the weights that it begins with: that tells which steps were repeated or
left out, whatever the script counts itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hydroslurm.prove.updates import Update

_MOST_NAMES = 3
_MOST_AHEAD = 8
"""So many steps a loader's position may be wrong by; what is farther away is of another order."""


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as in the undisturbed run.

    Attributes:
        rank, attempt: where; attempts are counted from 1.
        step: the optimizer step of the undisturbed run, counted from 1.
        what: what was seen, and what the undisturbed run has there.
        cause: the likely cause, and what to do.
    """

    rank: int
    attempt: int
    step: int
    what: str
    cause: str

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank else ""
        return f"step {self.step} (attempt {self.attempt}{rank}): {self.what}. {self.cause}"


@dataclass
class Comparison:
    """What came of it for one rank or for all.

    Attributes:
        compared: updates of the stopped run that were compared.
        repeated: updates that were trained again, for an attempt began before the last one's end.
        left_out: updates that no attempt trained.
        differences: the first of each attempt.
    """

    compared: int = 0
    repeated: int = 0
    left_out: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether every bit was the same, and each step was trained once."""
        return not (self.differences or self.repeated or self.left_out)


def compare(
    whole: Mapping[int, Sequence[Update]],
    stopped: Mapping[int, Sequence[Sequence[Update]]],
    *,
    steps: int,
    generators: Collection[str],
) -> Comparison:
    """Compare the first ``steps`` updates, rank by rank; the earliest difference comes first.

    Args:
        generators: those whose state counts, see :func:`seeded_generators`.
    """
    result = Comparison()
    for rank, attempts in stopped.items():
        if rank in whole:
            right = [_only(one, generators) for one in whole[rank][:steps]]
            mine = [[_only(one, generators) for one in attempt] for attempt in attempts]
            _compare_rank(rank, right, mine, result)
    result.differences.sort(key=lambda one: (one.attempt, one.step, one.rank))
    return result


def seeded_generators(
    one: Mapping[int, Sequence[Update]], other: Mapping[int, Sequence[Update]]
) -> set[str]:
    """The generators that are alike in two undisturbed runs. One that nobody seeds, such as NumPy's
    in a script that does not use it, is another in every process."""
    pairs = [
        (mine.rng, right.rng)
        for rank in one.keys() & other.keys()
        for mine, right in zip(one[rank], other[rank], strict=False)
    ]
    names = {name for mine, _ in pairs for name in mine}
    return {name for name in names if all(a.get(name) == b.get(name) for a, b in pairs)}


def _only(update: Update, generators: Collection[str]) -> Update:
    return msgspec.structs.replace(
        update, rng={n: v for n, v in update.rng.items() if n in generators}
    )


def _compare_rank(
    rank: int,
    whole: Sequence[Update],
    attempts: Sequence[Sequence[Update]],
    result: Comparison,
) -> None:
    expected = repeated = left_out = 0
    for number, updates in enumerate(attempts, 1):
        if not updates or expected >= len(whole):
            continue
        place = place_of(updates[0], whole, expected)
        if place is None:
            said = _unknown_start(updates[0], whole[expected])
            result.differences.append(Difference(rank, number, expected + 1, *said))
            return
        repeated += max(0, expected - place)
        left_out += max(0, place - expected)
        for i, (mine, right) in enumerate(zip(updates, whole[place:], strict=False), place):
            result.compared += 1
            seen = _difference(mine, right, whole, i, is_first=i == place and number > 1)
            if seen is not None:
                result.differences.append(Difference(rank, number, i + 1, *seen))
                break
        expected = place + len(updates)
    result.repeated = max(result.repeated, repeated)
    result.left_out = max(result.left_out, left_out)


def place_of(first: Update, whole: Sequence[Update], expected: int) -> int | None:
    """The update of the whole run that begins with these weights; of several (a learning rate of 0
    changes nothing) the nearest to the one that is next."""
    same = [
        i
        for i, one in enumerate(whole)
        if one.optimizer == first.optimizer and one.weights == first.weights
    ]
    with_state = [i for i in same if whole[i].state == first.state]
    return min(with_state or same, key=lambda i: abs(i - expected), default=None)


def _unknown_start(mine: Update, right: Update) -> tuple[str, str]:
    if set(mine.weights) != set(right.weights):
        what = f"other parameters are trained: {_names(set(mine.weights) ^ set(right.weights))}"
        return what, "Does the script build another model or optimizer when it resumes?"
    names = [name for name in right.weights if mine.weights[name] != right.weights[name]]
    if len(names) == len(right.weights):
        what = "the attempt begins with weights that the undisturbed run never had"
        cause = (
            "Was nothing loaded, and is the initialisation not seeded? Or did the attempt before "
            "differ already behind its last step that was recorded?"
        )
    else:
        what = f"the attempt begins with other values of {_names(names)}; the rest was restored"
        cause = "Are they part of what the script saves?"
    return what, cause


def _difference(
    mine: Update, right: Update, whole: Sequence[Update], i: int, *, is_first: bool
) -> tuple[str, str] | None:
    """What differs in one update, in the order in which one thing leads to the next."""
    if mine.rows != right.rows:
        return _of_samples(mine, right, whole, i)
    following = whole[i + 1] if i + 1 < len(whole) else None
    seen = _of_rng(mine, right, following) or _of_tensors(mine, right)
    if seen is not None:
        return seen
    if mine.losses != right.losses:
        return (
            f"the loss is {_some(mine.losses)} and not {_some(right.losses)}, from the same "
            "samples, weights and random numbers",
            "Something that is neither a parameter nor a buffer differs: an attribute that counts "
            "steps, an augmentation in the training loop, a loss scale. Give it a state_dict and "
            "save it"
            if is_first
            else "Is an operator not deterministic (torch.use_deterministic_algorithms)?",
        )
    if mine.weights != right.weights or mine.after != right.after:
        of = mine.weights != right.weights
        ours, theirs = (mine.weights, right.weights) if of else (mine.after, right.after)
        names = _names([name for name in theirs if ours.get(name) != theirs[name]])
        return (
            f"the step leads to other values of {names}, from the same loss",
            "Gradients that were accumulated before the stop are lost, or are counted twice: save "
            "only behind a complete optimizer step. Otherwise, what the step depends on besides "
            "(gradient clipping with a history, an average of weights) is not saved",
        )
    return None


def _of_samples(mine: Update, right: Update, whole: Sequence[Update], i: int) -> tuple[str, str]:
    ours, theirs = _flat(mine.rows), _flat(right.rows)
    seen = f"samples {_samples(mine)} were trained on; the undisturbed run has {_samples(right)}"
    if len(mine.rows) != len(right.rows) and ours == theirs[: len(ours)]:
        forwards = plural(len(mine.rows), "forward")
        return (
            f"the step was made of {forwards} instead of {len(right.rows)}",
            "The stop came in the middle of gradient accumulation: save only behind a complete "
            "optimizer step",
        )
    if mine.samples == right.samples and all(n is not None for one in mine.samples for n in one):
        return (
            f"samples {_samples(mine)} are those of the undisturbed run, with other values",
            "The random numbers that change them (augmentation) are not restored: those of the "
            "DataLoader's workers come from its base seed, drawn when the iterator is made",
        )
    if (other := _same_of_another_epoch(ours, whole, i)) is not None:
        return (
            f"{seen}: those of step {other + 1}, which has this place in "
            f"{'an earlier' if other < i else 'a later'} epoch",
            "Either the generator of the sampler is seeded anew and not restored, or the sampler "
            "is told its epoch (set_epoch) after the iterator is made, which has workers fetch at "
            "once"
            if other < i
            else "The order of the epoch was drawn anew: the generator of the sampler is saved as "
            "it is after that draw, and has to be saved as it was when the epoch began",
        )
    for distance in range(1, min(len(whole), _MOST_AHEAD + 1)):
        if i >= distance and ours == _flat(whole[i - distance].rows):
            steps = plural(distance, "step")
            return (
                f"{seen}: those of {steps} earlier, seen twice",
                "The position in the data was saved before the last batches were trained on, or "
                "the loader begins again too early",
            )
        if i + distance < len(whole) and ours == _flat(whole[i + distance].rows):
            steps = plural(distance, "step")
            return (
                f"{seen}: those of {steps} later; what lies between is never seen",
                "Batches that were fetched ahead are part of the state: count what was trained on, "
                "not what the loader gave out",
            )
    known = {row for one in whole for row in _flat(one.rows)}
    if not set(ours) & known:
        return (
            f"{seen}, and none of these is in the recorded steps of the undisturbed run",
            "Either the order of the epoch was drawn anew, or samples are changed by random "
            "numbers (augmentation) that are not restored: those of the DataLoader's workers come "
            "from its base seed, which is drawn when the iterator is made",
        )
    return (
        f"{seen}: the order is another one",
        "The order of the epoch was drawn anew: the generator of the sampler, as it was when the "
        "epoch began, is not part of the state",
    )


def _same_of_another_epoch(ours: tuple[str, ...], whole: Sequence[Update], i: int) -> int | None:
    """The step that was trained on these, at the place in its epoch that step ``i`` has in its own:
    an epoch is what came from one iterator of a loader."""
    begins: dict[int, int] = {}
    for j, one in enumerate(whole):
        if one.iterator is not None:
            begins.setdefault(one.iterator, j)
    own = whole[i].iterator
    if own is None:
        return None
    for iterator, begin in begins.items():
        j = begin + i - begins[own]
        is_there = iterator != own and j < len(whole) and whole[j].iterator == iterator
        if is_there and ours == _flat(whole[j].rows):
            return j
    return None


def _of_rng(mine: Update, right: Update, following: Update | None) -> tuple[str, str] | None:
    names = [name for name in right.rng if mine.rng.get(name, right.rng[name]) != right.rng[name]]
    if not names:
        return None
    what = f"the random numbers of {_names(names)} are others when the step begins"
    if following is not None and all(mine.rng[n] == following.rng.get(n) for n in names):
        return (
            f"{what}: those of the step that follows",
            "The state was saved in the middle of a step, behind its forward and before its "
            "optimizer step: weights and random numbers are of two different steps",
        )
    return (
        what,
        "Dropout and augmentation differ from here on: the generator's state is not saved, or is "
        "restored before something else draws from it (making the DataLoader's iterator does)",
    )


def _of_tensors(mine: Update, right: Update) -> tuple[str, str] | None:
    names = [n for n in right.buffers if mine.buffers.get(n) != right.buffers[n]]
    if names:
        return (
            f"buffers differ: {_names(names)}",
            "Running statistics are part of the model's state_dict unless they are registered with "
            "persistent=False",
        )
    names = [n for n in {**right.state, **mine.state} if mine.state.get(n) != right.state.get(n)]
    if names:
        lost = " and is empty" if right.state and not mine.state else ""
        return (
            f"the state of optimizer {mine.optimizer + 1} differs{lost}: {_names(names)}",
            "Is this optimizer part of what the script saves, and loaded before the first step?",
        )
    if mine.lr != right.lr:
        return (
            f"the learning rate is {_some(mine.lr)} and not {_some(right.lr)}",
            "The scheduler is not part of what the script saves, or steps at another place",
        )
    return None


def _flat(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(row for one in rows for row in one)


def _samples(update: Update) -> str:
    known = [n for one in update.samples for n in one]
    if any(n is not None for n in known):
        return _some([("?" if n is None else str(n)) for n in known])
    return _some(_flat(update.rows))


def _some(values: Sequence[str]) -> str:
    shown = ", ".join(values[: 2 * _MOST_NAMES])
    return shown + (", ..." if len(values) > 2 * _MOST_NAMES else "") if values else "none"


def _names(names: Sequence[str] | set[str]) -> str:
    ordered = list(names) if isinstance(names, (list, tuple)) else sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def plural(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {what}{'' if number == 1 else 's'}"

"""Compare a stopped run with an undisturbed one: the first difference, and its likely cause.

Pure: lists of :class:`Update` in, findings out. Each attempt of the stopped run is first placed
within the undisturbed run by its initial weights. That shows which steps were repeated or left out,
whatever the script itself counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hydroslurm.prove.updates import Update

_MOST_NAMES = 3
_MOST_AHEAD = 8
"""How far a loader's position may be off, in steps; anything farther is another order."""


@dataclass(frozen=True)
class Difference:
    """The first deviation from the undisturbed run.

    Attributes:
        rank, attempt: where; attempts are counted from 1.
        step: the optimizer step of the undisturbed run, counted from 1.
        what: both runs' values.
        cause: the likely cause, and the fix.
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
    """Result for one or all ranks.

    Attributes:
        compared: compared updates of the stopped run.
        repeated: updates trained again, as an attempt began before the last one's end.
        left_out: updates that no attempt trained.
        differences: the first one of each attempt.
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
    """Compare the first ``steps`` updates, rank by rank; sort the differences by attempt.

    Args:
        generators: those whose state counts, see :func:`seeded_generators`.
    """
    result = Comparison()
    for rank, attempts in stopped.items():
        if rank in whole:
            want = [_only(update, generators) for update in whole[rank][:steps]]
            got = [[_only(update, generators) for update in attempt] for attempt in attempts]
            _compare_rank(rank, want, got, result)
    result.differences.sort(key=lambda d: (d.attempt, d.step, d.rank))
    return result


def seeded_generators(
    one: Mapping[int, Sequence[Update]], other: Mapping[int, Sequence[Update]]
) -> set[str]:
    """Return the generators that are equal in two undisturbed runs. An unseeded one, such as an
    unused NumPy's, differs in every process."""
    pairs = [
        (got.rng, want.rng)
        for rank in one.keys() & other.keys()
        for got, want in zip(one[rank], other[rank], strict=False)
    ]
    names = {name for got, _ in pairs for name in got}
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
            reasons = _unknown_start(updates[0], whole[expected])
            result.differences.append(Difference(rank, number, expected + 1, *reasons))
            return
        repeated += max(0, expected - place)
        left_out += max(0, place - expected)
        for i, (got, want) in enumerate(zip(updates, whole[place:], strict=False), place):
            result.compared += 1
            seen = _difference(got, want, whole, i, is_first=i == place and number > 1)
            if seen is not None:
                result.differences.append(Difference(rank, number, i + 1, *seen))
                break
        expected = place + len(updates)
    result.repeated = max(result.repeated, repeated)
    result.left_out = max(result.left_out, left_out)


def place_of(first: Update, whole: Sequence[Update], expected: int) -> int | None:
    """Return the update of the undisturbed run with these initial weights; of several (a learning
    rate of 0 changes nothing) the one nearest to the expected."""
    same = [
        i
        for i, update in enumerate(whole)
        if update.optimizer == first.optimizer and update.weights == first.weights
    ]
    with_state = [i for i in same if whole[i].state == first.state]
    return min(with_state or same, key=lambda i: abs(i - expected), default=None)


def _unknown_start(got: Update, want: Update) -> tuple[str, str]:
    if set(got.weights) != set(want.weights):
        what = f"other parameters are trained: {_names(set(got.weights) ^ set(want.weights))}"
        return what, "Does the script build another model or optimizer when it resumes?"
    names = [name for name in want.weights if got.weights[name] != want.weights[name]]
    if len(names) == len(want.weights):
        what = "the attempt begins with weights that the undisturbed run never had"
        cause = (
            "Was nothing loaded, and is the initialisation not seeded? Or did the attempt before "
            "differ already after its last step that was recorded?"
        )
    else:
        what = f"the attempt begins with other values of {_names(names)}; the rest was restored"
        cause = "Are they part of what the script saves?"
    return what, cause


def _difference(
    got: Update, want: Update, whole: Sequence[Update], i: int, *, is_first: bool
) -> tuple[str, str] | None:
    """Return the first difference within an update, in causal order."""
    if got.rows != want.rows:
        return _of_samples(got, want, whole, i)
    following = whole[i + 1] if i + 1 < len(whole) else None
    seen = _of_rng(got, want, following) or _of_tensors(got, want)
    if seen is not None:
        return seen
    if got.losses != want.losses:
        return (
            f"the loss is {_some(got.losses)} and not {_some(want.losses)}, from the same "
            "samples, weights and random numbers",
            "Something that is neither a parameter nor a buffer differs: an attribute that counts "
            "steps, an augmentation in the training loop, a loss scale. Give it a state_dict and "
            "save it"
            if is_first
            else "Is an operator not deterministic (torch.use_deterministic_algorithms)?",
        )
    if got.weights != want.weights or got.after != want.after:
        of = got.weights != want.weights
        ours, theirs = (got.weights, want.weights) if of else (got.after, want.after)
        names = _names([name for name in theirs if ours.get(name) != theirs[name]])
        return (
            f"the step leads to other values of {names}, from the same loss",
            "Gradients that were accumulated before the stop are lost, or are counted twice: save "
            "only after a complete optimizer step. Otherwise, what the step depends on besides "
            "(gradient clipping with a history, an average of weights) is not saved",
        )
    return None


def _of_samples(got: Update, want: Update, whole: Sequence[Update], i: int) -> tuple[str, str]:
    ours, theirs = _flat(got.rows), _flat(want.rows)
    seen = f"samples {_samples(got)} were trained on; the undisturbed run has {_samples(want)}"
    if len(got.rows) != len(want.rows) and ours == theirs[: len(ours)]:
        forwards = plural(len(got.rows), "forward")
        return (
            f"the step was made of {forwards} instead of {len(want.rows)}",
            "The stop came in the middle of gradient accumulation: save only after a complete "
            "optimizer step",
        )
    if got.samples == want.samples and all(n is not None for row in got.samples for n in row):
        return (
            f"samples {_samples(got)} are those of the undisturbed run, with other values",
            "The random numbers that change them (augmentation) are not restored: those of the "
            "DataLoader's workers come from its base seed, drawn when the iterator is made",
        )
    if (other := _same_of_another_epoch(ours, whole, i)) is not None:
        return (
            f"{seen}: those of step {other + 1}, which has this place in "
            f"{'an earlier' if other < i else 'a later'} epoch",
            "Either the generator of the sampler is seeded again and not restored, or the sampler "
            "is told its epoch (set_epoch) after the iterator is made, which has workers fetch at "
            "once"
            if other < i
            else "The order of the epoch was drawn again: the generator of the sampler is saved as "
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
    known = {row for update in whole for row in _flat(update.rows)}
    if not set(ours) & known:
        return (
            f"{seen}, and none of these is in the recorded steps of the undisturbed run",
            "Either the order of the epoch was drawn again, or samples are changed by random "
            "numbers (augmentation) that are not restored: those of the DataLoader's workers come "
            "from its base seed, which is drawn when the iterator is made",
        )
    return (
        f"{seen}: the order is another one",
        "The order of the epoch was drawn again: the generator of the sampler, as it was when the "
        "epoch began, is not part of the state",
    )


def _same_of_another_epoch(ours: tuple[str, ...], whole: Sequence[Update], i: int) -> int | None:
    """Return the step that was trained on these samples at the same place in another epoch; an
    epoch is one iterator of a loader."""
    begins: dict[int, int] = {}
    for j, update in enumerate(whole):
        if update.iterator is not None:
            begins.setdefault(update.iterator, j)
    own = whole[i].iterator
    if own is None:
        return None
    for iterator, begin in begins.items():
        j = begin + i - begins[own]
        is_there = iterator != own and j < len(whole) and whole[j].iterator == iterator
        if is_there and ours == _flat(whole[j].rows):
            return j
    return None


def _of_rng(got: Update, want: Update, following: Update | None) -> tuple[str, str] | None:
    names = [name for name in want.rng if got.rng.get(name, want.rng[name]) != want.rng[name]]
    if not names:
        return None
    what = f"the random numbers of {_names(names)} are others when the step begins"
    if following is not None and all(got.rng[n] == following.rng.get(n) for n in names):
        return (
            f"{what}: those of the step that follows",
            "The state was saved in the middle of a step, after its forward and before its "
            "optimizer step: weights and random numbers are of two different steps",
        )
    return (
        what,
        "Dropout and augmentation differ from here on: the generator's state is not saved, or is "
        "restored before something else draws from it (making the DataLoader's iterator does)",
    )


def _of_tensors(got: Update, want: Update) -> tuple[str, str] | None:
    names = [n for n in want.buffers if got.buffers.get(n) != want.buffers[n]]
    if names:
        return (
            f"buffers differ: {_names(names)}",
            "Running statistics are part of the model's state_dict unless they are registered with "
            "persistent=False",
        )
    names = [n for n in {**want.state, **got.state} if got.state.get(n) != want.state.get(n)]
    if names:
        lost = " and is empty" if want.state and not got.state else ""
        return (
            f"the state of optimizer {got.optimizer + 1} differs{lost}: {_names(names)}",
            "Is this optimizer part of what the script saves, and loaded before the first step?",
        )
    if got.lr != want.lr:
        return (
            f"the learning rate is {_some(got.lr)} and not {_some(want.lr)}",
            "The scheduler is not part of what the script saves, or steps at another place",
        )
    return None


def _flat(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(row for forward in rows for row in forward)


def _samples(update: Update) -> str:
    known = [n for forward in update.samples for n in forward]
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
    """Format as ``1 step``, ``2 steps``."""
    return f"{number} {what}{'' if number == 1 else 's'}"

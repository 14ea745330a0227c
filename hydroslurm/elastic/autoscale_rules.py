"""The rules by which an elastic run chooses its size, as a spec gives them and ``options.json`` has
them: targets, limits, a price, a schedule, and how fast the size may move. What they ask for is
:func:`hydroslurm.elastic.autoscale.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from hydroslurm.errors import UsageError

_Rules = TypeVar("_Rules")
UTILIZATIONS = ("cpu", "memory", "gpu")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
BEHAVIORS = {
    "scale_up": {"stabilization_window_s": 60.0, "cooldown_s": 180.0, "step": 4},
    "scale_down": {"stabilization_window_s": 300.0, "cooldown_s": 180.0, "step": 4},
}


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """How far and how often the size moves in one direction.

    Attributes:
        stabilization_window_s: the most cautious recommendation of so long counts.
        cooldown_s: so long after a change of the size nothing moves.
        step: at most so many members at once.
    """

    stabilization_window_s: float
    cooldown_s: float
    step: int

    def __post_init__(self) -> None:
        _check(self, stabilization_window_s=0, cooldown_s=0, step=1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Other bounds at certain hours.

    Attributes:
        days: on which a period begins.
        start, end: "HH:MM" in ``time_zone``; an end at or before the start is on the next day.
    """

    days: tuple[str, ...] = DAYS
    start: str = "00:00"
    end: str = "00:00"
    time_zone: str = "UTC"
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if unknown := [day for day in self.days if day not in DAYS]:
            raise UsageError(f"schedule: {unknown[0]!r} is no day; wanted {', '.join(DAYS)}")
        _minutes(self.start), _minutes(self.end)
        if self.min is None and self.max is None:
            raise UsageError("schedule: neither min nor max is given, so it would change nothing")
        try:
            ZoneInfo(self.time_zone)
        except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError
            raise UsageError(f"schedule: time_zone {self.time_zone!r}: {error}") from error
        except KeyError:
            raise UsageError(
                f"schedule: this machine knows no time zone {self.time_zone!r}; wanted a name "
                "such as Europe/Berlin, or UTC"
            ) from None

    def holds(self, epoch_s: float) -> bool:
        """Whether the moment lies in it."""
        local = datetime.fromtimestamp(epoch_s, ZoneInfo(self.time_zone))
        now, today = local.hour * 60 + local.minute, local.weekday()
        start, end = _minutes(self.start), _minutes(self.end)
        if start < end:
            return start <= now < end and DAYS[today] in self.days
        after_midnight = now < end and DAYS[today - 1] in self.days
        return after_midnight or (now >= start and DAYS[today] in self.days)


@dataclass(frozen=True, kw_only=True)
class AutoscalePolicy:
    """The rules; what is None does not count.

    Attributes:
        min, max: of ``elastic``.
        dry_run: decide, and record what would have been done; the size stays.
        partition: whose queue and idle nodes count; "": that of the coordinator's job.
        step_time_s: the target of a step's time.
        cpu, memory, gpu: targets of use, 0 to 1.
        efficiency: the least samples per second of the last member, as a part of what a member
            brings at the smallest size that was seen.
        leave_idle: idle nodes of the partition that are left to others; the run grows into the
            rest.
        queue_length: more jobs of others waiting in the partition than this, and the run gives
            nodes back.
        node_price_per_hour, max_price_per_hour: together a ceiling of the size.
        tolerance: a target missed by less than this part of it is met.
        history_s: older observations are forgotten, so that a size that once did not pay is tried
            again.

    Raises:
        UsageError: they cannot all hold.
    """

    min: int
    max: int
    dry_run: bool = False
    partition: str = ""
    step_time_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None
    efficiency: float | None = None
    leave_idle: int | None = None
    queue_length: int | None = None
    node_price_per_hour: float | None = None
    max_price_per_hour: float | None = None
    schedule: tuple[Schedule, ...] = ()
    tolerance: float = 0.1
    history_s: float = 3600.0
    scale_up: Behavior = field(default_factory=lambda: _made(Behavior, BEHAVIORS["scale_up"]))
    scale_down: Behavior = field(default_factory=lambda: _made(Behavior, BEHAVIORS["scale_down"]))

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise UsageError(
                f"autoscale: min={self.min}, max={self.max}: 1 <= min <= max is needed"
            )
        for name in (*UTILIZATIONS, "efficiency"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"autoscale: {name}={value}; wanted a part of 1, as 0.8 for 80 %")
        if self.step_time_s is not None and not 0 < self.step_time_s < math.inf:
            raise UsageError(f"autoscale: step_time_s={self.step_time_s}; wanted more than 0")
        _check(self, leave_idle=0, queue_length=0, tolerance=0, history_s=1)
        longest_s = max(
            self.scale_up.stabilization_window_s, self.scale_down.stabilization_window_s
        )
        if self.history_s < longest_s:
            raise UsageError(
                f"autoscale: history_s={self.history_s:g} is shorter than a stabilization window "
                f"of {longest_s:g} s; raise it"
            )
        self._check_price()
        for one in self.schedule:
            least = self.min if one.min is None else one.min
            most = self.max if one.max is None else one.max
            if not self.min <= least <= most <= self.max:
                raise UsageError(
                    f"autoscale: a schedule of {least} to {most} members, and elastic allows "
                    f"{self.min} to {self.max}"
                )

    def _check_price(self) -> None:
        price, most = self.node_price_per_hour, self.max_price_per_hour
        if (price is None) != (most is None):
            raise UsageError(
                "autoscale: node_price_per_hour and max_price_per_hour: wanted both, or neither"
            )
        if price is None or most is None:
            return
        if not price > 0 or not math.isfinite(most):
            raise UsageError(f"autoscale: node_price_per_hour={price}; wanted more than 0")
        if math.floor(most / price) < self.min:
            raise UsageError(
                f"autoscale: max_price_per_hour={most:g} pays for {math.floor(most / price)} nodes "
                f"at {price:g} each, and min is {self.min}; raise it, or lower min"
            )

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, least: int, most: int) -> AutoscalePolicy:
        """The rules as ``options.json`` has them; ``least``, ``most``: ``elastic.min``, ``max``.

        Raises:
            UsageError: what it does not know, or cannot use.
        """
        given = dict(document)
        try:
            schedule = tuple(
                _made(Schedule, {**one, "days": tuple(one.get("days", DAYS))})
                for one in given.pop("schedule", ())
            )
            for name, default in BEHAVIORS.items():
                if name in given:
                    given[name] = _made(Behavior, {**default, **given[name]})
            return _made(cls, {**given, "schedule": schedule, "min": least, "max": most})
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            raise UsageError(f"autoscale: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return {name: value for name, value in asdict(self).items() if name not in ("min", "max")}


def _minutes(text: str) -> int:
    hours, colon, minutes = str(text).partition(":")
    digits = colon and len(minutes) == 2 and hours.isdecimal() and minutes.isdecimal()
    if digits and int(hours) < 24 and int(minutes) < 60:
        return int(hours) * 60 + int(minutes)
    raise UsageError(f"schedule: {text!r} is no time of day; wanted HH:MM, 00:00 to 23:59")


def _check(of: object, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(of, name)
        if value is not None and not bound <= value < math.inf:
            raise UsageError(f"autoscale: {name}={value}; wanted {bound:g} or more")


def _made(kind: type[_Rules], given: Any) -> _Rules:
    if not isinstance(given, Mapping):
        raise UsageError(f"autoscale: {given!r} where the fields of {kind.__name__} are wanted")
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if odd := sorted(given.keys() - known):
        raise UsageError(
            f"autoscale: no rule {', '.join(odd)}; there are {', '.join(sorted(known))}"
        )
    return kind(**given)

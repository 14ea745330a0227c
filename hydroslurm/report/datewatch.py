"""The date of one process against CLOCK_MONOTONIC: how far apart they are, and when it was set."""

from __future__ import annotations

import statistics

_BUCKET_NS = 10 * 10**9
SET_NS = 10**9
"""A date that differs by so much was set; NTP moves it slowly below that, and CLOCK_MONOTONIC with
it."""
_APART_NS = 10**6
_MOST_SET = 100


class DateWatch:
    """The difference of date and CLOCK_MONOTONIC over one process, as it was at its beginning.

    An event is stamped when it happens and dated when it is recorded, so that the difference of its
    clocks is never too small: of every 10 s the least counts. A single one that is larger than both
    of its neighbours was recorded late, for example by a process that had been stopped meanwhile.

    Attributes:
        set_ns: by how much the date was set, each time.
    """

    def __init__(self) -> None:
        self.set_ns: list[int] = []
        self._set_ns = 0
        self._least: dict[int, int] = {}
        self._level_ns: int | None = None
        self._suspect: tuple[int, int] | None = None

    def see(self, mono_ns: int, epoch_ns: int) -> None:
        offset_ns = epoch_ns - mono_ns - self._set_ns
        if self._level_ns is None:
            self._level_ns = offset_ns
        by_ns = offset_ns - self._level_ns
        if by_ns >= SET_NS and not self._is_set_forward(mono_ns, offset_ns):
            return
        if abs(by_ns) >= SET_NS and len(self.set_ns) < _MOST_SET:
            self.set_ns.append(by_ns)
            self._set_ns += by_ns
            offset_ns = self._level_ns
        self._suspect, self._level_ns = None, min(offset_ns, self._level_ns)
        bucket = mono_ns // _BUCKET_NS
        if offset_ns < self._least.setdefault(bucket, offset_ns):
            self._least[bucket] = offset_ns

    def _is_set_forward(self, mono_ns: int, offset_ns: int) -> bool:
        """Whether two events are later than their stamps by the same: those that were recorded
        together after a stop are later by what lies between their stamps."""
        if self._suspect is not None:
            apart_ns = mono_ns - self._suspect[0]
            if apart_ns >= _APART_NS and 2 * abs(offset_ns - self._suspect[1]) <= apart_ns:
                return True
            if 0 <= apart_ns < _APART_NS:
                return False
        self._suspect = mono_ns, offset_ns
        return False

    @property
    def offset_ns(self) -> int:
        """Date minus CLOCK_MONOTONIC."""
        return statistics.median_low(self._believed())

    @property
    def error_ns(self) -> int | None:
        """The largest deviation from it; None for an attempt of a few seconds."""
        believed = self._believed()
        if len(believed) < 2:
            return None
        offset_ns = self.offset_ns
        return max(abs(one - offset_ns) for one in believed)

    def _believed(self) -> list[int]:
        least = [self._least[bucket] for bucket in sorted(self._least)]
        if len(least) < 2:
            return least
        padded = [least[1], *least, least[-2]]
        around = zip(padded, padded[1:], padded[2:], strict=False)
        return [min(one, max(before, after)) for before, one, after in around]

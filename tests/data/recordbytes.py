"""FFRecord files made with nothing but struct and zlib, for tests of reader and writer."""

from __future__ import annotations

import struct
import zlib


def ffrecord(
    samples: list[bytes],
    *,
    count: int | None = None,
    bounds: list[int] | None = None,
    old: bool = False,
) -> bytes:
    """Header and samples, byte for byte.

    Args:
        count, bounds: a number of samples and offsets that are not true; the CRC is.
        old: without the header's CRC, as the first writers left it.
    """
    sizes = [len(sample) for sample in samples]
    starts = [12 + 12 * len(samples) + sum(sizes[:n]) for n in range(len(samples))]
    covered = struct.pack("<q", len(samples) if count is None else count)
    for sample in samples:
        covered += struct.pack("<I", zlib.crc32(sample))
    for start in starts if bounds is None else bounds:
        covered += struct.pack("<q", start)
    header = struct.pack("<I", 0 if old else zlib.crc32(covered)) + covered
    return header + b"".join(samples)

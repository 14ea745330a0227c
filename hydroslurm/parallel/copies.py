"""Between a bucket of gradients and the node's memory: on the host by the processor, from a GPU by
copies on a stream of their own. The GPU's half has not been run on one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from hydroslurm.parallel.library import Library
from hydroslurm.parallel.segment import Segment


@dataclass
class HostCopies:
    """Of buckets in host memory. A rank's own slice is summed where it is, and is not copied."""

    library: Library
    segment: Segment

    def begin(self) -> Any:
        """Called by the thread of the backward: what has to be waited for."""
        return None

    def bring(
        self, bucket: torch.Tensor, _begun: Any, start: int, stop: int, *, area: int, skip: range
    ) -> None:
        """Copy elements ``start`` to ``stop`` into an area (an offset), but for those of ``skip``,
        which are counted from ``start``."""
        size = bucket.element_size()
        source, target = bucket.data_ptr() + start * size, self.segment.address + area
        ctypes.memmove(target, source, skip.start * size)
        rest = stop - start - skip.stop
        ctypes.memmove(target + skip.stop * size, source + skip.stop * size, rest * size)

    def own(self, bucket: torch.Tensor, start: int, _area: int) -> int:
        """The address from which this rank's own slice of a piece is read."""
        return bucket.data_ptr() + start * bucket.element_size()

    def take(
        self, bucket: torch.Tensor, start: int, stop: int, *, area: int, kind: torch.dtype
    ) -> None:
        """Copy the result, which is of type ``kind``, from an area into the bucket."""
        size = bucket.element_size()
        target, source = bucket.data_ptr() + start * size, self.segment.address + area
        if kind is bucket.dtype:
            ctypes.memmove(target, source, (stop - start) * size)
            return
        wide = torch.float64 if torch.float64 in (kind, bucket.dtype) else torch.float32
        self.library.sum(target, bucket.dtype, [source], kind, count=stop - start, accumulate=wide)


class CudaCopies:
    """Of buckets in a GPU's memory: on two streams of their own, one for each direction, from and
    to the node's memory, which is pinned for that."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.segment = segment
        self.device = device
        size = segment.layout.size_bytes
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(segment.address, size, 0)
        if int(error) not in (0, 712):  # 712: registered already, by another model's copies
            torch.cuda.check_error(int(error))
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def bring(
        self,
        bucket: torch.Tensor,
        begun: Any,
        start: int,
        stop: int,
        *,
        area: int,
        skip: range,  # noqa: ARG002 - all of it is copied: the sums are the host's
    ) -> None:
        with torch.cuda.stream(self._down):
            self._down.wait_event(begun)
            host = self.segment.tensor(area, stop - start, bucket.dtype)
            host.copy_(bucket[start:stop], non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._down)
        done.synchronize()

    def own(self, _bucket: torch.Tensor, _start: int, area: int) -> int:
        return self.segment.address + area

    def take(
        self, bucket: torch.Tensor, start: int, stop: int, *, area: int, kind: torch.dtype
    ) -> None:
        with torch.cuda.stream(self._up):
            host = self.segment.tensor(area, stop - start, kind)
            if kind is bucket.dtype:
                bucket[start:stop].copy_(host, non_blocking=True)
            else:  # the conversion is the GPU's
                bucket[start:stop].copy_(host.to(self.device, non_blocking=True))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._up)
        done.synchronize()

"""The kernel's memory policy of a thread, by the system call itself: no libnuma is needed."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Collection
from typing import Literal, get_args

Policy = Literal["preferred", "strict", "none"]
"""``preferred``: from these nodes as long as they have memory. ``strict``: from nowhere else, so
that a rank is killed when they are full. ``none``: as it was, which is where a thread runs."""
POLICIES: tuple[str, ...] = get_args(Policy)

# linux/mempolicy.h
_PREFERRED, _BIND, _PREFERRED_MANY = 1, 2, 5
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
_BITS = 64


def set_policy(nodes: Collection[int], policy: Policy, *, machine: str | None = None) -> str | None:
    """Have the calling thread, and those that it starts from now on, get memory from these nodes.

    Memory that it has already stays where it is.

    Args:
        machine: instead of this one's kind of processor.

    Returns:
        None when that is in force, else why not, in words: containers often forbid the call.
    """
    if policy == "none" or not nodes:
        return None
    number = _SET_MEMPOLICY.get(machine or platform.machine())
    if number is None:
        return f"the number of set_mempolicy is not known for {machine or platform.machine()}"
    if policy == "strict":
        return _reason(_call(number, _BIND, nodes))
    error = _call(number, _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY, nodes)
    if error == errno.EINVAL and len(nodes) > 1:  # before Linux 5.15
        error = _call(number, _PREFERRED, [min(nodes)])
    return _reason(error)


def _call(number: int, mode: int, nodes: Collection[int]) -> int:
    """0, or an errno."""
    words = max(nodes) // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // _BITS] |= 1 << node % _BITS
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    # the kernel looks at one bit less than it is told
    bits = ctypes.c_ulong(words * _BITS + 1)
    if syscall(ctypes.c_long(number), ctypes.c_long(mode), mask, bits) == 0:
        return 0
    return ctypes.get_errno()


def _reason(error: int) -> str | None:
    if error == 0:
        return None
    if error in (errno.EPERM, errno.ENOSYS):
        return (
            f"the kernel does not let this process set it ({os.strerror(error)}): containers need "
            "--cap-add SYS_NICE or a seccomp profile that has set_mempolicy"
        )
    return f"set_mempolicy: {os.strerror(error)}"

"""Can a pause here give the device memory back, and is there time for it? Pure."""

from __future__ import annotations

from hydroslurm.observe.doctor.facts import Facts, Finding, Severity
from hydroslurm.vacate.cuda_checkpoint import USUAL_BYTES_PER_S
from hydroslurm.vacate.policy import fitting_bytes, gb


def vacates_in_time(facts: Facts) -> Finding | None:
    """How much device memory fits between SIGTSTP and SIGSTOP: for jobs that have devices, or whose
    run has vacated."""
    job, measured = facts.job, facts.vacate
    if measured is None and (job is None or not job.gres):
        return None
    grace_s = facts.config.suspend_grace_time_s
    rate = measured.bytes_per_s if measured else USUAL_BYTES_PER_S
    source = measured.source if measured else "as usual for CUDA's checkpoint API; not measured"
    fits_bytes = fitting_bytes(rate, grace_s=grace_s)
    text = (
        f"A pause with --preempt=vacate, or of hydroslurm pause --vacate, moves the device memory "
        f"to the host. Slurm stops a suspended process {grace_s} s after its SIGTSTP: at "
        f"{gb(rate)}/s ({source}) {gb(fits_bytes)} per rank fit into that. A rank with more parks "
        "only, and says so."
    )
    if facts.no_vacate:
        text += f" This very node cannot vacate: {facts.no_vacate}."
    text += _host_memory(facts)
    if measured is None or measured.device_bytes <= fits_bytes:
        return Finding("vacate", Severity.NOTE, f"{gb(fits_bytes)} fit into a suspend", text)
    wanted_s = int(measured.device_bytes / rate) + 2
    fix = f"slurm.conf: PreemptParameters=suspend_grace_time={wanted_s} (Slurm 23.11 and newer)"
    title = f"{gb(measured.device_bytes)} do not fit into a suspend"
    return Finding("vacate", Severity.RISK, title, text, fix)


def _host_memory(facts: Facts) -> str:
    """What bounds the copy, where Slurm tells."""
    told = ""
    if facts.config.get("ConstrainRAMSpace", "").lower() == "no":
        told = (
            " Slurm does not bound this job's memory (cgroup.conf: ConstrainRAMSpace=no): the copy "
            "may take what the job that gets the GPU needs on the host."
        )
    measured, asked_bytes = facts.vacate, facts.memory_per_node_bytes
    if measured is not None and asked_bytes is not None and asked_bytes < measured.device_bytes:
        told += (
            f" The job asks for {gb(asked_bytes)} per node, and a rank's copy alone takes "
            f"{gb(measured.device_bytes)}: it refuses to vacate. Ask for more (--mem)."
        )
    return told

"""The judgement on settings made by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.observe.doctor.facts import Facts, Finding, SaveFacts, Saver, Severity, VacateFacts
from hydroslurm.observe.doctor.findings import as_json, diagnose, work_would_be_lost
from hydroslurm.observe.doctor.gather import last_save, why_untrusted
from hydroslurm.observe.doctor.script import ScriptOptions, read_script
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.policy import StopReason, site_policy
from hydroslurm.slurm.stops import LimitWarning
from hydroslurm.slurm.values import Job, JobState, Partition
from hydroslurm.training.cadence import Cadence

OK, NOTE, RISK, LOSS = Severity.OK, Severity.NOTE, Severity.RISK, Severity.LOSS
URGENT = Partition(name="urgent", priority_tier=10, nodes=("n1",))
GOOD = {
    "SLURM_VERSION": "22.05.8",
    "ClusterName": "c",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "KillWait": "30 sec",
    "AuthInfo": "cred_expire=5",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "ProctrackType": "proctrack/linuxproc",
}
SCRIPT = ScriptOptions(warning=LimitWarning("URG", 120), appends=True)
EXPEDITED = replace(SCRIPT, is_expedited=True)
RANKS = replace(SCRIPT, tasks=4)
TORCHRUN = replace(RANKS, launcher="torchrun")
AGENT = replace(RANKS, has_agent=True)
ONE_TORCHRUN = replace(SCRIPT, launcher="torchrun")


def _set(**variables: str) -> ScriptOptions:
    return replace(RANKS, settings=variables)


UNHANDLED = _set(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
EXPEDITES = "enable_expedited_requeue"
GRACE_7 = "suspend_grace_time=7"
TWO_NODES = {"memory_per_cpu_bytes": 2**29, "n_cpus": 4, "n_nodes": 2}
PMIX = {"SLURM_VERSION": "26.05.3", "MpiDefault": "pmix_v4"}
CGROUP = {"ProctrackType": "proctrack/cgroup"}
GANG = {"PreemptMode": "GANG,SUSPEND"}


def _facts(
    script: ScriptOptions | None = SCRIPT,
    *,
    mode: str = "REQUEUE",
    grace_s: int = 60,
    job: Job | None = None,
    save_s: float | None = 2.0,
    suspend_s: float | None = None,
    **settings: str,
) -> Facts:
    config = Config({**GOOD, **(GANG if mode == "SUSPEND" else {}), **settings})
    low = Partition(
        name="low", preempt_mode=mode, grace_time_s=grace_s, nodes=("n1",), max_time_s=3600
    )
    return Facts(
        config=config,
        policy=site_policy(config, low, partitions=(low, URGENT), job=job),
        partition=low,
        job=job,
        script=script,
        save=None if save_s is None else SaveFacts(save_s=save_s),
        suspend_s=suspend_s,
    )


def _saved_by(saver: Saver, **settings: Any) -> Facts:
    return replace(_facts(job=_job(), **settings), saver=saver)


def _without_run(**settings: Any) -> Facts:
    """With a grace it ends at its SIGTERM, FAILED; without one Slurm itself requeues it."""
    return _saved_by(Saver.NO_RUN, **settings)


def _copies(state_mib: int, **asked: int) -> Facts:
    """A job with so large a state, which has asked for so much memory."""
    save = SaveFacts(save_s=2.0, state_bytes=state_mib * 2**20)
    return replace(_facts(job=_job(**asked)), save=save)


def _vacates(
    moved_gb: int | None = 4, *, per_s: float = 2e9, asked_gb: int = 64, **config: str
) -> Facts:
    """A job with a device whose run has measured a vacate, or not."""
    job = _job(gres="gpu:1", memory_per_node_bytes=asked_gb * 10**9)
    measured = None
    if moved_gb is not None:
        moved = moved_gb * 10**9
        measured = VacateFacts(device_bytes=moved, bytes_per_s=per_s, source="measured")
    facts = _facts(job=job, **{"PreemptParameters": "suspend_grace_time=2", **config})
    return replace(facts, vacate=measured, no_vacate="no driver")


def _spaced(**measured: Any) -> Facts:
    """A job whose run has measured a save, and what it lost."""
    known = {"every_s": 600.0, "stall_s": 0.8, "save_s": 2.0, "losses": 3, "ran_s": 144e3}
    cadence = Cadence(**{**known, **measured})
    return replace(_facts(), save=SaveFacts(save_s=2.0, cadence=cadence))


def _warned(option: str, *, signals: str = "") -> Facts:
    warning = LimitWarning.parse(option)
    return _facts(mode="OFF", script=replace(SCRIPT, warning=warning, signals=signals), save_s=40.0)


def _job(**values: bool | str | int) -> Job:
    given = {"is_batch": True, "may_requeue": True, "time_limit_s": 600, **values}
    return Job(job_id=7, state=JobState.RUNNING, partition="low", **given)  # type: ignore[arg-type]


def _found(facts: Facts) -> dict[str, Finding]:
    findings = diagnose(facts)
    by_key = {finding.key: finding for finding in findings}
    assert len(by_key) == len(findings), "two findings of one key"
    assert all(finding.title and finding.explanation.rstrip(")")[-1] == "." for finding in findings)
    return by_key


def test_a_good_site() -> None:
    """Grace, warning, requeue, accounting, a short save: nothing but good news."""
    found = _found(_facts(job=_job()))
    assert {key: finding.severity for key, finding in found.items()} == {
        "preemption": OK, "save": OK,
    }  # fmt: skip
    assert "stopped and requeued" in found["preemption"].title
    assert "urgent" in found["preemption"].explanation
    exempt = _found(_facts(job=_job(), PreemptExemptTime="00:30:00", MaxBatchRequeue="5"))
    assert "not in the first 1800 s" in exempt["preemption"].explanation
    assert exempt.keys() == found.keys()


def test_a_checkpoint_is_promised_to_a_run_only() -> None:
    """What a preemption leaves is said of this job: of one without a Run never that it goes on from
    its last checkpoint."""
    for saver in (Saver.NO_RUN, Saver.NOBODY):
        finding = _found(_saved_by(saver))["preemption"]
        assert "checkpoint" not in finding.explanation
        assert "hydroslurm.Run" in finding.fix


@pytest.mark.parametrize(
    ("save_s", "settings", "severity"),
    [
        (2.0, {}, OK),
        (20.0, {}, RISK),
        # scancel and scontrol requeue leave KillWait only; that is a person's choice
        (40.0, {}, RISK),
        (95.0, {}, LOSS),
        (40.0, GANG, LOSS),
        (4.8, {**GANG, "KillWait": "1 sec"}, LOSS),
        (None, {}, NOTE),
    ],
)
def test_whether_a_save_fits(
    save_s: float | None, settings: dict[str, str], severity: Severity
) -> None:
    """Against what Slurm does by itself it must fit; twice its time is comfort."""
    facts = _facts(save_s=save_s, **settings)
    finding = _found(facts)["save"]
    assert finding.severity is severity
    assert work_would_be_lost(diagnose(facts)) is (severity is LOSS)
    if severity in (RISK, LOSS):
        assert "KillWait=" in finding.fix
        assert ("GraceTime=" in finding.fix) is (settings == {})


def test_a_warning_before_the_time_limit() -> None:
    """Where nothing preempts the limit counts, with KillWait behind it if it comes unannounced.
    Without a script to look into, a warning may be there or not: that is no loss."""
    found = _found(_facts(mode="OFF", script=ScriptOptions(), save_s=40.0))
    assert (found["save"].severity, found["warning"].severity) == (LOSS, RISK)
    assert found["preemption"].title == "never preempted"
    found = _found(_facts(script=None, save_s=40.0))
    assert (found["save"].severity, found["warning"].severity) == (RISK, NOTE)


@pytest.mark.parametrize(
    ("option", "signals", "saves"),
    [
        ("TERM@90", "", True),
        ("12@90", "", True),
        ("HUP@90", "", False),
        ("HUP@90", "warning=HUP", True),
        ("INT@90", "", False),
        ("USR1@90", "user_pause=none", False),
        ("B:USR1@90", "", False),
    ],
)
def test_only_a_warning_that_makes_the_ranks_save_gives_them_time(
    option: str, signals: str, saves: bool
) -> None:
    """Any other leaves what the time limit leaves, KillWait."""
    facts = _warned(option, signals=signals)
    left = dict(facts.stops())[StopReason.TIME_LIMIT]
    assert ("--signal" in left.why) is saves
    assert _found(facts)["save"].severity is (RISK if saves else LOSS)


@pytest.mark.parametrize(
    ("facts", "key", "severity", "words"),
    [
        (_facts(grace_s=0), "grace", NOTE, "GraceTime="),
        (_facts(**GANG), "gang", RISK, "without GANG"),
        (_facts(grace_s=0, **GANG), "gang", NOTE, "without GANG"),
        (_facts(mode="CANCEL"), "preemption", RISK, "PreemptMode=REQUEUE"),
        (_facts(JobRequeue="0"), "requeue", RISK, "--requeue"),
        (_facts(job=_job(is_batch=False)), "requeue", NOTE, "sbatch"),
        (_facts(script=ScriptOptions(appends=True)), "warning", RISK, "--signal=URG@"),
        (_facts(script=None), "warning", NOTE, "--signal=URG@"),
        (_warned("B:URG@120"), "warning", RISK, "without B:"),
        (_warned("USR1@90"), "warning", NOTE, "--signal=URG@90"),
        (_warned("SIGINT@90"), "warning", RISK, "warning=SIGINT,interrupt=none"),
        (_facts(EXPEDITED, SlurmctldParameters=f"a,{EXPEDITES}"), "expedite", NOTE, "release"),
        (_facts(EXPEDITED), "expedite", RISK, "sbatch: --requeue"),
        (_facts(EXPEDITED, SLURM_VERSION="26.05.5"), "expedite", RISK, EXPEDITES),
        (_facts(MaxBatchRequeue="2"), "max_requeue", NOTE, "MaxBatchRequeue=5"),
        (_facts(replace(SCRIPT, shrinks_memory="2@1")), "mem_update", RISK, "no --mem-update"),
        (_facts(script=replace(SCRIPT, appends=False)), "logs", NOTE, "--open-mode"),
        (_facts(AuthInfo=""), "wait", NOTE, "cred_expire=5"),
        (_facts(AuthInfo="", SLURM_VERSION="25.11.7"), "wait", NOTE, "requeue_delay"),
        (_facts(AccountingStorageType="none"), "accounting", NOTE, "slurmdbd"),
        (_facts(**CGROUP), "reach", NOTE, "with srun"),
        (_facts(ONE_TORCHRUN, **CGROUP), "reach", LOSS, "SignalChildrenProcesses"),
        (_facts(mode="SUSPEND"), "gres", NOTE, "shard"),
        (_facts(mode="SUSPEND", job=_job(gres="gpu:2")), "gres", RISK, "shard"),
        (_facts(mode="SUSPEND"), "paused", NOTE, "resume"),
        (_facts(PreemptParameters="send_user_signal"), "user_signal", OK, ""),
        (_facts(PreemptType="preempt/qos"), "unknown", NOTE, ""),
        (_facts(TORCHRUN), "launcher", RISK, "hydroslurm agent --"),
        (_facts(TORCHRUN, **CGROUP), "reach", LOSS, "hydroslurm agent --"),
        (_facts(replace(RANKS, outlives_ranks=True)), "bad_exit", RISK, "bad-exit=1"),
        (_facts(replace(RANKS, outlives_nodes=True)), "no_kill", RISK, "no --no-kill"),
        (_facts(replace(RANKS, fixed_port="1")), "port", RISK, "set_torch_environment"),
        (_facts(RANKS, **PMIX), "pmix", NOTE, "--mpi=none"),
        (_facts(replace(RANKS, mpi="pmix"), SLURM_VERSION="26.11.0"), "pmix", NOTE, "--mpi=none"),
        (_facts(RANKS, mode="SUSPEND"), "clocks", NOTE, "--suspend-s"),
        (_facts(RANKS, suspend_s=700), "clock_collectives", NOTE, "(seconds=760)"),
        (_facts(RANKS, suspend_s=500), "clock_nccl", RISK, "HEARTBEAT_TIMEOUT_SEC=560"),
        (_facts(TORCHRUN, suspend_s=20), "clock_rendezvous", RISK, "max_attempt=16"),
        (_facts(AGENT, suspend_s=20), "clock_rendezvous", OK, ""),
        (_facts(RANKS, suspend_s=61), "clock_store", NOTE, "read_timeout"),
        (_facts(UNHANDLED, suspend_s=700), "clock_collectives", NOTE, "hanging forever"),
        (_facts(mode="SUSPEND", PreemptParameters=GRACE_7), "preemption", OK, "paused in place"),
        (_facts(mode="SUSPEND", PreemptParameters=GRACE_7), "preemption", OK, "7 s to park"),
        (_saved_by(Saver.RUN), "preemption", OK, "from its last checkpoint."),
        (_saved_by(Saver.TWO_CALLS), "preemption", OK, "from what it saves before go_suspend."),
        (_saved_by(Saver.UNKNOWN), "preemption", OK, "last checkpoint if the script uses"),
        (_saved_by(Saver.NO_RUN), "preemption", RISK, "have not created a hydroslurm.Run yet"),
        (_saved_by(Saver.NOBODY), "preemption", RISK, "None of its ranks has reported"),
        (
            _spaced(),
            "cadence",
            OK,
            "losses of work in 40 h: 3 (a stop saves, and is none) -> a save every 277 s",
        ),
        (_spaced(losses=0), "cadence", OK, "-> a save every 600 s; every_s=600 bounds it."),
        # a state and a copy of it; each node of several holds a part
        (_copies(600, memory_per_node_bytes=2**30), "memory", NOTE, "takes 629 MB of that"),
        (_copies(600, memory_per_node_bytes=2**30), "memory", NOTE, "sbatch: --mem=1624M"),
        (_copies(1200, **TWO_NODES), "memory", NOTE, "takes 629 MB of that"),
        # what a run has measured, else the usual rate, times the grace
        (_vacates(None), "vacate", NOTE, "7.0 GB fit"),
        (_vacates(None), "vacate", NOTE, "no driver"),
        (_vacates(), "vacate", RISK, "4.0 GB"),
        (_vacates(), "vacate", RISK, "suspend_grace_time=4"),
        (_vacates(PreemptParameters="suspend_grace_time=9"), "vacate", NOTE, "17.5 GB"),
        (_vacates(per_s=9e9, ConstrainRAMSpace="no"), "vacate", NOTE, "ConstrainRAMSpace=no"),
        (_vacates(asked_gb=3, ConstrainRAMSpace="yes"), "vacate", RISK, "refuses to vacate"),
        (_vacates(asked_gb=3, ConstrainRAMSpace="yes"), "vacate", RISK, "3.0 GB per node"),
        (_without_run(), "preemption", RISK, "SIGTERM 60 s before the requeue"),
        (_without_run(), "preemption", RISK, "has FAILED, and is not requeued"),
        (_without_run(RequeueExit="143"), "preemption", RISK, "codes in RequeueExit=143"),
        (_without_run(grace_s=0), "preemption", RISK, "or from the beginning"),
        (_without_run(**GANG), "preemption", RISK, "or from the beginning"),
        (replace(_facts(RANKS), no_munge=""), "ranks_key", OK, ""),
        (replace(_facts(RANKS), no_munge="no socket"), "ranks_key", NOTE, "no socket"),
        (replace(_facts(RANKS), no_munge="no socket"), "ranks_key", NOTE, "srun --preempt"),
    ],
)
def test_what_is_found(facts: Facts, key: str, severity: Severity, words: str) -> None:
    """Each risk, with the line that would change it."""
    finding = _found(facts)[key]
    assert finding.severity is severity
    assert words in f"{finding.title}. {finding.explanation} {finding.fix}"


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        (_facts(grace_s=0, mode="SUSPEND"), "grace"),
        (_facts(mode="SUSPEND"), "gang"),
        (_facts(mode="SUSPEND", job=_job()), "gres"),
        (_facts(job=_job(is_batch=False), script=None), "warning"),
        (_facts(JobFileAppend="1", script=replace(SCRIPT, appends=False)), "logs"),
        (_facts(JobRequeue="0", AuthInfo=""), "wait"),
        (_facts(**CGROUP, SignalChildrenProcesses="yes"), "reach"),
        (_facts(replace(SCRIPT, has_agent=True), **CGROUP), "reach"),
        (_facts(TORCHRUN, **CGROUP), "launcher"),
        (_facts(replace(RANKS, outlives_ranks=True), KillOnBadExit="1"), "bad_exit"),
        (_facts(replace(RANKS, outlives_nodes=True, tasks=1)), "no_kill"),
        (_facts(replace(RANKS, fixed_port="29500"), JobRequeue="0"), "port"),
        (_facts(RANKS, SLURM_VERSION="25.11.7", MpiDefault="pmix"), "pmix"),
        (_facts(replace(RANKS, tasks=1), **PMIX), "pmix"),
        (_facts(replace(RANKS, mpi="other"), **PMIX), "pmix"),
        (_facts(RANKS, mode="SUSPEND", suspend_s=5), "clocks"),
        (_facts(replace(RANKS, tasks=1), mode="SUSPEND"), "clocks"),
        (_facts(RANKS, suspend_s=599), "clock_collectives"),
        (_facts(RANKS, suspend_s=479), "clock_nccl"),
        (_facts(TORCHRUN, suspend_s=14), "clock_rendezvous"),
        (_facts(RANKS, suspend_s=3600), "clock_rendezvous"),
        (_facts(RANKS, suspend_s=59), "clock_store"),
        (_facts(_set(TORCH_NCCL_ENABLE_MONITORING="0"), suspend_s=900), "clock_nccl"),
        (_facts(_set(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="1800"), suspend_s=900), "clock_nccl"),
        (_copies(600, memory_per_node_bytes=4 * 2**30), "memory"),
        (_copies(800, **TWO_NODES), "memory"),
        (_facts(job=_job()), "vacate"),
        (_spaced(stall_s=0.0), "cadence"),
        (_spaced(every_s=0.0), "cadence"),
        (_facts(RANKS), "ranks_key"),
        (replace(_facts(replace(RANKS, tasks=1)), no_munge="none"), "ranks_key"),
    ],
)
def test_what_is_not_said(facts: Facts, key: str) -> None:
    """Where a thing does no harm, nothing is said of it."""
    assert key not in _found(facts)


def test_what_does_not_bound_the_copy() -> None:
    """Where Slurm bounds the memory, and the job asked for enough, or Slurm does not tell."""
    for facts in (_vacates(ConstrainRAMSpace="yes"), _vacates()):
        said = _found(facts)["vacate"].explanation
        assert not any(word in said for word in ("ConstrainRAMSpace", "refuses"))


def _warning(*values: Any, **options: bool) -> dict[str, Any]:
    return {"warning": LimitWarning(*values, **options)}


URG_90 = _warning("URG", 90)
TORCHRUN_CONF = "torchrun --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=9 a.py"
KEEP_ALIVE = {"keep_alive_interval": "1", "keep_alive_max_attempt": "9"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --signal=URG@90", URG_90),
        ("#SBATCH --signal URG@90 --ntasks=2", {**URG_90, "tasks": 2}),
        ("#SBATCH --signal=USR1", _warning("USR1", 60)),
        ("#SBATCH --signal=B:10@5  # a remark", _warning("10", 5, batch_shell_only=True)),
        ("#SBATCH --signal=B:URG@90\nexec hydroslurm batch -- \\", URG_90),
        ("#SBATCH --open-mode=append", {"appends": True}),
        ("export HYDROSLURM_SIGNALS='warning=HUP'", {"signals": "warning=HUP"}),
        ("#SBATCH --requeue=expedite", {"is_expedited": True}),
        ("#SBATCH --mem-update=20@10", {"shrinks_memory": "20@10"}),
        ("##SBATCH --signal=URG@90", {}),
        ("#SBATCH --comment='no end", {}),
        ("echo\n#SBATCH --signal=URG@90", {}),
        ("srun -K torchrun --nproc-per-node=8 a.py", {"launcher": "torchrun"}),
        ("srun -K python -m torch.distributed.run a.py", {"launcher": "torch.distributed.run"}),
        ("#SBATCH --nodes=2 --ntasks-per-node=4", {"tasks": 8}),
        ("#SBATCH -N 2-4", {"tasks": 2}),
        ("#SBATCH --no-kill --nodes=2", {"tasks": 2, "outlives_nodes": True}),
        ("#SBATCH --no-kill=off", {}),
        ("  srun python b.py", {"outlives_ranks": True}),
        ("srun -K0 python a.py", {"outlives_ranks": True}),
        ("srun --kill-on-bad-exit=0 python a.py", {"outlives_ranks": True}),
        ("srun --unbuffered \\\n  --kill-on-bad-exit python a.py", {}),
        ("srun -K hydroslurm agent -- --nproc-per-node=8 a.py", {"has_agent": True}),
        ("export SLURM_KILL_BAD_EXIT=1\nsrun python a.py", {"SLURM_KILL_BAD_EXIT": "1"}),
        ("srun -K --mpi=pmix_v4 python a.py", {"mpi": "pmix"}),
        ("srun -K --mpi none python a.py", {"mpi": "other"}),
        ("export MASTER_PORT=29500", {"fixed_port": "29500"}),
        ("export MASTER_PORT=$((20000 + SLURM_JOB_ID % 1000))", {}),
        ("torchrun --rdzv-endpoint=$HOST:29400 a", {"launcher": "torchrun", "fixed_port": "29400"}),
        ("torchrun --rdzv-endpoint=$HOST:0 a.py", {"launcher": "torchrun"}),
        (TORCHRUN_CONF, {"launcher": "torchrun", **KEEP_ALIVE}),
        ("export TORCH_NCCL_ENABLE_MONITORING=0 # why", {"TORCH_NCCL_ENABLE_MONITORING": "0"}),
    ],
)
def test_batch_script(line: str, expected: dict[str, Any]) -> None:
    """Options up to the first command, how many tasks there are, what stands between srun and the
    ranks, and what is set for them."""
    settings = {name: expected[name] for name in expected if name.isupper() or name in KEEP_ALIVE}
    options = {name: expected[name] for name in expected if name not in settings}
    found = read_script(f"#!/bin/bash\n\n{line}\n")
    assert found == ScriptOptions(**options, **({"settings": settings} if settings else {}))


def test_last_save(tmp_path: Path) -> None:
    """The newest committed checkpoint that can be read tells how long a save takes."""
    assert last_save(tmp_path) is None

    def manifest(step: int, kind: str, save_s: float) -> str:
        written = Manifest(step, 0, kind, 0, save_s, state_bytes=9, files={})
        return written.to_json()

    manifests = {
        "step-000000010": manifest(10, "periodic", 1.5),
        "step-000000020": manifest(20, "stop", 2.5),
        "step-000000030": "{",
        "step-000000040": manifest(40, "stop", 2.5).replace("2.5", "3.5"),
        ".tmp-step-000000050": manifest(50, "stop", 9.0),
    }
    for folder, text in manifests.items():
        path = tmp_path / "checkpoints" / folder / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "checkpoints/step-000000060").mkdir()
    save = last_save(tmp_path)
    assert save == SaveFacts(
        save_s=2.5, state_bytes=9, source="the stop checkpoint of step 20", cadence=Cadence()
    )


def test_json_keeps_its_names() -> None:
    """Programs find the same names in every release of this version."""
    facts = _facts(save_s=95.0)
    answer = as_json(facts, diagnose(facts))
    assert answer["version"] == 1
    assert set(answer) == {
        "version", "cluster", "slurm", "job_id", "partition", "qos", "policy", "time_left",
        "saver", "save", "findings", "work_would_be_lost",
    }  # fmt: skip
    assert set(answer["policy"]) == {
        "action", "gang", "grace_s", "kill_wait_s", "preempt_exempt_s", "suspend_grace_s",
        "may_requeue", "requeue_wait_s", "send_user_signal",
    }  # fmt: skip
    assert {tuple(sorted(row)) for row in answer["time_left"]} == {("kind", "seconds", "why")}
    assert {tuple(sorted(row)) for row in answer["findings"]} == {
        ("explanation", "fix", "key", "severity", "title")
    }
    assert answer["save"] == {
        "save_s": 95.0, "state_bytes": None, "source": "--save-s", "cadence": None
    }  # fmt: skip
    assert answer["work_would_be_lost"] is True


def test_a_shared_run_folder_is_told(tmp_path: Path) -> None:
    """A run folder of the user's alone says nothing, one below a group's folder is a note, and one
    that a job would refuse is a risk that names the place."""
    lab = tmp_path / "lab"
    run = lab / "run"
    run.mkdir(parents=True, mode=0o700)
    is_root = os.getuid() == 0
    for mode, severity in ((0o755, None), (0o2770, NOTE if is_root else None), (0o777, RISK)):
        os.chown(lab, os.getuid(), 12345 if is_root and mode != 0o755 else os.getgid())
        lab.chmod(mode)
        why = {
            "untrusted": why_untrusted(run, shared=True),
            "shared": why_untrusted(run, shared=False),
        }
        found = _found(replace(_facts(), **why)).get("run_folder")
        assert (found and found.severity) is severity
        assert found is None or f"others can write {lab} " in found.explanation

"""The judgement on settings made by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.observe.doctor.facts import Facts, Finding, SaveFacts, Saver, Severity, VacateFacts
from hydroslurm.observe.doctor.findings import as_json, diagnose, work_would_be_lost
from hydroslurm.observe.doctor.gather import last_save, read_file, why_untrusted
from hydroslurm.observe.doctor.script import ScriptOptions, read_script
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.limit_warning import LimitWarning
from hydroslurm.slurm.policy import StopKind, site_policy
from hydroslurm.slurm.values import Job, JobState, Partition

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


def _warned(option: str, *, signals: str = "") -> Facts:
    warning = LimitWarning.parse(option)
    return _facts(mode="OFF", script=replace(SCRIPT, warning=warning, signals=signals), save_s=40.0)


def _job(**values: bool | str) -> Job:
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
    assert {key: finding.severity.value for key, finding in found.items()} == {
        "preemption": "ok",
        "save": "ok",
    }
    assert "stopped and requeued" in found["preemption"].title
    assert "urgent" in found["preemption"].explanation
    exempt = _found(_facts(job=_job(), PreemptExemptTime="00:30:00", MaxBatchRequeue="5"))
    assert "not in the first 1800 s" in exempt["preemption"].explanation
    assert exempt.keys() == found.keys()


@pytest.mark.parametrize(
    ("saver", "severity", "words"),
    [
        (Saver.RUN, Severity.OK, "from its last checkpoint."),
        (Saver.TWO_CALLS, Severity.OK, "from what it saves before go_suspend."),
        (Saver.UNKNOWN, Severity.OK, "from its last checkpoint if the script uses hydroslurm.Run."),
        (Saver.NO_RUN, Severity.RISK, "have not created a hydroslurm.Run yet"),
        (Saver.NOBODY, Severity.RISK, "None of its ranks has reported"),
    ],
)
def test_a_checkpoint_is_promised_to_a_run_only(
    saver: Saver, severity: Severity, words: str
) -> None:
    """What a preemption leaves is said of this job: of one without a Run never that it goes on from
    its last checkpoint."""
    finding = _found(replace(_facts(job=_job()), saver=saver))["preemption"]
    assert finding.severity is severity
    assert words in finding.explanation
    if severity is Severity.RISK:
        assert "checkpoint" not in finding.explanation
        assert "hydroslurm.Run" in finding.fix


@pytest.mark.parametrize(
    ("settings", "grace_s", "words"),
    [
        ({}, 60, "SIGTERM 60 s before the requeue"),
        ({"RequeueExit": "143"}, 60, "except with the exit codes in RequeueExit=143"),
        ({}, 0, "or from the beginning"),
        (GANG, 60, "or from the beginning"),
    ],
)
def test_what_becomes_of_a_script_without_run(
    settings: dict[str, str], grace_s: int, words: str
) -> None:
    """With a grace it ends at its SIGTERM, FAILED; without one Slurm itself requeues it."""
    facts = replace(_facts(job=_job(), grace_s=grace_s, **settings), saver=Saver.NO_RUN)
    explanation = _found(facts)["preemption"].explanation
    assert words in explanation
    requeued_by_slurm = "from the beginning" in words
    assert ("has FAILED, and is not requeued" in explanation) is not requeued_by_slurm


@pytest.mark.parametrize(
    ("save_s", "settings", "severity"),
    [
        (2.0, {}, Severity.OK),
        (20.0, {}, Severity.RISK),
        # scancel and scontrol requeue leave KillWait only; that is a person's choice
        (40.0, {}, Severity.RISK),
        (95.0, {}, Severity.LOSS),
        (40.0, GANG, Severity.LOSS),
        (4.8, {**GANG, "KillWait": "1 sec"}, Severity.LOSS),
        (None, {}, Severity.NOTE),
    ],
)
def test_whether_a_save_fits(
    save_s: float | None, settings: dict[str, str], severity: Severity
) -> None:
    """Against what Slurm does by itself it must fit; twice its time is comfort."""
    facts = _facts(save_s=save_s, **settings)
    finding = _found(facts)["save"]
    assert finding.severity is severity
    assert work_would_be_lost(diagnose(facts)) is (severity is Severity.LOSS)
    if severity in (Severity.RISK, Severity.LOSS):
        assert "KillWait=" in finding.fix
        assert ("GraceTime=" in finding.fix) is (settings == {})


def test_a_time_limit_without_warning_is_what_counts() -> None:
    """Nothing preempts here, but the time limit comes unannounced, with KillWait behind it."""
    facts = _facts(mode="OFF", script=ScriptOptions(), save_s=40.0)
    found = _found(facts)
    assert found["save"].severity is Severity.LOSS
    assert found["warning"].severity is Severity.RISK
    assert found["preemption"].title == "never preempted"


@pytest.mark.parametrize(
    ("option", "signals", "saves"),
    [
        ("TERM@90", "", True),
        ("SIGUSR1@90", "", True),
        ("12@90", "", True),
        ("HUP@90", "", False),
        ("HUP@90", "warning=HUP", True),
        ("INT@90", "", False),
        ("CONT@90", "", False),
        ("USR1@90", "user_pause=none", False),
        ("B:USR1@90", "", False),
    ],
)
def test_only_a_warning_that_makes_the_ranks_save_gives_them_time(
    option: str, signals: str, saves: bool
) -> None:
    """Any other leaves what the time limit leaves, KillWait."""
    facts = _warned(option, signals=signals)
    kinds = {kind for kind, _ in facts.stops()}
    assert (StopKind.TIME_LIMIT_WARNED in kinds) is saves
    assert _found(facts)["save"].severity is (Severity.RISK if saves else Severity.LOSS)


def test_what_could_not_be_looked_at_is_not_called_a_loss() -> None:
    """Without a script to look into, a warning before the time limit may be there or not."""
    found = _found(_facts(script=None, save_s=40.0))
    assert found["save"].severity is Severity.RISK
    assert found["warning"].severity is Severity.NOTE


@pytest.mark.parametrize(
    ("facts", "key", "severity", "fix"),
    [
        (_facts(grace_s=0), "grace", Severity.NOTE, "GraceTime="),
        (_facts(**GANG), "gang", Severity.RISK, "without GANG"),
        (_facts(grace_s=0, **GANG), "gang", Severity.NOTE, "without GANG"),
        (_facts(mode="CANCEL"), "preemption", Severity.RISK, "PreemptMode=REQUEUE"),
        (_facts(JobRequeue="0"), "requeue", Severity.RISK, "--requeue"),
        (_facts(job=_job(may_requeue=False)), "requeue", Severity.RISK, "--requeue"),
        (_facts(job=_job(is_batch=False)), "requeue", Severity.NOTE, "sbatch"),
        (_facts(script=ScriptOptions(appends=True)), "warning", Severity.RISK, "--signal=URG@"),
        (_facts(script=None), "warning", Severity.NOTE, "--signal=URG@"),
        (_warned("B:URG@120"), "warning", Severity.RISK, "without B:"),
        (_warned("USR1@90"), "warning", Severity.NOTE, "--signal=URG@90"),
        (_warned("HUP@90"), "warning", Severity.RISK, "warning=HUP"),
        (_warned("SIGINT@90"), "warning", Severity.RISK, "warning=SIGINT,interrupt=none"),
        (
            _facts(script=EXPEDITED, SlurmctldParameters="a,enable_expedited_requeue"),
            "expedite",
            Severity.NOTE,
            "scontrol release",
        ),
        (_facts(script=EXPEDITED), "expedite", Severity.RISK, "sbatch: --requeue"),
        (
            _facts(script=EXPEDITED, SLURM_VERSION="26.05.5"),
            "expedite",
            Severity.RISK,
            "enable_expedited_requeue",
        ),
        (_facts(MaxBatchRequeue="2"), "max_requeue", Severity.NOTE, "MaxBatchRequeue=5"),
        (
            _facts(script=replace(SCRIPT, shrinks_memory="20@10")),
            "mem_update",
            Severity.RISK,
            "no --mem-update",
        ),
        (_facts(script=replace(SCRIPT, appends=False)), "logs", Severity.NOTE, "--open-mode"),
        (_facts(AuthInfo=""), "wait", Severity.NOTE, "cred_expire=5"),
        (_facts(AuthInfo="", SLURM_VERSION="25.11.7"), "wait", Severity.NOTE, "requeue_delay"),
        (
            _facts(AccountingStorageType="accounting_storage/none"),
            "accounting",
            Severity.NOTE,
            "slurmdbd",
        ),
        (_facts(**CGROUP), "reach", Severity.NOTE, "with srun"),
        (
            _facts(replace(SCRIPT, launcher="torchrun"), **CGROUP),
            "reach",
            Severity.LOSS,
            "SignalChildrenProcesses",
        ),
        (_facts(mode="SUSPEND"), "gres", Severity.NOTE, "shard"),
        (_facts(mode="SUSPEND", job=_job(gres="gpu:2")), "gres", Severity.RISK, "shard"),
        (_facts(mode="SUSPEND"), "paused", Severity.NOTE, "resume"),
        (_facts(PreemptParameters="send_user_signal"), "user_signal", Severity.OK, ""),
        (_facts(PreemptType="preempt/qos"), "unknown", Severity.NOTE, ""),
        (_facts(TORCHRUN), "launcher", Severity.RISK, "hydroslurm agent --"),
        (_facts(TORCHRUN, **CGROUP), "reach", Severity.LOSS, "hydroslurm agent --"),
        (_facts(replace(RANKS, outlives_ranks=True)), "bad_exit", Severity.RISK, "bad-exit=1"),
        (_facts(replace(RANKS, outlives_nodes=True)), "no_kill", Severity.RISK, "no --no-kill"),
        (_facts(replace(RANKS, fixed_port="1")), "port", Severity.RISK, "set_torch_environment"),
        (_facts(RANKS, **PMIX), "pmix", Severity.NOTE, "--mpi=none"),
        (
            _facts(replace(RANKS, mpi="pmix"), SLURM_VERSION="26.11.0", MpiDefault="none"),
            "pmix",
            Severity.NOTE,
            "--mpi=none",
        ),
        (_facts(RANKS, mode="SUSPEND"), "clocks", Severity.NOTE, "--suspend-s"),
        (_facts(RANKS, suspend_s=700), "clock_collectives", Severity.NOTE, "(seconds=760)"),
        (_facts(RANKS, suspend_s=500), "clock_nccl", Severity.RISK, "HEARTBEAT_TIMEOUT_SEC=560"),
        (_facts(TORCHRUN, suspend_s=20), "clock_rendezvous", Severity.RISK, "max_attempt=16"),
        (_facts(AGENT, suspend_s=20), "clock_rendezvous", Severity.OK, ""),
        (_facts(RANKS, suspend_s=61), "clock_store", Severity.NOTE, "read_timeout"),
    ],
)
def test_what_is_risky(facts: Facts, key: str, severity: Severity, fix: str) -> None:
    """Each risk is found, with the line that would change it."""
    finding = _found(facts)[key]
    assert finding.severity is severity
    assert fix in finding.fix


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
        (_facts(AGENT), "launcher"),
        (_facts(replace(SCRIPT, outlives_ranks=True, tasks=1)), "bad_exit"),
        (_facts(replace(RANKS, outlives_ranks=True), KillOnBadExit="1"), "bad_exit"),
        (_facts(RANKS), "no_kill"),
        (_facts(replace(RANKS, outlives_nodes=True, tasks=1)), "no_kill"),
        (_facts(replace(RANKS, fixed_port="29500"), JobRequeue="0"), "port"),
        (_facts(RANKS, SLURM_VERSION="25.11.7", MpiDefault="pmix"), "pmix"),
        (_facts(RANKS, SLURM_VERSION="26.05.3", MpiDefault="none"), "pmix"),
        (_facts(replace(RANKS, tasks=1), **PMIX), "pmix"),
        (_facts(replace(RANKS, mpi="other"), **PMIX), "pmix"),
        (_facts(RANKS), "clocks"),
        (_facts(RANKS, mode="SUSPEND", suspend_s=5), "clocks"),
        (_facts(replace(RANKS, tasks=1), mode="SUSPEND"), "clocks"),
        (_facts(RANKS, suspend_s=599), "clock_collectives"),
        (_facts(RANKS, suspend_s=479), "clock_nccl"),
        (_facts(TORCHRUN, suspend_s=14), "clock_rendezvous"),
        (_facts(RANKS, suspend_s=3600), "clock_rendezvous"),
        (_facts(RANKS, suspend_s=59), "clock_store"),
        *(
            (_facts(replace(RANKS, settings=settings), suspend_s=900), "clock_nccl")
            for settings in (
                {"TORCH_NCCL_ENABLE_MONITORING": "0"},
                {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800"},
            )
        ),
    ],
)
def test_what_is_not_said(facts: Facts, key: str) -> None:
    """Where a thing does no harm, nothing is said of it."""
    assert key not in _found(facts)


@pytest.mark.parametrize(
    ("moved", "grace_s", "severity", "said"),
    [
        (None, 2, Severity.NOTE, "7.0 GB fit"),
        ((10**9, 2e9), 2, Severity.NOTE, "3.5 GB"),
        ((4 * 10**9, 2e9), 2, Severity.RISK, "4.0 GB"),
        ((4 * 10**9, 2e9), 9, Severity.NOTE, "17.5 GB"),
    ],
)
def test_how_much_fits_into_a_suspend(
    moved: tuple[int, float] | None, grace_s: int, severity: Severity, said: str
) -> None:
    """What a run has measured, else the usual rate, times the grace; too little names the setting
    that would be enough. A job without devices hears nothing of it."""
    parameters = f"suspend_grace_time={grace_s}"
    facts = _facts(job=_job(gres="gpu:1"), PreemptParameters=parameters)
    measured = None
    if moved is not None:
        measured = VacateFacts(device_bytes=moved[0], bytes_per_s=moved[1], source="measured")
    finding = _found(replace(facts, vacate=measured, no_vacate="no driver"))["vacate"]
    assert finding.severity is severity
    assert said in finding.title
    assert "no driver" in finding.explanation
    assert ("suspend_grace_time=4" in finding.fix) == (severity is Severity.RISK)
    assert "vacate" not in _found(_facts(job=_job()))


def test_what_bounds_the_copy() -> None:
    """Slurm does not bound the memory, or the job asked for less than one rank has vacated: both
    are said, and neither where it is not so, or Slurm does not tell."""
    measured = VacateFacts(device_bytes=4 * 10**9, bytes_per_s=9e9, source="measured")

    def said(asked_bytes: int, **config: str) -> str:
        facts = _facts(job=_job(gres="gpu:1", memory_per_node_bytes=asked_bytes), **config)
        return _found(replace(facts, vacate=measured))["vacate"].explanation

    ample, short = 64 * 10**9, 3 * 10**9
    assert "ConstrainRAMSpace=no" in said(ample, ConstrainRAMSpace="no")
    assert "refuses to vacate" in said(short, ConstrainRAMSpace="yes")
    assert "3.0 GB per node" in said(short)
    for quiet in (said(ample), said(ample, ConstrainRAMSpace="yes")):
        assert "ConstrainRAMSpace" not in quiet
        assert "refuses" not in quiet


def test_paused_in_place() -> None:
    """Under PreemptMode=SUSPEND a preemption stops nothing, and the seconds to park are told."""
    found = _found(_facts(mode="SUSPEND", PreemptParameters="suspend_grace_time=7"))
    assert found["preemption"].title == "paused in place"
    assert "7 s to park" in found["preemption"].explanation


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --signal=URG@90", ScriptOptions(warning=LimitWarning("URG", 90))),
        (
            "#SBATCH --signal URG@90 --ntasks=2",
            ScriptOptions(warning=LimitWarning("URG", 90), tasks=2),
        ),
        ("#SBATCH --signal=USR1", ScriptOptions(warning=LimitWarning("USR1", 60))),
        (
            "#SBATCH --signal=B:10@5  # a remark",
            ScriptOptions(warning=LimitWarning("10", 5, batch_shell_only=True)),
        ),
        (
            "#SBATCH --signal=B:URG@90\nexec hydroslurm batch -- \\",
            ScriptOptions(warning=LimitWarning("URG", 90)),
        ),
        ("#SBATCH --open-mode=append", ScriptOptions(appends=True)),
        ("export HYDROSLURM_SIGNALS='warning=HUP'", ScriptOptions(signals="warning=HUP")),
        ("#SBATCH --requeue=expedite", ScriptOptions(is_expedited=True)),
        ("#SBATCH --requeue", ScriptOptions()),
        ("#SBATCH --mem-update=20@10", ScriptOptions(shrinks_memory="20@10")),
        ("##SBATCH --signal=URG@90", ScriptOptions()),
        ("#SBATCH --comment='no end", ScriptOptions()),
        ("echo\n#SBATCH --signal=URG@90", ScriptOptions()),
        ("srun -K torchrun --nproc-per-node=8 a.py", ScriptOptions(launcher="torchrun")),
        ("# srun torchrun a.py", ScriptOptions()),
        (
            "srun -K python -m torch.distributed.run a.py",
            ScriptOptions(launcher="torch.distributed.run"),
        ),
        ("#SBATCH --nodes=2 --ntasks-per-node=4", ScriptOptions(tasks=8)),
        ("#SBATCH -N2\n#SBATCH -n 6", ScriptOptions(tasks=6)),
        ("#SBATCH -N 2-4", ScriptOptions(tasks=2)),
        ("#SBATCH --no-kill --nodes=2", ScriptOptions(tasks=2, outlives_nodes=True)),
        ("#SBATCH -k\n#SBATCH -N2", ScriptOptions(tasks=2, outlives_nodes=True)),
        ("#SBATCH --no-kill=off", ScriptOptions()),
        ("  srun python b.py", ScriptOptions(outlives_ranks=True)),
        ("srun -K1 python a.py", ScriptOptions()),
        ("srun -K0 python a.py", ScriptOptions(outlives_ranks=True)),
        ("srun --kill-on-bad-exit=0 python a.py", ScriptOptions(outlives_ranks=True)),
        ("srun --unbuffered \\\n  --kill-on-bad-exit python a.py", ScriptOptions()),
        ("srun -K hydroslurm agent -- --nproc-per-node=8 a.py", ScriptOptions(has_agent=True)),
        (
            "export SLURM_KILL_BAD_EXIT=1\nsrun python a.py",
            ScriptOptions(settings={"SLURM_KILL_BAD_EXIT": "1"}),
        ),
        ("srun -K --mpi=pmix_v4 python a.py", ScriptOptions(mpi="pmix")),
        ("srun -K --mpi none python a.py", ScriptOptions(mpi="other")),
        ("export MASTER_PORT=29500", ScriptOptions(fixed_port="29500")),
        ("export MASTER_PORT=$((20000 + SLURM_JOB_ID % 1000))", ScriptOptions()),
        (
            "srun -K torchrun --rdzv-endpoint=$HOST:29400 a.py",
            ScriptOptions(launcher="torchrun", fixed_port="29400"),
        ),
        ("srun -K torchrun --rdzv-endpoint=$HOST:0 a.py", ScriptOptions(launcher="torchrun")),
        (
            "torchrun --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=9 a.py",
            ScriptOptions(
                launcher="torchrun",
                settings={"keep_alive_interval": "1", "keep_alive_max_attempt": "9"},
            ),
        ),
        (
            "export TORCH_NCCL_ENABLE_MONITORING=0 # why",
            ScriptOptions(settings={"TORCH_NCCL_ENABLE_MONITORING": "0"}),
        ),
    ],
)
def test_batch_script(line: str, expected: ScriptOptions) -> None:
    """Options up to the first command, how many tasks there are, what stands between srun and the
    ranks, and what is set for them."""
    assert read_script(f"#!/bin/bash\n\n{line}\n") == expected


def test_last_save(tmp_path: Path) -> None:
    """The newest committed checkpoint that can be read tells how long a save takes."""
    assert last_save(tmp_path) is None
    manifests = {
        "step-000000010": '{"step": 10, "kind": "periodic", "save_s": 1.5, "state_bytes": 8}',
        "step-000000020": '{"step": 20, "kind": "stop", "save_s": 2.5, "state_bytes": 9}',
        "step-000000030": "{",
        "step-000000040": '{"step": 40, "kind": "stop", "save_s": null, "state_bytes": 9}',
        ".tmp-step-000000050": '{"step": 50, "kind": "stop", "save_s": 9, "state_bytes": 9}',
    }
    for folder, text in manifests.items():
        path = tmp_path / "checkpoints" / folder / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "checkpoints/step-000000060").mkdir()
    save = last_save(tmp_path)
    assert save == SaveFacts(save_s=2.5, state_bytes=9, source="the stop checkpoint of step 20")


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
    assert answer["save"] == {"save_s": 95.0, "state_bytes": None, "source": "--save-s"}
    assert answer["work_would_be_lost"] is True


def test_a_shared_run_folder_is_told(tmp_path: Path) -> None:
    """A run folder of the user's alone says nothing, one below a group's folder is a note, and one
    that a job would refuse is a risk that names the place."""
    lab = tmp_path / "lab"
    run = lab / "run"
    run.mkdir(parents=True, mode=0o700)
    seen = []
    for mode in (0o755, 0o2770, 0o777):
        lab.chmod(mode)
        if mode & 0o020:
            os.chown(lab, os.getuid(), 12345 if os.getuid() == 0 else os.getgid())
            lab.chmod(mode)
        why = {
            name: why_untrusted(run, shared=name == "untrusted") for name in ("untrusted", "shared")
        }
        found = _found(replace(_facts(), **why)).get("run_folder")
        seen.append(found and found.severity)
        assert found is None or f"others can write {lab} " in found.explanation
    assert seen[0] is None
    assert seen[2] is Severity.RISK
    if os.getuid() == 0:
        assert seen[1] is Severity.NOTE


@pytest.mark.parametrize(
    ("asked", "state_mib", "told"),
    [
        ({"memory_per_node_bytes": 2**30}, 600, True),
        ({"memory_per_node_bytes": 4 * 2**30}, 600, False),
        ({"memory_per_cpu_bytes": 2**29, "n_cpus": 4, "n_nodes": 2}, 800, False),
        ({"memory_per_cpu_bytes": 2**29, "n_cpus": 4, "n_nodes": 2}, 1200, True),
        ({}, 600, False),
    ],
)
def test_little_memory_for_copies(asked: dict[str, int], state_mib: int, told: bool) -> None:
    """A job whose state and a copy of it exceed what it has asked for is told so, with a --mem that
    is larger by a copy; each node of several holds a part."""
    save = SaveFacts(save_s=2.0, state_bytes=state_mib * 2**20)
    facts = replace(_facts(job=replace(_job(), **asked)), save=save)  # type: ignore[arg-type]
    found = _found(facts)
    assert ("memory" in found) == told
    if told:
        assert "its state takes 629 MB of that" in found["memory"].explanation
        assert found["memory"].fix.startswith("sbatch: --mem=1624M")


def test_errors_that_are_not_handled() -> None:
    """With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 a collective that ran out hangs instead."""
    script = replace(RANKS, settings={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    words = _found(_facts(script, suspend_s=700))["clock_collectives"].explanation
    assert "hanging forever" in words


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    """A wrong --script is a usage error that names it."""
    with pytest.raises(UsageError, match=r"nothing\.sbatch"):
        read_file(tmp_path / "nothing.sbatch")


def test_how_ranks_get_their_key() -> None:
    """With MUNGE it is well; without it the reason is told, and what helps; one rank needs none."""
    facts = _facts(RANKS)
    assert "ranks_key" not in _found(facts)
    assert _found(replace(facts, no_munge=""))["ranks_key"].severity is Severity.OK
    found = _found(replace(facts, no_munge="Failed to access socket"))["ranks_key"]
    assert found.severity is Severity.NOTE
    assert "Failed to access socket" in found.explanation
    assert "srun --preempt" in found.fix
    alone = replace(_facts(replace(RANKS, tasks=1)), no_munge="none")
    assert "ranks_key" not in _found(alone)

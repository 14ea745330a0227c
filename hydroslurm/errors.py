"""Every exception that hydroslurm raises on purpose.

    HydroslurmError (RuntimeError)
    |-- GateError                  the gate could not be built, loaded or trusted
    |   |-- NoCompiler             no C++ compiler, and no prebuilt gate
    |   `-- GateSelfTestFailed     it loads, but does not hold operators of this torch
    |-- InstallError               pausing could not be set up in this process
    |   |-- AlreadyInstalled       a second install() in one process
    |   |-- NotInstalled           pause(), resume() ... before install()
    |   `-- TorchMissing           torch cannot be imported
    |-- AckTimeout                 a signal was sent, the rank did not answer in time
    |-- VacateError                device memory could not be moved, or not in time
    |-- TargetError                the process to signal is gone, or would die of the signal
    |-- SlurmError                 Slurm refused, or could not be asked
    |   |-- SlurmMissing           no Slurm programs or no slurm.conf on this machine
    |   |-- ControllerUnreachable  slurmctld did not answer, retries included
    |   |-- SlurmTimeout           a Slurm program ran longer than its time-out
    |   |-- NoSuchJob              unknown to slurmctld (and to sacct, where that was asked)
    |   |-- NotPermitted           this user may not do that
    |   |-- WrongJobState          suspend of a pending job, requeue of an srun allocation ...
    |   `-- UnreadableOutput       Slurm printed what no known release prints
    |-- SpankError                 the plugin for --preempt cannot be built or installed
    |-- SpecError                  a job spec that is none: what, where, what to write instead
    |-- LaunchError                a job could not be submitted
    |   `-- MaybeSubmitted         and Slurm has it, or may have it
    |-- RunFolderError             a run folder that is not one, or that cannot be written
    |-- UntrustedFile              somebody else owns it, or could write it
    |-- CheckpointError            a checkpoint could not be written, found, trusted or applied
    |   |-- CheckpointMissing      there is none that is committed
    |   |-- CheckpointCorrupt      a file of it is gone, cut off or changed
    |   |-- CheckpointTooNew       of a newer hydroslurm, in a form that this one cannot read
    |   |-- CheckpointTooOld       of an older hydroslurm, in a form that is not read any more
    |   |-- StateMismatch          of other classes: names the keys that differ
    |   |-- UnsavableState         only pickling could save what it holds
    |   |-- SaveFailed             disk full ...; what was committed before is whole
    |   `-- SaveAbandoned          given up on purpose, for one that can still be in time
    |-- RecordError                a file of records is none, or is cut off or changed
    |-- RanksError                 the ranks of a job could not do something together
    |   |-- AgreementFailed        a rank is gone or has given up; the same for all who asked
    |   |-- NoSecret               nothing that they could prove their identity with
    |   |-- ReductionFailed        gradients could not be summed on the host: a rank has died ...
    |   |-- StaleRank              of an earlier attempt, or in this one a second time
    |   `-- CoordinatorLost        what connects the ranks has ended, or was never reached
    |-- ProfileError               a report of nsys that is none, or that cannot be read
    |   `-- NsysMissing            it has to be exported first, and there is no nsys here
    |-- RunEnded                   a budget is spent, or attempts pass without progress
    |-- StaleAttempt               a newer attempt of the run holds its folder, or its job
    |-- ProofError                 a script to be proved failed, hung, or trains nothing
    `-- ClusterError               the dev cluster could not be started, reached or stopped
    UsageError (ValueError)        the caller's own mistake: a wrong argument or value

Messages give the value that was seen, the value that was wanted, and the next step. Only
``hydroslurm.cli`` prints them and turns them into an exit status.
"""

from __future__ import annotations


class HydroslurmError(RuntimeError):
    """Base of all errors that are not the caller's mistake."""


class UsageError(ValueError):
    """A wrong argument or value; the message names the right ones."""


class GateError(HydroslurmError):
    """The operator gate could not be built, loaded or trusted."""


class NoCompiler(GateError):
    """There is no C++ compiler, and no prebuilt gate for this torch."""


class GateSelfTestFailed(GateError):
    """The gate loads, but does not hold the operators of the torch that is installed."""


class InstallError(HydroslurmError):
    """Pausing could not be set up in this process; nothing of it was left behind."""


class AlreadyInstalled(InstallError):
    """``install()`` was called twice in one process without ``uninstall()`` between."""


class NotInstalled(InstallError):
    """Pausing was asked for in a process where nothing is installed."""


class TorchMissing(InstallError):
    """torch cannot be imported."""


class AckTimeout(HydroslurmError):
    """A rank was signalled and did not answer in time."""


class VacateError(HydroslurmError):
    """Device memory could not be moved, or not in time."""


class TargetError(HydroslurmError):
    """The process to be signalled is gone, is not ours, or would die of the signal."""


class SlurmError(HydroslurmError):
    """Slurm refused something, or could not be asked."""


class SlurmMissing(SlurmError):
    """This machine has no Slurm programs, or no slurm.conf."""


class ControllerUnreachable(SlurmError):
    """slurmctld did not answer, and the retries are used up."""


class SlurmTimeout(SlurmError):
    """A Slurm program ran longer than its time-out and was ended."""


class NoSuchJob(SlurmError):
    """Slurm does not know the job."""


class NotPermitted(SlurmError):
    """This user may not do that to this job."""


class WrongJobState(SlurmError):
    """The job is not in a state, or not of a kind, for which the request makes sense."""


class UnreadableOutput(SlurmError):
    """Slurm's answer has a form that no known release prints."""


class SpankError(HydroslurmError):
    """Slurm's plugin for ``--preempt`` could not be built, installed or taken away."""


class SpecError(HydroslurmError):
    """A job spec cannot be read or is not one; the message has a line for each problem."""


class LaunchError(HydroslurmError):
    """A job could not be submitted."""


class MaybeSubmitted(LaunchError):
    """A submission failed, and Slurm has the job, or may have it; the message says which one it is,
    or how to look."""


class RunFolderError(HydroslurmError):
    """A folder that is not a run folder, or one that cannot be written."""


class UntrustedFile(HydroslurmError):
    """A file or folder that was to be obeyed belongs to somebody else, or others could write it."""


class CheckpointError(HydroslurmError):
    """A checkpoint could not be written, found, trusted or applied."""


class CheckpointMissing(CheckpointError):
    """There is no committed checkpoint where one was asked for."""


class CheckpointCorrupt(CheckpointError):
    """A file of a committed checkpoint is gone, cut off, or not what was written."""


class CheckpointTooNew(CheckpointError):
    """The checkpoint was written by a newer hydroslurm in a form that this one cannot read."""


class CheckpointTooOld(CheckpointError):
    """The checkpoint was written by an older hydroslurm in a form that is not read any more."""


class StateMismatch(CheckpointError):
    """The checkpoint does not fit the objects it is to be loaded into; names the keys."""


class UnsavableState(CheckpointError):
    """The state holds an object that could be saved by pickling only, which is never done."""


class SaveFailed(CheckpointError):
    """A save failed on the way to its commit; what was committed before is whole."""


class SaveAbandoned(CheckpointError):
    """A save was given up on purpose, before its commit."""


class RecordError(HydroslurmError):
    """A file of records cannot be read as one; the message names the file and the record."""


class RanksError(HydroslurmError):
    """The ranks of a job could not do something together."""


class AgreementFailed(RanksError):
    """Not all ranks took part in an agreement. Every rank that did is told the same.

    Attributes:
        missing: ranks that have died or left.
        withdrawn: ranks that have given up waiting.
    """

    def __init__(
        self, message: str, *, missing: tuple[int, ...] = (), withdrawn: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.withdrawn = withdrawn


class NoSecret(RanksError):
    """The ranks have nothing to prove their identity with, and do not connect without."""


class ReductionFailed(RanksError):
    """Gradients could not be reduced on the host; the message names the rank that is missing."""


class StaleRank(RanksError):
    """This process is of an earlier attempt of the job, or its rank has joined already."""


class CoordinatorLost(RanksError):
    """The process that connects the ranks has ended, or could not be reached."""


class ProfileError(HydroslurmError):
    """A file is no report of nsys, or nothing of it can be read."""


class NsysMissing(ProfileError):
    """A ``.nsys-rep`` has to be exported to SQLite first, and this machine has no ``nsys``."""


class RunEnded(HydroslurmError):
    """The run must not go on: a budget is spent, or attempts pass without progress."""


class StaleAttempt(HydroslurmError):
    """A newer attempt of the run has begun: this one may not write, nor requeue the job."""


class ProofError(HydroslurmError):
    """The script that is put to the proof failed, hung, or trains nothing."""


class ClusterError(HydroslurmError):
    """The dev cluster could not be started, reached or stopped."""

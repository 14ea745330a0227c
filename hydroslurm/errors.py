"""Every exception that hydroslurm raises on purpose.

    HydroslurmError (RuntimeError)
    |-- GateError                  the gate could not be built, loaded or trusted
    |   |-- NoCompiler             no C++ compiler, and no prebuilt gate
    |   `-- GateSelfTestFailed     it loads, but does not hold this torch's operators
    |-- InstallError               pausing could not be set up in this process
    |   |-- AlreadyInstalled       a second install() in one process
    |   |-- NotInstalled           pause(), resume() ... before install()
    |   `-- TorchMissing           torch cannot be imported
    |-- AckTimeout                 a rank did not answer a signal in time
    |-- VacateError                device memory could not be moved, or not in time
    |-- TargetError                the process to signal is gone, or would die of the signal
    |-- SlurmError                 Slurm refused, or could not be asked
    |   |-- SlurmMissing           no Slurm programs or no slurm.conf on this machine
    |   |-- ControllerUnreachable  slurmctld did not answer, retries included
    |   |-- SlurmTimeout           a Slurm program exceeded its timeout
    |   |-- NoSuchJob              unknown to slurmctld (and to sacct, if asked)
    |   |-- NotPermitted           this user may not do that
    |   |-- WrongJobState          suspend of a pending job, requeue of an srun allocation ...
    |   `-- UnreadableOutput       Slurm's output matches no known release
    |-- SpankError                 the plugin for --preempt cannot be built or installed
    |-- SpecError                  an invalid job spec: what, where, what to write instead
    |-- LaunchError                a job could not be submitted
    |   `-- MaybeSubmitted         and Slurm has it, or may have it
    |-- RunFolderError             not a run folder, or one that cannot be written
    |-- UntrustedFile              another user owns it, or could write it
    |-- CheckpointError            a checkpoint could not be written, found, trusted or applied
    |   |-- CheckpointMissing      none is committed
    |   |-- CheckpointCorrupt      one of its files is missing, cut off or changed
    |   |-- CheckpointTooNew       written by a newer hydroslurm, unreadable for this one
    |   |-- CheckpointTooOld       written by an older hydroslurm, in a form no longer read
    |   |-- StateMismatch          of other classes: names the keys that differ
    |   |-- UnsavableState         it holds something only pickle could save
    |   |-- SaveFailed             disk full ...; earlier checkpoints are intact
    |   `-- SaveAbandoned          given up on purpose, for one that can still be in time
    |-- RecordError                not a file of records, or cut off or changed
    |-- RanksError                 the ranks of a job could not do something together
    |   |-- AgreementFailed        a rank is gone or has given up; the same on all ranks
    |   |-- NoSecret               nothing to prove their identity with
    |   |-- ReductionFailed        gradients could not be summed on the host: a rank has died ...
    |   |-- StaleRank              of an earlier attempt, or joined twice in this one
    |   `-- CoordinatorLost        the process that connects the ranks is gone or unreachable
    |-- ProfileError               not an nsys report, or unreadable
    |   `-- NsysMissing            a report must be exported first, and there is no nsys here
    |-- RunEnded                   a budget is spent, or attempts pass without progress
    |-- StaleAttempt               a newer attempt of the run holds its folder, or its job
    |-- ProofError                 the script under test failed, hung, or trains nothing
    `-- ClusterError               the dev cluster could not be started, reached or stopped
    UsageError (ValueError)        the caller's own mistake: a wrong argument or value

Messages say what was seen, what was wanted, and the next step. Only ``hydroslurm.cli`` prints them
and turns them into an exit status.
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
    """The gate loads, but does not hold the installed torch's operators."""


class InstallError(HydroslurmError):
    """Pausing could not be set up in this process; everything was undone."""


class AlreadyInstalled(InstallError):
    """``install()`` was called twice in one process without ``uninstall()`` between."""


class NotInstalled(InstallError):
    """Pausing was requested in a process where nothing is installed."""


class TorchMissing(InstallError):
    """torch cannot be imported."""


class AckTimeout(HydroslurmError):
    """A rank was signalled and did not answer in time."""


class VacateError(HydroslurmError):
    """Device memory could not be moved, or not in time."""


class TargetError(HydroslurmError):
    """The process to signal is gone, is not ours, or would die of the signal."""


class SlurmError(HydroslurmError):
    """Slurm refused something, or could not be asked."""


class SlurmMissing(SlurmError):
    """This machine has no Slurm programs, or no slurm.conf."""


class ControllerUnreachable(SlurmError):
    """slurmctld did not answer, and the retries are used up."""


class SlurmTimeout(SlurmError):
    """A Slurm program exceeded its timeout and was ended."""


class NoSuchJob(SlurmError):
    """Slurm does not know the job."""


class NotPermitted(SlurmError):
    """This user may not do that to this job."""


class WrongJobState(SlurmError):
    """The job is in a state, or of a kind, that does not allow the request."""


class UnreadableOutput(SlurmError):
    """Slurm's answer has a form that no known release prints."""


class SpankError(HydroslurmError):
    """Slurm's plugin for ``--preempt`` could not be built, installed or removed."""


class SpecError(HydroslurmError):
    """A job spec is unreadable or invalid; the message has a line for each problem."""


class LaunchError(HydroslurmError):
    """A job could not be submitted."""


class MaybeSubmitted(LaunchError):
    """A submission failed, and Slurm has the job, or may have it; the message says which one, or
    how to look."""


class RunFolderError(HydroslurmError):
    """A folder that is not a run folder, or one that cannot be written."""


class UntrustedFile(HydroslurmError):
    """Another user owns a file or folder that would be obeyed, or could write it."""


class CheckpointError(HydroslurmError):
    """A checkpoint could not be written, found, trusted or applied."""


class CheckpointMissing(CheckpointError):
    """There is no committed checkpoint where one was requested."""


class CheckpointCorrupt(CheckpointError):
    """A file of a committed checkpoint is missing, cut off or changed."""


class CheckpointTooNew(CheckpointError):
    """A newer hydroslurm wrote the checkpoint in a form that this one cannot read."""


class CheckpointTooOld(CheckpointError):
    """An older hydroslurm wrote the checkpoint in a form that is no longer read."""


class StateMismatch(CheckpointError):
    """The checkpoint does not fit the objects it is to be loaded into; names the keys."""


class UnsavableState(CheckpointError):
    """The state holds an object that only pickle could save, which is never used."""


class SaveFailed(CheckpointError):
    """A save failed before its commit; earlier checkpoints are intact."""


class SaveAbandoned(CheckpointError):
    """A save was given up on purpose, before its commit."""


class RecordError(HydroslurmError):
    """A file of records is unreadable; the message names the file and the record."""


class RanksError(HydroslurmError):
    """The ranks of a job could not do something together."""


class AgreementFailed(RanksError):
    """Not all ranks took part in an agreement. The error is the same on all that did.

    Attributes:
        missing: ranks that have died or left.
        withdrawn: ranks that gave up waiting.
    """

    def __init__(
        self, message: str, *, missing: tuple[int, ...] = (), withdrawn: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.withdrawn = withdrawn


class NoSecret(RanksError):
    """The ranks have nothing to prove their identity with, and do not connect without it."""


class ReductionFailed(RanksError):
    """Gradients could not be reduced on the host; the message names the missing rank."""


class StaleRank(RanksError):
    """This process is of an earlier attempt of the job, or its rank has joined already."""


class CoordinatorLost(RanksError):
    """The process that connects the ranks has ended, or could not be reached."""


class ProfileError(HydroslurmError):
    """A file is not an nsys report, or unreadable."""


class NsysMissing(ProfileError):
    """A ``.nsys-rep`` must be exported to SQLite first, and this machine has no ``nsys``."""


class RunEnded(HydroslurmError):
    """The run must not go on: a budget is spent, or attempts pass without progress."""


class StaleAttempt(HydroslurmError):
    """A newer attempt of the run has begun: this one may not write, nor requeue the job."""


class ProofError(HydroslurmError):
    """The script under test failed, hung, or trains nothing."""


class ClusterError(HydroslurmError):
    """The dev cluster could not be started, reached or stopped."""

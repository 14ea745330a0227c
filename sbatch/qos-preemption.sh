#!/bin/sh
# The QOSes of qos-preemption.conf, for an administrator of Slurm; once, with slurmdbd running.
set -eu

# Jobs of `urgent` preempt those of `preemptible`, which have 60 s from their first SIGTERM to the one that
# begins KillWait. Choose GraceTime longer than a save takes; without it there is KillWait and no more.
sacctmgr -i add qos preemptible set PreemptMode=requeue GraceTime=60 Priority=0
sacctmgr -i add qos urgent set Priority=100 Preempt=preemptible

# Who may use them: here all accounts below root. What jobs get without asking stays `normal`, which preempts
# nobody and is preempted by nobody. Each line a call of its own: sacctmgr 22.05 knows no QOS that it has
# just made itself.
sacctmgr -i modify account root set qos+=preemptible,urgent

"""From a job spec or a script to running ranks: spec, launch, supervisor and agent.

Must not know what a checkpoint contains or how a rank parks: ranks are told by signals and by their
environment, and are known by the files in the run folder.
"""

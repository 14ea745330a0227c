"""The shapes of other systems on top of ``training``: Caffe2's Job and JobRunner, HFAI's calls.

Nothing here is needed by a script that uses ``hydroslurm.Run``; no other room imports it.
"""

"""Other systems' interfaces on top of ``training``: Caffe2's Job and JobRunner, HFAI's calls.

A script that uses ``hydroslurm.Run`` needs none of this; no other package imports it.
"""

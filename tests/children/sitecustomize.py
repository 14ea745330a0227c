"""Read by every Python that the tests start: garbage is collected less often.

Loading torch makes a million objects that stay, and with Python's own thresholds a third of the
time that it takes goes into looking for garbage among them, in hundreds of processes.
"""

import gc

gc.set_threshold(100_000, 50, 100)

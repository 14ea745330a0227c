"""What the scene `saved` runs: steps that take a while, until there is a file
``hurry``."""

from __future__ import annotations

import json
from pathlib import Path

from submitted import train

print(json.dumps(train(Path(), think_s=0.3)))

"""A fit of Lightning's and a train() of transformers', one after the other."""

from __future__ import annotations

import lightning_scenes
import transformers_scenes

lightning_scenes.main("plain")
transformers_scenes.main("plain")

"""What survives a stop: the state of a run as files that exist completely or not at all."""

"""The loop that a user writes around their training: save, stop, requeue, go on."""

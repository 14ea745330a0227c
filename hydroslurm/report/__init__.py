"""After a run: its events become pauses, figures, a table and a picture."""

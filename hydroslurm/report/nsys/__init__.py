"""Read what nsys recorded of a job: its export to SQLite, the NVTX marks in it, and their clock."""

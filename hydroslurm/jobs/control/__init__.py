"""Requests to jobs that were submitted: pause, resume, requeue, a command beside a rank."""

"""Elastic runs: nodes come and go while the training goes on in the same processes.

A run's members are single nodes, each with its ranks. A coordinator that belongs to no member says
who trains together: one *generation* after the other. See docs/elastic.md.
"""

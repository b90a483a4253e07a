"""Trackers: services and formats that show a run's log elsewhere. Start with trackers.py.

The first process of a run opens those whose keys are set. They never end the run: one that fails is left out.
"""

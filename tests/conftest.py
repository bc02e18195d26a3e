"""Hypothesis draws the same examples in every run, and a slow machine fails no test."""

from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

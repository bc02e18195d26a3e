"""Programs that run in a sandbox, with a harness's own packages, and drive it by its library.

Invariant: nothing here is imported by ClawGym, and nothing here imports it: a sandbox shows one of these files alone.
They lie in a folder of their own, since where a sandbox shows the host's paths their neighbours can be imported.
"""

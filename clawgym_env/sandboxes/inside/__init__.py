"""What runs inside a sandbox: programs of the standard library alone, shown there as plain files.

Invariant: nothing here imports anything of ours but its neighbours; the host's side imports ``wire`` alone.
"""

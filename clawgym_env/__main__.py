"""``python -m clawgym_env`` is the ``clawgym`` command."""

from clawgym_env.cli import main

main()

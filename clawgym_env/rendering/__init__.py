"""Messages <-> tokens: the policy's chat format, on the ``renderers`` library."""

from clawgym_env.rendering.chat import ChatRenderer, off_loop
from clawgym_env.rendering.messages import linked

__all__ = ["ChatRenderer", "linked", "off_loop"]

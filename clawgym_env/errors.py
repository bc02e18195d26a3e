"""One exception tree, a class a boundary; each also inherits the stdlib error it stands for.

```
ClawGymError
├── ConfigError (ValueError)           settings, unknown keys, unknown names
├── TaskError (ValueError)             a task or suite that cannot be loaded
├── SandboxError (RuntimeError)        the box itself
│   ├── SandboxUnavailable             the backend cannot work on this machine
│   ├── SandboxStartFailed             no start succeeded, of several
│   ├── WorkspaceTooLarge              more in it than may be read out
│   └── SandboxClosed                  used after stop, or its owner died
├── HarnessError (RuntimeError)
│   └── HarnessNotInstalled (FileNotFoundError)
├── WireError (ValueError)             a request that a wire cannot take; carries the HTTP status
├── ProxyError (RuntimeError)
│   └── BudgetExhausted                this rollout may make no more calls
├── RenderingError (ValueError)        messages that no template holds; a model without tool tokens
│   └── ContextOverflow                prompt that leaves no room for an answer
├── EngineError (RuntimeError)         the policy engine failed
└── VerifierError (RuntimeError)       the verifier crashed or gave no valid score
```
"""

from __future__ import annotations


class ClawGymError(Exception):
    """Base of every error that ClawGym raises on purpose."""


class ConfigError(ClawGymError, ValueError):
    """A setting, key or name that cannot be honoured."""


class TaskError(ClawGymError, ValueError):
    """A task or suite that cannot be loaded."""


class SandboxError(ClawGymError, RuntimeError):
    """The sandbox failed; never the policy's doing."""


class SandboxUnavailable(SandboxError):
    """The backend cannot work on this machine; the message names the ways out."""


class SandboxStartFailed(SandboxError):
    """Several starts in a row failed; the message holds the last one's reason."""


class WorkspaceTooLarge(SandboxError):
    """The workspace holds more files, bytes or levels than may be read out: the doing of who filled it."""


class SandboxClosed(SandboxError):
    """The sandbox was used after it ended."""


class HarnessError(ClawGymError, RuntimeError):
    """The harness could not be set up or started."""


class HarnessNotInstalled(HarnessError, FileNotFoundError):
    """The harness is not in the cache; the message gives the install command."""


class WireError(ClawGymError, ValueError):
    """A request that the wire cannot take.

    Attributes:
        status: HTTP status to answer with.
        param: Request field at fault, where there is one.
        code: Machine-readable code of the API, where it has one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ProxyError(ClawGymError, RuntimeError):
    """The model boundary failed."""


class BudgetExhausted(ProxyError):
    """The rollout has used up its calls or tokens."""


class RenderingError(ClawGymError, ValueError):
    """Messages that cannot become tokens, or a model that cannot hold them."""


class ContextOverflow(RenderingError):
    """A prompt that leaves no room for an answer in the policy's context.

    Attributes:
        prompt_tokens: Length of the prompt.
        max_context: Context length in tokens; an answer takes one of them at least.
        max_prompt: Length of the longest prompt that can be answered.
    """

    def __init__(self, prompt_tokens: int, max_context: int):
        super().__init__(
            f"This model's maximum context length is {max_context} tokens. However, you requested {prompt_tokens + 1} "
            f"tokens ({prompt_tokens} in the messages, 1 in the completion)."
        )
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context
        self.max_prompt = max_context - 1


class EngineError(ClawGymError, RuntimeError):
    """The policy engine failed."""


class VerifierError(ClawGymError, RuntimeError):
    """The verifier crashed or gave no valid score."""

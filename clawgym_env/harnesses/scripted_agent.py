"""A small agent that runs inside the sandbox: asks the model, writes files, stops when it is told to.

Invariant: its requests are a function of the instruction and the model's answers alone: no clock, no random ids, no
environment. Standard library only: ``python3 -I -S scripted_agent.py BASE_URL API_KEY MODEL MAX_TOKENS <instruction``,
started in the workspace. Exit code 0 when the model has finished, 1 with one line on stderr otherwise.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TURNS = 20
SYSTEM = "You are an agent that works in a folder. Use write_file to create files and finish when the task is done."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a file in the workspace.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
                "required": ["path", "content"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "finish",
            "description": "End the task.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


class AgentError(Exception):
    """Ends the run with exit code 1."""


def ask(base_url: str, api_key: str, request: dict[str, Any]) -> dict[str, Any]:
    """Posts one chat completion and returns the assistant's message."""
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80)
    headers = {"content-type": "application/json", "authorization": "Bearer " + api_key}
    try:
        connection.request("POST", url.path + "/v1/chat/completions", json.dumps(request).encode(), headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise AgentError(f"no answer from {base_url}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise AgentError(f"status {response.status}: {body[:300].decode('utf-8', 'replace')}")
    try:
        message: dict[str, Any] = json.loads(body)["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise AgentError(f"malformed answer: {error!r}") from error
    return message


def write_file(arguments: dict[str, Any]) -> str:
    """Carries one call out inside the working directory; failures are answers to the model."""
    path, content = arguments.get("path"), arguments.get("content")
    if not isinstance(path, str) or not isinstance(content, str):
        return "error: path and content must be strings"
    root = Path.cwd()
    try:
        target = (root / path).resolve()
        if root not in target.parents:
            return "error: path is outside the workspace"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    except (OSError, ValueError) as error:
        return f"error: {error}"
    return f"wrote {len(content)} characters"


def run_tool(function: dict[str, Any]) -> str:
    """Result of one tool call, as text for the model."""
    name = function.get("name")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        return "error: arguments are not valid JSON"
    if not isinstance(arguments, dict):
        return "error: arguments are not a JSON object"
    if name == "write_file":
        return write_file(arguments)
    return "finished" if name == "finish" else f"error: unknown tool {name}"


def run(base_url: str, api_key: str, model: str, max_tokens: int, instruction: str) -> None:
    """Talks to the model until it finishes."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instruction},
    ]
    for _ in range(MAX_TURNS):
        request = {"model": model, "messages": messages, "tools": TOOLS, "max_tokens": max_tokens}
        message = ask(base_url, api_key, request)
        calls = message.get("tool_calls") or []
        if not calls:
            return
        messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": calls})
        for call in calls:
            function = call.get("function") or {}
            messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": run_tool(function)})
        if any((call.get("function") or {}).get("name") == "finish" for call in calls):
            return
    raise AgentError(f"the model did not finish within {MAX_TURNS} turns")


def main() -> int:
    """Entry point."""
    base_url, api_key, model, max_tokens = sys.argv[1:]
    try:
        run(base_url, api_key, model, int(max_tokens), sys.stdin.read())
    except AgentError as error:
        print("scripted agent: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A whole agent in one file, with one tool: ``python3 shell_agent.py BASE_URL API_KEY MODEL MAX_TOKENS [FAULT] <task``.

It is what a third party might bring. ``FAULT`` makes it break a rule on purpose, to see whether the suite notices.
"""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.parse

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command in the workspace.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(base_url: str, key: str, request: dict) -> dict:
    """One chat completion: its choice."""
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"content-type": "application/json", "authorization": "Bearer " + key}
    connection.request("POST", url.path + "/chat/completions", json.dumps(request), headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        sys.exit(f"status {response.status}: {body.decode()}")
    return json.loads(body)["choices"][0]


def run(call: dict) -> str:
    """Carries one tool call out; what goes wrong is told to the model."""
    if call["function"]["name"] != "bash":
        return f"error: there is no tool {call['function']['name']}"
    try:
        command = json.loads(call["function"]["arguments"])["command"]
    except (ValueError, KeyError, TypeError):
        return "error: arguments must be a JSON object with a command"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def main() -> None:
    """Talks to the model until it calls no tool."""
    base_url, key, model, max_tokens, fault = (*sys.argv[1:], "")[:5]
    system = "You are an agent." + (f" Session {os.urandom(4).hex()}." if fault == "nonce" else "")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": sys.stdin.read()}]
    while True:
        told = messages[:2] + messages[2:][-2:] if fault == "forgets" else messages
        request = {"model": model, "messages": told, "tools": [TOOL], "max_tokens": int(max_tokens)}
        choice = ask(base_url, key, request)
        if fault == "hangs":
            time.sleep(3600)
        if fault == "wastes" and len(messages) == 2:
            choice = ask(base_url, key, request)
        message = choice["message"]
        calls = message.get("tool_calls") or []
        messages.append(message)
        if not calls or (choice["finish_reason"] == "length" and fault != "trusts"):
            return
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in calls]


main()

"""Tools of OpenAI Responses: JSON <-> types, for :mod:`clawgym_env.wire.openai_responses`.

A namespace is a named group of tools. Models know plain names only, so the model is offered ``group__tool``, written in
the alphabet that every API has for names. The harness is told both parts, and what it tells of a call is joined again:
the history says what the model wrote. What a group is for stands before what its first tool does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from clawgym_env.errors import WireError
from clawgym_env.types import ChatRequest, Namespace, ToolSpec
from clawgym_env.wire import base

SEPARATOR = "__"
#: What the model is offered for a tool that takes one text.
FREE_TEXT_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_TOOL_FIELDS: Mapping[str, frozenset[str]] = {
    "function": frozenset({"type", "name", "description", "parameters"}),
    "custom": frozenset({"type", "name", "description"}),
}
#: A grammar binds the model at the API and cannot here. The harness checks its tool's input itself, so it is accepted.
_TOOL_HARMLESS: Mapping[str, frozenset[str]] = {
    "function": frozenset({"strict", "output_schema"}),
    "custom": frozenset({"format"}),
}
_TOOL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "async": (False,),
    "allowed_callers": (["direct"],),
}


def read_tools(data: Mapping[str, Any]) -> tuple[tuple[ToolSpec, ...], dict[str, Any]]:
    """A request's tools, and what of them is not acted on, by its path.

    Raises:
        WireError: one cannot be offered; ``param`` names the field.
    """
    tools: list[ToolSpec] = []
    recorded: dict[str, Any] = {}
    for i, tool in enumerate(base.optional(data, "tools", list) or []):
        where = f"tools[{i}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            tools += _namespace(tool, f"{where}.", recorded)
        else:
            tools.append(_tool(tool, where, recorded))
    return tuple(tools), recorded


def tools_json(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools as they were asked for."""
    out: list[dict[str, Any]] = []
    for namespace, tools in groupby(request.tools, key=lambda tool: tool.namespace):
        if namespace is None:
            for tool in tools:
                out.append(_tool_json(tool, request.extra, f"tools[{len(out)}]."))
        else:
            named = {"name": namespace.name, "description": namespace.description}
            out.append({"type": "namespace", **named, "tools": _members(tools, request.extra, f"tools[{len(out)}]")})
    return out


def name_fields(tool: ToolSpec) -> dict[str, str]:
    """The name of a tool as its harness knows it."""
    if tool.namespace is None:
        return {"name": tool.name}
    return {"namespace": tool.namespace.name, "name": tool.name.removeprefix(joined_name(tool.namespace.name, ""))}


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a tool as the model knows it."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def _namespace(data: Mapping[str, Any], at: str, recorded: dict[str, Any]) -> list[ToolSpec]:
    base.check_fields(data, read={"type", "name", "description", "tools"}, harmless=(), neutral={}, where=at)
    description = base.optional(data, "description", str, at) or ""
    namespace = Namespace(base.expect(data, "name", str, at), description)
    listed = base.expect(data, "tools", list, at)
    if not listed:
        raise WireError("a namespace must hold at least one tool", param=f"{at}tools")
    tools = [_tool(tool, f"{at}tools[{j}]", recorded) for j, tool in enumerate(listed)]
    tools = [replace(t, name=joined_name(namespace.name, t.name), namespace=namespace) for t in tools]
    tools[0] = replace(tools[0], description=_introduction(namespace) + tools[0].description)
    return tools


def _introduction(namespace: Namespace) -> str:
    return f"{namespace.description}\n\n" if namespace.description else ""


def _tool(data: Any, where: str, recorded: dict[str, Any]) -> ToolSpec:
    if not isinstance(data, dict):
        raise WireError("a tool must be a JSON object", param=where)
    kind, at = data.get("type"), f"{where}."
    if not isinstance(kind, str) or kind not in _TOOL_FIELDS:
        only = "only types 'function' and 'custom' can, by themselves or in a 'namespace'"
        raise WireError(f"tools of type {kind!r} cannot be offered here; {only}", param=f"{at}type")
    rest = base.check_fields(
        data, read=_TOOL_FIELDS[kind], harmless=_TOOL_HARMLESS[kind], neutral=_TOOL_NEUTRAL, where=at
    )
    recorded |= {at + key: value for key, value in rest.items()}
    name = base.expect(data, "name", str, at)
    description = base.optional(data, "description", str, at) or ""
    if kind == "function":
        return ToolSpec(name, description, base.schema(data.get("parameters"), f"{at}parameters"))
    form = base.optional(data, "format", dict, at)
    if form is not None and form.get("type") not in ("text", "grammar"):
        raise WireError("a custom tool's format must be of type 'text' or 'grammar'", param=f"{at}format.type")
    return ToolSpec(name, description, FREE_TEXT_PARAMETERS, free_text=True)


def _members(tools: Iterable[ToolSpec], extra: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    out = []
    for j, tool in enumerate(tools):
        said = _tool_json(tool, extra, f"{where}.tools[{j}].") | {"name": name_fields(tool)["name"]}
        if j == 0 and tool.namespace is not None:
            said["description"] = said["description"].removeprefix(_introduction(tool.namespace))
        out.append(said)
    return out


def _tool_json(tool: ToolSpec, extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    named = {"name": tool.name, "description": tool.description}
    if tool.free_text:
        return {"type": "custom", **named, "format": extra.get(f"{where}format") or {"type": "text"}}
    return {"type": "function", **named, "parameters": tool.parameters, "strict": extra.get(f"{where}strict")}

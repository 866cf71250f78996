"""What a request offered: tool names, and the argument schema where it is given."""

from collections.abc import Iterable, Mapping
from typing import Any


class Offer:
    """The tools of a request after `tool_choice`. `names` None: not known, every name is taken."""

    def __init__(self, tools: Iterable[Any] | None, tool_choice: Any = "auto") -> None:
        self.disabled = tool_choice == "none"
        self.names: set[str] | None = None
        self._properties: dict[str, Mapping[str, Any]] = {}
        if tools is not None:
            self.names = {self._add(tool) for tool in tools}
            self.disabled = self.disabled or not self.names
        named = _named(tool_choice)
        if named is not None and not self.disabled:
            self.names = named if self.names is None else self.names & named

    def _add(self, tool: Any) -> str:
        name: Any
        schema: Any
        if isinstance(tool, str):
            name, schema = tool, None
        elif isinstance(tool, Mapping):
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            schema = (function.get("parameters") or function.get("input_schema")) if name else None
        else:
            name = schema = None
        if not isinstance(name, str):
            raise TypeError(f"a tool is a name or a mapping with a name, as in the OpenAI API; got {tool!r}")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping):
            self._properties[name] = properties
        return name

    def has(self, name: str) -> bool:
        """Whether the tool may be called."""
        return self.names is None or name in self.names

    def properties(self, name: str) -> Mapping[str, Any] | None:
        """The tool's parameters by name, or None if its schema is not known."""
        return self._properties.get(name)


def _named(tool_choice: Any) -> set[str] | None:
    """The names to which a `tool_choice` restricts the offer, in any of OpenAI's shapes; None: it does not."""
    if not isinstance(tool_choice, Mapping):
        return None
    if tool_choice.get("type") == "allowed_tools":
        allowed = tool_choice.get("allowed_tools", tool_choice)
        tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
        return {name for tool in tools if (name := _name(tool)) is not None} if isinstance(tools, list) else None
    name = _name(tool_choice)
    return None if name is None else {name}


def _name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None

"""YAML that a stranger wrote, as plain data: bounded in size, depth and what its aliases unfold to.

Scalars stay the text that was written: `1.10` is a version, `no` a restart policy and `2020-13-45` a name, whatever
YAML's own reading of them. Every mapping says on which line it begins, under `LINE`.
"""

from typing import Any

import yaml

LINE = "\0line"
"""The key of a mapping's line: ours, also where a file has such a key of its own."""
MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 100_000

SLOW_BYTES = 128 << 10
"""Read also by the loader in Python, which takes escapes of JSON that libyaml refuses (`"\\ud83d\\ude00"`)."""


class Refused(ValueError):
    """It is no YAML, or too much of it; the message says which."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    found = {
        str(loader.construct_object(key, deep=True)): loader.construct_object(value, deep=True)
        for key, value in node.value
    }
    return {**found, LINE: node.start_mark.line + 1}


def _untagged(loader: Any, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)


def _plain(base: Any) -> Any:
    """A loader for which no scalar is anything but text, but for null and the merge key. Other tags are passed over."""

    class Plain(base):  # type: ignore[misc]
        yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
            first: [(tag, pattern) for tag, pattern in found if tag.endswith((":null", ":merge"))]
            for first, found in base.yaml_implicit_resolvers.items()
        }

    Plain.add_constructor("tag:yaml.org,2002:map", _mapping)
    for kind in ("bool", "int", "float", "binary", "timestamp", "omap", "pairs", "set"):
        Plain.add_constructor(f"tag:yaml.org,2002:{kind}", lambda loader, node: _untagged(loader, "", node))
    Plain.add_multi_constructor("!", _untagged)
    Plain.add_multi_constructor("tag:yaml.org,2002:", _untagged)
    return Plain


_LOADERS = [_plain(getattr(yaml, "CSafeLoader", yaml.SafeLoader)), _plain(yaml.SafeLoader)]


def load(text: str) -> list[Any]:
    """The documents of a file. Raises `Refused`."""
    if len(text) > MAX_BYTES:
        raise Refused(f"YAML of more than {MAX_BYTES >> 20} MiB")
    try:
        return _load(text, _LOADERS[0])
    except yaml.YAMLError as error:
        if len(text) > SLOW_BYTES:
            raise Refused(f"YAML that can be read{_where(error)}") from error
    try:
        return _load(text, _LOADERS[1])
    except yaml.YAMLError as error:
        raise Refused(f"YAML that can be read{_where(error)}") from error


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" (line {mark.line + 1})" if mark is not None else ""


def _load(text: str, loader: Any) -> list[Any]:
    try:
        _check(text, loader)
        return list(yaml.load_all(text, Loader=loader))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"YAML that can be read ({type(error).__name__})") from error


def _check(text: str, loader: Any) -> None:
    """Refuse depth and aliases before anything is built: what an alias stands for is counted where it stands."""
    sizes: dict[str, int] = {}  # of anchors that are closed
    open_ones: list[tuple[str | None, int]] = []  # the anchor of each open collection, and what was counted before it
    count = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise Refused("YAML without an alias that holds itself")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((event.anchor, count))
            sizes.pop(event.anchor or "", None)
            count += 1
            if len(open_ones) > MAX_DEPTH:
                raise Refused(f"YAML nested at most {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_ones.pop()
            if anchor:
                sizes[anchor] = count - before
        if count > MAX_NODES:
            raise Refused(f"YAML that unfolds to at most {MAX_NODES} values")

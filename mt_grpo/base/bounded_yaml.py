"""YAML that stays as large as it is written, and that says what it seems to say."""

from __future__ import annotations

import collections.abc
import re
from typing import Any

import yaml

YAML_LEVELS = 50
YAML_VALUES = 10_000


class BoundedLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that raises `YAMLError` for more levels or values than a person writes.

    An alias stands for all that it names. A few lines of aliases of aliases are more values than there is memory.

    >>> yaml.load("a: &a [1, 2]\\nb: [*a, *a]", BoundedLoader)
    {'a': [1, 2], 'b': [[1, 2], [1, 2]]}
    """

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._open = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # (values, levels) of each node that is whole

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, as in PyYAML. Raises `YAMLError`."""
        line, is_alias = self.peek_event().start_mark.line + 1, self.check_event(yaml.AliasEvent)
        self._open += 1
        if self._open > YAML_LEVELS:
            raise yaml.YAMLError(f"line {line} has more than {YAML_LEVELS} levels. Use fewer levels.")
        node = super().compose_node(parent, index)
        self._open -= 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.YAMLError(f"line {line} has an alias of what it stands in. Use an alias of an earlier value.")
        if is_alias:
            return node
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [each for pair in inner for each in pair] if isinstance(node, yaml.MappingNode) else inner
        values = 1 + sum(self._sizes[id(each)][0] for each in inner)
        levels = 1 + max((self._sizes[id(each)][1] for each in inner), default=0)
        if values > YAML_VALUES or levels > YAML_LEVELS:
            raise yaml.YAMLError(
                f"line {line} has more than {YAML_VALUES} values or {YAML_LEVELS} levels, its aliases filled in. "
                "Use fewer."
            )
        self._sizes[id(node)] = values, levels
        return node


class RecipeLoader(BoundedLoader):
    """`BoundedLoader` that raises `YAMLError` for a key that is set twice; the original uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, collections.abc.Hashable):
                continue
            if key in lines:
                raise yaml.YAMLError(
                    f"{key!r} is set on line {lines[key]} and again on line {line}. Remove one of them."
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def plain_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """A number; `1:30` and `010` stay text, which no number's key takes. YAML 1.1 would read 90 and 8."""
    if ":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value):
        return node.value
    return {"int": loader.construct_yaml_int, "float": loader.construct_yaml_float}[node.tag.rpartition(":")[2]](node)


for tag in ("int", "float"):
    RecipeLoader.add_constructor(f"tag:yaml.org,2002:{tag}", plain_number)

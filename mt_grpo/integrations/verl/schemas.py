"""verl's tool schemas and what a tool answers, for files that import them where verl is not installed.

Unlike verl's own, they keep the keys of JSON schema that they do not list (`items`, `default`, nested `properties`),
so that the model reads what the file says.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class OpenAIFunctionPropertySchema(BaseModel):
    """The schema of one parameter of a function."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The schema of the parameters of a function."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """The schema of a function: name, description and parameters."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """The schema of a tool, of type `function`."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call whose arguments are JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """(the call, whether its arguments were no JSON object: then it has none)."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        wrong = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if wrong else arguments), wrong


class OpenAIFunctionToolCall(BaseModel):
    """A tool call of the model, with its id."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """The answer of a tool. `image` and `video` are lists, as in verl. Videos are not supported.

    >>> ToolResponse().is_empty(), ToolResponse(text="7").is_text_only()
    (True, True)
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def lists_of_media(cls, values: Any) -> Any:
        """Raise `ValueError` for one image or video that is in no list."""
        for key in ("image", "video"):
            if isinstance(values, dict) and key in values and not isinstance(values[key], list):
                raise ValueError(f"{key} is {type(values[key]).__name__}, expected a list. Write [{key}].")
        return values

    def is_empty(self) -> bool:
        """Whether the answer has neither text nor images nor videos."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether the answer has a text and nothing else."""
        return bool(self.text) and not (self.image or self.video)

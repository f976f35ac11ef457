"""verl's tool schemas and what a tool returns, for files that import them if verl is not installed.

Unlike verl's own, they keep the keys of JSON schema that they do not list (`items`, `default`, nested `properties`),
so that the model reads what the file says.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class OpenSchema(BaseModel, extra="allow"):
    """A schema that keeps unlisted keys."""


class OpenAIFunctionPropertySchema(OpenSchema):
    """The schema of one parameter of a function."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(OpenSchema):
    """The schema of the parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(OpenSchema):
    """The schema of a function: name, description and parameters."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()


class OpenAIFunctionToolSchema(BaseModel):
    """The schema of a tool, of type `function`."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool returns. `image` and `video` are lists, as in verl. Videos are not supported."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

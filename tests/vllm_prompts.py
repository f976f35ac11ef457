"""The ids that vLLM's own endpoints give their model for a request: its renderer, without an engine."""

import asyncio
import json

import pytest

MODEL = "hf_recipes/tiny/calculator-hermes-model"


class VllmPrompts:
    """vLLM's renderer with the tokenizer of the tiny model and a chat template, in this process."""

    _renderer = None

    def __init__(self, chat_template):
        pytest.importorskip("vllm.entrypoints.anthropic.serving")
        from vllm.renderers.online_renderer import OnlineRenderer

        config, renderer = self.renderer()
        self.renders = OnlineRenderer(
            config, renderer, request_logger=None, chat_template=chat_template, chat_template_content_format="auto",
            enable_auto_tools=True, tool_parser="hermes",
        )  # fmt: skip

    @classmethod
    def renderer(cls):
        """(the model's configuration, its renderer), which are made once."""
        if VllmPrompts._renderer is None:
            from vllm.config import ModelConfig, VllmConfig
            from vllm.renderers import renderer_from_config

            length = 2**20  # of prompts of programs, which the tiny model itself could not read
            longer = {"max_position_embeddings": length}
            config = ModelConfig(model=MODEL, dtype="float32", max_model_len=length, hf_overrides=longer)
            VllmPrompts._renderer = config, renderer_from_config(VllmConfig(model_config=config))
        return VllmPrompts._renderer

    def ids(self, endpoint, body):
        """What the model reads of a request to `chat/completions`, `responses` or `messages`."""
        body = json.loads(json.dumps({"model": "policy", **body}))
        return asyncio.run(self._of_responses(body) if endpoint == "responses" else self._of_chat(endpoint, body))

    async def _of_responses(self, body):
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        rendered = await self.renders.render_responses(ResponsesRequest.model_validate(body))
        return rendered.engine_input["prompt_token_ids"]

    async def _of_chat(self, endpoint, body):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        if endpoint == "messages":
            request = await self._converted(body)
        else:
            request = ChatCompletionRequest.model_validate(body)
        _, (rendered,) = await self.renders.render_chat(request)
        return rendered["prompt_token_ids"]

    async def _converted(self, body):
        """A request of /v1/messages as vLLM makes it one of /v1/chat/completions, what it probes included."""
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Serving

        serving = Serving.__new__(Serving)  # of which no engine is needed for what follows
        serving.online_renderer, serving.model_config = self.renders, self.renders.model_config
        serving._disabled_thinking_effort = None
        return Serving.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate({"max_tokens": 50, **body}),
            merge_inline_system=Serving._should_merge_inline_system(self.renders),
            disabled_thinking_effort=await serving._get_disabled_thinking_effort(),
        )

"""A model of inspect_ai that is a search: `gambit/NAME` is what `gambit serve` serves, and logs keep votes and tokens.

Put it beside your tasks and import it before the evaluation, since the command `inspect` looks for models first:

    gambit serve --model pawn --port 8000
    python -c "import inspect_provider; from inspect_ai import eval; eval('task.py', model='gambit/pawn')"
"""

from __future__ import annotations

import os
from typing import Any

from inspect_ai.model import ChatMessage, GenerateConfig, ModelCall, ModelOutput, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.tool import ToolChoice, ToolInfo

ADDRESS = "http://127.0.0.1:8000/v1"


@modelapi(name="gambit")
class GambitServer(OpenAICompatibleAPI):
    """The server's chat completions; `metadata` of each output in the log has the field `gambit` of the answer."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 # as inspect_ai's own
        **model_args: Any,
    ) -> None:
        key = api_key or os.environ.get("GAMBIT_API_KEY", "none")
        super().__init__(model_name, base_url, key, config, service="gambit", service_base_url=ADDRESS, **model_args)

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002 # inspect_ai's name
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
        **options: Any,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        found = await super().generate(input, tools, tool_choice, config, **options)
        if isinstance(found, tuple) and isinstance(found[0], ModelOutput):
            output, call = found
            output.metadata = {**(output.metadata or {}), "gambit": (call.response or {}).get("gambit")}
        return found

    def service_model_name(self) -> str:
        """Returns the name that the server knows, which has no service before it."""
        return self.model_name

"""Requests with tools, JSON objects and efforts, for `serve_load.py --kinds`, on a server whose model says set texts.

No model that fits here calls tools. So an engine plays traces that call, in several spellings, the tools of their own
question; everything else is `gambit serve` and the real openai client. Each question has a number of its own, which
must come back in the calls, in the object or in the box.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import openai

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests"), str(Path(__file__).resolve().parents[1])]

NAME = "talker"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
FLAT = [{"type": tool["type"], **tool["function"]} for tool in TOOLS]
EFFORTS = {"low": 1, "medium": 16, "high": 16}  # most roots


def say(prompt: str, noise: int) -> str:
    """What a trace says to a question such as "pair 17": calls of two tools with 17, or something else now and then."""
    kind, number = prompt.rpartition("<|im_start|>user\n")[2].split("<|im_end|>")[0].split()
    spelling = f"{number}.0" if noise % 2 else number
    first = f'<tool_call>\n{{"name": "f", "arguments": {{"n": {spelling}}}}}\n</tool_call>'
    second = f'<tool_call>{{"arguments": {{"n": {spelling}, "m": "x"}}, "name": "g"}}</tool_call>'
    final = {
        "call": first,
        "pair": second + first if noise % 2 else first + second,
        "object": f'{{"n": {spelling}}}',
        "box": f"\\boxed{{{spelling}}}",
    }[kind]
    return f"so we have {number}\n\nthen the sum of two numbers</think>\n\n{final if noise % 5 else 'let us check'}"


def serve(folder: str, port: str, *keys: str) -> None:
    """Runs `gambit serve` with the engine that speaks."""
    from gambit.cli import main
    from gambit.config import registry
    from support.speaking import STARTED, SpeakingEngine

    registry.BUILT_IN["gambit.engines"]["speaking"] = "support.speaking:start"
    STARTED[folder] = SpeakingEngine(say)
    options = [part for key in keys for part in ("--api-key", key)]
    sys.argv = ["gambit", "serve", folder, "--engine", "speaking", "--scorer", "constant", "--port", port, *options,
                "--served-model-name", NAME, "--policy", "sc", "--capacity", "16", "--max-waiting", "200"]  # fmt: skip
    main()


def command(*keys: str) -> list[str]:
    """The command that serves it, with a model's folder of its own."""
    from support.tiny import save_tiny

    folder = save_tiny(Path(tempfile.mkdtemp(prefix="gambit-talker-")))
    return [sys.executable, __file__, str(folder), "0", *keys]


class Kinds:
    """A client of that server, which checks that it gets its own number back."""

    def __init__(self, url: str, key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=600, max_retries=20)
        self._kinds = (self.call, self.streamed_pair, self.response_pair, self.object, self.effort)

    async def one(self, rng: random.Random) -> str:
        kind = rng.choice(self._kinds)
        await kind(rng, rng.randrange(10**6))
        return f"right: {kind.__name__.replace('_', ' ')}"

    async def _chat(self, word: str, number: int, **fields: object) -> openai.types.chat.ChatCompletion:
        messages = [{"role": "user", "content": f"{word} {number}"}]
        return await self._client.chat.completions.create(model=NAME, messages=messages, **fields)

    async def call(self, rng: random.Random, number: int) -> None:
        [choice] = (await self._chat("call", number, tools=TOOLS, tool_choice=rng.choice(["auto", "required"]))).choices
        assert [json.loads(each.function.arguments) for each in choice.message.tool_calls] == [{"n": number}]

    async def streamed_pair(self, rng: random.Random, number: int) -> None:
        messages = [{"role": "user", "content": f"pair {number}"}]
        async with self._client.chat.completions.stream(model=NAME, messages=messages, tools=TOOLS) as stream:
            [choice] = (await stream.get_final_completion()).choices
        made = {each.function.name: json.loads(each.function.arguments) for each in choice.message.tool_calls}
        assert made == {"f": {"n": number}, "g": {"n": number, "m": "x"}} and choice.finish_reason == "tool_calls"

    async def response_pair(self, rng: random.Random, number: int) -> None:
        if rng.random() < 0.5:
            reply = await self._client.responses.create(model=NAME, input=f"pair {number}", tools=FLAT)
        else:
            async with self._client.responses.stream(model=NAME, input=f"pair {number}", tools=FLAT) as stream:
                reply = await stream.get_final_response()
        made = {item.name: json.loads(item.arguments) for item in reply.output if item.type == "function_call"}
        assert made == {"f": {"n": number}, "g": {"n": number, "m": "x"}}

    async def object(self, rng: random.Random, number: int) -> None:
        [choice] = (await self._chat("object", number, response_format={"type": "json_object"})).choices
        assert json.loads(choice.message.content) == {"n": number}

    async def effort(self, rng: random.Random, number: int) -> None:
        effort, most = rng.choice(list(EFFORTS.items()))
        if rng.random() < 0.5:
            reply = await self._chat("box", number, reasoning_effort=effort)
        else:
            question = f"box {number}"
            reply = await self._client.responses.create(model=NAME, input=question, reasoning={"effort": effort})
        assert reply.gambit["counts"]["roots"] <= most
        assert reply.gambit["answer"] in (str(number), f"{number}.0", None), reply.gambit["votes"]


if __name__ == "__main__":
    serve(*sys.argv[1:])

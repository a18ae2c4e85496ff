"""Token ids of a problem: chat templates, system prompt, think tags and the ids that end a turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gambit.answers import AnswerKind
from gambit.answers.structured import CALL
from gambit.errors import UserError
from gambit.text.boundary import THINK_END, BoundaryRule
from gambit.text.tokenizers import Tokenizer, single_token
from gambit.types import ChatMessage, Toolbox

DEFAULT_SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|return|>")
HARMONY_CHANNEL = "<|channel|>"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A problem as the model reads it."""

    token_ids: tuple[int, ...]
    thinks: bool  # the model will think before it answers
    notes: tuple[str, ...]  # warnings the caller shows once


def rule_for(rule: BoundaryRule, *, thinks: bool) -> BoundaryRule:
    """Returns the rule after a prompt. If it has closed the think block already, thoughts count everywhere."""
    return rule if thinks else replace(rule, think_end=None)


def encode_problem(
    tokenizer: Tokenizer,
    problem: str | Sequence[ChatMessage],
    *,
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
    enable_thinking: bool = True,
    tools: Toolbox | None = None,
) -> EncodedPrompt:
    """Encodes a problem by the tokenizer's chat template, where it has one."""
    messages = _messages(problem, system_prompt)
    notes: list[str] = []
    if tools is not None:
        _check_tools(str(tokenizer.chat_template))
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages) + "\n\n"
        notes.append("the tokenizer has no chat template: the problem is sent as plain text, without turns")
    else:
        options: dict[str, object] = {**_template_options(tokenizer, enable_thinking, notes)}
        if tools is not None:
            options["tools"] = list(tools.tools)
        text = _render(tokenizer, messages, options)
    ids = tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)
    thinks = not text.rstrip().endswith(THINK_END) and single_token(tokenizer, THINK_END) is not None
    return EncodedPrompt(tuple(ids), thinks, tuple(notes))


def _messages(problem: str | Sequence[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    messages = [ChatMessage(role="user", content=problem)] if isinstance(problem, str) else list(problem)
    roles = [message["role"] for message in messages]
    if "user" not in roles or roles[-1] not in ("user", "tool"):
        raise UserError(f"the problem must end with a user message or a tool's result, not with {messages[-1:]}")
    if messages[-1]["role"] == "user" and not messages[-1]["content"].strip():
        raise UserError(f"the problem is empty ({messages[-1]['content']!r}): give it some text")
    if system_prompt and all(message["role"] != "system" for message in messages):
        messages.insert(0, ChatMessage(role="system", content=system_prompt))
    return messages


def _template_options(tokenizer: Tokenizer, enable_thinking: bool, notes: list[str]) -> dict[str, bool]:
    if "enable_thinking" in str(tokenizer.chat_template):
        return {"enable_thinking": enable_thinking}
    if not enable_thinking and single_token(tokenizer, THINK_END) is not None:
        notes.append("the chat template cannot switch thinking off (no enable_thinking in it): the model may think")
    return {}


def _check_tools(template: str) -> None:
    """Raises if a model takes no tools, or makes calls in another form than is read here."""
    if "tools" not in template:
        raise UserError("the chat template of this model takes no tools: leave tools out, or use another model")
    if CALL not in template or "<function=" in template:  # the latter stands for XML inside the same tags
        raise UserError(f"this model does not write calls of tools as JSON in {CALL} tags, which alone is read: leave "
                        "tools out, or use another model")  # fmt: skip


def _render(tokenizer: Tokenizer, messages: list[ChatMessage], options: dict[str, object]) -> str:
    """Renders a prompt. Templates without a system role raise or skip that message: then the first user turn has it."""
    from jinja2 import TemplateError

    systems = [message["content"].strip() for message in messages if message["role"] == "system"]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        if all(system in text for system in systems):
            return text
    except TemplateError as error:
        if not systems:
            raise UserError(f"the chat template refuses these messages ({error}): {messages}") from error
    return _render(tokenizer, _fold_system(messages), options)


def _fold_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    systems = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    first = next(index for index, message in enumerate(rest) if message["role"] == "user")
    folded = ChatMessage(role="user", content="\n\n".join([*systems, rest[first]["content"]]))
    return [*rest[:first], folded, *rest[first + 1 :]]


# What begins an answer of each kind, the first that the vocabulary can write.
STEMS = {
    AnswerKind.BOXED: ("\n\nThe final answer is \\boxed{", "\n\\boxed{"),
    AnswerKind.NUMBER: ("\n\nThe final answer is \\boxed{", "\n\\boxed{"),
    AnswerKind.CHOICE: ("\n\nThe answer is (",),
    AnswerKind.TEXT: ("\n\nThe answer is: ",),
    AnswerKind.JSON: ("\n\n{",),
}


def ends_of(tokenizer: Tokenizer, kind: AnswerKind, *, thinks: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that end the thinking and begin an answer, and those that only end it (none without it)."""
    token = single_token(tokenizer, THINK_END) if thinks else None
    end = () if token is None else (token,)
    for stem in (*STEMS[kind], "\n"):
        ids = tokenizer.encode(stem, add_special_tokens=False)
        if tokenizer.decode(ids) == stem:
            break
    return (*end, *ids), end


def stop_ids(tokenizer: Tokenizer, configured: Iterable[int] = ()) -> frozenset[int]:
    """Returns all ids that end a turn: the tokenizer's, those that the model's files name, and the usual ones."""
    # In the harmony format <|end|> only closes one channel, and the answer comes in the next.
    is_harmony = single_token(tokenizer, HARMONY_CHANNEL) is not None
    names = [name for name in END_OF_TURN if not (is_harmony and name == "<|end|>")]
    found = [tokenizer.eos_token_id, *configured, *(single_token(tokenizer, name) for name in names)]
    return frozenset(index for index in found if index is not None)

"""Builders of small things the tests share; never needs a network or files outside the repository."""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "so",
    "we",
    "have",
    "the",
    "sum",
    "of",
    "two",
    "numbers",
    "then",
    "let",
    "us",
    "check",
    "if",
    "x",
    "is",
    "answer",
)
SPECIAL_TOKENS = ("<eos>", "<pad>", "<|im_start|>", "<|im_end|>")
THINK_TAGS = ("<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def tiny_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, think_tags: bool = True, more_special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    r"""A byte-level BPE of 512 ids in which "\n\n" is one token."""
    rng = random.Random(0)
    text = [" ".join(rng.choices(WORDS, k=12)) + ".\n\n" for _ in range(200)] + [str(i) for i in range(100)]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\n\n|\s?\w+|[^\w\s]|\s"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL_TOKENS, *(THINK_TAGS if think_tags else ()), *more_special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    wrapped.chat_template = chat_template
    return wrapped


def tiny_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece conventions: the newline is the byte token <0x0A>, a space is ▁."""
    tokens = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", ".\n\n"]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")

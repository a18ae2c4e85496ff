"""A tiny random Qwen3 whose traces are short, cut into many thoughts and sometimes boxed; made in the tests."""

import copy
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
SPECIAL = ["<eos>", "<pad>", "<unk>", "<think>", "</think>"]
# Many boundary ids of several kinds: a random model then ends a thought every few tokens.
BREAKS = ["\n\n", ".\n\n", "!\n\n", "?\n\n", "\n", ":\n\n", ";\n\n"]
PLAIN = [*"abcdefgh0123456789 =+-*", "\\boxed{7}", "\\boxed{8}"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Word level: one id per piece, text and ids in bijection."""
    pieces = [*SPECIAL, *BREAKS, *PLAIN]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    split = "|".join(__import__("re").escape(p) for p in sorted(BREAKS + PLAIN, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(__import__("tokenizers").Regex(split), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<think>", "</think>"],
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    return wrapped


def tiny_config(**changes: object) -> Qwen3Config:
    tokenizer = tiny_tokenizer()
    options = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    return Qwen3Config(**{**options, **changes})


def livened(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights: logits that differ enough for greedy and sampled traces to have a will of their own."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return model.float().eval()


def tiny_model(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return livened(Qwen3ForCausalLM(tiny_config(**changes)))


def save_tiny(folder: Path, seed: int = 0) -> Path:
    """A folder that `--model` takes."""
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def copied(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """With a config of its own: exchanging the attention of one must not touch the other."""
    twin = type(model)(copy.deepcopy(model.config))
    twin.load_state_dict(model.state_dict())
    return twin.to(model.dtype).eval()


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


def word_tokenizer(
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


def save_worded(folder: Path, seed: int = 0) -> Path:
    """As `save_tiny`, with a vocabulary that can write everything."""
    tokenizer = word_tokenizer()
    tiny_model(seed, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

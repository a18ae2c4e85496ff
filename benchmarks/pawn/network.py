"""Pawn's architecture and tokenizer as Hugging Face objects: a stock Qwen3 at small size."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pawn.vocabulary import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    ID,
    OPERATORS,
    PAD,
    PIECE,
    THINK,
    UNKNOWN,
    USER,
    VOCABULARY,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

MAX_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the network. Few, small key-value heads keep the cache small, which bounds decoding on a CPU."""

    num_layers: int = 8
    hidden_size: int = 256
    intermediate_size: int = 704
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 32


TINY_SHAPE = Shape(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_size=16)


def build_model(shape: Shape) -> "Qwen3ForCausalLM":
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=ID[PAD],
        bos_token_id=None,
        eos_token_id=ID[END],
    )
    return Qwen3ForCausalLM(config)


def take_over(model: "Qwen3ForCausalLM", folder: Path) -> None:
    """Starts from the weights of another pawn, whose vocabulary is the beginning of this one's."""
    from transformers import Qwen3ForCausalLM

    own, earlier = model.state_dict(), Qwen3ForCausalLM.from_pretrained(folder).state_dict()
    for name, weights in earlier.items():
        own[name][: len(weights)] = weights


def build_tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(ID), unk_token=UNKNOWN))
    # Puzzles typed with other spacing become the canonical text, which the normalizer leaves alone.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(rf" *{'[' + op.strip() + ']'} *"), op) for op in OPERATORS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE.pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (PAD, END, UNKNOWN, USER, ASSISTANT)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (THINK, "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )

"""Makes a tiny random model on which a visit can be tried out on a CPU: it names answers of the problems at random.

python -m benchmarks.long_chains.tiny FOLDER [SPEC:SPLIT …]

Its tokenizer is a byte-level BPE with a token for a box of the answer of each split's first problems, so that some
traces are right. It comes with a scorer of random weights, `FOLDER.scorer.safetensors`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from benchmarks.long_chains.problems import generate, prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gambit.chains import SPLITS

SPECS = ("chains:24", "moves:2", "moves:3")
NUM_PROBLEMS = 3  # of each split: the first ones
END = "<eos>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
HIDDEN = 64


def boxes(specs: list[str]) -> list[str]:
    found = []
    for spec in specs:
        for split in SPLITS:
            found += [rf"\boxed{{{row['answer']}}}" for row in generate(spec, split, NUM_PROBLEMS)]
    return sorted(set(found))


def tokenizer(answers: list[str], texts: list[str]) -> PreTrainedTokenizerFast:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(texts, trainer)
    found.add_tokens(answers)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END, pad_token=END)
    wrapped.chat_template = TEMPLATE
    return wrapped


def model(words: PreTrainedTokenizerFast, answers: list[str]) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(words), hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=False,
        eos_token_id=words.eos_token_id, pad_token_id=words.eos_token_id, bos_token_id=None,
    ))  # fmt: skip
    with torch.no_grad():
        # Logits of boxes, ends and new lines vary more than others, so that these are often the likeliest.
        made.lm_head.weight.mul_(6.0)
        often = [*words.convert_tokens_to_ids(answers), words.eos_token_id]
        made.lm_head.weight[torch.tensor(often)] *= 2.0
        made.lm_head.weight[words.convert_tokens_to_ids("Ċ")] *= 6.0
    return made.float().eval()


def random_scorer(folder: Path) -> None:
    from gambit.config.trust import ScorerTrust
    from gambit.scorers.base import ScorerInfo
    from gambit.scorers.checkpoint import save_checkpoint
    from gambit.scorers.mlp import MlpScorer

    shapes = ((16, HIDDEN), (16,), (1, 16), (1,))
    weights = [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]
    info = ScorerInfo("mlp", hidden_size=HIDDEN, layers=(2,), boundary_rule="line")
    trust = ScorerTrust(auc=(0.7, 0.75, 0.8, 0.85), num_problems=100, source="none: random weights", median_tokens=60.0)
    save_checkpoint(
        MlpScorer(info, tuple(weights)), folder.with_suffix(".scorer.safetensors"), {"trust": trust.to_json()}
    )


def main() -> None:
    folder, specs = Path(sys.argv[1]), sys.argv[2:] or list(SPECS)
    answers = boxes(specs)
    texts = [prompt(row["question"]) for spec in specs for row in generate(spec, "train", 60)]
    random.seed(0)
    words = tokenizer(answers, texts)
    words.save_pretrained(folder)
    model(words, answers).save_pretrained(folder)
    random_scorer(folder)
    print(f"{folder}: {len(words)} tokens, {len(answers)} of them boxes")


if __name__ == "__main__":
    main()

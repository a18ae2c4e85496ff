"""Makes a transformers folder of a GGUF file, on all cores: seconds where transformers itself takes minutes.

    python benchmarks/gguf_model.py model.gguf OUT                      # all of it
    python benchmarks/gguf_model.py model.gguf OUT --only description   # configuration and tokenizer

Numbers are those that transformers makes of the file: dequantised to float32, then rounded to bfloat16. For models
whose GGUF holds tensors as they are (Qwen2, Qwen3); Llama's are permuted there and refused. Needs gguf, torch,
transformers.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = {"qwen2", "qwen3"}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
READERS: list[Any] = []  # of the one file, open in every process


def name_of(tensor: str) -> str:
    """Returns transformers' name of a tensor; raises KeyError for one that these models do not have."""
    *path, kind = tensor.split(".")
    if path[0] == "blk":
        return f"model.layers.{path[1]}.{INNER[path[2]]}.{kind}"
    return f"{OUTER[path[0]]}.{kind}"


def dequantised(number: int) -> tuple[str, torch.Tensor]:
    from gguf.quants import dequantize

    torch.set_num_threads(1)  # every core has a tensor of its own
    tensor = READERS[0].tensors[number]
    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    return name_of(tensor.name), values.to(torch.bfloat16)


def write_tensors(file: Path, out: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)  # takes seconds, most of them for the vocabulary: forked processes have it already
    READERS.append(reader)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    if architecture not in ARCHITECTURES:
        raise SystemExit(f"{file} is a {architecture}: only {', '.join(sorted(ARCHITECTURES))} are converted here")
    largest_first = sorted(range(len(reader.tensors)), key=lambda number: -reader.tensors[number].n_elements)
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        tensors = dict(pool.map(dequantised, largest_first))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def write_description(file: Path, out: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    config = AutoConfig.from_pretrained(**where)
    config.dtype = torch.bfloat16
    config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
    config.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=["description", "tensors"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only != "tensors" and not (options.out / "config.json").is_file():
        write_description(options.file, options.out)
    if options.only != "description":
        write_tensors(options.file, options.out)


if __name__ == "__main__":
    main()

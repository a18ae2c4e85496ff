"""LoRA adapters of the tiny model, as peft writes them."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from support.tiny import copied, tiny_model


def save_adapter(folder: Path, seed: int = 3, rank: int = 4) -> str:
    """Saves random matrices that change what the model says."""
    model = copied(tiny_model())
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=32, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    return str(folder)


def merged(folder: str):
    """The tiny model with an adapter in its weights."""
    return PeftModel.from_pretrained(copied(tiny_model()), folder).merge_and_unload().eval()

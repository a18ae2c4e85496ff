"""Tiny checkpoints in the formats in which quantised weights come, and the weights that they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.tiny import tiny_model, tiny_tokenizer

GROUP = 32  # weights of one scale
PER_INT = 8  # of four bits
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in an integer
LARGEST_FP8 = 448.0
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HIDDEN = 128
Tensors = dict[str, torch.Tensor]


def grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes of 0 to 15 as [in, out], scales as [groups, out], and the weights that they stand for."""
    num_out, num_in = weight.shape
    groups = weight.T.reshape(num_in // GROUP, GROUP, num_out)
    scales = (groups.abs().amax(1) / 7).clamp(min=1e-6).half()
    whole = (groups / scales.float()[:, None]).round().clamp(-8, 7)
    stands_for = (whole * scales.float()[:, None]).reshape(num_in, num_out).T
    return (whole.reshape(num_in, num_out) + 8).long(), scales, stands_for


def packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(PER_INT))) -> torch.Tensor:
    """Packs every eight columns into one integer."""
    found = sum(codes[:, place::PER_INT] << (4 * bits) for bits, place in enumerate(order))
    return torch.where(found >= 2**31, found - 2**32, found).int()


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, stands_for = grouped(weight)
    zeros = torch.full(scales.shape, 7).long()  # one less than the zero, as GPTQ has it
    places = (torch.arange(len(codes)) // GROUP).int()
    return {"qweight": packed(codes.T).T, "qzeros": packed(zeros), "scales": scales, "g_idx": places}, stands_for


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, stands_for = grouped(weight)
    zeros = packed(torch.full(scales.shape, 8).long(), AWQ_ORDER)
    return {"qweight": packed(codes, AWQ_ORDER), "qzeros": zeros, "scales": scales}, stands_for


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().max() / LARGEST_FP8).float()
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


@dataclass(frozen=True)
class Format:
    """A way to store the weights of linear layers."""

    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    config: dict[str, object]


FOUR_BITS = {"bits": 4, "group_size": GROUP}
FORMATS = {
    "gptq": Format(gptq, {"quant_method": "gptq", **FOUR_BITS, "desc_act": False, "sym": True, "lm_head": False}),
    "awq": Format(awq, {"quant_method": "awq", **FOUR_BITS, "zero_point": True, "version": "gemm"}),
    "fp8": Format(fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}


def save_quantised(name: str, folder: Path) -> torch.nn.Module:
    """Saves a tiny model in a format; returns it with the weights that the checkpoint stands for."""
    model = tiny_model(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    stored: Tensors = {}
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if key.endswith(".weight") and key.split(".")[-2] in LINEAR:
                tensors, stands_for = FORMATS[name].quantise(weight)
                stored |= {key.removesuffix("weight") + each: tensor.contiguous() for each, tensor in tensors.items()}
                weight.copy_(stands_for)
            else:
                stored[key] = weight.clone()
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": FORMATS[name].config, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    return model

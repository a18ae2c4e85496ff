"""Quantised weights on a GPU: tiny checkpoints of each format, FP8 on the fly, and the kernels that ran.

    PYTHONPATH=src VLLM_USE_FLASHINFER_SAMPLER=0 python benchmarks/quantised_check.py --out OUT.json     # one GPU

Each is loaded by vLLM, passes the engine's self-check, and writes a greedy trace that is compared with the weights that
the checkpoint stands for. On a CPU, for debugging, formats without kernels there report why.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from support.engine_setups import (  # noqa: E402
    GREEDY,
    PROMPT,
    finish,
    open_search,
    random_mlp,
    spec,
    start_own_vllm,
    tokens_of,
    worker_of,
)
from support.quantised import FORMATS, HIDDEN, save_quantised  # noqa: E402
from support.tiny import save_tiny, tiny_model  # noqa: E402

TOKENS = 60
ON_THE_FLY = "fp8 on the fly"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default=",".join([*FORMATS, ON_THE_FLY]))
    args = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"}
    for name in args.formats.split(","):
        try:
            found[name] = checked(name)
        except Exception as error:  # one format without kernels must not cost the others
            found[name] = {"error": str(error).partition("\n")[0][:300]}
        print(name, json.dumps(found[name]), flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def checked(name: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    options: dict[str, object] = {"self_check": True}
    if name == ON_THE_FLY:
        model = tiny_model(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN)
        save_tiny(folder)
        model.save_pretrained(folder)
        options["quantization"] = "fp8"
    else:
        model = save_quantised(name, folder)
    engine = start_own_vllm(random_mlp(HIDDEN), model=folder, dtype="float16", memory_ratio=0.1, **options)
    try:
        modules = worker_of(engine).model_runner.get_model().modules()
        open_search(engine, stops=())
        engine.submit([spec(0, sampling=GREEDY, tokens=TOKENS)])
        tokens = tokens_of(finish(engine))[0]
        return {"kernels": dict(Counter(filter(None, map(kernel_of, modules)))), **compared(model, tokens)}
    finally:
        engine.close()


def kernel_of(module: torch.nn.Module) -> str | None:
    """Returns the method of a quantised layer, and the kernel behind it where vLLM names one."""
    method = getattr(module, "quant_method", None)
    if method is None or "Unquantized" in type(method).__name__:
        return None
    kernel = next((each for name, each in vars(method).items() if "kernel" in name or name == "fp8_linear"), None)
    return type(method).__name__ + ("" if kernel is None else f": {type(kernel).__name__}")


def compared(model: torch.nn.Module, tokens: tuple[int, ...]) -> dict[str, float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0][len(PROMPT) - 1 : -1]
    chosen = logits[torch.arange(len(tokens)), list(tokens)]
    return {
        "tokens that are the best": int((logits.argmax(-1) == torch.tensor(tokens)).sum()), "of": len(tokens),
        "most behind the best": round(float((logits.max(-1).values - chosen).max() / logits.abs().max()), 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()

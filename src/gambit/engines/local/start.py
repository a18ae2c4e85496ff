"""Starts the embedded engine from a config."""

from __future__ import annotations

from gambit.config.options import EngineConfig
from gambit.engines.local.engine import LocalEngine
from gambit.engines.local.model import load_model
from gambit.scorers.base import Scorer


def start_local(config: EngineConfig, model: str, scorer: Scorer) -> LocalEngine:
    """`model` is what transformers can load: a folder or a hub name."""
    pool_model, tokenizer = load_model(model, config.device, config.dtype)
    return LocalEngine(
        pool_model,
        tokenizer,
        scorer,
        kv_budget_tokens=config.kv_budget_tokens,
        memory_ratio=config.memory_ratio,
    )

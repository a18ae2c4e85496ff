"""vLLM's configuration object: built from options, and read where Gambit needs one of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext

from gambit.engines.base import EngineInfo
from gambit.engines.vllm.messages import GambitConfig

VERSION: str = vllm.__version__.partition("+")[0]


def device_type() -> str:
    """What this vLLM is built for: "cpu" or "cuda"."""
    return str(current_platform.device_type)


class EngineSetup:
    """A vLLM engine that is about to be started, by its config."""

    def __init__(self, options: Mapping[str, Any], kv_budget_tokens: int | None) -> None:
        self.raw = _build(options, kv_budget_tokens)

    @property
    def gambit(self) -> GambitConfig:
        return self.raw.additional_config

    def use_vllm_noise(self) -> None:
        self.raw.additional_config = replace(self.gambit, exact_noise=False)

    @property
    def has_seeded_noise(self) -> bool:
        """Whether vLLM's sampler makes its noise from a request's seed and position: model runner V2 does."""
        return has_model_runner_v2(self.raw)

    @property
    def architecture(self) -> str:
        return str(self.raw.model_config.architecture)

    @property
    def num_layers(self) -> int:
        return num_layers(self.raw)

    @property
    def vocab_size(self) -> int:
        return int(self.raw.model_config.get_vocab_size())

    @property
    def gives_inner_states(self) -> bool:
        """Whether vLLM can have this model return states of inner layers: it does so for EAGLE-3's drafts."""
        return supports_eagle3(get_model_cls(self.raw.model_config))

    def info(self, model: str, versions: Mapping[str, str]) -> EngineInfo:
        """Once the engine has started: only then vLLM knows how many blocks there are."""
        config, block_tokens = self.raw, int(self.raw.cache_config.block_size)
        return EngineInfo(
            name="vllm",
            model=model,
            device=str(config.device_config.device_type),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            hidden_size=int(config.model_config.get_hidden_size()),
            context_tokens=int(config.model_config.max_model_len),
            kv_capacity_tokens=num_blocks(config) * block_tokens,
            block_tokens=block_tokens,
            versions={"vllm": VERSION, **versions},
            most_traces=int(config.scheduler_config.max_num_seqs),
            most_traces_option="max_num_seqs",
        )


def _build(options: Mapping[str, Any], kv_budget_tokens: int | None) -> Any:
    # As vLLM's own offline class: its defaults for other uses are 128 sequences and 2,048 tokens a step.
    config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    if options.get("async_scheduling"):
        config.scheduler_config.async_scheduling = True  # vLLM switches it off on a CPU
    if kv_budget_tokens is not None:
        # vLLM refuses to start with a cache below one whole context; the scheduler holds back what is over the budget.
        tokens = max(kv_budget_tokens, config.model_config.max_model_len)
        config.cache_config.num_gpu_blocks_override = -(-tokens // config.cache_config.block_size) + 1
    return config


def num_blocks(config: Any) -> int:
    """Those that traces may use: the first block is a placeholder, and a smaller budget leaves some unused."""
    blocks = int(config.cache_config.num_gpu_blocks) - 1
    budget = config.additional_config.kv_budget_tokens
    return blocks if budget is None else min(blocks, budget // config.cache_config.block_size)


def has_model_runner_v2(config: Any) -> bool:
    return bool(getattr(config, "use_v2_model_runner", False))


def num_layers(config: Any) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def sampling_params(temperature: float, top_p: float, top_k: int, min_p: float, stop_ids: tuple[int, ...]) -> Any:
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # `stop_ids` has them all
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

"""vLLM as a pooling engine: the hidden state of each sequence's last token, with prefix caching."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry, PoolingParams
from vllm.config import PoolerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from gambit.engines.vllm.compat.core import new_request, start_client

HEADLESS = "GambitHeadless"
HEADS = ("score.", "v_head.", "lm_head.", "classifier.")  # of verifiers: applied to the states afterwards
TASK = "embed"


class StatePooler:
    """Computes states of last tokens without a model's own head, so that every architecture with a causal LM works.

    It uses vLLM's engine core, because its `LLM` needs a tokenizer even for token ids.
    """

    def __init__(self, folder: str, model_type: str, options: dict[str, Any]) -> None:
        _register_headless(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        arguments = EngineArgs(
            model=folder, runner="pooling", convert="embed",
            hf_overrides={"architectures": [HEADLESS], "auto_map": {}},
            pooler_config=PoolerConfig(task=TASK, pooling_type="LAST"), skip_tokenizer_init=True,
            enable_prefix_caching=True, use_tqdm_on_load=False, disable_log_stats=True, **options,
        )  # fmt: skip
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        if not config.cache_config.enable_prefix_caching:
            raise ValueError("vLLM has no prefix caching for this model: every thought would be read from the start")
        self._core = start_client(config, own_process=False)
        self._params = PoolingParams(task=TASK, use_activation=False)  # a unit vector otherwise
        self._params.verify(config.model_config)
        self._num_requests = 0
        self.max_tokens = int(config.model_config.max_model_len)

    def states(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[int]]:
        """Returns [n, hidden] in float32, and how many tokens were computed for each."""
        requests = []
        for tokens in sequences:
            self._num_requests += 1
            requests.append(str(self._num_requests))
            params = self._params.clone()
            self._core.add_request(new_request(requests[-1], list(tokens), self._num_requests, pooling_params=params))
        found: dict[str, tuple[torch.Tensor, int]] = {}
        while len(found) < len(requests):
            for output in self._core.get_output().outputs:
                if output.pooling_output is None:
                    raise RuntimeError(f"vLLM gave up a reading ({output.finish_reason})")
                state = output.pooling_output.float().cpu()
                found[output.request_id] = state, int(output.prefill_stats.num_computed_tokens)
        states, counts = zip(*(found[request] for request in requests), strict=True)
        return torch.stack(states), list(counts)


def _register_headless(architecture: str) -> None:
    """Registers the causal LM with that name as one that passes over the weights of heads it does not have."""
    base = ModelRegistry.models[architecture].load_model_cls()

    class GambitHeadless(base):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            return super().load_weights((name, each) for name, each in weights if not name.startswith(HEADS))

    ModelRegistry.register_model(HEADLESS, GambitHeadless)

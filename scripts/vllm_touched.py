"""The names of vLLM that Gambit uses, by class: which it calls, overrides, reads or sets, in which versions.

tests/engines/test_vllm_names.py compares this list with `engines/vllm/compat` and with the installed vLLM;
scripts/vllm_names.py checks it against the source of another version and writes it to docs/vllm-internals.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

VERSIONS = ("0.25.1", "0.27.0", "0.32.0", "0.33.0")
# Names that not every version has; the code that uses them checks for them first.
ONLY_IN = {
    "Request.async_tokens_to_discard": ("0.25.1",),
    "CacheConfig.prefix_cache_retention_interval": ("0.32.0", "0.33.0"),
    "Request.num_in_flight_tokens": ("0.27.0", "0.32.0", "0.33.0"),
    "Request.num_stale_output_tokens": ("0.27.0", "0.32.0", "0.33.0"),
    "Scheduler.aux_output_connector": ("0.32.0", "0.33.0"),
    "Scheduler.enable_return_routed_experts": ("0.25.1", "0.27.0"),
    "Scheduler.max_num_active_reqs": ("0.32.0", "0.33.0"),
    "SingleTypeKVCacheManager._record_new_block_ids": ("0.27.0", "0.32.0", "0.33.0"),
}


# Overridden in a subclass; replaced on an instance, by a function or an object that passes calls on.
Use = Literal["imported", "called", "overridden", "replaced", "read", "set"]


@dataclass(frozen=True, slots=True)
class Touched:
    """Names of one class, or of a module, as words in a string."""

    module: str
    owner: str = ""  # empty: the module itself
    is_imported: bool = False  # the class itself, by its name
    imported: str = ""
    called: str = ""
    overridden: str = ""
    replaced: str = ""
    read: str = ""
    set: str = ""

    def uses(self) -> Iterator[tuple[str, Use]]:
        if self.is_imported:
            yield self.owner, "imported"
        for use in get_args(Use):
            for name in getattr(self, use).split():
                yield name, use

    def versions(self, name: str) -> tuple[str, ...]:
        """Returns the versions that have a name; one that is not listed is taken to be like the newest."""
        return ONLY_IN.get(f"{self.owner}.{name}", VERSIONS)


TOUCHED = (
    # -- start and configuration
    Touched("vllm", imported="ModelRegistry PoolingParams SamplingParams"),
    Touched("vllm.sampling_params", "RequestOutputKind", is_imported=True, read="DELTA"),
    Touched(
        "vllm.sampling_params", "SamplingParams",
        read="extra_args min_tokens repetition_detection stop_token_ids eos_token_id", set="extra_args max_tokens seed",
    ),
    Touched("vllm.pooling_params", "PoolingParams", called="clone verify"),
    Touched("vllm.engine.arg_utils", "EngineArgs", is_imported=True, called="create_engine_config"),
    Touched("vllm.usage.usage_lib", "UsageContext", is_imported=True, read="LLM_CLASS"),
    Touched("vllm.platforms", imported="current_platform"),
    Touched(
        "vllm.platforms.interface", "Platform", called="is_cpu is_cuda is_device_capability_family", read="device_type"
    ),
    Touched("vllm.envs", imported="disable_envs_cache"),
    Touched("vllm.lora.request", imported="LoRARequest"),
    Touched("vllm.model_executor.model_loader.utils", imported="get_model_cls"),
    Touched("vllm.model_executor.models.interfaces", imported="supports_eagle3"),
    Touched("vllm.model_executor.models.interfaces", "SupportsEagle3", called="set_aux_hidden_state_layers"),
    Touched("vllm.model_executor.models.interfaces_base", "VllmModelForTextGeneration", called="compute_logits"),
    Touched("vllm.model_executor.models.registry", "_ModelRegistry", called="register_model", read="models"),
    Touched("vllm.model_executor.models.registry", "_BaseRegisteredModel", called="load_model_cls"),
    Touched("vllm.triton_utils", imported="HAS_TRITON tl triton"),
    Touched("vllm.utils.torch_utils", imported="get_accelerator_view_from_cpu_tensor"),
    Touched(
        "vllm.config.vllm", "VllmConfig",
        read="additional_config cache_config compilation_config device_config model_config scheduler_config "
             "use_v2_model_runner",
        set="additional_config",
    ),
    Touched(
        "vllm.config.cache", "CacheConfig",
        read="block_size enable_prefix_caching num_gpu_blocks prefix_cache_retention_interval",
        set="num_gpu_blocks_override prefix_cache_retention_interval",
    ),
    Touched("vllm.config", imported="PoolerConfig"),
    Touched("vllm.config.device", "DeviceConfig", read="device_type"),
    Touched("vllm.config.scheduler", "SchedulerConfig", read="max_num_seqs", set="async_scheduling"),
    Touched(
        "vllm.config.model", "ModelConfig", called="get_hidden_size get_sliding_window get_vocab_size",
        read="architecture dtype enforce_eager hf_text_config is_hybrid max_model_len model",
    ),
    Touched("vllm.config.compilation", "CUDAGraphMode", is_imported=True, read="FULL"),
    Touched("vllm.config.compilation", "CompilationConfig", read="static_forward_context"),
    # -- the engine core
    Touched("vllm.v1.executor.abstract", "Executor", is_imported=True, called="get_class shutdown"),
    Touched("vllm.v1.engine", imported="EngineCoreOutput EngineCoreOutputs EngineCoreRequest FinishReason"),
    Touched(
        "vllm.v1.engine", "EngineCoreOutput",
        read="finish_reason kv_transfer_params new_token_ids pooling_output prefill_stats request_id",
    ),
    Touched("vllm.v1.engine", "EngineCoreOutputs", read="outputs"),
    Touched("vllm.v1.metrics.stats", "PrefillStats", read="num_computed_tokens"),
    Touched("vllm.v1.engine", "FinishReason", read="LENGTH STOP"),
    Touched("vllm.v1.engine.core", "EngineCore", read="model_executor"),
    Touched(
        "vllm.v1.engine.core_client", "EngineCoreClient", is_imported=True,
        called="abort_requests add_request get_output make_client shutdown",
    ),
    Touched("vllm.v1.engine.core_client", "InprocClient", read="engine_core"),
    Touched("vllm.v1.engine.core_client", "MPClient", read="_finalizer resources"),
    Touched("vllm.v1.engine.core_client", "SyncMPClient", read="outputs_queue"),
    Touched("vllm.v1.engine.core_client", "BackgroundResources", read="engine_dead"),
    # -- the scheduler
    Touched("vllm.v1.core.sched.async_scheduler", imported="AsyncScheduler"),
    Touched(
        "vllm.v1.core.sched.scheduler", "Scheduler", is_imported=True,
        overridden="__init__ _free_request _preempt_request add_request finish_requests schedule update_from_output",
        called="_free_request finish_requests get_num_unfinished_requests",
        replaced="_make_cached_request_data _update_after_schedule",
        read="aux_output_connector block_size cache_config connector current_step defer_block_free ec_connector "
             "enable_return_routed_experts kv_cache_config "
             "kv_cache_manager lora_config max_model_len max_num_active_reqs max_num_running_reqs "
             "max_num_scheduled_tokens num_lookahead_tokens num_spec_tokens prev_step_scheduled_req_ids requests "
             "running structured_output_manager use_pp use_v2_model_runner vllm_config",
        set="max_num_active_reqs max_num_running_reqs max_num_scheduled_tokens running",
    ),
    Touched("vllm.v1.request", "RequestStatus", is_imported=True, read="FINISHED_ABORTED RUNNING"),
    Touched(
        "vllm.v1.request", "Request", called="update_block_hashes",
        read="_all_token_ids _output_token_ids async_tokens_to_discard is_prefill_chunk max_tokens num_computed_tokens "
             "num_in_flight_tokens num_output_placeholders num_prompt_tokens num_stale_output_tokens num_tokens "
             "priority prompt_token_ids request_id sampling_params status structured_output_request "
             "use_structured_output",
        set="next_decode_eligible_step num_computed_tokens num_in_flight_tokens num_output_placeholders priority "
            "status structured_output_request",
    ),
    Touched("vllm.v1.structured_output", "StructuredOutputManager", set="backend"),
    Touched("vllm.v1.structured_output.request", "StructuredOutputRequest", is_imported=True, set="grammar"),
    Touched(
        "vllm.v1.core.sched.output", "SchedulerOutput",
        read="finished_req_ids new_block_ids_to_zero num_common_prefix_blocks num_scheduled_tokens "
             "scheduled_cached_reqs scheduled_new_reqs total_num_scheduled_tokens",
        set="num_common_prefix_blocks num_scheduled_tokens total_num_scheduled_tokens",
    ),
    Touched(
        "vllm.v1.core.sched.output", "NewRequestData",
        read="block_ids num_computed_tokens req_id sampling_params", set="num_computed_tokens",
    ),
    Touched(
        "vllm.v1.core.sched.output", "CachedRequestData",
        read="new_block_ids num_computed_tokens num_output_tokens req_ids resumed_req_ids",
        set="new_block_ids num_computed_tokens num_output_tokens req_ids",
    ),
    # -- KV blocks
    Touched("vllm.v1.kv_cache_interface", imported="FullAttentionSpec"),
    Touched("vllm.v1.kv_cache_interface", "KVCacheConfig", read="kv_cache_groups num_blocks"),
    Touched("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", read="kv_cache_spec"),
    Touched(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager", called="get_num_common_prefix_blocks",
        replaced="allocate_slots", read="block_pool cache_blocks coordinator empty_kv_cache_blocks",
    ),
    Touched(
        "vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", called="get_blocks", read="single_type_managers"
    ),
    Touched(
        "vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager",
        read="_record_new_block_ids block_pool new_block_ids req_to_blocks", set="new_block_ids",
    ),
    Touched("vllm.v1.core.block_pool", "BlockPool", called="get_new_blocks get_num_free_blocks"),
    Touched("vllm.v1.core.kv_cache_utils", "KVCacheBlock", read="block_id"),
    # -- attention
    Touched("vllm.v1.attention.backends.registry", imported="AttentionBackendEnum register_backend"),
    Touched("vllm.v1.attention.backends.registry", "AttentionBackendEnum", read="CUSTOM"),
    Touched("vllm.v1.attention.backend", "AttentionType", is_imported=True, read="DECODER"),
    Touched(
        "vllm.v1.attention.backend", "CommonAttentionMetadata",
        read="block_table_tensor max_query_len max_seq_len num_reqs seq_lens",
    ),
    Touched("vllm.v1.attention.backend", "AttentionMetadataBuilder", read="device kv_cache_spec layer_names"),
    Touched("vllm.v1.attention.backends.fa_utils", imported="get_flash_attn_version", called="flash_attn_varlen_func"),
    Touched(
        "vllm.v1.attention.backends.flash_attn",
        imported="FlashAttentionBackend FlashAttentionImpl FlashAttentionMetadataBuilder",
    ),
    Touched(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend",
        overridden="get_builder_cls get_impl_cls get_name",
    ),
    Touched(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder", overridden="build",
        read="headdim num_heads_kv num_heads_q",
    ),
    Touched(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl", overridden="__init__ forward",
        read="alibi_slopes attn_type head_size kv_cache_dtype logits_soft_cap scale sinks sliding_window "
             "vllm_flash_attn_version",
    ),
    Touched("vllm.v1.kv_cache_interface", "KVCacheSpec", read="block_size page_size_bytes"),
    Touched("vllm.v1.kv_cache_interface", "AttentionSpec", read="dtype"),
    Touched("vllm.model_executor.layers.attention.attention", "Attention", read="impl"),
    Touched("vllm.v1.worker.utils", "AttentionGroup", called="get_metadata_builder"),
    Touched("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", replaced="dispatch"),
    Touched("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager", replaced="_capture_descs dispatch graphs"),
    Touched("vllm.v1.worker.gpu.cudagraph_utils", "BatchExecutionDescriptor", read="num_reqs uniform_token_count"),
    # -- the worker and its model runner, V1 and V2
    Touched("vllm.v1.worker.cpu_worker", imported="CPUWorker"),
    Touched(
        "vllm.v1.worker.gpu_worker", "Worker", is_imported=True,
        overridden="compile_or_warm_up_model execute_model load_model sample_tokens", read="model_runner",
    ),
    Touched("vllm.v1.worker.worker_base", "WorkerBase", read="device is_driver_worker model_config vllm_config"),
    Touched(
        "vllm.v1.outputs", "AsyncModelRunnerOutput", is_imported=True, called="get_output", overridden="get_output"
    ),
    Touched("vllm.v1.outputs", "ModelRunnerOutput", is_imported=True, read="req_id_to_index req_ids sampled_token_ids"),
    Touched(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", called="get_model", replaced="sampler",
        read="attn_groups cudagraph_dispatcher execute_model_state input_batch kv_cache_config kv_caches model "
             "query_start_loc vllm_config",
        set="use_aux_hidden_state_outputs",
    ),
    Touched(
        "vllm.v1.worker.gpu_model_runner", "ExecuteModelState",
        read="aux_hidden_states hidden_states sample_hidden_states",
    ),
    Touched("vllm.v1.worker.gpu_input_batch", "InputBatch", read="req_ids"),
    Touched("vllm.v1.utils", "CpuGpuBuffer", read="gpu"),
    Touched(
        "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", called="capture_model get_model", replaced="sampler",
        read="attn_groups cudagraph_manager execute_model_state kv_cache_config kv_caches model vllm_config",
        set="use_aux_hidden_state_outputs",
    ),
    Touched("vllm.v1.worker.gpu.model_runner", "ExecuteModelState", read="aux_hidden_states hidden_states input_batch"),
    Touched("vllm.v1.worker.gpu.input_batch", "InputBatch", read="logits_indices req_ids"),
)  # fmt: skip

"""The scenario: what a YAML file may say, with vLLM's names, as frozen pydantic models.

A model holds what is true of one value; what is true of several together is in `kvsim.scenario.sense`.
Nothing here imports an engine: `package.module:Name` stays a text until the scenario is run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from kvsim.scenario.fields import (
    Block,
    Bool,
    Count,
    CountOrZero,
    Custom,
    FolderName,
    Int,
    NotNegative,
    Number,
    Positive,
    PositiveSize,
    Seed,
    Size,
    Text,
    TimeNs,
    is_import_path,
)
from kvsim.scenario.words import did_you_mean
from kvsim.scenario.workload_schema import AnyWorkload, Workload

Engine: TypeAlias = Literal[
    "paged", "vllm-v0", "vllm-v1", "vllm-v1-async", "orca-max", "orca-pow2", "orca-oracle", "static", "no-evict"
]
ENGINES: tuple[Engine, ...] = get_args(Engine)

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8", "int8"]
CacheDtype: TypeAlias = Literal[
    "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8",
    "int4", "nvfp4", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "fp8_ds_mla",
]  # fmt: skip


def _choice_or_path(*choices: str) -> Any:
    """A built-in policy by name, or `package.module:name`."""

    def check(value: Any) -> str:
        if value in choices or is_import_path(value):
            return str(value)
        named = f"one of {', '.join(choices)}, or " if choices else ""
        raise ValueError(f"must be {named}package.module:name{did_you_mean(value, choices)}")

    path: dict[str, Any] = {"type": "string", "pattern": ":"}
    schema = {"anyOf": [{"enum": list(choices)}, path]} if choices else path
    return Annotated[str, BeforeValidator(check), WithJsonSchema(schema)]


class ModelGeometry(Block):
    """A model in full, in the words of Hugging Face's config.json."""

    num_hidden_layers: Annotated[Int, Field(ge=1, le=10_000)]
    """Layers that keep KV."""
    num_key_value_heads: Annotated[Int, Field(ge=1, le=100_000)] | None = None
    """KV heads (GQA, MQA); null: as many as attention heads."""
    head_dim: Annotated[Int, Field(ge=1, le=100_000)] | None = None
    """Elements per head; null: hidden_size / num_attention_heads."""
    dtype: Dtype = "float16"
    """Of weights, and of the KV cache unless kv_cache_dtype says otherwise."""
    num_attention_heads: Annotated[Int, Field(ge=1, le=100_000)] | None = None
    """Query heads."""
    hidden_size: Annotated[Int, Field(ge=1, le=10_000_000)] | None = None
    """Width of the model."""
    intermediate_size: Annotated[Int, Field(ge=1, le=10_000_000)] | None = None
    """Width of the MLP."""
    vocab_size: Count | None = None
    """Tokens of the vocabulary."""
    weight_bytes: PositiveSize | None = None
    """Size of the weights, to know what memory they leave; null: counted from the shapes."""
    max_position_embeddings: Count | None = None
    """Longest text: prompt and output together, where the scheduler sets no max_model_len."""
    model_type: Text | None = None
    """The family, to count weights."""
    sliding_window: Count | None = None
    """Of the model, to describe it; blocks are freed by allocator.sliding_window."""
    kv_lora_rank: Count | None = None
    """MLA: elements of the latent that replaces K and V."""
    qk_rope_head_dim: Count | None = None
    """MLA: elements of the rotary part beside it."""


class GpuSpec(Block):
    """A GPU in full."""

    memory: PositiveSize
    """Device memory."""
    name: Text | None = None
    """What the results call it."""


class Memory(Block):
    """How much KV cache there is: a share of the GPU, a size, or a number of blocks."""

    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1)] = 0.9
    """Share of the GPU for weights, activations and KV cache."""
    kv_cache_memory_bytes: PositiveSize | None = None
    """Size of the KV cache; overrides gpu_memory_utilization."""
    num_gpu_blocks_override: Annotated[Int, Field(ge=1, le=100_000_000)] | None = None
    """Blocks of the KV cache; overrides both."""
    swap_space: Size = 0
    """Host memory for swapped blocks, for each GPU."""
    num_cpu_blocks_override: Annotated[Int, Field(ge=0, le=100_000_000)] | None = None
    """Host blocks; overrides swap_space."""


class PagedMemory(Block):
    """On-demand blocks behind block tables."""

    type: Literal["paged"] = "paged"
    block_size: Annotated[Int, Field(ge=1, le=1_048_576)] = 16
    """Tokens per block."""
    watermark: Annotated[Number, Field(ge=0, lt=1)] = 0.01
    """Share of blocks, rounded down, that an admission must leave free; nothing while nobody runs."""
    enable_prefix_caching: Bool = False
    """Blocks keep their content when freed, and are found again by it."""
    free_list: Literal["fifo", "lifo", "lru", "exclusive_first"] = "fifo"
    """Which free block is handed out next."""
    sliding_window: Count | None = None
    """Tokens a sequence still reads, a multiple of block_size; excludes enable_prefix_caching. Blocks wholly outside
    are freed or reused. null: all."""
    null_block: Bool = False
    """Block 0 is set aside, as in today's vLLM."""


class ContiguousMemory(Block):
    """One region per sequence, taken whole at admission."""

    type: Literal["contiguous"]
    block_size: Annotated[Int, Field(ge=1, le=1_048_576)] = 16
    """Only turns a number of blocks into slots, so that every engine gets the same memory."""
    placement: Literal["buddy", "first_fit", "best_fit", "worst_fit"] = "buddy"
    """Which hole a region is taken from."""
    compaction: Literal["on_demand"] | None = None
    """Slides regions together when only a hole is missing; the engine pauses for it."""


class _Limits(Block):
    max_num_seqs: Annotated[Int, Field(ge=1, le=10_000_000)] = 256
    """Sequences that run at once."""
    max_num_batched_tokens: Count | None = None
    """Tokens computed in one step; null: no limit."""
    max_model_len: Count | None = None
    """Prompt and output together; null: the model's. A prompt that reaches it is rejected; an output ends there."""


class ContinuousScheduler(_Limits):
    """Iteration-level batching: the generic engine, over blocks or over contiguous reservations."""

    type: Literal["continuous"] = "continuous"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """First come first served, or by the requests' priorities."""
    preemption: _choice_or_path("recompute", "swap", "swap_forked") = "recompute"  # type: ignore[valid-type]
    """What happens to a victim's blocks; swap_forked: requests of several sequences are swapped, others recomputed."""
    enable_chunked_prefill: Bool = True
    """A prompt may be computed over several steps."""
    admission: Literal["full_prompt", "first_chunk"] = "full_prompt"
    """What must fit before a request is admitted."""
    prefill_first: Bool = False
    """Prompts are computed before decodes go on, in steps of their own."""
    long_prefill_token_threshold: CountOrZero = 0
    """Longest chunk of one prompt in a step, as long as another request is there; 0: no limit."""
    reservation: Literal["max", "pow2", "oracle"] | None = None
    """Contiguous memory only: slots set aside for a request."""
    victim: _choice_or_path("last_admitted", "least_urgent") | None = None  # type: ignore[valid-type]
    """Who is preempted when blocks run out; null: the policy's."""
    queue_order: _choice_or_path("by_priority") | None = None  # type: ignore[valid-type]
    """Sort key of the waiting queue; null: the policy's."""
    gate: _choice_or_path() | None = None  # type: ignore[valid-type]
    """A test of yours, asked before an admission."""


class StaticScheduler(_Limits):
    """Request-level batching: a batch's members are fixed until the longest ends."""

    type: Literal["static"]
    reservation: Literal["max", "pow2", "oracle"] = "max"
    """Slots set aside for a request."""


class NoEvictScheduler(_Limits):
    """Continuous batching that admits a request only if its longest outcome fits beside all promises."""

    type: Literal["no-evict"]
    scheduling_policy: _choice_or_path("fcfs", "priority") = "fcfs"  # type: ignore[valid-type]
    """Order of the queue."""
    enable_chunked_prefill: Bool = True
    """A prompt may be computed over several steps."""
    prefill_first: Bool = False
    """Prompts are computed before decodes go on, in steps of their own."""
    long_prefill_token_threshold: CountOrZero = 0
    """Longest chunk of one prompt in a step, as long as another request is there; 0: no limit."""


class VllmV0Scheduler(_Limits):
    """vLLM 0.2.7, by the authors of the PagedAttention paper: prompt steps apart from decode steps."""

    type: Literal["vllm-v0"]
    max_paddings: CountOrZero = 256
    """Padding tokens in one prompt step."""
    preemption: _choice_or_path("auto", "recompute", "swap") = "auto"  # type: ignore[valid-type]
    """auto: single sequences are recomputed, groups are swapped."""


class VllmV1Scheduler(_Limits):
    """Today's vLLM: one pass over running then waiting, chunked prefill, recompute only."""

    type: Literal["vllm-v1", "vllm-v1-async"]
    max_num_batched_tokens: Count = 8192
    """Tokens computed in one step."""
    scheduling_policy: _choice_or_path("fcfs", "priority") = "fcfs"  # type: ignore[valid-type]
    """Order of the queue."""
    enable_chunked_prefill: Bool = True
    """A prompt may be computed over several steps."""
    long_prefill_token_threshold: CountOrZero = 0
    """Longest chunk of one prompt in a step, as long as another request is there; 0: no limit."""
    scheduler_reserve_full_isl: Bool = True
    """A request is admitted only if its whole prompt fits, not just its first chunk."""
    max_loras: CountOrZero = 0
    """LoRA adapters in one batch; 0: no limit."""


def _tag_by_type(default: str) -> Any:
    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        if is_import_path(kind):
            return "custom"
        return kind if isinstance(kind, str) else None

    return tag


AnyAllocator: TypeAlias = Annotated[
    Annotated[PagedMemory, Tag("paged")]
    | Annotated[ContiguousMemory, Tag("contiguous")]
    | Annotated[Custom, Tag("custom")],
    Discriminator(_tag_by_type("paged")),
]
AnyScheduler: TypeAlias = Annotated[
    Annotated[ContinuousScheduler, Tag("continuous")]
    | Annotated[StaticScheduler, Tag("static")]
    | Annotated[NoEvictScheduler, Tag("no-evict")]
    | Annotated[VllmV0Scheduler, Tag("vllm-v0")]
    | Annotated[VllmV1Scheduler, Tag("vllm-v1")]
    | Annotated[VllmV1Scheduler, Tag("vllm-v1-async")]
    | Annotated[Custom, Tag("custom")],
    Discriminator(_tag_by_type("continuous")),
]


class LinearCostConfig(Block):
    """A step costs a constant and a price per token, whatever the model and the GPU; sources in the catalog."""

    type: Literal["linear"] = "linear"
    step_ms: NotNegative = 6.0
    """Milliseconds of every step."""
    prefill_token_us: NotNegative = 18.0
    """Microseconds per prompt token computed."""
    decode_us: NotNegative = 0.0
    """Microseconds per decoding sequence."""
    context_token_ns: NotNegative = 45.0
    """Nanoseconds per token that decodes attend to."""
    copy_bandwidth_gb_s: Positive = 1500.0
    """Copies within the device (copy-on-write, compaction), GB/s read and written."""
    swap_bandwidth_gb_s: Positive = 25.0
    """Transfers between host and device, GB/s each way."""
    swap_block_us: NotNegative = 10.0
    """Microseconds per block moved between host and device."""


class KernelCostConfig(Block):
    """A step is the sum of its kernels, from a calibrated profile of one GPU."""

    type: Literal["kernels"]
    profile: Text | None = None
    """A shipped profile, or a YAML file that `kvsim calibrate` wrote; null: the one of `gpu`."""
    table_sync: Literal["on_change", "every_step", "device"] = "on_change"
    """Where the block table lives, and when it is uploaded."""
    step_overhead_us: NotNegative | None = None
    """Microseconds of every step beside its kernels; null: the profile's."""
    cpu_schedule_us: NotNegative | None = None
    """Microseconds of CPU scheduling per step; null: the profile's."""
    table_entry_bytes: Literal[4, 8] = 4
    """Bytes of a block-table entry."""


class RooflineCostConfig(Block):
    """A step from datasheet figures: explicit, uncalibrated."""

    type: Literal["roofline"]
    peak_tflops: Positive
    """Dense 16-bit tensor throughput."""
    memory_bandwidth_gb_s: Positive
    """Device memory, GB/s."""
    efficiency: Annotated[Number, Field(gt=0, le=1)] = 0.7
    """Share of both that kernels reach."""
    step_overhead_us: NotNegative = 500.0
    """Microseconds of every step beside its kernels."""
    pcie_bandwidth_gb_s: Positive = 25.0
    """Host link, GB/s each way."""
    interconnect_gb_s: Positive = 300.0
    """Between GPUs, GB/s (tensor parallel)."""
    table_sync: Literal["on_change", "every_step", "device"] = "on_change"
    """Where the block table lives, and when it is uploaded."""
    cpu_schedule_us: NotNegative | None = None
    """Microseconds of CPU scheduling per step."""
    table_entry_bytes: Literal[4, 8] = 4
    """Bytes of a block-table entry."""


AnyCost: TypeAlias = Annotated[
    Annotated[LinearCostConfig, Tag("linear")]
    | Annotated[KernelCostConfig, Tag("kernels")]
    | Annotated[RooflineCostConfig, Tag("roofline")]
    | Annotated[Custom, Tag("custom")],
    Discriminator(_tag_by_type("linear")),
]


class Slo(Block):
    """Service-level objectives of a request; goodput counts those that meet all."""

    ttft: TimeNs | None = None
    """Time to first token."""
    tpot: TimeNs | None = None
    """Time per output token after the first."""
    e2el: TimeNs | None = None
    """End-to-end latency."""


def _seeds_tag(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


def _some(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if not seeds:
        raise ValueError("must name at least one seed")
    return seeds


class Sweep(Block):
    """A grid of scenarios for `kvsim sweep`."""

    vary: dict[Text, Any]
    """Key to values: a list, or a text such as 8,16,32 or 1:10:1."""
    zip: Bool = False
    """Take the lists side by side instead of every combination."""
    seeds: Annotated[
        Annotated[Int, Field(ge=1, le=100_000), Tag("number")]
        | Annotated[tuple[Seed, ...], AfterValidator(_some), Tag("list")],
        Discriminator(_seeds_tag),
    ] = 1
    """How many seeds, or which."""


def _record(value: Any) -> tuple[str, ...]:
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    known = ("summary", "steps", "requests")
    if not isinstance(items, list | tuple) or not items or any(item not in known for item in items):
        raise ValueError(f"must be a list of {', '.join(known)}")
    return tuple(name for name in known if name in items)


Record: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_record),
    WithJsonSchema({"type": "array", "items": {"enum": ["summary", "steps", "requests"]}}),
]


def _model_tag(value: Any) -> str:
    return "name" if isinstance(value, str) else "geometry"


class Scenario(Block):
    """One experiment: engine, memory, workload, cost."""

    name: FolderName = "scenario"
    """Names the results folder."""
    description: Text | None = None
    """What it is for."""
    seed: Seed = 0
    """Everything random is drawn from it, by name."""
    engine: Engine = "paged"
    """A preset of allocator and scheduler; their own blocks override it."""
    model: Annotated[
        Annotated[Text, Tag("name")] | Annotated[ModelGeometry, Tag("geometry")], Discriminator(_model_tag)
    ] = "llama-2-7b"
    """A preset, the path of a Hugging Face config.json, or the geometry itself."""
    gpu: Annotated[Annotated[Text, Tag("name")] | Annotated[GpuSpec, Tag("geometry")], Discriminator(_model_tag)] = (
        "a100-80gb"
    )
    """A preset, or {memory: 80GiB}."""
    tensor_parallel_size: Annotated[Int, Field(ge=1, le=1024)] = 1
    """GPUs that share every layer."""
    kv_cache_dtype: CacheDtype = "auto"
    """Of the KV cache; auto: the model's."""
    memory: Memory = Memory()
    """How much KV cache there is."""
    allocator: AnyAllocator = PagedMemory()
    """How it is divided."""
    scheduler: AnyScheduler = ContinuousScheduler()
    """Who runs next, and who is preempted."""
    workload: AnyWorkload = Workload()
    """Who sends what, and when."""
    cost: AnyCost = LinearCostConfig()
    """How long a step takes."""
    slo: Slo = Slo()
    """Goals of latency."""
    horizon: TimeNs | None = None
    """The clock stops here, above 0; null: when all is done."""
    engine_loop: Literal["calendar", "plain"] = "calendar"
    """plain: without the block-boundary calendar; slower, same results."""
    upstream_faults: Bool = False
    """The vLLM engines keep their own faults, and our guards are off."""
    record: Record = ("summary", "steps", "requests")
    """Which tables are written."""
    timeline: Bool = False
    """Also write timeline.json, for Perfetto."""
    sweep: Sweep | None = None
    """What `kvsim sweep` varies."""

"""The `workload:` block; each key is explained in `kvsim.workload.spec`, which these models mirror."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from kvsim.scenario.fields import (
    Block,
    Count,
    CountOrZero,
    Custom,
    Delay,
    Int,
    IntKey,
    LengthRange,
    Number,
    Positive,
    Rate,
    Seconds,
    Share,
    Text,
    Window,
    is_import_path,
)


class PoissonArrivals(Block):
    """Independent arrivals at a mean rate."""

    type: Literal["poisson"] = "poisson"
    request_rate: Rate = 1.0
    """Requests per second; .inf sends all at time 0."""


class GammaArrivals(Block):
    """Arrivals more or less regular than Poisson's."""

    type: Literal["gamma"]
    request_rate: Rate = 1.0
    """Requests per second."""
    burstiness: Annotated[Number, Field(ge=1e-3, le=1e6)] = 1.0
    """Shape of the gamma distribution of gaps: 1 is Poisson, below 1 burstier, above 1 more regular."""


class ConstantArrivals(Block):
    """One request every 1 / request_rate seconds."""

    type: Literal["constant"]
    request_rate: Rate = 1.0
    """Requests per second."""


class BatchArrivals(Block):
    """Groups of requests that arrive together."""

    type: Literal["batch"]
    batch_size: Count | None = None
    """Requests per group; null: all in one."""
    interval: Seconds = 0.0
    """Time between groups."""


class TraceArrivals(Block):
    """The times of the trace, which is also the default where a trace has times."""

    type: Literal["trace"]


Arrivals: TypeAlias = Annotated[
    PoissonArrivals | GammaArrivals | ConstantArrivals | BatchArrivals | TraceArrivals, Field(discriminator="type")
]


class _Lengths(Block):
    max_total: Count | None = None
    """Pairs whose sum is larger are drawn anew."""
    correlation: Annotated[Number, Field(ge=-1, le=1)] | None = None
    """Spearman's rank correlation of prompt and output; null: none (presets bring their own)."""


class FixedLengths(_Lengths):
    """Every request alike."""

    type: Literal["fixed"]
    prompt: Count
    """Prompt tokens."""
    output: Count
    """Output tokens."""

    @model_validator(mode="before")
    @classmethod
    def _one_value(cls, values: Any) -> Any:
        for name in ("prompt", "output"):
            if isinstance(values, dict) and isinstance(values.get(name), list | tuple):
                raise ValueError(f"{name} of fixed lengths is one number; a range [low, high] needs type: uniform")
        return values


class UniformLengths(_Lengths):
    """Lengths drawn evenly from a range, both ends included."""

    type: Literal["uniform"]
    prompt: LengthRange
    """[low, high] prompt tokens."""
    output: LengthRange
    """[low, high] output tokens."""


class NormalLengths(_Lengths):
    """Normal lengths, rounded, at least 1."""

    type: Literal["normal"]
    prompt_mean: Annotated[Number, Field(gt=0, le=1e8)]
    """Mean prompt length in tokens."""
    prompt_std: Annotated[Number, Field(ge=0, le=1e8)] = 0.0
    """Its standard deviation."""
    output_mean: Annotated[Number, Field(gt=0, le=1e8)]
    """Mean output length in tokens."""
    output_std: Annotated[Number, Field(ge=0, le=1e8)] = 0.0
    """Its standard deviation."""


class LognormalLengths(NormalLengths):
    """Log-normal lengths; mean and deviation are those of the lengths, not of their logarithms."""

    type: Literal["lognormal"]  # type: ignore[assignment]


class PresetLengths(_Lengths):
    """Lengths of a real data set, from its quantiles."""

    type: Literal["preset"] = "preset"
    name: Literal[
        "sharegpt", "sharegpt_vllm_filter", "alpaca", "azure_conv", "mooncake_conversation", "arxiv_summarization"
    ] = "sharegpt"
    """Which data set."""
    prompt_mean: Annotated[Number, Field(gt=0, le=1e8)] | None = None
    """Rescales the prompts to this mean."""
    output_mean: Annotated[Number, Field(gt=0, le=1e8)] | None = None
    """Rescales the outputs to this mean."""


Lengths: TypeAlias = Annotated[
    FixedLengths | UniformLengths | NormalLengths | LognormalLengths | PresetLengths, Field(discriminator="type")
]


class Sampling(Block):
    """How outputs are decoded."""

    n: Annotated[Int, Field(ge=1, le=1024)] = 1
    """Parallel samples of one prompt."""
    beam_width: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Beams; 0: no beam search."""
    lengths: Literal["same", "independent"] = "same"
    """Whether the samples of a request are equally long."""
    theta: Annotated[Number, Field(ge=0, le=1e6)] = 1.0
    """Parameter of the beam model: how unevenly survivors are spread over parents."""

    @model_validator(mode="after")
    def _one_mode(self) -> Self:
        if self.n > 1 and self.beam_width > 0:
            raise ValueError("n and beam_width exclude each other: a request is sampled or searched")
        return self


class SystemPrompt(Block):
    """A text that the requests of a group begin with."""

    num_groups: Count = 1
    """Texts to choose from."""
    zipf: Annotated[Number, Field(ge=0, le=100)] = 1.0
    """How unequal the groups are; 0: equal."""
    tokens: Count = 1024
    """Length of each."""


class FewShot(Block):
    """Worked examples behind the system prompt."""

    num_groups: Count = 1
    """Tasks to choose from."""
    zipf: Annotated[Number, Field(ge=0, le=100)] = 0.0
    """How unequal the tasks are; 0: equal."""
    num_examples: Count = 5
    """Examples in each."""
    example_tokens: Count = 68
    """Length of an example."""


class Content(Block):
    """What prompts have in common."""

    system_prompt: SystemPrompt | None = None
    """A text that groups of requests begin with."""
    few_shot: FewShot | None = None
    """Worked examples behind it."""
    num_loras: CountOrZero = 0
    """LoRA adapters, one drawn for each request: their caches are apart."""


class Sessions(Block):
    """Conversations, or agents' tool loops: each turn's prompt is the history and a new message.

    Answers stand in the history in full, also those that a client gave up on.
    """

    type: Literal["chat", "agent"] = "chat"
    num_turns: Count | None = None
    """Turns of every session."""
    mean_turns: Annotated[Number, Field(ge=1, le=1e6)] | None = None
    """Mean of geometrically distributed turns."""
    think_time: Delay = 0.0
    """Mean time between an answer and the next turn."""
    think_time_distribution: Literal["exponential", "constant"] = "exponential"
    """Around that mean, or exactly that."""
    max_context: Count | None = None
    """A session ends before a prompt and its answer would be longer together."""
    truncate_to: Count | None = None
    """A prompt is the last so many tokens of the history and the new message."""

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.num_turns is not None and self.mean_turns is not None:
            raise ValueError("num_turns and mean_turns exclude each other; keep one")
        return self


class Abort(Block):
    """Clients that give up."""

    probability: Share = 0.0
    """Share of the requests whose client gives up."""
    after: Delay = 10.0
    """Time after arrival: the mean, or exactly."""
    distribution: Literal["exponential", "constant"] = "exponential"
    """Around that mean, or exactly that."""


def _workload_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if is_import_path(kind) else "builtin"


class Workload(Block):
    """Who sends what, and when."""

    num_requests: Annotated[Int, Field(ge=1, le=50_000_000)] | None = None
    """Requests; null: 1000, or every row of the trace."""
    arrivals: Arrivals | None = None
    """When requests come; null: Poisson at 1 per second, or the trace's times."""
    lengths: Lengths | None = None
    """How long prompts and outputs are; null: the sharegpt preset, or the trace's."""
    max_output_tokens: Count | None = None
    """What a client allows; longer outputs are cut there. null: a client knows its output's length."""
    sampling: Sampling = Sampling()
    """How outputs are decoded."""
    trace: Text | None = None
    """A file of requests (Azure, Mooncake, BurstGPT, Vidur, ShareGPT, or plain CSV); replaces arrivals and lengths."""
    trace_format: Literal["azure", "mooncake", "burstgpt", "vidur", "sharegpt", "csv"] | None = None
    """Null: found out from the file."""
    hash_block_size: Count | None = None
    """Tokens per hash id of a trace that has them."""
    chars_per_token: Annotated[Number, Field(ge=0.01, le=1000)] = 4.0
    """Turns the text of a ShareGPT file into a length."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row that cannot be used does."""
    first: Count | None = None
    """Only this many requests of the trace, the earliest ones."""
    window: Window | None = None
    """Only requests of these seconds of the trace: [begin, end)."""
    speed: Annotated[Number, Field(ge=1e-6, le=1e6)] = 1.0
    """2.0 plays the trace twice as fast."""
    rate: Positive | None = None
    """Rescales the trace to this many requests per second."""
    repeat: Annotated[Int, Field(ge=1, le=1_000_000)] = 1
    """Plays the trace this often, one after another."""
    max_concurrency: Count | None = None
    """At most this many requests at once; the others wait at the client."""
    content: Content | None = None
    """What prompts share; null: nothing, or what the trace says."""
    sessions: Sessions | None = None
    """Conversations instead of single requests."""
    priorities: dict[IntKey, Positive] | None = None
    """Shares of priorities (lower is more urgent): {0: 0.2, 1: 0.8}."""
    abort: Abort | None = None
    """Clients that give up."""
    requests: tuple[dict[str, Any], ...] | None = None
    """Requests written out: keys as the columns of a plain CSV, and id, beam_width, abort_s, lora, salt."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.requests is not None and not self.requests:
            raise ValueError("requests is an empty list: the workload is empty; write at least one request")
        if self.requests is not None and self.trace is not None:
            raise ValueError("requests and trace exclude each other; keep one")
        if self.sessions is not None and (self.requests is not None or self.trace is not None):
            other = "requests" if self.requests is not None else "trace"
            raise ValueError(f"sessions and {other} exclude each other: sessions make their own requests; keep one")
        if self.rate is not None and self.speed != 1.0:
            raise ValueError("rate and speed exclude each other: both rescale the times")
        if isinstance(self.arrivals, TraceArrivals) and self.trace is None:
            raise ValueError("arrivals of type trace need a file: trace: some.csv")
        if self.priorities is not None and not self.priorities:
            raise ValueError("priorities is empty; write {0: 0.2, 1: 0.8} or leave it out")
        return self


AnyWorkload: TypeAlias = Annotated[
    Annotated[Workload, Tag("builtin")] | Annotated[Custom, Tag("custom")], Discriminator(_workload_tag)
]

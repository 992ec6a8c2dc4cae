"""The `workload:` block of a scenario as frozen data: every key, its type and its default.

Times are seconds (the scenario layer turns "10s" or "250ms" into seconds before it gets here). A key that is None was
not given. `WorkloadSpec.from_dict` builds the tree from plain dicts and refuses unknown keys.

    workload:
      num_requests: 2000                 # default: 1000, or all rows of a trace
      arrivals: {type: poisson, request_rate: 4.0}
      #   type: poisson | gamma | constant | batch | trace; burstiness (gamma's shape; 1 = poisson);
      #   batch: groups of batch_size (default: all) every interval seconds (null: by request_rate); request_rate inf:
      #   all at 0
      lengths: {type: preset, name: sharegpt}
      #   type: fixed     prompt, output
      #         uniform   prompt: [low, high], output: [low, high]    (both ends included)
      #         normal    prompt_mean, prompt_std, output_mean, output_std   (rounded, at least 1)
      #         lognormal the same four: mean and standard deviation of the lengths themselves, not of their logs
      #         preset    name: sharegpt | sharegpt_vllm_filter | alpaca | azure_conv | mooncake_conversation |
      #                   arxiv_summarization; prompt_mean, output_mean rescale it
      #   every type: max_total (pairs whose sum is larger are dropped and drawn anew), correlation (Spearman's;
      #   presets bring their own)
      max_output_tokens: null            # what a client allows; outputs are cut there; default: the output itself
      sampling: {n: 1, beam_width: 0, lengths: same, theta: 1.0}        # lengths: same | independent
      trace: file.csv                    # replaces arrivals and lengths (a trace without times keeps `arrivals`)
      trace_format: null                 # azure | mooncake | burstgpt | vidur | sharegpt | csv; default: found out
      hash_block_size: null              # tokens per hash id; default 512, or what fits the file
      chars_per_token: 4.0               # sharegpt: text is turned into a length by this
      on_bad_row: error                  # or skip
      first: null                        # first N requests in order of time
      window: null                       # [t0, t1] seconds of the trace, t1 excluded
      speed: 1.0                         # 2.0: twice as fast
      rate: null                         # rescale the times to this mean rate
      repeat: 1                          # play it this often, one after another
      max_concurrency: null              # as in `vllm bench serve`
      content:
        system_prompt: {num_groups: 8, zipf: 1.0, tokens: 1024}
        few_shot: {num_groups: 4, zipf: 0.0, num_examples: 5, example_tokens: 68}
        num_loras: 0                     # LoRA adapters, one drawn for each request
      sessions: {type: chat, num_turns: 4, think_time: 10.0}
      #   type: chat | agent; num_turns fixed, or mean_turns (geometric); think_time: mean seconds between an answer
      #   and the next turn, think_time_distribution: exponential | constant (agent: the tool's run time);
      #   max_context: a session ends before a prompt and its answer would be longer; truncate_to: a prompt is the last
      #   so many tokens of history and message. `arrivals` are those of sessions, `num_requests` counts turns.
      priorities: {0: 0.2, 1: 0.8}       # priority: share
      abort: {probability: 0.1, after: 5.0, distribution: exponential}   # or constant
      requests: null                     # written out: keys as the columns of a plain CSV, and id, beam_width, abort_s
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from kvsim.types import ScenarioError

ArrivalType = Literal["poisson", "gamma", "constant", "batch", "trace"]
LengthType = Literal["fixed", "uniform", "normal", "lognormal", "preset"]
TraceFormat = Literal["azure", "mooncake", "burstgpt", "vidur", "sharegpt", "csv"]
Pair = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class ArrivalsSpec:
    """When requests come; `request_rate` per second."""

    type: ArrivalType = "poisson"
    request_rate: float = 1.0
    burstiness: float = 1.0
    batch_size: int | None = None
    interval: float | None = None
    """Between batches; None: as far apart as the rate asks for."""


@dataclass(frozen=True, slots=True)
class LengthsSpec:
    """How long prompts and outputs are; which fields are read depends on `type`."""

    type: LengthType = "preset"
    name: str = "sharegpt"
    prompt: Pair | None = None
    output: Pair | None = None
    prompt_mean: float | None = None
    prompt_std: float | None = None
    output_mean: float | None = None
    output_std: float | None = None
    max_total: int | None = None
    correlation: float | None = None


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Decoding mode of every request; `theta` is the beam model's parameter (`kvsim.workload.beam`)."""

    n: int = 1
    beam_width: int = 0
    lengths: Literal["same", "independent"] = "same"
    theta: float = 1.0


@dataclass(frozen=True, slots=True)
class SystemPromptSpec:
    """A text of `tokens` tokens that each request of a group begins with; groups are drawn by Zipf's law."""

    num_groups: int = 1
    zipf: float = 1.0
    tokens: int = 1024


@dataclass(frozen=True, slots=True)
class FewShotSpec:
    """`num_examples` worked examples that each request of a task carries behind its system prompt."""

    num_groups: int = 1
    zipf: float = 0.0
    num_examples: int = 5
    example_tokens: int = 68


@dataclass(frozen=True, slots=True)
class ContentSpec:
    """What prompts have in common; the lengths of `lengths` are those of a request's own text behind it."""

    system_prompt: SystemPromptSpec | None = None
    few_shot: FewShotSpec | None = None
    num_loras: int = 0


@dataclass(frozen=True, slots=True)
class SessionsSpec:
    """Conversations (`chat`) or tool loops (`agent`): each turn's prompt is the history and a new message."""

    type: Literal["chat", "agent"] = "chat"
    num_turns: int | None = None
    mean_turns: float | None = None
    think_time: float = 0.0
    think_time_distribution: Literal["exponential", "constant"] = "exponential"
    max_context: int | None = None
    truncate_to: int | None = None


@dataclass(frozen=True, slots=True)
class AbortSpec:
    """Clients that give up: with `probability`, `after` seconds (the mean, or exactly)."""

    probability: float = 0.0
    after: float = 10.0
    distribution: Literal["exponential", "constant"] = "exponential"


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The whole `workload:` block; see the module's text for each key."""

    num_requests: int | None = None
    arrivals: ArrivalsSpec | None = None
    lengths: LengthsSpec | None = None
    max_output_tokens: int | None = None
    sampling: SamplingSpec = SamplingSpec()
    trace: str | None = None
    trace_format: TraceFormat | None = None
    hash_block_size: int | None = None
    chars_per_token: float = 4.0
    on_bad_row: Literal["error", "skip"] = "error"
    first: int | None = None
    window: tuple[float, float] | None = None
    speed: float = 1.0
    rate: float | None = None
    repeat: int = 1
    max_concurrency: int | None = None
    content: ContentSpec | None = None
    sessions: SessionsSpec | None = None
    priorities: Mapping[int, float] | None = None
    abort: AbortSpec | None = None
    requests: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> WorkloadSpec:
        """The spec of a plain mapping (as YAML gives it); unknown keys raise ScenarioError."""
        return _build(cls, block, "workload")


_NESTED: dict[str, type] = {
    "workload.arrivals": ArrivalsSpec,
    "workload.lengths": LengthsSpec,
    "workload.sampling": SamplingSpec,
    "workload.content": ContentSpec,
    "workload.content.system_prompt": SystemPromptSpec,
    "workload.content.few_shot": FewShotSpec,
    "workload.sessions": SessionsSpec,
    "workload.abort": AbortSpec,
}

_T = TypeVar("_T")


def _build(cls: type[_T], block: Mapping[str, Any], where: str) -> _T:
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in block:
        if key not in names:
            raise ScenarioError(f"{where}: unknown key {key!r}{hint(str(key), names)}; known: {', '.join(names)}")
    return cls(**{key: _value(value, f"{where}.{key}") for key, value in block.items() if value is not None})


def _value(value: Any, where: str) -> Any:
    nested = _NESTED.get(where)
    if nested is not None and isinstance(value, Mapping):
        return _build(nested, value, where)
    if nested is not None and not isinstance(value, nested):
        raise ScenarioError(f"{where} is {value!r}; it takes keys, such as {{type: ...}}")
    return tuple(value) if isinstance(value, list) else value


def hint(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'rate'?)` for a close known word, else nothing."""
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

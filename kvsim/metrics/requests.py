"""What happened to each request: a log while it lives, a row of integers once it is over."""

from __future__ import annotations

from kvsim.metrics.columns import CHUNK_ROWS, RowTable
from kvsim.request import FINISHED, WAITING, Request, Sequence, Status

NEVER = -1
"""A time that did not come."""

NOT_ARRIVED = "not_arrived"
"""Status of requests that the horizon cut off before they arrived."""


class RequestLog:
    """What happened to one request; times in ns, `NEVER` where it did not happen."""

    __slots__ = (
        "finish_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "index",
        "longest_output",
        "num_cow_copies",
        "num_output_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "peak_blocks",
        "prefix_hit_tokens",
        "reason",
        "request",
        "sequences",
        "status",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        """Its number in order of submission."""
        self.status = WAITING
        self.reason = ""
        self.first_scheduled_ns = NEVER
        self.first_token_ns = NEVER
        self.finish_ns = NEVER
        self.num_output_tokens = 0
        self.longest_output = 0
        """Tokens of its longest sample."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.prefix_hit_tokens = 0
        self.num_cow_copies = 0
        self.peak_blocks = 0
        self.sequences: list[Sequence] | None = None
        """Its sequences with tables, once it has several."""


STATUSES = (
    Status.FINISHED.value,
    Status.REJECTED.value,
    Status.ABORTED.value,
    Status.RUNNING.value,
    Status.WAITING.value,
    Status.SWAPPED.value,
    NOT_ARRIVED,
)
STATUS_CODE = {status: code for code, status in enumerate(STATUSES)}


class EndedRequests:
    """Finished, rejected and aborted requests as columns of integers, with their texts beside them.

    Without `keep_rows` only what the summary needs is kept: a few dozen bytes a request.
    """

    SUMMARY_FIELDS = (
        "status",
        "arrival_ns",
        "prompt_tokens",
        "first_token_ns",
        "finish_ns",
        "priority",
        "longest_output",
    )
    FIELDS = (
        *SUMMARY_FIELDS,
        "index",
        "output_tokens",
        "first_scheduled_ns",
        "num_preemptions",
        "recomputed_tokens",
        "prefix_hit_tokens",
        "num_cow_copies",
        "peak_blocks",
    )

    def __init__(self, *, keep_rows: bool) -> None:
        self.keep_rows = keep_rows
        self.table = RowTable(self.FIELDS if keep_rows else self.SUMMARY_FIELDS, narrow=True)
        self.request_ids: list[str] = []
        self.reasons: list[str] = []
        self.count: dict[str, int] = dict.fromkeys(STATUSES, 0)
        self.num_cut = 0
        """Finished requests that met `max_model_len` before they had said all they had to say."""
        self.first_rejected: tuple[str, str] | None = None
        """The first rejected request and the reason: kept without rows too, for the warning."""

    def add(self, log: RequestLog, status: str) -> None:
        """A request is over, or the run is."""
        request = log.request
        self.count[status] += 1
        if status == FINISHED:
            self.num_cut += log.longest_output < request.longest_output_len
        elif status == Status.REJECTED and self.first_rejected is None:
            self.first_rejected = (request.request_id, log.reason)
        row = (
            STATUS_CODE[status],
            request.arrival_ns,
            request.prompt_len,
            log.first_token_ns,
            log.finish_ns,
            request.priority,
            log.longest_output,
            # Beyond the fields of the summary.
            log.index,
            log.num_output_tokens,
            log.first_scheduled_ns,
            log.num_preemptions,
            log.num_recomputed_tokens,
            log.prefix_hit_tokens,
            log.num_cow_copies,
            log.peak_blocks,
        )
        if self.keep_rows:
            self.request_ids.append(request.request_id)
            self.reasons.append(log.reason)
            self.table.rows.append(row)
        else:
            self.table.rows.append(row[: len(self.SUMMARY_FIELDS)])
        if len(self.table.rows) >= CHUNK_ROWS:
            self.table.take_chunk()

"""Replays recorded scheduler cases of the paper's engine (kind `sched`), step by step and field by field.

The recorder's loop and the layout of a record live here; every decision is taken by `VllmV0Scheduler` over a
`PagedAllocator`, the classes that `run` uses. The allocator is watched from outside, for the order of forks and
frees and for its answers to admission.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvsim.conform.cases import MAX_SEQUENCES, CaseError
from kvsim.conform.recorder import allocator_keywords, signed_table, state_hash
from kvsim.conform.result import CaseResult, Mismatch, agrees_in
from kvsim.memory import PagedAllocator
from kvsim.request import Group, Request, Sampling, Sequence
from kvsim.scheduling.plan import StepPlan
from kvsim.scheduling.vllm_v0 import OutOfHostBlocks, VllmV0Scheduler
from kvsim.scheduling.vllm_v0_beam import BeamAction
from kvsim.tokens import TokenStream
from kvsim.types import NS_PER_S, AllocStatus, SeqId

FIELDS = (
    "t", "ab", "pre", "ca", "p", "nb", "s", "bt", "in", "out", "cp", "ign", "q", "f", "h", "sh", "act", "f2", "h2",
    "err", "stuck",
)  # fmt: skip
"""Fields of a record, in the order in which they are compared."""

_LABELS_PER_GROUP = MAX_SEQUENCES["sched"]
_EMPTY_STEPS_TO_STUCK = 3


class WatchedAllocator(PagedAllocator):
    """The ordinary allocator, with a note of each fork, free and admission answer."""

    scheduler: VllmV0Scheduler

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__(**allocator_keywords(cfg))
        self.labels: dict[SeqId, int] = {}
        """Recorded names of the sequences: group x 1000 + place in fork order."""
        self._num_labels: dict[int, int] = {}
        self._actions: list[list[Any]] = []
        self._answers: list[list[Any]] = []

    def name_parent(self, seq: Sequence) -> None:
        group = int(seq.request.request_id)
        self.labels[seq.seq_id] = group * _LABELS_PER_GROUP
        self._num_labels[group] = 1

    def take_actions(self) -> list[list[Any]]:
        """Forks and frees since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def take_answers(self) -> list[list[Any]]:
        """Admission answers other than OK since the last call, in order."""
        answers, self._answers = self._answers, []
        return answers

    def can_allocate(self, num_tokens: int, **kwargs: Any) -> AllocStatus:
        status = super().can_allocate(num_tokens, **kwargs)
        if status is not AllocStatus.OK:
            self._answers.append([_group_id(self.scheduler.waiting.head()), str(status)])
        return status

    def fork(self, parent_id: SeqId, child_id: SeqId, **kwargs: Any) -> None:
        super().fork(parent_id, child_id, **kwargs)
        group = self.labels[parent_id] // _LABELS_PER_GROUP
        self.labels[child_id] = group * _LABELS_PER_GROUP + self._num_labels[group]
        self._num_labels[group] += 1
        self._actions.append(["k", self.labels[parent_id], self.labels[child_id]])

    def free(self, seq_id: SeqId) -> None:
        super().free(seq_id)
        self._actions.append(["f", self.labels[seq_id]])

    def named_tables(self, groups: Iterable[Group]) -> dict[int, list[int]]:
        """Tables of the groups' live sequences by label, a host block b written as -(b + 1)."""
        found = ((self.labels[seq.seq_id], seq.seq_id) for group in groups for seq in group.seqs)
        return {label: signed_table(self, seq_id) for label, seq_id in sorted(found) if self.has_table(seq_id)}


class SchedulerReplay:
    """Drives one scheduler through the arrivals and aborts of a case; `records()` are what the recorder would write."""

    def __init__(self, case: dict[str, Any], engine_loop: str) -> None:
        cfg = case["cfg"]
        self.allocator = WatchedAllocator(cfg)
        self.scheduler = self.allocator.scheduler = VllmV0Scheduler(
            self.allocator,
            max_num_seqs=cfg["mns"],
            max_num_batched_tokens=cfg["mnbt"],
            max_model_len=cfg["mml"],
            max_paddings=cfg["mpad"],
            watermark=cfg["wm"],
            engine_loop=engine_loop,
            beam_moves=self._move_beams,
            detail=True,
            upstream_faults=True,
        )
        self._arrivals = sorted(case["groups"], key=lambda group: int(group["at"]))
        self._arrivals.reverse()
        self._aborts: dict[int, list[int]] = {}
        for step, group in case["aborts"]:
            self._aborts.setdefault(step, []).append(group)
        self._scripts = {group["g"]: group["ev"] for group in case["groups"] if group["mode"] == "beam"}
        self._last_tables: dict[int, list[int]] = {}
        self._last_shown: dict[str, Any] = {}
        self._num_empty = 0
        self._num_empty_at_end = 0
        self._is_over = False
        self.step = 0

    def next_record(self, *, may_end: bool = False) -> dict[str, Any] | None:
        """Run one step; None after the last.

        A recorder may count empty steps from before the last arrival: with `may_end` they suffice to end a stuck case.
        """
        if self._is_over or not (self.scheduler.has_work or self._arrivals):
            return None
        if not self.scheduler.has_work:
            self.step = max(self.step, self._arrivals[-1]["at"])
        num_empty = self._num_empty if may_end else self._num_empty_at_end
        if num_empty >= _EMPTY_STEPS_TO_STUCK and not self._arrivals:
            self._is_over = True
            return {"t": self.step, "stuck": self._ids(self.scheduler.waiting) + self._ids(self.scheduler.swapped)}
        record = self._run_step()
        self.step += 1
        # The first record has `s` even if nothing is scheduled.
        return {key: value for key, value in record.items() if key == "s" or value not in ([], {})}

    def snapshot(self) -> dict[str, object]:
        """Queues and free lists, as they are between two steps."""
        return {
            **dict(zip(("waiting", "running", "swapped"), map(self._ids, self._queues()), strict=True)),
            "free_gpu": list(self.allocator.free_block_ids()),
            "free_cpu": list(self.allocator.free_host_block_ids()),
        }

    def _run_step(self) -> dict[str, Any]:
        while self._arrivals and self._arrivals[-1]["at"] <= self.step:
            self._submit(self._arrivals.pop())
        self.allocator.take_actions()
        for group in self._aborts.get(self.step, ()):
            self.scheduler.abort(str(group))
        record: dict[str, Any] = {"t": self.step, "ab": self.allocator.take_actions()}
        self.allocator.take_answers()
        try:
            plan = self.scheduler.schedule(self.step)
        except OutOfHostBlocks as error:
            self._is_over = True
            pre = _preemptions(error.preempted)
            return record | {"pre": pre, "ca": self.allocator.take_answers(), "err": "SWAP_SPACE"}
        record |= self._planned(plan)
        self.allocator.take_actions()
        self.scheduler.complete(plan)
        return record | self._acted()

    def _planned(self, plan: StepPlan) -> dict[str, Any]:
        """What the recorder notes between schedule() and the model."""
        scheduled = [chunk.seq for chunk in plan.prefills] or list(plan.decodes or ())
        self._count_empty(plan)
        tables = self._tables()
        refs = self.allocator.ref_counts()
        is_prompt = bool(plan.prefills or plan.rejected)
        num_prompts, longest = plan.shape.padded_batch
        shown = {
            "s": self._by_group(scheduled),
            "q": [self._ids(queue) for queue in self._queues()],
        }
        record = {
            "pre": _preemptions(plan.preempted),
            "ca": self.allocator.take_answers(),
            "p": int(is_prompt),
            "nb": num_prompts * longest if is_prompt else len(scheduled),
            "bt": {str(label): table for label, table in tables.items() if self._last_tables.get(label) != table},
            "in": [list(move) for move in plan.swap_in],
            "out": [list(move) for move in plan.swap_out],
            "cp": _copies(plan),
            "ign": [_request_id(rejection.seq) for rejection in plan.rejected],
            "f": self._free_counts(),
            "h": state_hash(self.allocator, tables),
            "sh": [sum(1 for ref in refs if ref > 1), sum(refs)],
        }
        record |= {key: value for key, value in shown.items() if self._last_shown.get(key) != value}
        self._last_tables, self._last_shown = tables, shown
        return record

    def _acted(self) -> dict[str, Any]:
        """What the recorder notes after the model; nothing if nothing was forked or freed."""
        actions = self.allocator.take_actions()
        if not actions:
            return {}
        return {"act": actions, "f2": self._free_counts(), "h2": state_hash(self.allocator, self._tables())}

    def _count_empty(self, plan: StepPlan) -> None:
        is_empty = plan.is_empty and not plan.preempted
        self._num_empty = self._num_empty + 1 if is_empty else 0
        self._num_empty_at_end = min(self._num_empty, self._num_empty_at_end + 1) if not self._arrivals else 0

    def _submit(self, group: dict[str, Any]) -> None:
        self.scheduler.submit(_request(group, self.scheduler.max_model_len))
        self.allocator.name_parent(self.scheduler.groups[str(group["g"])].seqs[0])

    def _move_beams(self, group: Group, step: int) -> list[BeamAction]:
        script = self._scripts[_group_id(group)]
        events = script[step] if step < len(script) else []
        first = _group_id(group) * _LABELS_PER_GROUP
        beams = {first + seq.sample for seq in group.seqs}
        next_label = first + group.next_place
        actions = []
        for kind, beam, *child in events:
            if beam not in beams or (kind == "k" and child != [next_label]):
                raise CaseError(f"groups[g={group.request_id}].ev[{step}] names beams that are not there: {events}")
            beams = beams | set(child) if kind == "k" else beams - {beam}
            next_label += len(child)
            actions.append(BeamAction("fork" if kind == "k" else "free", beam - first))
        return actions

    def _tables(self) -> dict[int, list[int]]:
        return self.allocator.named_tables(group for queue in self._queues() for group in queue)

    def _queues(self) -> tuple[Iterable[Group], Iterable[Group], Iterable[Group]]:
        return self.scheduler.waiting, self.scheduler.running.values(), self.scheduler.swapped

    def _by_group(self, sequences: Iterable[Sequence]) -> list[list[Any]]:
        groups: dict[int, list[int]] = {}
        for seq in sequences:
            groups.setdefault(_request_id(seq), []).append(self.allocator.labels[seq.seq_id])
        return [[group, labels] for group, labels in groups.items()]

    def _free_counts(self) -> list[int]:
        return [self.allocator.num_free_blocks, self.allocator.num_free_host_blocks]

    @staticmethod
    def _ids(groups: Iterable[Group]) -> list[int]:
        return [_group_id(group) for group in groups]


def replay(case: dict[str, Any], *, engine_loop: str = "calendar") -> CaseResult:
    """Replay one case of kind `sched`; stops at the first recorded field that differs."""
    driver = SchedulerReplay(case, engine_loop)
    num_fields = 0
    for expected in case["steps"]:
        before = driver.snapshot()
        got = driver.next_record(may_end="stuck" in expected)
        if got is None:
            return CaseResult(case["id"], num_fields, Mismatch(expected["t"], "record", expected, None, before))
        for name in _names(expected, got):
            if not agrees_in(name, expected, got):
                mismatch = Mismatch(expected["t"], name, expected.get(name), got.get(name), before)
                return CaseResult(case["id"], num_fields, mismatch)
            num_fields += 1
    before = driver.snapshot()
    if extra := driver.next_record():
        return CaseResult(case["id"], num_fields, Mismatch(extra["t"], "record", None, extra, before))
    return CaseResult(case["id"], num_fields)


def _names(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Fields of either record in the order of the format; unknown ones last, for they cannot agree."""
    known = [name for name in FIELDS if name in expected or name in got]
    return known + [name for name in expected if name not in FIELDS]


def _request(group: dict[str, Any], max_model_len: int) -> Request:
    is_beam = group["mode"] == "beam"
    # A beam ends when its script says so.
    lengths = (max_model_len + 1,) if is_beam else tuple(group["out"])
    return Request(
        request_id=str(group["g"]),
        arrival_ns=round(group["arr"] * NS_PER_S),
        prompt=TokenStream.from_segment(group["g"] + 1, group["plen"]),
        output_len=max(lengths),
        max_output_len=max(lengths),
        sampling=Sampling(beam_width=group["n"]) if is_beam else Sampling(n=group["n"]),
        sample_lens=() if is_beam else lengths,
    )


def _preemptions(preempted: Iterable[Any]) -> list[list[Any]]:
    """[group, "R" or "S"] for each preempted group, in order."""
    modes = {_request_id(entry.seq): "S" if entry.is_swap else "R" for entry in preempted}
    return [[group, mode] for group, mode in modes.items()]


def _copies(plan: StepPlan) -> list[list[Any]]:
    grouped: dict[int, list[int]] = {}
    for copy in plan.copies:
        grouped.setdefault(copy.src, []).append(copy.dst)
    return [[src, dsts] for src, dsts in grouped.items()]


def _request_id(seq: Sequence) -> int:
    return int(seq.request.request_id)


def _group_id(group: Group) -> int:
    return int(group.request_id)

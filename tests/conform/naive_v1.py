"""Both schedulers of vLLM V1 once more, written from their description alone and as plainly as possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

Record = dict[str, Any]


def checksum(parts: Iterable[str], separator: str = ";") -> int:
    return crc32(separator.join(parts).encode())


class NaiveRequest:
    """A request and all that an engine knows of it."""

    def __init__(self, row: Record) -> None:
        self.row = row
        self.id: str = row["id"]
        self.tokens: list[int] = list(row["prompt_token_ids"])
        self.outputs: list[int] = row["output_token_ids"]
        self.max_tokens: int = row.get("max_tokens", len(self.outputs))
        self.urgency = (row.get("priority", 0), row.get("arrival_time", row["arrival_step"]))
        self.lora = row.get("lora")
        self.is_over = self.was_preempted = False
        self.table: list[int] = []
        self.num_outputs = self.computed = self.registered = 0
        self.placeholders = self.in_flight = self.stale = 0

    def text(self, num_blocks: int, block_size: int) -> tuple[Any, ...]:
        return self.lora, self.row.get("cache_salt"), tuple(self.tokens[: num_blocks * block_size])


class Entry(NamedTuple):
    """One request in one step; `samples` is None where that is asked when the outputs come."""

    request: NaiveRequest
    kind: str
    num_tokens: int
    start: int
    blocks: list[int]
    samples: bool | None = None


class NaiveV1:
    """The scheduler and its memory; `is_async` plans ahead of the outputs."""

    def __init__(self, config: Record, *, is_async: bool) -> None:
        self.config = config
        self.is_async = is_async
        self.block_size: int = config["block_size"]
        self.free = list(range(1, config["num_blocks"]))
        self.refs = [0] * config["num_blocks"]
        self.text_of: dict[int, tuple[Any, ...]] = {}
        self.carriers: dict[tuple[Any, ...], list[int]] = {}
        self.running: list[NaiveRequest] = []
        self.waiting: list[NaiveRequest] = []
        self.evicted: list[int] = []
        self.preempted: list[NaiveRequest] = []
        self.left_out: list[NaiveRequest] = []
        self.totals = dict.fromkeys(
            ("scheduled_tokens", "preemptions", "evictions", "finished", "aborted")
            + ("stale", "discarded") * is_async
            + ("queries", "hits", "preempted_queries", "preempted_hits"),
            0,
        )

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pop(self) -> int:
        block_id = self.free.pop(0)
        if (text := self.text_of.pop(block_id, None)) is not None:
            self.carriers[text].remove(block_id)
            self.evicted.append(block_id)
        self.refs[block_id] = 1
        return block_id

    def give_back(self, request: NaiveRequest) -> None:
        plain: list[int] = []
        hashed: list[int] = []
        for block_id in reversed(request.table):
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                (hashed if block_id in self.text_of else plain).append(block_id)
        self.free = plain + self.free + hashed
        request.table = []

    def register(self, request: NaiveRequest, num_tokens: int) -> None:
        if self.config["enable_prefix_caching"]:
            while request.registered < num_tokens // self.block_size:
                block_id = request.table[request.registered]
                request.registered += 1
                text = request.text(request.registered, self.block_size)
                self.text_of[block_id] = text
                self.carriers.setdefault(text, []).append(block_id)

    def hits(self, request: NaiveRequest) -> list[int]:
        found: list[int] = []
        if self.config["enable_prefix_caching"]:
            for index in range((len(request.tokens) - 1) // self.block_size):
                carriers = self.carriers.get(request.text(index + 1, self.block_size))
                if not carriers:
                    break
                found.append(carriers[0])
        return found

    def order(self) -> None:
        if self.config["policy"] == "priority":
            self.waiting.sort(key=lambda request: (request.urgency, request.id))

    def preempt(self, victim: NaiveRequest) -> None:
        self.running.remove(victim)
        self.give_back(victim)
        victim.stale = victim.in_flight
        victim.computed = victim.registered = victim.placeholders = 0
        victim.was_preempted = True
        self.waiting.insert(0, victim)
        self.order()
        self.preempted.append(victim)

    def victim(self) -> NaiveRequest:
        if self.config["policy"] == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda request: request.urgency)

    def is_last_in_flight(self, request: NaiveRequest) -> bool:
        is_long = len(request.tokens) + request.placeholders >= self.config["max_model_len"]
        is_done = request.num_outputs + request.placeholders >= request.max_tokens
        return request.placeholders > 0 and (is_done or is_long)

    def schedule(self) -> list[Entry]:
        self.preempted, self.left_out = [], []
        self.order()
        threshold = self.config["long_prefill_token_threshold"]
        if not threshold or len(self.running) + len(self.waiting) <= 1:
            threshold = 1 << 62
        entries: list[Entry] = []
        budget = self.continue_running(entries, threshold)
        if not self.preempted:
            self.admit(entries, threshold, budget)
        for index, entry in enumerate(entries):
            request = entry.request
            request.computed += entry.num_tokens
            if self.is_async:
                request.in_flight += entry.num_tokens
                samples = request.computed == len(request.tokens) + request.placeholders
                request.placeholders += samples
                entries[index] = entry._replace(samples=samples)
        return entries

    def continue_running(self, entries: list[Entry], threshold: int) -> int:
        budget: int = self.config["max_num_batched_tokens"]
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if self.is_last_in_flight(request):
                self.left_out.append(request)
                index += 1
                continue
            wanted = len(request.tokens) + request.placeholders - request.computed
            num_tokens = min(wanted, threshold, budget)
            num_new = self.blocks(request.computed + num_tokens) - len(request.table)
            while num_new > len(self.free) and request in self.running:
                victim = self.victim()
                budget += sum(entry.num_tokens for entry in entries if entry.request is victim)
                entries[:] = [entry for entry in entries if entry.request is not victim]
                index -= self.running.index(victim) < index
                self.preempt(victim)
            if request not in self.running:
                continue
            new = [self.pop() for _ in range(num_new)]
            request.table += new
            self.register(request, min(request.computed + num_tokens, len(request.tokens)))
            entries.append(Entry(request, "C", num_tokens, request.computed, new))
            budget -= num_tokens
            index += 1
        return budget

    def admit(self, entries: list[Entry], threshold: int, budget: int) -> None:
        config, set_aside = self.config, []
        while budget > 0 and self.waiting and len(self.running) < config["max_num_seqs"]:
            request = self.waiting[0]
            loras = {other.lora for other in self.running if other.lora}
            if request.lora and 0 < config["max_loras"] <= len(loras) and request.lora not in loras:
                set_aside.append(self.waiting.pop(0))
                continue
            hits = self.hits(request)
            start, known = len(hits) * self.block_size, len(request.tokens)
            num_tokens = min(known - start, threshold)
            if num_tokens > budget and not config["enable_chunked_prefill"]:
                break
            num_tokens = min(num_tokens, budget)
            kept = int(config["watermark"] * config["num_blocks"]) if self.running else 0
            revived = [block_id for block_id in hits if not self.refs[block_id]]
            asked = known if config["reserve_full_isl"] else start + num_tokens
            if self.blocks(asked) - len(hits) + len(revived) + kept > len(self.free):
                break
            self.waiting.pop(0)
            for block_id in revived:
                self.free.remove(block_id)
            for block_id in hits:
                self.refs[block_id] += 1
            request.table = hits + [self.pop() for _ in range(self.blocks(start + num_tokens) - len(hits))]
            request.computed, request.registered = start, len(hits)
            self.register(request, start + num_tokens)
            if config["enable_prefix_caching"]:
                prefix = "preempted_" * request.was_preempted
                self.totals[prefix + "queries"] += known
                self.totals[prefix + "hits"] += start
            kind = "R" if request.was_preempted else "N"
            entries.append(Entry(request, kind, num_tokens, start, list(request.table)))
            self.running.append(request)
            budget -= num_tokens
        self.waiting[:0] = set_aside
        self.order()

    def leave(self, request: NaiveRequest) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.give_back(request)
        request.is_over = True

    def abort(self, requests: Iterable[NaiveRequest]) -> list[str]:
        aborted = [request for request in requests if request in self.running or request in self.waiting]
        for request in aborted:
            self.leave(request)
        self.totals["aborted"] += len(aborted)
        return [request.id for request in aborted]

    def apply(self, entries: list[Entry]) -> list[str]:
        """Outputs come; returns who finished."""
        finished: list[str] = []
        for entry in entries:
            request = entry.request
            if request.is_over:
                self.totals["discarded"] += 1
                continue
            is_stale = request.stale > 0
            if self.is_async:
                request.in_flight -= entry.num_tokens
                request.stale -= is_stale * entry.num_tokens
            if not (entry.samples if self.is_async else request.computed == len(request.tokens)):
                continue
            request.tokens.append(request.outputs[request.num_outputs])
            request.num_outputs += 1
            if is_stale:
                self.totals["stale"] += 1
            elif self.is_async:
                request.placeholders -= 1
                self.register(request, request.computed - request.in_flight)
            if request.num_outputs == len(request.outputs) or len(request.tokens) >= self.config["max_model_len"]:
                self.leave(request)
                finished.append(request.id)
        self.totals["finished"] += len(finished)
        return finished


class NaiveRun:
    """The clock of a case, and what is written down of each step."""

    def __init__(self, case: Record, *, is_async: bool) -> None:
        self.engine = NaiveV1(case["config"], is_async=is_async)
        self.is_async = is_async
        self.is_compact = case.get("trace") == "compact"
        self.requests = [NaiveRequest(row) for row in case["requests"]]
        self.last_event = -1
        for row in case["requests"]:
            self.last_event = max(self.last_event, row["arrival_step"])
            if (step := row.get("abort_at_step")) is not None:
                self.last_event = max(self.last_event, step + row.get("abort_mid", False))
        self.why = "max_steps"

    def expected(self, max_steps: int) -> Record:
        """What a case expects; `end.end` is "max_steps" if it would go on."""
        engine = self.engine
        steps = self.records(max_steps)
        end = {"end": self.why, "steps": len(steps)} | engine.totals | {"free": len(engine.free)}
        if self.why != "done":
            end["unfinished"] = [request.id for request in engine.running + engine.waiting]
        return {"steps": steps, "end": end}

    def records(self, max_steps: int) -> list[Record]:
        engine = self.engine
        steps: list[Record] = []
        late: list[NaiveRequest] = []
        queue: list[tuple[int, list[Entry]]] = []
        is_dirty = False
        for step in range(max_steps):
            aborted = engine.abort(late)
            arriving = [request for request in self.requests if request.row["arrival_step"] == step]
            engine.waiting += arriving
            leaving = [request for request in self.requests if request.row.get("abort_at_step") == step]
            aborted += engine.abort(request for request in leaving if not request.row.get("abort_mid"))
            late = [request for request in leaving if request.row.get("abort_mid")]
            was_in_flight = any(entries for _, entries in queue)
            if not (engine.running or engine.waiting or step < self.last_event or aborted or was_in_flight):
                self.why = "done"
                break
            record: Record = {"t": step}
            planned: list[Entry] | None = None
            if not self.is_async or engine.running or engine.waiting or is_dirty or aborted:
                planned, is_dirty = engine.schedule(), False
                queue.append((step, planned))
            self.note_plan(record, planned)
            is_alone = self.is_async and planned is not None and len(queue) == 1
            if queue and not (is_alone and (planned or engine.running or engine.waiting)):
                planned_at, entries = queue.pop(0)
                record["am"], late = engine.abort(late), []
                record["f"] = engine.apply(entries)
                is_dirty = bool(record["am"] or record["f"])
                if self.is_async and entries:
                    record["o"] = planned_at
            self.note_end(record, aborted)
            steps.append(record)
            is_idle = planned is not None and not planned and not engine.preempted and not was_in_flight
            if is_idle and step >= self.last_event and (engine.running or engine.waiting):
                self.why = "stalled"
                break
        return steps

    def note_plan(self, record: Record, planned: list[Entry] | None) -> None:
        engine = self.engine
        rows = [[entry.request.id, *entry[1:5]] for entry in planned or ()]
        record["s"] = rows
        if self.is_compact:
            record["s"] = [row for row in rows if row[1:3] != ["C", 1] or row[4]]
            record["d"] = len(rows) - len(record["s"])
        if planned is not None:
            record["p"] = [request.id for request in engine.preempted]
            record["w"] = [request.id for request in engine.waiting][: 8 * bool(record["p"])]
            record["k"] = [request.id for request in engine.running if request in engine.left_out]
        record["e"], engine.evicted = engine.evicted, []
        record["fr"] = [len(engine.free)]
        record["q"] = [len(engine.running), len(engine.waiting)]
        record["h"] = checksum(f"{row[0]}:{row[1]}:{row[2]}:{row[3]}:{','.join(map(str, row[4]))}" for row in rows)
        engine.totals["scheduled_tokens"] += sum(row[2] for row in rows)
        engine.totals["preemptions"] += len(record.get("p", ()))
        engine.totals["evictions"] += len(record["e"])

    def note_end(self, record: Record, aborted: list[str]) -> None:
        engine = self.engine
        record["a"] = aborted
        record["fr"].append(len(engine.free))
        record["nc"] = len(engine.text_of)
        record["fq"] = checksum(map(str, engine.free), ",")
        if self.is_async:
            record["rs"] = checksum(
                f"{request.id}:{len(request.tokens)}:{request.computed}:{request.placeholders}"
                for request in engine.running + engine.waiting
            )
        for name in ("p", "w", "k", "e", "a", "am", "f"):
            if not record.get(name, True):
                del record[name]

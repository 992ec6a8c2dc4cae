"""The scheduler of the paper's engine once more, written from its description alone and as plainly as possible."""

from __future__ import annotations

from typing import Any

from conform.naive_block_manager import NaiveBlockManager

Record = dict[str, Any]
LABELS = 1000


class NoHostRoom(Exception):
    """A group is to be swapped out and does not fit: the engine dies."""


class NaiveGroup:
    """A request with its samples or beams."""

    def __init__(self, row: Record) -> None:
        self.row = row
        self.id: int = row["g"]
        self.root = self.id * LABELS
        self.is_beam = row["mode"] == "beam"
        self.num_tokens = 0
        """Output tokens so far."""
        self.next_label = self.root + 1


class NaiveV0(NaiveBlockManager):
    """Waiting, running and swapped groups over the plain block manager; `actions` are forks and frees in order."""

    def __init__(self, case: Record) -> None:
        super().__init__({"sw": None} | case["cfg"])
        self.cfg = case["cfg"]
        self.waiting: list[NaiveGroup] = []
        self.running: list[NaiveGroup] = []
        self.swapped: list[NaiveGroup] = []
        self.actions: list[list[Any]] = []
        self.last_token: dict[int, int] = {}
        self.record: Record = {}

    def arrive(self, row: Record) -> None:
        group = NaiveGroup(row)
        self.groups[group.id] = [group.root]
        self.length[group.root], self.status[group.root] = row["plen"], "waiting"
        if not group.is_beam:
            self.last_token[group.root] = row["out"][0]
        self.waiting.append(group)

    def abort(self, number: int) -> None:
        for queue in (self.waiting, self.running, self.swapped):
            for group in [group for group in queue if group.id == number]:
                queue.remove(group)
                for label in self.unfinished(group.id):
                    self.free(label)

    def free(self, label: int) -> None:
        if label in self.tables:
            self.actions.append(["f", label])
        super().free(label)

    def fork(self, parent: int, child: int) -> None:
        self.actions.append(["k", parent, child])
        self.tables[child] = self.tables[parent].copy()
        self.length[child], self.status[child] = self.length[parent], "running"
        self.groups[parent // LABELS].append(child)
        for device, block_id in self.tables[child]:
            self.refs[device][block_id] += 1

    def width(self, group: NaiveGroup) -> int:
        wanted: int = group.row["n"]
        if group.is_beam or wanted > len(self.groups[group.id]):
            return wanted
        return len(self.unfinished(group.id))

    def total_width(self) -> int:
        return sum(map(self.width, self.running))

    def schedule(self, record: Record) -> list[NaiveGroup]:
        """Groups that run in this step; what happened besides is noted in the record."""
        self.record = record
        record |= {"pre": [], "ca": [], "in": [], "out": [], "cp": [], "ign": []}
        scheduled, longest = ([], 0) if self.swapped else self._admit()
        if scheduled or record["ign"]:
            record |= {"p": 1, "nb": len(scheduled) * longest}
            return scheduled
        self._decode()
        record |= {"p": 0, "nb": sum(len(self.those(group.id, "running")) for group in self.running)}
        return self.running.copy()

    def _admit(self) -> tuple[list[NaiveGroup], int]:
        cfg, scheduled, lengths = self.cfg, [], list[int]()
        while self.waiting:
            group = self.waiting[0]
            length = self.length[self.those(group.id, "waiting")[0]]
            is_too_long = length > min(cfg["mml"], cfg["mnbt"])
            answer = "OK" if is_too_long else self.can_alloc(group.id)
            if answer != "OK":
                self.record["ca"].append([group.id, answer])
            if is_too_long or answer == "NEVER":
                self.record["ign"].append(self.waiting.pop(0).id)
                continue
            all_lengths = [*lengths, length]
            padded = len(all_lengths) * max(all_lengths)
            is_refused = answer == "LATER" or padded > cfg["mnbt"] or padded - sum(all_lengths) > cfg["mpad"]
            if is_refused or self.total_width() + self.width(group) > cfg["mns"]:
                break
            lengths = all_lengths
            self.alloc(group.id)
            scheduled.append(group)
            self.running.append(self.waiting.pop(0))
        return scheduled, max(lengths, default=0)

    def _decode(self) -> None:
        turn, self.running = sorted(self.running, key=_arrival), []
        while turn:
            group = turn.pop(0)
            while not self.can_append(group.id) and self.those(group.id, "running"):
                self._preempt(turn.pop() if turn else group)
            if self.those(group.id, "running"):
                self._append(group)
                self.running.append(group)
        self.swapped.sort(key=_arrival)
        while self.swapped and not self.record["pre"]:
            group = self.swapped[0]
            if not self.can_swap_in(group.id) or self.total_width() + self.width(group) > self.cfg["mns"]:
                break
            self.record["in"] += self.swap_in(group.id)
            self._append(group)
            self.running.append(self.swapped.pop(0))

    def _preempt(self, victim: NaiveGroup) -> None:
        is_swap = self.width(victim) > 1
        self.record["pre"].append([victim.id, "S" if is_swap else "R"])
        if not is_swap:
            self.recompute(victim.id)
            self.waiting.insert(0, victim)
        elif self.can_swap_out(victim.id):
            self.record["out"] += self.swap_out(victim.id)
            self.swapped.append(victim)
        else:
            raise NoHostRoom

    def _append(self, group: NaiveGroup) -> None:
        for label in self.those(group.id, "running"):
            # The length has grown when the token was sampled.
            self.length[label] -= 1
            if copy := self.append(label):
                copies = dict(self.record["cp"])
                copies.setdefault(copy[0], []).append(copy[1])
                self.record["cp"] = [list(pair) for pair in copies.items()]

    def run_model(self, scheduled: list[NaiveGroup]) -> None:
        for group in scheduled:
            labels = self.those(group.id, "running")
            for label in labels:
                self.length[label] += 1
            group.num_tokens += 1
            if group.is_beam:
                self._move_beams(group)
                continue
            if group.num_tokens == 1:
                self._fork_samples(group)
            for label in labels:
                if self._is_over(group, label):
                    self.free(label)
        self.running = [group for group in self.running if self.unfinished(group.id)]

    def _is_over(self, group: NaiveGroup, label: int) -> bool:
        num_tokens = self.length[label] - group.row["plen"]
        return num_tokens >= self.last_token[label] or self.length[label] > self.cfg["mml"]

    def _fork_samples(self, group: NaiveGroup) -> None:
        for num_tokens in group.row["out"][1:]:
            if num_tokens == 1 or self.length[group.root] > self.cfg["mml"]:
                # It joins the group, and has neither a table nor a name.
                unnamed = -1 - len(self.status)
                self.groups[group.id].append(unnamed)
                self.status[unnamed] = "finished"
                continue
            self.fork(group.root, group.next_label)
            self.last_token[group.next_label] = num_tokens
            group.next_label += 1

    def _move_beams(self, group: NaiveGroup) -> None:
        script = group.row["ev"]
        for kind, *labels in script[group.num_tokens - 1] if group.num_tokens <= len(script) else ():
            if kind == "k":
                self.fork(*labels)
            else:
                self.free(*labels)


def _arrival(group: NaiveGroup) -> float:
    arrival: float = group.row["arr"]
    return arrival


class NaiveRun:
    """The recorder's loop."""

    def __init__(self, case: Record) -> None:
        self.case = case
        self.engine = NaiveV0(case)
        self.last: dict[str, Any] = {}

    def records(self, max_steps: int) -> tuple[list[Record], str]:
        """What a case records, and how it ends: done, stuck, err, or endless."""
        engine, steps, step, num_empty = self.engine, list[Record](), 0, 0
        coming = self.case["groups"]
        while len(steps) < max_steps:
            if not (engine.waiting or engine.running or engine.swapped):
                if not coming:
                    return steps, "done"
                step = max(step, min(row["at"] for row in coming))
            if num_empty >= 3 and not coming:
                left = [group.id for group in engine.waiting + engine.swapped]
                return [*steps, {"t": step, "stuck": left}], "stuck"
            for row in coming:
                if row["at"] <= step:
                    engine.arrive(row)
            coming = [row for row in coming if row["at"] > step]
            engine.actions = []
            for at, number in self.case["aborts"]:
                if at == step:
                    engine.abort(number)
            record: Record = {"t": step, "ab": engine.actions}
            engine.actions = []
            try:
                scheduled = engine.schedule(record)
            except NoHostRoom:
                kept = {name: record[name] for name in ("t", "ab", "ca", "pre") if record[name] != []}
                return [*steps, kept | {"err": "SWAP_SPACE"}], "err"
            self._note(record, scheduled)
            num_empty = 0 if scheduled or record.get("pre") else num_empty + 1
            engine.actions = []
            engine.run_model(scheduled)
            if engine.actions:
                record |= {"act": engine.actions, "f2": self._num_free(), "h2": engine.hash()}
            steps.append(record)
            step += 1
        return steps, "endless"

    def _num_free(self) -> list[int]:
        return [len(self.engine.free_list["gpu"]), len(self.engine.free_list["cpu"])]

    def _note(self, record: Record, scheduled: list[NaiveGroup]) -> None:
        engine = self.engine
        tables = {
            str(label): [block_id if device == "gpu" else -block_id - 1 for device, block_id in table]
            for label, table in sorted(engine.tables.items())
        }
        before = self.last.get("tables", {})
        record["bt"] = {label: table for label, table in tables.items() if before.get(label) != table}
        for name in ("ab", "pre", "ca", "bt", "in", "out", "cp", "ign"):
            if not record[name]:
                del record[name]
        shown = {
            "s": [[group.id, engine.those(group.id, "running")] for group in scheduled],
            "q": [[group.id for group in queue] for queue in (engine.waiting, engine.running, engine.swapped)],
        }
        record |= {name: value for name, value in shown.items() if self.last.get(name) != value}
        refs = engine.refs["gpu"]
        record |= {"f": self._num_free(), "h": engine.hash(), "sh": [sum(ref > 1 for ref in refs), sum(refs)]}
        self.last = shown | {"tables": tables}

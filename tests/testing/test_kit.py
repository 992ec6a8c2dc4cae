"""The public kit: its documentation runs, its parts say what they should, and it accepts every real allocator."""

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvsim.memory import BlockCopy, BlockMove, PagedAllocator, Usage
from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.testing import DictModel, Features, Harness, LawViolation, ShadowMemory, check_allocator, machine_for
from kvsim.testing.adapter import BlockManagerAdapter
from kvsim.types import AllocatorError, AllocStatus, BlockId, OutOfBlocks, SeqId

POLICIES = {"fifo": "lru", "lru": "lru", "lifo": "tail_first", "exclusive_first": "tail_first"}
"""Free-list order -> the eviction order that it promises."""


def doc_examples(repo_root: Path) -> list[str]:
    text = (repo_root / "docs" / "test-your-allocator.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_documented_examples_run_and_are_short(repo_root: Path) -> None:
    mine, manager, adapter = doc_examples(repo_root)
    assert max(len(code.splitlines()) for code in (mine, adapter)) < 30
    namespace: dict[str, Any] = {"__name__": "example"}
    for code in (mine, manager, adapter):
        exec(code, namespace)
    namespace["test_every_law"]()


def test_the_adapted_manager_forks_too(repo_root: Path) -> None:
    _, manager, adapter = doc_examples(repo_root)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(manager + adapter, namespace)

    class Forking(namespace["Adapted"]):  # type: ignore[misc]
        def share(self, parent_id: SeqId, child_id: SeqId) -> None:
            self.manager.map[child_id] = self.manager.map[parent_id].copy()
            for block_id in self.manager.map[child_id]:
                self.manager.refs[block_id] += 1

    class Forgetful(Forking):
        def share(self, parent_id: SeqId, child_id: SeqId) -> None:
            self.manager.map[child_id] = self.manager.map[parent_id].copy()

    check_allocator(Forking, max_examples=15)
    with pytest.raises(LawViolation):
        check_allocator(Forgetful, max_examples=30, shrink=False)


class Swapping(BlockManagerAdapter):
    """A foreign manager that can swap: ours behind the adapter."""

    out_of_blocks = (AllocatorError,)

    def __init__(self) -> None:
        super().__init__(8, 4, num_host_blocks=4)
        self.inner = PagedAllocator(8, 4, num_host_blocks=4)

    def take(self, seq_id: SeqId, num_tokens: int) -> None:
        self.inner.allocate(seq_id, num_tokens)

    def grow(self, seq_id: SeqId, num_tokens: int) -> list[tuple[BlockId, BlockId]]:
        return [(copy.src, copy.dst) for copy in self.inner.append_slots(seq_id)]

    def drop(self, seq_id: SeqId) -> None:
        self.inner.free(seq_id)

    def table(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        return self.inner.block_table(seq_id)

    def num_free(self) -> int:
        return self.inner.num_free_blocks

    def share(self, parent_id: SeqId, child_id: SeqId) -> None:
        self.inner.fork(parent_id, child_id)

    def to_host(self, seq_ids: Any) -> Any:
        return self.inner.swap_out(seq_ids)

    def to_gpu(self, seq_ids: Any) -> Any:
        return self.inner.swap_in(seq_ids)


def test_adapter_with_swap() -> None:
    check_allocator(Swapping, max_examples=20)


class LeaksSharedHostBlocks(Swapping):
    """A host block that two sequences shared is not given back; no table and no count tells, room does in the end."""

    num_lost = 0

    def to_host(self, seq_ids: Any) -> Any:
        num_blocks = len({block_id for seq_id in seq_ids for block_id in self.table(seq_id)})
        return super().to_host(seq_ids) if num_blocks + self.num_lost <= self.inner.num_free_host_blocks else None

    def to_gpu(self, seq_ids: Any) -> Any:
        num_entries = sum(len(self.table(seq_id)) for seq_id in seq_ids)
        moves = super().to_gpu(seq_ids)
        self.num_lost += bool(moves) and len(moves) < num_entries
        return moves


def test_a_host_block_that_is_never_given_back_is_found() -> None:
    with pytest.raises(LawViolation, match=r"law 4: a swap of 4 blocks was refused, though 4 are free"):
        check_allocator(LeaksSharedHostBlocks, max_examples=20, shrink=False)


@pytest.mark.parametrize(("policy", "eviction"), POLICIES.items())
@pytest.mark.parametrize("caching", [False, True])
def test_real_allocator_obeys_every_law(policy: str, eviction: Any, caching: bool) -> None:
    def factory() -> PagedAllocator:
        return PagedAllocator(10, 4, num_host_blocks=8, enable_prefix_caching=caching, free_list=policy)

    check_allocator(factory, max_examples=6, eviction=eviction)


@pytest.mark.parametrize("block_size", [1, 3])
def test_other_block_sizes(block_size: int) -> None:
    def factory() -> PagedAllocator:
        return PagedAllocator(13, block_size, num_host_blocks=3, enable_prefix_caching=True, null_block=True)

    check_allocator(factory, max_examples=6)


@pytest.mark.parametrize("placement", ["first_fit", "best_fit", "buddy"])
def test_contiguous_regions_hold_what_they_were_given(placement: Any) -> None:
    def factory() -> ContiguousAllocator:
        return ContiguousAllocator(100, placement=placement)

    check_allocator(factory, fork=False, exact_blocks=False, max_examples=6)


@pytest.mark.deep
@pytest.mark.parametrize(("policy", "eviction"), POLICIES.items())
def test_nothing_is_found_in_20000_commands(policy: str, eviction: Any) -> None:
    def factory() -> PagedAllocator:
        return PagedAllocator(10, 4, num_host_blocks=8, enable_prefix_caching=True, free_list=policy)

    machine = run_deep(factory, eviction)
    print(policy, machine.num_examples, machine.num_steps)
    assert machine.num_steps >= 20_000


def run_deep(factory: Any, eviction: Any) -> Any:
    machine = machine_for(factory, Features(eviction=eviction))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=500,
            stateful_step_count=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine


def test_shadow_memory_reads_what_copies_and_moves_left() -> None:
    shadow = ShadowMemory(4)
    shadow.write([3, 0], 0, [1, 2, 3, 4, 5, 6])
    shadow.copy([BlockCopy(0, 4, 2)])
    shadow.write([3, 4], 6, [7])
    shadow.check("a", [3, 0], [1, 2, 3, 4, 5, 6], is_swapped=False)
    shadow.check("b", [3, 4], [1, 2, 3, 4, 5, 6, 7], is_swapped=False)
    shadow.swap_out([BlockMove(3, 0), BlockMove(4, 1)])
    shadow.check("b", [0, 1], [1, 2, 3, 4, 5, 6, 7], is_swapped=True)
    with pytest.raises(LawViolation, match="law 8: sequence 'a' reads 7 at position 6"):
        shadow.check("a", [3, 4], [1, 2, 3, 4, 5, 6, 8], is_swapped=False)


def test_model_counts_references_from_the_tables() -> None:
    model = DictModel(5, 5, 4)
    model.allocate("p", tuple(range(20)), 0, 6)
    model.fork("p", "c", tuple(range(20)))
    assert model.num_free == 3
    assert model.num_needed("p", 1) == 1
    copy = model.append("p", 1)
    assert copy is not None
    assert copy.num_tokens == 2
    assert model.append("c", 1) is None
    assert model.num_free == 2
    model.move(["p", "c"])
    assert (model.num_free, model.num_host_free) == (5, 2)


def test_harness_names_the_law() -> None:
    allocator = PagedAllocator(4, 4)
    harness = Harness(allocator)
    harness.allocate("a", tuple(range(20)), 6)
    allocator.pool.ref[0] = 2
    with pytest.raises(LawViolation, match=r"^law 4: GPU block 0 has ref count 2, but 1 tables name it"):
        harness.check()


class Odd(PagedAllocator):
    """Ours, with one method of the test's."""

    def __init__(self) -> None:
        super().__init__(8, 4, num_host_blocks=4, enable_prefix_caching=True)


def unimplemented(*args: Any, **keywords: Any) -> Any:
    raise NotImplementedError


ODD = [
    ("append_slots", lambda *args: None, "append_slots returned None; it must be a tuple of BlockCopy"),
    ("append_slots", lambda *args: [1], r"append_slots returned \[1\]; it must be a tuple of BlockCopy"),
    ("can_allocate", lambda *args, **keys: True, "can_allocate returned True; it must be an AllocStatus"),
    ("match_prefix", lambda *args: None, "match_prefix returned None; it must be a PrefixMatch"),
    ("match_prefix", lambda *args: (0, ()), r"match_prefix returned \(0, \(\)\); it must be a PrefixMatch"),
    ("block_table", lambda *args: None, "block_table returned None; it must be a sequence of block ids"),
    ("num_tokens", lambda *args: 1.5, "num_tokens returned 1.5; it must be a whole number of at least 0"),
    ("num_slots", lambda *args: None, "num_slots returned None; it must be a whole number"),
    ("has_table", lambda *args: None, "has_table returned None; it must be True or False"),
    ("usage", lambda *args: {}, r"usage returned {}; it must be a Usage"),
    ("swap_out", lambda *args: False, "swap_out returned False; it must be a tuple of BlockMove, or None"),
    ("num_free_blocks", lambda *args: 3, "num_free_blocks is <bound method.*; it must be a whole number"),
    (
        "usage",
        lambda self: PagedAllocator.usage(self)._replace(num_used=-2),
        "usage returned num_used=-2; it must be a whole number of at least 0",
    ),
    ("free", None, "Odd.free is None; it is a method"),
    ("fork", unimplemented, "Odd.fork is not implemented; leave it out with fork=False"),
    ("swap_out", unimplemented, "Odd.swap_out is not implemented; leave it out with swap=False"),
    ("free", unimplemented, "Odd.free is not implemented\n"),
    ("num_free_blocks", property(unimplemented), "Odd.num_free_blocks is not implemented\n"),
    (
        "allocate",
        lambda self, seq_id, num_tokens: None,
        r"Odd.allocate takes \(seq_id, num_tokens\): got an unexpected",
    ),
]


@pytest.mark.parametrize(("name", "method", "expected"), ODD)
def test_what_breaks_the_protocol_is_named(name: str, method: Any, expected: str) -> None:
    odd = type("Odd", (Odd,), {name: method})
    with pytest.raises(LawViolation, match=f"protocol: .*{expected}"):
        check_allocator(odd, max_examples=20, shrink=False)


def raising(error: Exception, method: Any) -> Any:
    """The method, with this exception wherever it refuses."""

    def wrapped(*args: Any, **keywords: Any) -> Any:
        try:
            value = method(*args, **keywords)
        except AllocatorError as refused:
            if isinstance(error, MemoryError) and not isinstance(refused, OutOfBlocks):
                raise
            raise error from refused
        if value is None and method.__name__.startswith("swap"):
            raise error
        return value

    return wrapped


REFUSALS = [
    ("free", KeyError("s1"), "not refused with AllocatorError, it raised KeyError: 's1'"),
    ("allocate", MemoryError("full"), "not refused with OutOfBlocks, it raised MemoryError: full"),
    ("swap_out", OutOfBlocks(3, 1), "a swap of . blocks .* raised OutOfBlocks: .* does not fit returns None"),
    ("swap_in", OutOfBlocks(3, 1), "a swap of . blocks .* raised OutOfBlocks: .* does not fit returns None"),
]


@pytest.mark.parametrize(("name", "error", "expected"), REFUSALS)
def test_a_refusal_in_other_words_is_named(name: str, error: Exception, expected: str) -> None:
    odd = type("Odd", (Odd,), {name: raising(error, getattr(PagedAllocator, name))})
    with pytest.raises(LawViolation, match=f"law 7: .*{expected}"):
        check_allocator(odd, max_examples=500, shrink=False)


def test_a_refused_region_is_not_taken_either() -> None:
    """Without exact blocks the model cannot tell who is refused, yet a refusal changes nothing."""

    class Grabs(ContiguousAllocator):
        def __init__(self) -> None:
            super().__init__(60, placement="first_fit")

        def allocate(self, *args: Any, **keywords: Any) -> None:
            try:
                super().allocate(*args, **keywords)
            except OutOfBlocks:
                if self.num_free_blocks:
                    super().allocate(object(), 1)
                raise

    with pytest.raises(LawViolation, match="law 7: a refused command changed something"):
        check_allocator(Grabs, fork=False, exact_blocks=False, max_examples=20, shrink=False)


@pytest.mark.parametrize("field", ["num_logical", "num_shared"])
def test_what_regions_say_of_their_tables_is_compared_with_them(field: str) -> None:
    """The ledger of a run counts with both."""

    class Silent(ContiguousAllocator):
        def __init__(self) -> None:
            super().__init__(60, placement="first_fit")

        def usage(self) -> Usage:
            usage = super().usage()
            return usage._replace(num_logical=0) if field == "num_logical" else usage._replace(num_shared=1)

    with pytest.raises(LawViolation, match=rf"law 4: usage\(\)\.{field} is .; it should be"):
        check_allocator(Silent, fork=False, exact_blocks=False, max_examples=5, shrink=False)


def test_an_adapter_without_forks_says_how_to_leave_them_out(repo_root: Path) -> None:
    _, manager, adapter = doc_examples(repo_root)
    code = (manager + adapter).replace("fork=False, ", "")
    with pytest.raises(LawViolation, match=r"Adapted\.fork is not implemented: no share; leave it out with fork=False"):
        exec(code, {"__name__": "example"})


def test_what_the_kit_is_given_is_checked() -> None:
    with pytest.raises(TypeError, match=r"the factory is <.*Odd .*; every history begins with a fresh allocator"):
        check_allocator(Odd())  # type: ignore[arg-type]
    with pytest.raises(LawViolation, match="protocol: the factory returned the class Odd, not an allocator"):
        check_allocator(lambda: Odd, max_examples=2, shrink=False)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="eviction is 'LRU'; it is one of lru, tail_first, any"):
        check_allocator(Odd, eviction="LRU")  # type: ignore[arg-type]


def test_a_method_that_is_missing_is_named() -> None:
    class Bare:
        block_size = 4
        num_blocks = num_free_blocks = 8

    with pytest.raises(LawViolation, match="protocol: Bare has no usage; kvsim"):
        check_allocator(Bare, max_examples=2, shrink=False)  # type: ignore[arg-type]
    with pytest.raises(LawViolation, match="protocol: NoneType has no usage"):
        check_allocator(lambda: None, max_examples=2, shrink=False)  # type: ignore[arg-type, return-value]


def test_what_is_not_claimed_may_be_missing() -> None:
    """No fork, no swap, no cache: such an allocator needs neither their methods nor their keywords."""

    class Plain(PagedAllocator):
        fork = swap_out = swap_in = match_prefix = None  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__(8, 4)

    check_allocator(Plain, max_examples=5, fork=False)


class Copied(NamedTuple):
    """A copy in an engine's own words."""

    src: int
    dst: int
    num_tokens: int


class Foreign:
    """A method whose parameters nobody knows, as those of compiled code."""

    __signature__ = "unknown"

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.method(*args, **keywords)


def test_an_engine_may_have_its_own_copies_and_compiled_methods() -> None:
    class Own(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.free = Foreign(self.free)  # type: ignore[method-assign]

        def append_slots(self, *args: Any, **keywords: Any) -> Any:
            return [Copied(*copy) for copy in super().append_slots(*args, **keywords)]

    check_allocator(Own, max_examples=30, shrink=False)

    class Broken(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.free = Foreign(lambda seq_id: seq_id + None)  # type: ignore[method-assign]

    with pytest.raises(TypeError, match="NoneType"):
        check_allocator(Broken, max_examples=30, shrink=False)


class OneBlockAtMost(PagedAllocator):
    """Two faults: a catch-up takes one block, however many it needs; and the host's order of two sequences is mixed."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        return super().append_slots(seq_id, min(num_tokens, self.block_size))

    def swap_out(self, seq_ids: Any) -> Any:
        moves = super().swap_out(seq_ids)
        return moves and tuple(BlockMove(move.dst, move.src) for move in moves)


@pytest.mark.parametrize("prints_blob", [False, True])
def test_a_violation_tells_the_history_as_the_allocator_was_told_it(prints_blob: bool) -> None:
    """One violation, though there are two faults, and behind it every command with what came of it.

    Nothing of Hypothesis's own comes behind that, whatever the caller's profile says: where `CI` is set it prints more.
    """
    before = settings.get_current_profile_name()
    settings.register_profile("prints", settings.get_profile(before), print_blob=prints_blob)
    settings.load_profile("prints")
    try:
        check_history_of_one_violation()
    finally:
        settings.load_profile(before)


def check_history_of_one_violation() -> None:
    with pytest.raises(LawViolation) as raised:
        check_allocator(lambda: OneBlockAtMost(10, 4, num_host_blocks=4), max_examples=60, shrink=False)
    told = "\n".join(raised.value.__notes__)
    history = told.split("As the allocator was told it:\n")[1].splitlines()
    assert re.fullmatch(r"allocate\('s1', \d+\); table of 's1': \[[\d, ]+\]", history[0])
    command = r"(append_slots\('s\d+', \d+\) -> .*|swap_out\(\[.*\]\) -> .*); table of 's\d+': \[[\d, ]+\].*"
    assert re.fullmatch(command, history[-1])


def double_that_goes_before_the_end_of_its_chain(features: Features) -> None:
    """A and B hold the same first two blocks, B's third is found by C; then B's second block is handed out."""
    harness = Harness(PagedAllocator(8, 4, enable_prefix_caching=True, free_list="exclusive_first"), features)
    text, other = tuple(range(40)), tuple(range(100, 140))
    harness.allocate("A", text, 8)
    harness.allocate("B", text, 13)
    harness.register("A")
    harness.register("B")
    harness.allocate("C", text, 13)
    assert harness.allocator.block_table("C") == (0, 1, 4, 6)
    for seq_id in ("A", "C", "B"):
        harness.free(seq_id)
    harness.allocate("D", other, 16)
    assert harness.allocator.block_table("D") == (7, 6, 5, 3)


def test_a_double_may_go_before_the_end_of_its_chain() -> None:
    double_that_goes_before_the_end_of_its_chain(Features(eviction="tail_first"))


def test_strict_lru_lets_no_double_go_sooner() -> None:
    with pytest.raises(LawViolation, match=r"eviction order: a cached block went before block \d, "):
        double_that_goes_before_the_end_of_its_chain(Features(eviction="lru"))


@pytest.mark.parametrize("eviction", ["tail_first", "any"])
def test_the_first_of_two_doubles_may_go_sooner_too(eviction: Any) -> None:
    """Another carrier of its text stays, so that nothing is lost."""

    allocator = PagedAllocator(4, 4, enable_prefix_caching=True)
    harness = Harness(allocator, Features(eviction=eviction))
    text = tuple(range(40))
    harness.allocate("A", text, 8)
    harness.allocate("B", text, 8)
    harness.register("A")
    harness.register("B")
    harness.free("A")
    allocator.pool.free.remove(0)
    allocator.pool.free.remove(1)
    allocator.pool.free.extend([0])
    allocator.pool.free.extend([1])
    harness.allocate("C", tuple(range(100, 140)), 4)
    assert harness.allocator.block_table("C") == (0,)


def test_tables_of_one_swap_are_released_in_any_order() -> None:
    class Backwards(Odd):
        def swap_out(self, seq_ids: Any) -> Any:
            return super().swap_out(list(reversed(seq_ids)))

    harness = Harness(Backwards(), Features(eviction="lru"))
    for start in range(2):
        harness.allocate(f"s{start}", tuple(range(100 * start, 100 * start + 40)), 8)
        harness.register(f"s{start}")
    harness.swap_out(["s0", "s1"])
    harness.allocate("more", tuple(range(500, 540)), 20)
    assert harness.allocator.usage().num_evicted == 1
    assert not harness.allocator.index.has_text(3)  # type: ignore[attr-defined]


class Ahead(PagedAllocator):
    """A full tail has its next block already, and so has a prompt that fills its blocks."""

    def __init__(self) -> None:
        super().__init__(10, 4, num_host_blocks=8, enable_prefix_caching=True)

    def audit(self) -> None:
        pass

    def _ceil(self, num_tokens: int) -> int:
        return num_tokens // self.block_size + 1


def test_blocks_reserved_ahead_evict_and_move() -> None:
    """Their texts are gone when they are taken, not when something is stored there; and they go to the host too."""
    check_allocator(Ahead, exact_blocks=False, fork=False, eviction="lru", max_examples=60, shrink=False)


def test_regions_may_find_no_hole_on_the_host() -> None:
    class Holes(PagedAllocator):
        def __init__(self) -> None:
            super().__init__(10, 4, num_host_blocks=8)

        def swap_out(self, seq_ids: Any) -> Any:
            return None if self.host.num_free % 3 == 2 else super().swap_out(seq_ids)

    check_allocator(Holes, exact_blocks=False, max_examples=30, shrink=False)
    with pytest.raises(LawViolation, match=r"law 4: a swap of . blocks was refused, though . are free"):
        check_allocator(Holes, max_examples=60, shrink=False)


@pytest.mark.parametrize(("status", "done"), [(AllocStatus.OK, "refused"), (AllocStatus.LATER, "done")])
def test_regions_do_what_can_allocate_says(status: AllocStatus, done: str) -> None:
    class Says(ContiguousAllocator):
        def __init__(self) -> None:
            super().__init__(60, placement="first_fit")

        def can_allocate(self, *args: Any, **keywords: Any) -> AllocStatus:
            return status

    with pytest.raises(LawViolation, match=f"law 4: can_allocate says {status}, but the allocation was {done}"):
        check_allocator(Says, fork=False, exact_blocks=False, max_examples=20, shrink=False)


class SwappingRaises(Swapping):
    """Its one word for a swap without room is its exception."""

    def to_host(self, seq_ids: Any) -> Any:
        return self._or_raise(super().to_host(seq_ids))

    def to_gpu(self, seq_ids: Any) -> Any:
        return self._or_raise(super().to_gpu(seq_ids))

    def _or_raise(self, moves: Any) -> Any:
        if moves is None:
            raise AllocatorError("no room")
        return moves


def test_an_adapted_swap_may_raise_out_of_blocks() -> None:
    check_allocator(SwappingRaises, max_examples=20)


@pytest.mark.parametrize("order", [deque([1, 2]), None, lambda block_ids: None])
def test_free_block_ids_of_another_allocator_may_be_anything(order: Any) -> None:
    """A list, nothing, or the command that frees blocks: only ours is known to tell an order."""

    class Named(Swapping):
        free_block_ids = order

    check_allocator(Named, max_examples=5)


def test_a_prefix_cache_that_is_not_claimed_is_not_used() -> None:
    check_allocator(Odd, prefix_cache=False, max_examples=20)


def test_a_prefix_cache_that_nobody_told_of_is_named() -> None:
    class Untold(Odd):
        def __getattribute__(self, name: str) -> Any:
            if name == "enable_prefix_caching" and sys._getframe(1).f_globals["__name__"] == "kvsim.testing.harness":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with pytest.raises(LawViolation, match=r"num_cached_idle is .; it should be 0; give prefix_cache=True if it has"):
        check_allocator(Untold, max_examples=40, shrink=False)


def test_a_hit_and_a_refusal_stand_in_the_history() -> None:
    harness = Harness(PagedAllocator(3, 4, enable_prefix_caching=True))
    text = tuple(range(40))
    harness.allocate("A", text, 6)
    harness.register("A")
    harness.allocate("B", text, 6)
    harness.append("A", 6)
    assert harness.history.splitlines() == [
        "allocate('A', 6); table of 'A': [0, 1]",
        "register('A', 6)",
        "allocate('B', 6, hit [0]); table of 'B': [0, 2]",
        "append_slots('A', 6) raises OutOfBlocks",
    ]

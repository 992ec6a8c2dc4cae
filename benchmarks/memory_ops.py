"""How many allocator calls a second: 256 sequences, 512-token prompts, 256 decode tokens, block size 16.

An operation is one call for one sequence and one token, with the can-append question asked each time. Run it with
`python benchmarks/memory_ops.py`; it prints the best of five runs for each setting, in CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvsim.memory import PagedAllocator, PrefixKeys
from kvsim.memory.journal import Journal
from kvsim.tokens import TokenStream

NUM_SEQUENCES = 256
PROMPT_LEN = 512
NUM_DECODES = 256
BLOCK_SIZE = 16
NUM_BLOCKS = NUM_SEQUENCES * (PROMPT_LEN + NUM_DECODES) // BLOCK_SIZE + 1
NUM_RUNS = 5


def plain() -> float:
    """Prefix caching off: seconds of the decode phase."""
    allocator = PagedAllocator(NUM_BLOCKS, BLOCK_SIZE)
    for seq_id in range(NUM_SEQUENCES):
        allocator.allocate(seq_id, PROMPT_LEN)
    return _decode(allocator, registers=False)


def lifo() -> float:
    """The paper's engine's free list."""
    allocator = PagedAllocator(NUM_BLOCKS, BLOCK_SIZE, free_list="lifo")
    for seq_id in range(NUM_SEQUENCES):
        allocator.allocate(seq_id, PROMPT_LEN)
    return _decode(allocator, registers=False)


def caching() -> float:
    """Prefix caching on: every full block is made findable when it fills up."""
    allocator = PagedAllocator(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
    for seq_id in range(NUM_SEQUENCES):
        text = TokenStream.from_segment(1 + seq_id, PROMPT_LEN + NUM_DECODES)
        allocator.allocate(seq_id, PROMPT_LEN, keys=PrefixKeys(text, None, BLOCK_SIZE))
        allocator.register(seq_id, PROMPT_LEN)
    return _decode(allocator, registers=True)


def journal() -> float:
    """Caching off, every block observed."""
    observer = Journal()
    allocator = PagedAllocator(NUM_BLOCKS, BLOCK_SIZE, journal=observer)
    for seq_id in range(NUM_SEQUENCES):
        allocator.allocate(seq_id, PROMPT_LEN)
    return _decode(allocator, registers=False)


def crossings() -> float:
    """As an engine with a block calendar calls it: once per block and sequence, catching up 16 tokens."""
    allocator = PagedAllocator(NUM_BLOCKS, BLOCK_SIZE)
    for seq_id in range(NUM_SEQUENCES):
        allocator.allocate(seq_id, PROMPT_LEN)
    start = time.process_time()
    for _ in range(NUM_DECODES // BLOCK_SIZE):
        for seq_id in range(NUM_SEQUENCES):
            allocator.append_slots(seq_id, BLOCK_SIZE)
    return time.process_time() - start


def _decode(allocator: PagedAllocator, *, registers: bool) -> float:
    can_append, append_slots, register = allocator.can_append, allocator.append_slots, allocator.register
    start = time.process_time()
    for step in range(1, NUM_DECODES + 1):
        fills_block = registers and (PROMPT_LEN + step) % BLOCK_SIZE == 0
        for seq_id in range(NUM_SEQUENCES):
            if can_append(1):
                append_slots(seq_id)
            if fills_block:
                register(seq_id, PROMPT_LEN + step)
    return time.process_time() - start


def main() -> None:
    num_ops = NUM_SEQUENCES * NUM_DECODES
    settings: dict[str, tuple[Callable[[], float], int]] = {
        "caching off": (plain, num_ops),
        "caching off, lifo": (lifo, num_ops),
        "caching on": (caching, num_ops),
        "journal on": (journal, num_ops),
        "calendar, one call per block": (crossings, num_ops // BLOCK_SIZE),
    }
    for name, (run, num_calls) in settings.items():
        seconds = min(run() for _ in range(NUM_RUNS))
        print(f"{name:30} {num_calls / seconds / 1e6:6.2f} M calls/s  {num_ops / seconds / 1e6:7.2f} M tokens/s")


if __name__ == "__main__":
    main()

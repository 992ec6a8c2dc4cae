"""The prefix cache: which full blocks hold which text, found by walking a text from its start.

The index is a tree. A node stands for one whole prefix in one namespace (a path of block contents), so that two
texts meet in a node exactly if they are equal up to there: there is no hash to collide. Blocks that hold a node's
last block of text are its carriers, in the order in which they were registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsim.memory.interface import KeyChain, Link
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, BlockId


class NamespaceLike(Protocol):
    """Anything with a LoRA id and a cache salt, such as `kvsim.request.Namespace`."""

    @property
    def lora(self) -> str | None: ...

    @property
    def salt(self) -> str | None: ...


class PrefixKeys:
    """The links and chain keys of one text in one namespace, made on demand and remembered.

    `stream` is all that may ever be stored: the prompt, and the output where it is known. How much of it counts
    is said at each `match_prefix` and `register`. Keys cost O(1) per block for segments.
    """

    __slots__ = ("_block_size", "_keys", "_links", "_namespace", "_num_blocks", "_stream")

    def __init__(self, stream: TokenStream, namespace: NamespaceLike | None, block_size: int) -> None:
        self._stream = stream
        self._namespace = _namespace_ints(namespace)
        self._block_size = block_size
        self._num_blocks = len(stream) // block_size
        self._links: list[Link] = []
        self._keys: list[int] = []

    def num_full_blocks(self, num_tokens: int) -> int:
        """Whole blocks among the first `num_tokens` tokens of the text."""
        return min(num_tokens // self._block_size, self._num_blocks)

    def link(self, block_index: int) -> Link:
        """What block `block_index` adds; equal links up to k mean equal text and namespace up to k, and vice versa."""
        links = self._links
        if block_index < len(links):
            return links[block_index]
        while len(links) <= block_index:
            start = len(links) * self._block_size
            content = self._stream.content(start, start + self._block_size)
            links.append((content, () if links else self._namespace))
        return links[block_index]

    def chain(self, block_index: int) -> int:
        """A 64-bit key of the whole prefix up to block `block_index`, the same in every process."""
        keys = self._keys
        while len(keys) <= block_index:
            keys.append(hash((keys[-1] if keys else 0, self.link(len(keys)))))
        return keys[block_index]


def _namespace_ints(namespace: NamespaceLike | None) -> tuple[int, int]:
    """Integers instead of strings: their hash does not depend on the process."""
    if namespace is None:
        return (0, 0)
    return (_as_int(namespace.lora), _as_int(namespace.salt))


def _as_int(text: str | None) -> int:
    return 0 if text is None else int.from_bytes(b"\x01" + text.encode(), "big")


class PrefixNode:
    """One prefix: the path from the root. It lives while a block carries it or a longer prefix needs it."""

    __slots__ = ("carriers", "children", "link", "parent")

    def __init__(self, parent: PrefixNode | None, link: Link) -> None:
        self.parent = parent
        self.link = link
        self.carriers: list[BlockId] = []
        self.children: dict[Link, PrefixNode] = {}


class PrefixIndex:
    """Finds the blocks that hold a text, and forgets a block when it is handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.root = PrefixNode(None, ((), ()))
        self.node_of: list[PrefixNode | None] = [None] * num_blocks
        self.num_hashed = 0
        """Blocks that carry a text, in use or free."""

    def has_text(self, block_id: BlockId) -> bool:
        return self.node_of[block_id] is not None

    def find(self, keys: KeyChain, max_blocks: int) -> list[BlockId]:
        """The earliest registered carrier of each leading block, up to the first that nobody carries."""
        found: list[BlockId] = []
        node = self.root
        for block_index in range(min(max_blocks, keys.num_full_blocks(1 << 62))):
            child = node.children.get(keys.link(block_index))
            if child is None or not child.carriers:
                break
            found.append(child.carriers[0])
            node = child
        return found

    def is_path(self, block_ids: Sequence[BlockId]) -> bool:
        """The blocks carry consecutive texts from the start of one prefix: what `find` returned still holds."""
        parent = self.root
        for block_id in block_ids:
            node = self.node_of[block_id]
            if node is None or node.parent is not parent:
                return False
            parent = node
        return True

    def add(self, block_id: BlockId, parent: PrefixNode, link: Link) -> PrefixNode:
        """Let a full block carry `parent`'s prefix plus `link`; a block that does so already stays as it is."""
        node = parent.children.get(link)
        if node is None:
            node = parent.children[link] = PrefixNode(parent, link)
        carried = self.node_of[block_id]
        if carried is None:
            node.carriers.append(block_id)
            self.node_of[block_id] = node
            self.num_hashed += 1
        elif carried is not node:
            _prune(node)
            raise AllocatorError(f"block {block_id} is registered with another text than it holds")
        return node

    def drop(self, block_id: BlockId) -> bool:
        """Forget a block's text; False if it carried none."""
        node = self.node_of[block_id]
        if node is None:
            return False
        node.carriers.remove(block_id)
        self.node_of[block_id] = None
        self.num_hashed -= 1
        _prune(node)
        return True


def _prune(node: PrefixNode) -> None:
    """Remove nodes that no block carries and no longer prefix needs, from here upwards."""
    while node.parent is not None and not node.carriers and not node.children:
        del node.parent.children[node.link]
        node = node.parent

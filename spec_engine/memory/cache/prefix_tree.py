"""Prefix tree: which pages hold the K/V of a prefix that was computed before. A radix tree over whole pages.

With drafting the draft pool's slot p depends on token p + 1, so keys are bigrams: n tokens make n - 1 keys, and a page
is found by its own tokens and the one that follows them. Salt and adapter are part of the first page's key, so that
prefixes of different ones share nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcanary.invariants import check_pages_uncached, check_prefix_lock, check_run_pages
from spec_engine.memory.cache.lru import LeafQueue

PageKey = tuple[Hashable, ...]  # the tokens that identify a page below the pages before it


@dataclass(eq=False)
class Node:
    """A run of pages that no prefix in the tree parts: ``keys[i]`` stands for ``pages[i]``.

    children: by the first key of each; num_locks: of this node and of everything below it.
    """

    keys: list[PageKey] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    parent: Node | None = None
    children: dict[PageKey, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_access: int = 0
    is_queued: bool = False

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf that is in the tree."""
        return self.parent is not None and not self.children and not self.num_locks


@dataclass(frozen=True)
class Match:
    """The longest cached prefix: ``pages`` hold its ``num_tokens`` positions, ``node`` is what to lock."""

    node: Node
    pages: list[int]
    num_tokens: int


@dataclass(frozen=True)
class InsertResult:
    """``pages`` is what the tree has for the run, ``node`` its end.

    added: pages of the caller that are the tree's too from now on; duplicates: pages of the caller for which the tree
    had others before, to be given back once the caller uses the tree's.
    """

    node: Node
    pages: list[int]
    added: list[int]
    duplicates: list[int]


class PrefixTree:
    """Finds, takes, locks and gives up pages by the tokens that they hold; it moves no reference and no byte."""

    def __init__(self, page_size: int, bigram: bool) -> None:
        self.page_size, self.bigram = page_size, bigram
        self.num_protected = 0
        self._root = Node()
        self._cached: set[int] = set()
        self._leaves: LeafQueue[Node] = LeafQueue()
        self._clock = 0  # counts accesses; time of day would make evictions differ from run to run

    @property
    def pages(self) -> Collection[int]:
        """All cached pages; read only."""
        return self._cached

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_evictable(self) -> int:
        """Cached pages on no locked path."""
        return self.num_cached - self.num_protected

    def num_pages(self, num_tokens: int) -> int:
        """Pages that so many tokens can be found by: whole ones, of one token less when keys are bigrams."""
        return max(num_tokens - self.bigram, 0) // self.page_size

    def match(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> Match:
        """The longest prefix of ``tokens`` in whole pages; nothing protects it before ``lock``."""
        node, pages = self._walk(self._page_keys(tokens, salt, adapter))
        return Match(node, pages, len(pages) * self.page_size)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "", adapter: str = "") -> InsertResult:
        """Take the pages of all whole pages of ``tokens`` that are not cached yet.

        IndexLengthError: ``pages`` has less than one for each key. PageAliasError: a page stands for two prefixes.
        """
        keys = self._page_keys(tokens, salt, adapter)
        check_run_pages(len(keys), len(pages), self.page_size)
        own = list(pages[: len(keys)])
        node, known = self._walk(keys)
        added = own[len(known) :]
        check_pages_uncached(added, self._cached)
        if added:
            node = self._append(node, keys[len(known) :], added)
        duplicates = [page for page, cached in zip(own, known, strict=False) if page != cached]
        return InsertResult(node, known + added, added, duplicates)

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends with ``node``; PrefixLockError when it is not in the tree."""
        check_prefix_lock(node.num_locks, self._has(node))
        for part in _path(node):
            if not part.num_locks:
                self.num_protected += len(part.pages)
            part.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Take back one ``lock`` of that node; PrefixLockError when there is none."""
        if node is not self._root:
            check_prefix_lock(node.num_locks - 1, self._has(node))
        for part in _path(node):
            part.num_locks -= 1
            if not part.num_locks:
                self.num_protected -= len(part.pages)
                self._offer(part)

    def num_held_by(self, nodes: Iterable[Node]) -> int:
        """Protected pages that one ``unlock`` of each of ``nodes`` would make evictable."""
        locks = Counter(part for node in nodes for part in _path(node))
        return sum(len(part.pages) for part, count in locks.items() if count == part.num_locks)

    def evictable_pages(self) -> list[int]:
        """The pages that could be evicted now; walks the unlocked part of the tree."""
        found: list[int] = []
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            found += [] if node.num_locks else node.pages
        return found

    def evict(self, num_pages: int) -> list[int]:
        """Give up that many pages, fewer where fewer are evictable: ends of unlocked leaves, least recently used first.

        The caller drops the tree's references of the pages that are returned.
        """
        evicted: list[int] = []
        while len(evicted) < num_pages and (leaf := self._leaves.pop()) is not None:
            count = min(num_pages - len(evicted), len(leaf.pages))
            evicted += reversed(leaf.pages[-count:])
            self._cut(leaf, len(leaf.pages) - count)
        self._cached.difference_update(evicted)
        return evicted

    def drop(self, pages: Collection[int]) -> list[int]:
        """Give up these pages, and those behind them, which were computed from them; what is locked stays.

        The caller drops the tree's references of the pages that are returned.
        """
        dropped: list[int] = []
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            count = next((place for place, page in enumerate(node.pages) if page in pages), None)
            if count is None or node.num_locks:
                nodes += node.children.values()
            else:
                dropped += self._prune(node, count)
        self._cached.difference_update(dropped)
        return dropped

    def _prune(self, node: Node, count: int) -> list[int]:
        """Leave the first ``count`` pages of a node and nothing below it; the pages of all the rest."""
        pages, below = node.pages[count:], list(node.children.values())
        while below:
            child = below.pop()
            below += child.children.values()
            pages += child.pages
            child.parent = None
        node.children.clear()
        self._cut(node, count)
        return pages

    def _has(self, node: Node) -> bool:
        return node is self._root or node.parent is not None

    def _page_keys(self, tokens: Sequence[int], salt: str, adapter: str) -> list[PageKey]:
        size, reach = self.page_size, self.page_size + self.bigram
        starts = range(0, self.num_pages(len(tokens)) * size, size)
        keys: list[PageKey] = [tuple(tokens[start : start + reach]) for start in starts]
        if keys:
            keys[0] = (salt, adapter, *keys[0])
        return keys

    def _walk(self, keys: Sequence[PageKey]) -> tuple[Node, list[int]]:
        """The node at which the longest known run of ``keys`` ends, and its pages; all of its path was used now."""
        self._clock += 1
        node, pages = self._root, []
        while len(pages) < len(keys):
            child = node.children.get(keys[len(pages)])
            if child is None:
                break
            node = self._split(child, _common_len(child.keys, keys[len(pages) : len(pages) + len(child.keys)]))
            node.last_access = self._clock
            pages += node.pages
        return node, pages

    def _split(self, node: Node, count: int) -> Node:
        """A node of the first ``count`` pages; ``node``, which locks name by its end, keeps the others below it."""
        if count == len(node.keys):
            return node
        head = Node(node.keys[:count], node.pages[:count], node.parent, num_locks=node.num_locks)
        node.parent.children[head.keys[0]] = head
        node.keys, node.pages, node.parent = node.keys[count:], node.pages[count:], head
        head.children[node.keys[0]] = node
        return head

    def _append(self, parent: Node, keys: list[PageKey], pages: list[int]) -> Node:
        leaf = Node(keys, pages, parent, last_access=self._clock)
        parent.children[keys[0]] = leaf
        self._cached.update(pages)
        self._offer(leaf)
        return leaf

    def _cut(self, leaf: Node, count: int) -> None:
        """Leave the first ``count`` pages of a leaf; without any its parent may be a leaf."""
        rest = leaf
        if not count:
            rest = leaf.parent
            del rest.children[leaf.keys[0]]
            leaf.parent = None
        del leaf.keys[count:], leaf.pages[count:]
        self._offer(rest)

    def _offer(self, node: Node) -> None:
        if node.is_evictable:
            self._leaves.push(node)


def _path(node: Node) -> Iterator[Node]:
    """From ``node`` up to the child of the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common_len(a: Sequence[PageKey], b: Sequence[PageKey]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))

"""The prefix tree finds, takes, locks and evicts pages as a plain dictionary of all page prefixes does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary.invariants import IndexLengthError, PageAliasError, PrefixLockError
from spec_engine.memory.cache.prefix_tree import PrefixTree


def tree_of(*runs: tuple[list[int], list[int]], bigram: bool = False) -> PrefixTree:
    """Pages of two tokens."""
    tree = PrefixTree(2, bigram)
    for tokens, pages in runs:
        tree.insert(tokens, pages)
    return tree


def test_match_finds_the_longest_prefix_of_whole_pages():
    """Two of three pages agree; the token behind them is no whole page."""
    tree = tree_of(([1, 2, 3, 4, 5, 6], [7, 8, 9]))
    match = tree.match([1, 2, 3, 4, 5])
    assert (match.pages, match.num_tokens) == ([7, 8], 4)
    assert tree.match([1, 2, 3, 9, 5, 6]).pages == [7]
    assert tree.match([2, 2]).pages == []


def test_bigram_keys_need_the_token_that_follows():
    """The draft's last slot of a page was computed with the next token: another one there is another page."""
    tree = tree_of(([1, 2, 3, 4, 5], [7, 8]), bigram=True)
    assert tree.match([1, 2, 3, 4, 5]).pages == [7, 8]
    assert tree.match([1, 2, 3, 4, 6]).pages == [7]
    assert tree.match([1, 2, 3, 4]).pages == [7]
    assert tree.match([1, 2]).pages == []


def test_bigram_keys_of_whole_pages_are_one_page_less():
    """n tokens have n - 1 keys: 8 tokens are one page of four, 9 are two."""
    tree = PrefixTree(4, bigram=True)
    assert [tree.num_pages(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert PrefixTree(4, bigram=False).num_pages(8) == 2
    assert tree.insert(list(range(9)), [1, 2, 5]).pages == [1, 2]


@pytest.mark.parametrize("names", [{"salt": "b"}, {"adapter": "b"}, {"salt": "b", "adapter": "a"}])
def test_salts_and_adapters_share_nothing(names):
    """The same tokens under another salt or adapter are other pages."""
    tree = PrefixTree(2, bigram=False)
    tree.insert([1, 2, 3, 4], [7, 8], salt="a", adapter="a")
    other = {"salt": "a", "adapter": "a"} | names
    assert tree.match([1, 2, 3, 4], **other).pages == []
    assert tree.insert([1, 2, 3, 4], [5, 6], **other).added == [5, 6]
    assert tree.match([1, 2, 3, 4], salt="a", adapter="a").pages == [7, 8]


def test_insert_says_what_it_took_and_what_it_had():
    """The first page is the tree's already: the caller's own is a duplicate, the second is taken."""
    tree = tree_of(([1, 2, 3, 4], [7, 8]))
    result = tree.insert([1, 2, 5, 6, 9], [3, 4, 5])
    assert (result.pages, result.added, result.duplicates) == ([7, 4], [4], [3])
    assert tree.match([1, 2, 5, 6]).node is result.node
    again = tree.insert([1, 2, 5, 6], [7, 4])
    assert (again.pages, again.added, again.duplicates, again.node) == ([7, 4], [], [], result.node)


def test_a_page_stands_for_one_prefix():
    """A page that is cached already, or twice in one run, would be read for tokens that it does not hold."""
    tree = tree_of(([1, 2], [7]))
    with pytest.raises(PageAliasError, match=r"pages \[7\] cached, but \[7\] already stand for another prefix"):
        tree.insert([1, 2, 3, 4], [7, 7])
    with pytest.raises(PageAliasError, match="already stand for another prefix"):
        tree.insert([5, 6], [7])
    with pytest.raises(PageAliasError, match="some of them twice"):
        tree.insert([5, 6, 7, 8], [3, 3])
    assert (tree.num_cached, tree.match([5, 6]).pages) == (1, [])


def test_every_key_needs_a_page():
    """Tokens of two pages and one page are a caller's mistake, and nothing is cached."""
    tree = PrefixTree(2, bigram=False)
    with pytest.raises(IndexLengthError, match="tokens of 2 whole pages of 2 slots cached with 1 pages"):
        tree.insert([1, 2, 3, 4], [7])
    assert tree.num_cached == 0


def test_eviction_takes_ends_of_leaves_least_recently_used_first():
    """A prefix goes after what continues it, and a match is a use."""
    tree = tree_of(([1, 2, 3, 4], [1, 2]), ([1, 2, 5, 6], [1, 3]), ([7, 8, 9, 9], [4, 5]))
    tree.match([1, 2, 3, 4])
    assert tree.evict(2) == [3, 5]
    assert tree.evict(9) == [4, 2, 1]
    assert (tree.num_cached, tree.evict(1)) == (0, [])


def test_locked_prefixes_are_not_evicted():
    """A lock protects its path from the root, not what continues it; locks count."""
    tree = tree_of(([1, 2, 3, 4, 5, 6], [1, 2, 3]), ([9, 9], [4]))
    node = tree.match([1, 2, 3, 4]).node
    tree.lock(node)
    tree.lock(node)
    assert (tree.num_protected, tree.num_evictable, tree.num_cached) == (2, 2, 4)
    assert sorted(tree.evict(9)) == [3, 4]
    tree.unlock(node)
    assert tree.evict(9) == []
    tree.unlock(node)
    assert (tree.num_protected, tree.evict(9)) == (0, [2, 1])


def test_a_lock_survives_the_splitting_of_its_node():
    """A later request that shares the first page only parts the run; the lock still holds all of it."""
    tree = tree_of(([1, 2, 3, 4], [1, 2]))
    node = tree.match([1, 2, 3, 4]).node
    tree.lock(node)
    other = tree.insert([1, 2, 8, 8], [1, 5]).node
    assert (tree.num_protected, tree.evict(9)) == (2, [5])
    tree.unlock(node)
    assert tree.num_protected == 0
    with pytest.raises(PrefixLockError, match="the tree has evicted"):
        tree.lock(other)


def test_a_dropped_page_takes_along_what_was_computed_from_it():
    """All that follows it on its paths, but nothing that is locked, and nothing before it or beside it."""
    tree = tree_of(([1, 2, 3, 4, 5, 6], [7, 8, 9]), ([1, 2, 3, 4, 8, 8], [7, 8, 10]), ([5, 5], [11]))
    node = tree.match([1, 2, 3, 4, 8, 8]).node
    tree.lock(node)
    assert tree.drop({8, 9}) == [9]
    tree.unlock(node)
    assert sorted(tree.drop({8})) == [8, 10]
    assert sorted(tree.pages) == [7, 11]
    assert tree.match([1, 2, 3, 4]).pages == [7]


def test_an_unlock_without_a_lock_is_refused():
    """A second unlock would leave another request's prefix unprotected."""
    tree = tree_of(([1, 2], [1]))
    node = tree.match([1, 2]).node
    with pytest.raises(PrefixLockError, match="its locks would be -1"):
        tree.unlock(node)
    assert (node.num_locks, tree.num_protected) == (0, 0)


def test_nothing_matched_is_locked_and_unlocked_freely():
    """A request without a cached prefix holds the root, which is never evicted."""
    tree = PrefixTree(2, bigram=False)
    node = tree.match([1, 2]).node
    tree.lock(node)
    tree.unlock(node)
    assert tree.num_protected == 0


# -- against a dictionary


@dataclass
class Entry:
    """A cached page prefix of the model."""

    page: int
    used: int
    locks: int = 0


@dataclass
class Model:
    """Every cached run of pages by its tokens; with bigrams a run is known by one token more."""

    page_size: int
    bigram: bool
    clock: int = 0
    entries: dict[tuple, Entry] = field(default_factory=dict)

    def prefixes(self, tokens: list[int], salt: str) -> list[tuple]:
        found = []
        for count in itertools.count(1):
            end = count * self.page_size + (1 if self.bigram else 0)
            if end > len(tokens):
                return found
            found.append((salt, count, *tokens[:end]))
        return found

    def match(self, tokens: list[int], salt: str) -> list[int]:
        self.clock += 1
        known = list(itertools.takewhile(self.entries.__contains__, self.prefixes(tokens, salt)))
        for prefix in known:
            self.entries[prefix].used = self.clock
        return [self.entries[prefix].page for prefix in known]

    def insert(self, tokens: list[int], pages: list[int], salt: str) -> list[int]:
        known = self.match(tokens, salt)
        for prefix, page in list(zip(self.prefixes(tokens, salt), pages, strict=False))[len(known) :]:
            self.entries[prefix] = Entry(page, self.clock)
        return known

    def lock(self, tokens: list[int], salt: str, by: int) -> None:
        for prefix in self.prefixes(tokens, salt):
            self.entries[prefix].locks += by

    def evict(self, count: int) -> list[int]:
        evicted = []
        while len(evicted) < count:
            leaves = [(entry.used, prefix) for prefix, entry in self.entries.items() if self.is_free(prefix)]
            if not leaves:
                break
            evicted.append(self.entries.pop(min(leaves)[1]).page)
        return evicted

    def drop(self, pages: set[int]) -> list[int]:
        roots = [prefix for prefix, entry in self.entries.items() if entry.page in pages and not entry.locks]
        gone = [
            other
            for other in self.entries
            if any(other[0] == root[0] and other[2 : len(root)] == root[2:] for root in roots)
        ]
        return [self.entries.pop(prefix).page for prefix in gone]

    def is_free(self, prefix: tuple) -> bool:
        return not self.entries[prefix].locks and not any(self.continues(other, prefix) for other in self.entries)

    def continues(self, other: tuple, prefix: tuple) -> bool:
        length = len(prefix) - 2
        return other[0] == prefix[0] and other[1] == prefix[1] + 1 and other[2 : 2 + length] == prefix[2:]


RUNS = st.lists(st.integers(0, 1), max_size=9)
SALTS = st.sampled_from(["", "x"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("match"), RUNS, SALTS),
        st.tuples(st.just("insert"), RUNS, SALTS),
        st.tuples(st.just("lock"), RUNS, SALTS),
        st.tuples(st.just("unlock"), st.integers(0, 3)),
        st.tuples(st.just("evict"), st.integers(0, 4)),
        st.tuples(st.just("drop"), st.sets(st.integers(1, 12), max_size=2)),
    ),
    max_size=25,
)


class Pair:
    """Tree and model side by side; every answer of one is the other's."""

    def __init__(self, page_size: int, bigram: bool) -> None:
        self.tree, self.model = PrefixTree(page_size, bigram), Model(page_size, bigram)
        self.fresh = itertools.count(1)
        self.locked = []

    def match(self, tokens, salt):
        found = self.tree.match(tokens, salt)
        assert found.pages == self.model.match(tokens, salt)
        assert found.num_tokens == len(found.pages) * self.tree.page_size
        return found

    def insert(self, tokens, salt):
        own = [next(self.fresh) for _ in range(self.tree.num_pages(len(tokens)))]
        result = self.tree.insert(tokens, own, salt)
        known = self.model.insert(tokens, own, salt)
        assert (result.pages, result.added) == (known + own[len(known) :], own[len(known) :])
        assert result.duplicates == own[: len(known)]

    def lock(self, tokens, salt):
        found = self.match(tokens, salt)
        held = tokens[: found.num_tokens + self.tree.bigram]
        self.tree.lock(found.node)
        self.model.lock(held, salt, 1)
        self.locked.append((found.node, held, salt))

    def unlock(self, index):
        if index < len(self.locked):
            node, held, salt = self.locked.pop(index)
            self.tree.unlock(node)
            self.model.lock(held, salt, -1)

    def evict(self, count):
        assert self.tree.evict(count) == self.model.evict(count)

    def drop(self, pages):
        assert sorted(self.tree.drop(pages)) == sorted(self.model.drop(pages))

    def agree(self):
        entries = self.model.entries.values()
        assert sorted(self.tree.pages) == sorted(entry.page for entry in entries)
        assert self.tree.num_cached == len(entries)
        assert self.tree.num_protected == sum(entry.locks > 0 for entry in entries)
        assert self.tree.num_evictable == sum(entry.locks == 0 for entry in entries)


def run(page_size, bigram, steps) -> None:
    pair = Pair(page_size, bigram)
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
        pair.agree()
    while pair.locked:
        pair.unlock(0)
    pair.evict(len(pair.model.entries))
    assert pair.tree.num_cached == 0


@settings(max_examples=150, deadline=None)
@given(page_size=st.integers(1, 3), bigram=st.booleans(), steps=STEPS)
def test_tree_and_dictionary_agree(page_size, bigram, steps):
    """Whatever is matched, inserted, locked, unlocked, evicted and dropped, in the order of eviction too."""
    run(page_size, bigram, steps)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(page_size=st.integers(1, 3), bigram=st.booleans(), steps=STEPS)
def test_tree_and_dictionary_agree_for_long(page_size, bigram, steps):
    """The same, many more times."""
    run(page_size, bigram, steps)

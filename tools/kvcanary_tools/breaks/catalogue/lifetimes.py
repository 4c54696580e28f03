"""Pages: published, shared, freed and taken again."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from dataclasses import replace

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import CHAIN, GRAPH, PLAIN, PRESSED, SHARED, TREE

BREAKS = (
    Break(
        "published_one_token_early",
        "A page is published when all but its last slot is final",
        (
            Edit(
                "spec_engine.memory.cache.prefix_tree",
                "def num_pages(self, num_tokens: int) -> int:",
                "def num_pages(self, num_tokens: int) -> int:\n        num_tokens = num_tokens + 1\n        return self._num_pages(num_tokens)\n\n    def _num_pages(self, num_tokens: int) -> int:",
            ),
        ),
        (
            SHARED,
            PLAIN,
        ),
        ends=("WritablePageError",),
        off=("WritablePageError",),
    ),
    Break(
        "published_early_unchecked",
        "The same behind the host's check",
        (
            Edit(
                "spec_engine.memory.cache.prefix_cache",
                "check_pages_final(request.request_id, num_pages, committed_len, self.tree.page_size)\n        result = self.tree.insert(tokens, request.pages, salt, adapter)",
                "tokens = list(tokens) + [0]\n        result = self.tree.insert(tokens, request.pages, salt, adapter)",
            ),
        ),
        (
            replace(SHARED, new=22),
            Case(draft="none", shared=16, repeats=True, page_size=4),
        ),
        ends=("PageStateError",),
    ),
    Break(
        "acquired_one_page_less",
        "A prefix hit counts one page more than it brings",
        (
            Edit(
                "spec_engine.memory.kv_memory",
                "request.committed_len = request.cached_len = self.cache.acquire(request, known, *request.root)",
                "n = self.cache.acquire(request, known, *request.root); request.committed_len = request.cached_len = n + (self.page_size if n else 0)",
            ),
        ),
        (SHARED,),
        ends=("RelayError",),
        off=("RelayError",),
    ),
    Break(
        "hit_of_another_prompt",
        "A prefix hit gives a page of another prompt",
        (
            Edit(
                "spec_engine.memory.cache.prefix_cache",
                "match = self.tree.match(tokens, salt, adapter)\n        usable",
                "match = self.tree.match(tokens, salt, adapter)\n        match = self._mixed(match)\n        usable",
            ),
            Edit(
                "spec_engine.memory.cache.prefix_cache",
                "    def publish(\n",
                "    def _mixed(self, match):\n        from dataclasses import replace\n        pages = sorted(self.tree.pages)\n        if len(match.pages) > 1 and len(pages) > len(match.pages):\n            other = [p for p in pages if p not in match.pages][0]\n            try:\n                return replace(match, pages=[*match.pages[:-1], other])\n            except TypeError:\n                return match._replace(pages=[*match.pages[:-1], other])\n        return match\n\n    def publish(\n",
            ),
        ),
        (
            SHARED,
            Case(draft="none", shared=16, repeats=True),
        ),
        ends=("R4", "R5", "R6", "R8"),
        cause="identity",
    ),
    Break(
        "freed_page_kept_in_row",
        "A finished request's row is handed on as it was",
        (Edit("spec_engine.memory.request_table", "self.table[row].zero_()", "pass"),),
        (
            TREE,
            PRESSED,
            GRAPH,
        ),
        silent="rows are filled before they are read",
    ),
    Break(
        "quarantine_ignored",
        "A page that was freed in a step is granted in it",
        (
            Edit(
                "spec_engine.memory.allocator",
                "if self.quarantine:\n            self._waiting.append((self._step, page))\n        else:",
                "if False:\n            pass\n        else:",
            ),
        ),
        (
            PRESSED,
            Case(
                page_size=4,
                topk=2,
                num_steps=2,
                pages=60,
                first=5,
                engine={"schedule": "overlap", "new_token_ratio": 0.0},
            ),
        ),
        ends=("PageStateError",),
    ),
    Break(
        "two_rows_share_a_table_row",
        "A row of the request table is released twice",
        (Edit("spec_engine.memory.request_table", "self._free_rows.append(row)", "self._free_rows += [row, row]"),),
        (TREE,),
        ends=("RowOwnershipError",),
        off=("RowOwnershipError",),
    ),
    Break(
        "stop_not_capped",
        "A stop inside an accepted chain leaves the committed length behind it",
        (
            Edit(
                "spec_engine.engine",
                "request.committed_len = min(committed_len, request.prompt_len + num_outputs)",
                "request.committed_len = committed_len",
            ),
        ),
        (
            TREE,
            CHAIN,
        ),
        ends=("CommitError",),
        off=("CommitError",),
    ),
    Break(
        "free_one_page_less",
        "A request keeps its reference to its last page",
        (
            Edit(
                "spec_engine.memory.cache.prefix_cache",
                'self.allocator.free(seam("lifetime.double_free", pages))',
                "self.allocator.free(pages[:-1])",
            ),
        ),
        (
            TREE,
            PLAIN,
        ),
        ends=("PageLeakError",),
        off=("PageLeakError",),
    ),
    Break(
        "evict_untold",
        "The canary is not told of evictions",
        (Edit("spec_engine.memory.kv_memory", "if evicted and self.canary is not None:", "if False:"),),
        (
            PRESSED,
            Case(page_size=4, topk=1, num_steps=2, pages=50, first=3, later=8, engine={"new_token_ratio": 0.3}),
        ),
        ends=("PageStateError",),
    ),
    Break(
        "retracted_length_kept",
        "A retracted request goes on with the length that it had",
        (
            Edit(
                "spec_engine.request",
                "    def begin(self)",
                "    def begin(self):\n        was = self.committed_len if self.output_ids else 0\n        self._begin()\n        self.committed_len = self.cached_len = was\n\n    def _begin(self)",
            ),
        ),
        (
            Case(
                page_size=16,
                topk=2,
                num_steps=2,
                pages=14,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
            Case(
                page_size=4,
                topk=1,
                num_steps=2,
                pages=36,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
        ),
        ends=("RelayError",),
        off=("RelayError",),
    ),
)

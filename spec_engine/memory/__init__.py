"""Where KV bytes live: sizes, the page allocator, the request table; pools and what outlives a request beside them."""

"""Where KV bytes live: sizing formulas, the pool, the page allocator, the request table."""

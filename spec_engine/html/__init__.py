"""HTML that needs no network: what the debug page and `kvcanary report` share, facts apart from templates."""

"""From violations to a finding: evidence, causes, text, and what the mode does."""

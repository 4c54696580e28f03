"""From what fired to a finding: evidence, causes, text, what the mode does; and the certificate of what was checked."""

"""What may have caused a finding: one file of rules for each kind, and their ranking."""

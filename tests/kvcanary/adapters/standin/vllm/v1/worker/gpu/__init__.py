"""Runner V2."""

"""Commands about servers that run elsewhere, one or many."""

"""The host's ledger: requests and their rows, states, owners and history of pages, and what is to be read again."""

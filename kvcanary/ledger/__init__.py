"""The host's books: requests and their rows, states, owners and history of pages, what is to be read again."""

"""Several engines behind one address, on Ray Serve: each replica is the server's application and an engine."""

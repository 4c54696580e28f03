"""Several engines behind one address, on Ray Serve: each replica is the server's own application, with its own engine."""

"""`instar bench`: recorded traffic replayed against a server, and what came of it."""

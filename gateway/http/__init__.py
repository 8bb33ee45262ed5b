"""HTTP without the API: sockets, bodies, event streams, keys and limits."""

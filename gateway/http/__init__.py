"""The HTTP side, whatever is asked: sockets, bodies, event streams, and who may come in."""

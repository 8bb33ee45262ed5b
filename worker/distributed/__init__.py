"""Communication between workers, beside the bus: links, messages, communicators and exchanges."""

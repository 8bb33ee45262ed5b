"""Tools: what a request offers, the calls in an answer's text, and the thoughts before it."""

"""The terminal chat: the conversation and its commands, and the terminal that shows them."""

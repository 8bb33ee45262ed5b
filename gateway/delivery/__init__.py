"""Delivery: every accepted request gets its tokens once, in order, and one end, whatever dies."""

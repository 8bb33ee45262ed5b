"""The OpenAI API: from a body to sequences for workers, and from their tokens to its answers."""

"""The OpenAI API: from a body to requests, and from their tokens to the answer."""

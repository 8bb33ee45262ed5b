"""Text and tokens: tokenizers with their chat templates, the text of tokens, stop strings."""

"""Text and tokens: tokenizers and chat templates, the text of tokens, stop strings."""

"""HTTP in, tokens out: the OpenAI API, the admin API and the dispatcher. Run as `python -m gateway`."""

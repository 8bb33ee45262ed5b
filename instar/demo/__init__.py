"""`instar demo`: a service of its own that a burst fills, with and without morphs, and a long request."""

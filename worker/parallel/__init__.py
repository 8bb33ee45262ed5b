"""Workers of one host that run one model together: groups, their steps, and the change of their degree."""

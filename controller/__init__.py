"""Decides for the cluster: who is alive, what the dead leave behind is put away, and what morphs when."""

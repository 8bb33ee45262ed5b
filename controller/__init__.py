"""Decides for the cluster. Today: who is alive, and the putting away of what the dead leave behind."""

"""Workers that join, leave and die, and what the dead leave behind."""

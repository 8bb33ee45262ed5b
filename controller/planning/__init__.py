"""The configuration and the place of a deployed model (iServe §4-§6). Pure: no clock, no input or output."""

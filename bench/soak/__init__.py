"""Hours of mixed load, morphs, deaths and replacements of every process, and what is lost or grows."""

"""Morphs: changes of what serves, between two steps of the engine, while requests decode.

==================  ===================================================================================
`manager`, `job`    morphs begun, carried on at every step boundary, ended with a report
`members`           the group of an instance as its leader sees it; a worker alone is a group of one
`swap`, `resize`    a Swap and a Resize as they run
`plan`, `run`       the halves that a Swap is about (pure); what all runs have in common
`target`            an instance and its memory, and how it carries out the actions of morphs
`resizer`           the KV cache, grown and shrunk while its sequences live in it
`reshard`           a layer's weights from one tensor-parallel degree to another
==================  ===================================================================================
"""

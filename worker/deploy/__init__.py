"""Models that come and go while others serve, and the pages that they share.

====================  ============================================================================
`site`                the models of one worker, and who must hear that they change
`newcomer`            one on its way in: what it needs, its pages, their contents
`arrival`             a Deploy as it runs: room, pages, contents, first request, service
`departure`           a Retire as it runs: last requests, then every page back
`sharing`             who gets KV pages of whom; pure
`shares`              the same, done between steps
====================  ============================================================================
"""

"""A simulator of the target engine. NOT SGLang: no model, no tensor, no figure that means anything.

It takes SGLang's command line, prints the target's log lines in order, waits for its peers as the engine does, opens
the same endpoints and fails on command (`faults`). What is real in it: the rendezvous, the death of all when one dies,
the tactics files with their sidecars, and the overlay's own start-up checks, which hook it as they hook the engine.
"""
